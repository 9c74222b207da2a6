"""Writes the commented experiment file of `amalgam init`."""

from __future__ import annotations

from pathlib import Path

from amalgam.pipeline.errors import ExperimentError

TEACHERS = """\
teachers:                       # each predicts its own labels; the student predicts all of them
  - name: first
    model: ./models/first       # ./a/folder, a Hub id, or package:module/folder
    # revision: main            # the workspace records its commit at first use
    # labels: [sports, politics]  # if the model's own names are LABEL_0, LABEL_1
    # rename: {Sport: sports}
  - name: second
    model: ./models/second

"""


TEMPLATE = (
    """\
# An amalgam experiment. Paths start from this file's folder. `amalgam schema` lists every field.
# amalgam plan                 lists the stages that would run, with the reasons
# amalgam run                  runs all missing work; after an interruption it resumes
# amalgam run cache.passes=8   overrides a field

corpus:
  train: texts/train.csv        # csv, jsonl, parquet, a folder of them, hf://... or s3://...; no labels needed
  # test: texts/test.csv        # labelled texts for the report
  # validation: texts/dev.csv   # labelled texts that select the checkpoint; default: held-out texts
  text: text                    # the text column, or two: [premise, hypothesis]
  # label: label                # the label column of test and validation
  # limit: 8000                 # largest number of training texts, sampled by content
  # on_bad_row: skip            # leave out, count and list rows without a usable text

# generate:                     # generates training texts instead of corpus.train; docs/data-free.md
#   language_model: ./models/lm # any causal language model, by folder or Hub id
#   texts: 200                  # for each teacher and class

"""
    + TEACHERS
    + """\
cache:                          # stage 1: predictions of the teachers, computed once
  passes: 16                    # Monte-Carlo dropout passes for each text and teacher
  max_tokens: 128
  # dropout: 0.1                # for teachers whose configured dropout is zero

student:                        # stage 3: trains a Hugging Face model on the targets
  name: student                 # written to students/student
  method: amalgam               # or muka-soft, muka-hard, uhc, vanilla-kd ...: `amalgam methods` lists them
  encoder: sentence-transformers/all-MiniLM-L6-v2
  # layers: 4                   # number of layers to keep
  epochs: 3
  learning_rate: 2e-5
  batch_size: 32

# targets:                      # stage 2: the method sets these fields; a value here overrides it
#   text_weights: none          # margin | margin-normalised | none
#   neighbours: 100

# objective:                    # loss on the teachers' hidden states: layerwise, dfa, cfl, stratanet, mt-bert
#   states: tokens              # pooled | tokens

# execution:                    # no field here changes a result
#   workspace: artifacts
#   device: auto
"""
)


def write_template(folder: Path, teachers: str = TEACHERS) -> Path:
    """Writes amalgam.yaml into the folder and returns its path; `teachers` replaces the section of that name."""
    path = folder / "amalgam.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.replace(TEACHERS, teachers))
    except FileExistsError:
        raise ExperimentError(f"{path} exists", where=str(path.absolute()), fix="edit it, or move it away") from None
    return path
