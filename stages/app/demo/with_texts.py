"""`amalgam demo`: three small classifiers become one student, offline, from the embedded corpus.

It writes an ordinary experiment and runs it with the ordinary stages, once per method; what two methods share is
computed once. What it leaves behind is the user's to go on with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amalgam.data.demo_corpus import Part, generate
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.runner import update
from amalgam.stages.app.demo.encoder import tiny_encoder
from amalgam.stages.app.session import open_run, working
from amalgam.stages.registry import STAGES
from amalgam.stages.report.blocks import Evaluation
from amalgam.stages.report.stage import evaluation, row

TEXTS: dict[str, tuple[Part, int, int]] = {
    "train": ("train", 4000, 0),
    "teachers": ("train", 4000, 100),
    "test": ("test", 1000, 0),
}
"""file: (part of the embedded corpus, texts, seed). Teachers learn from texts that the student never sees."""

FIRST_WORDS = ("# The demo's experiment", "# Teachers, a language model, and no text")

WRITTEN_FIRST = {"texts", "encoder", "artifacts", "lm", "with-texts.yaml"}

METHODS_SHOWN = ("vanilla-kd", "uhc", "muka-hard", "muka-soft", "amalgam", "supervised")


THREE_TEACHERS = """\
train_teachers:                    # three teachers, none of which knows the others' labels
  texts: texts/teachers.parquet    # other texts than the student's
  encoder: encoder
  groups:
    desk: [banking, computing]
    weekend: [cooking, football, gardening]
    study: [law, medicine, music]
  max_tokens: 48
  epochs: 6
  batch_size: 16
  learning_rate: 3e-4
"""


EXPERIMENT = (
    """\
# The demo's experiment: an ordinary one. Try, in this folder:
#   amalgam plan
#   amalgam plan student.method=muka-soft
#   amalgam run  student.method=muka-soft targets.temperature=0.5
corpus:
  train: texts/train.parquet       # its labels are read by the supervised student alone, and to inform
  test: texts/test.parquet
  label: label

"""
    + THREE_TEACHERS
    + """
cache:
  passes: 16
  max_tokens: 48

student:
  method: amalgam
  encoder: encoder
  max_tokens: 48
  epochs: 3
  batch_size: 32
  learning_rate: 1e-3
"""
)


def run_demo(folder: Path, overrides: list[str], *, quiet: bool) -> None:
    write_demo(folder)
    config = folder / "amalgam.yaml"
    console = Console(quiet=quiet)
    found: dict[str, Any] = {}
    for method in METHODS_SHOWN:
        console.say(f"== {method}")
        found[method] = _run_method(config, method, overrides, quiet=quiet)
    _, run = open_run(config, overrides, console=QuietTables(quiet=True))
    with working(run):  # HEAD is the file's own experiment, so that the ordinary commands go on from there
        update(STAGES, run)
    _show(console, found)
    console.result(f"\nAn ordinary experiment is in {folder}: cd {folder} && amalgam plan")
    console.result(f"Its student on one page: {folder}/reports/student.html")


def write_demo(folder: Path) -> None:
    """Texts, a tiny encoder and the experiment file; what is there already stays."""
    refuse_strange(folder)
    write_texts(folder)
    if not (folder / "encoder" / "model.safetensors").exists():
        tiny_encoder(folder / "encoder", [text for text, _ in demo_texts("train")], seed=0)
    if not (folder / "amalgam.yaml").exists():
        (folder / "amalgam.yaml").write_text(EXPERIMENT)


def demo_texts(name: str) -> list[tuple[str, str]]:

    part, count, seed = TEXTS[name]
    return generate(count, seed, part)


def refuse_strange(folder: Path) -> None:
    """A demo is known by its experiment file, or, where it was stopped while it was written, by having little else."""
    if folder.exists() and not folder.is_dir():
        raise ExperimentError(f"{folder} is not a folder", fix="amalgam demo DIR puts it elsewhere")
    file = folder / "amalgam.yaml"
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    ours = file.read_text("utf-8", "replace").startswith(FIRST_WORDS) if file.is_file() else there <= WRITTEN_FIRST
    if there and not ours:
        raise ExperimentError(f"{folder} is not empty and holds no demo", fix="amalgam demo DIR puts it elsewhere")


def write_texts(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "texts").mkdir(parents=True, exist_ok=True)
    for name in TEXTS:
        path = folder / f"texts/{name}.parquet"
        if not path.exists():
            rows = demo_texts(name)
            pq.write_table(pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]}), path)


def _run_method(config: Path, method: str, overrides: list[str], *, quiet: bool) -> Evaluation:
    told = [
        f"student.method={method}",
        f"student.name={method}",
        *overrides,
    ]
    _, run = open_run(config, told, console=QuietTables(quiet=quiet))
    with working(run):
        update(STAGES, run)
        return evaluation(run)


class QuietTables(Console):
    """Progress as always, but no table per method: the demo ends with one for all."""

    def table(self, title: str, header: Any, rows: Any) -> None: ...


def _show(console: Console, found: dict[str, Evaluation]) -> None:
    last = next(iter(found.values()))
    rows = [row(name, system, last["groups"]) for name, system in last["systems"].items() if "student" not in name]
    for method, one in found.items():
        name = "supervised student (saw labels)" if method == "supervised" else f"{method} student"
        rows += [row(name, system, last["groups"]) for key, system in one["systems"].items() if "student" in key]
    header = ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in last["groups"])]
    console.table(f"\n{last['n']:,} test texts, {len(last['labels'])} labels; accuracy over all labels", header, rows)
