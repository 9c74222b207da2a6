"""`amalgam demo`: three small classifiers become one student, offline, from the embedded corpus.

It writes an ordinary experiment and runs it with the ordinary stages, once per method; what two methods share is
computed once. What it leaves behind is the user's to go on with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.runner import bring_up_to_date
from amalgam.stages.commands import open_run, working
from amalgam.stages.order import STAGES
from amalgam.stages.report.stage import evaluation, row

TEXTS = {"train": 4000, "validation": 400, "test": 1200}
SEED = 0
METHODS_SHOWN = ("vanilla-kd", "muka-hard", "muka-soft", "supervised")

EXPERIMENT = """\
# The demo's experiment: an ordinary one. Try, in this folder:
#   amalgam plan
#   amalgam plan targets.temperature=0.5
#   amalgam run  targets.temperature=0.5
corpus:
  train: texts/train.parquet      # its labels are read only to train the teachers, and to inform
  test: texts/test.parquet
  label: label

train_teachers:                   # three teachers, none of which knows the others' labels
  encoder: encoder
  groups:
    money-and-law: [banking, law]
    body-and-table: [cooking, gardening, medicine]
    play-and-machine: [computing, football, music]
  max_tokens: 64
  epochs: 8
  batch_size: 32
  learning_rate: 1e-3

cache:
  passes: 16
  max_tokens: 64

targets:
  mode: soft
  temperature: 0.2

student:
  encoder: encoder
  max_tokens: 64
  epochs: 8
  batch_size: 32
  learning_rate: 1e-3
"""


def run_demo(folder: Path, overrides: list[str], *, quiet: bool) -> None:
    write_demo(folder)
    config = folder / "amalgam.yaml"
    console = Console(quiet=quiet)
    found: dict[str, Any] = {}
    for method in METHODS_SHOWN:
        console.say(f"== {method}")
        found[method] = _run_method(config, method, overrides, quiet=quiet)
    _, run = open_run(config, overrides, console=Console(quiet=True))
    with working(run):  # HEAD is the file's own experiment, so that the ordinary commands go on from there
        bring_up_to_date(STAGES, run)
    _show(console, found)
    console.result(f"\nAn ordinary experiment is in {folder}: cd {folder} && amalgam plan")


def write_demo(folder: Path) -> None:
    """Texts, a tiny encoder and the experiment file; what is there already stays."""
    _refuse_strange(folder)
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    for part, count in TEXTS.items():
        if part != "validation" and not (texts / f"{part}.parquet").exists():
            _write_texts(texts / f"{part}.parquet", part, count)
    if not (folder / "encoder" / "model.safetensors").exists():
        from amalgam.data.synthetic import generate
        from amalgam.stages.demo_models import tiny_encoder

        tiny_encoder(folder / "encoder", [text for text, _ in generate(TEXTS["train"], SEED)], SEED)
    if not (folder / "amalgam.yaml").exists():
        (folder / "amalgam.yaml").write_text(EXPERIMENT)


def _refuse_strange(folder: Path) -> None:
    ours = (folder / "amalgam.yaml").exists() and (folder / "encoder").exists()
    if folder.exists() and not folder.is_dir():
        raise ExperimentError(f"{folder} is not a folder", fix="amalgam demo DIR puts it elsewhere")
    if folder.exists() and any(folder.iterdir()) and not ours and not (folder / "texts").exists():
        raise ExperimentError(f"{folder} is not empty and holds no demo", fix="amalgam demo DIR puts it elsewhere")


def _write_texts(path: Path, part: Any, count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from amalgam.data.synthetic import generate

    rows = generate(count, SEED, part)
    pq.write_table(pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]}), path)


def _run_method(config: Path, method: str, overrides: list[str], *, quiet: bool) -> dict[str, Any]:
    told = [f"student.method={method}", f"student.name={method}", "targets.mode=" + _mode(method), *overrides]
    _, run = open_run(config, told, console=_Silent(quiet=quiet))
    with working(run):
        bring_up_to_date(STAGES, run)
        return evaluation(run)


def _mode(method: str) -> str:
    from amalgam.stages.methods import METHODS

    return str(METHODS[method]["targets"]["mode"])


class _Silent(Console):
    """Progress as always, but no table per method: the demo ends with one for all."""

    def table(self, title: str, header: Any, rows: Any) -> None: ...


def _show(console: Console, found: dict[str, Any]) -> None:
    last = next(iter(found.values()))
    rows = [row(name, system, last["groups"]) for name, system in last["systems"].items() if "student" not in name]
    for method, one in found.items():
        name = "supervised student (the ceiling: it saw the labels)" if method == "supervised" else f"{method} student"
        rows += [row(name, system, last["groups"]) for key, system in one["systems"].items() if "student" in key]
    header = ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in last["groups"])]
    console.table(f"\n{last['n']:,} test texts, {len(last['labels'])} labels; accuracy over all labels", header, rows)
