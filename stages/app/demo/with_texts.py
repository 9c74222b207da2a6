"""Runs `amalgam demo`: three small classifiers are distilled into one student, offline, from the embedded corpus.

It writes an ordinary experiment and runs its stages for each method; shared results are computed once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amalgam.data.demo_corpus import Part, generate
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.runner import update
from amalgam.stages.app.api import QuietTables, open_run, working
from amalgam.stages.app.demo.encoder import tiny_encoder
from amalgam.stages.registry import STAGES
from amalgam.stages.report.blocks import Evaluation
from amalgam.stages.report.stage import evaluation, row

TEXTS: dict[str, tuple[Part, int, int]] = {
    "train": ("train", 4000, 0),
    "teachers": ("train", 4000, 100),
    "test": ("test", 1000, 0),
}
"""file: (part of the embedded corpus, texts, seed). Teachers and students train on different texts."""

FIRST_WORDS = ("# The demo's experiment", "# Teachers, a language model, and no text")

WRITTEN_FIRST = {"texts", "encoder", "artifacts", "lm", "with-texts.yaml"}

METHODS_SHOWN = ("vanilla-kd", "uhc", "muka-hard", "muka-soft", "amalgam", "supervised")


THREE_TEACHERS = """\
train_teachers:                    # three teachers with different labels
  texts: texts/teachers.parquet    # not the texts of the student
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
  train: texts/train.parquet       # only the supervised student and the report read its labels
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
    evaluations: dict[str, Any] = {}
    for method in METHODS_SHOWN:
        console.say(f"== {method}")
        evaluations[method] = _run_method(config, method, overrides, quiet=quiet)
    run = open_run(config, overrides, console=QuietTables(quiet=True))
    with working(run):  # HEAD is the experiment of the file, from which later commands continue
        update(STAGES, run)
    _show(console, evaluations)
    console.result(f"\nAn ordinary experiment is in {folder}: cd {folder} && amalgam plan")
    console.result(f"Its student on one page: {folder}/reports/student.html")


def write_demo(folder: Path) -> None:
    """Writes texts, a tiny encoder and the experiment file; existing files stay."""
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
    """Refuses a folder that is neither empty nor a demo, complete or interrupted."""
    if folder.exists() and not folder.is_dir():
        raise ExperimentError(f"{folder} is not a folder", fix="name another folder: amalgam demo DIR")
    file = folder / "amalgam.yaml"
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    ours = file.read_text("utf-8", "replace").startswith(FIRST_WORDS) if file.is_file() else names <= WRITTEN_FIRST
    if names and not ours:
        raise ExperimentError(f"{folder} is not empty and is no demo", fix="name another folder: amalgam demo DIR")


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
    settings = [
        f"student.method={method}",
        f"student.name={method}",
        *overrides,
    ]
    run = open_run(config, settings, console=QuietTables(quiet=quiet))
    with working(run):
        update(STAGES, run)
        return evaluation(run)


def _show(console: Console, evaluations: dict[str, Evaluation]) -> None:
    last = next(iter(evaluations.values()))
    rows = [row(name, system, last["groups"]) for name, system in last["systems"].items() if "student" not in name]
    for method, result in evaluations.items():
        name = "supervised student (saw labels)" if method == "supervised" else f"{method} student"
        rows += [row(name, system, last["groups"]) for key, system in result["systems"].items() if "student" in key]
    header = ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in last["groups"])]
    console.table(f"\n{last['n']:,} test texts, {len(last['labels'])} labels; accuracy over all labels", header, rows)
