"""`amalgam init`: a commented experiment file, complete and short enough to read."""

from __future__ import annotations

from pathlib import Path

from amalgam.pipeline.errors import ExperimentError

TEACHERS = """\
teachers:                       # each knows its own labels; the student will know all of them
  - name: first
    model: ./models/first       # ./a/folder, a Hub id, or package:module/folder
    # revision: main            # pinned in the workspace to the commit it means today
    # labels: [sports, politics]  # where the model says LABEL_0, LABEL_1
    # rename: {Sport: sports}
  - name: second
    model: ./models/second

"""


TEMPLATE = (
    """\
# An amalgam experiment. Paths start from this file's folder. `amalgam schema` lists every field.
# amalgam plan                 what would run, and why
# amalgam run                  bring everything up to date; running again is resuming
# amalgam run cache.passes=8   any field can be overridden on the command line

corpus:
  train: texts/train.csv        # csv, jsonl, parquet, a folder of them, hf://... or s3://...; no labels needed
  # test: texts/test.csv        # labelled texts to measure on
  # validation: texts/dev.csv   # labelled texts to choose the checkpoint by; without them: held-out targets
  text: text                    # the text column, or two: [premise, hypothesis]
  # label: label                # the label column of test and validation
  # limit: 8000                 # at most so many texts, a sample by content
  # on_bad_row: skip            # leave out rows without a usable text, counted and listed

# generate:                     # no texts? these stand in the place of corpus.train; docs/data-free.md
#   language_model: ./models/lm # any causal language model, by folder or Hub id
#   texts: 200                  # per teacher and class

"""
    + TEACHERS
    + """\
cache:                          # stage 1: asked once, kept for good
  passes: 16                    # Monte-Carlo dropout passes per text and teacher
  max_tokens: 128
  # dropout: 0.1                # for teachers whose own dropout is zero

student:                        # stage 3: never sees a teacher; a plain Hugging Face folder comes out
  name: student                 # -> students/student
  method: amalgam               # or muka-soft, muka-hard, uhc, vanilla-kd ...: `amalgam methods` lists them
  encoder: sentence-transformers/all-MiniLM-L6-v2
  # layers: 4                   # only the first so many
  epochs: 3
  learning_rate: 2e-5
  batch_size: 32

# targets:                      # stage 2, seconds: the method sets these, what is said here stands over it
#   text_weights: none              # margin | margin-normalised | none
#   neighbours: 100

# objective:                    # layerwise, dfa, cfl and stratanet also look at the teachers' hidden states
#   states: tokens               # pooled | tokens

# execution:                    # how, never what: nothing here changes a result
#   workspace: artifacts
#   device: auto
"""
)


def write_template(folder: Path, teachers: str = TEACHERS) -> Path:
    """`teachers`: that section's own lines."""
    path = folder / "amalgam.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.replace(TEACHERS, teachers))
    except FileExistsError:
        raise ExperimentError(f"{path} exists", where=str(path.absolute()), fix="edit it, or move it away") from None
    return path
