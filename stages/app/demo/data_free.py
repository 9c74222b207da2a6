"""Runs `amalgam demo --data-free`: students learn from generated texts only.

It trains three teachers and a small language model. Stage 0 generates texts in four ways, and students learn from them.
The supervised student, trained on real texts, is the upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amalgam.data.demo_corpus import mixture
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.runner import update
from amalgam.stages.app.api import QuietTables, open_run, working
from amalgam.stages.app.demo.encoder import tiny_encoder
from amalgam.stages.app.demo.language_model import tiny_language_model
from amalgam.stages.app.demo.with_texts import THREE_TEACHERS, demo_texts, refuse_strange, write_texts
from amalgam.stages.registry import STAGES
from amalgam.stages.report.stage import evaluation, row

GENERAL_TEXTS = 8000

ROWS = (
    ("vanilla-kd", "random-words"),
    ("vanilla-kd", "cross-domain"),
    ("vanilla-kd", "prompted"),
    ("vanilla-kd", "steered"),
    ("amalgam", "steered"),
    ("stratanet", "steered"),
    ("as-dfd", None),
)
"""(method, source of its texts); as-dfd has no texts, but embeddings made by the teachers."""

SOURCES: Mapping[str, list[str]] = {"cross-domain": ["generate.corpus=texts/general.parquet"]}
"""Further overrides of a source."""


TEACHERS = (
    """\
# This experiment trains the teachers from labelled texts. The supervised student learns from these texts too, and is
# the upper bound for students without texts:
#   amalgam run -c with-texts.yaml
corpus:
  train: texts/train.parquet
  test: texts/test.parquet
  label: label

"""
    + THREE_TEACHERS
    + """
cache:
  passes: 0                        # no method here uses dropout
  max_tokens: 48

student:
  method: supervised
  name: supervised
  encoder: teacher:desk
  max_tokens: 48
  epochs: 4                        # about as many steps as other students
  batch_size: 16
  learning_rate: 1e-3
"""
)


EXPERIMENT = """\
# Teachers, a language model, and no text. Try, in this folder:
#   amalgam plan
#   amalgam plan generate.texts=400
#   amalgam run  student.method=vanilla-kd generate.steering_strength=5
corpus:
  test: texts/test.parquet         # read by the report only
  label: label

teachers:
  - {name: desk, model: ./teachers/desk}
  - {name: weekend, model: ./teachers/weekend}
  - {name: study, model: ./teachers/study}

generate:
  source: steered
  language_model: ./lm
  texts: 200                       # per teacher and class
  steering_strength: 2
  max_tokens: 32
  held_out: 0.2                    # for stratanet's statistics of the teachers; no student learns from it

pseudo_embeddings:
  count: 64                        # as-dfd's, per teacher and class

cache:
  passes: 0
  max_tokens: 48

student:
  method: amalgam
  encoder: teacher:desk
  max_tokens: 48
  epochs: 12                       # StrataNet has ten; these texts are few
  batch_size: 16
  learning_rate: 1e-3
"""


def run_data_free(folder: Path, overrides: list[str], *, quiet: bool) -> None:
    write_data_free(folder, Console(quiet=quiet))
    console, evaluations = Console(quiet=quiet), dict[str, Any]()
    console.say("== teachers")
    with_texts, config = folder / "with-texts.yaml", folder / "amalgam.yaml"
    _run(with_texts, [], quiet=quiet, target="train-teachers")
    for method, source in ROWS:
        name = f"{method} on {source} texts" if source else f"{method}, no texts"
        console.say(f"== {name}")
        settings = [
            f"student.method={method}",
            f"student.name={method}-{source}" if source else f"student.name={method}",
        ]
        settings += [f"generate.source={source}", *SOURCES.get(source, [])] if source else []
        evaluations[name] = _run(config, [*settings, *overrides], quiet=quiet)
    console.say("== supervised")
    evaluations["supervised student (real texts and labels)"] = _run(with_texts, [], quiet=quiet)
    _run(config, overrides, quiet=quiet)  # HEAD is the experiment of the file, from which later commands continue
    _show(console, evaluations)
    console.result(f"\nAn ordinary experiment is in {folder}: cd {folder} && amalgam plan")


def write_data_free(folder: Path, console: Console) -> None:
    """Writes texts, the teachers' encoder, the language model and two experiment files; existing files stay."""
    refuse_strange(folder)
    write_texts(folder)
    if not (folder / "texts/general.parquet").exists():
        _write_general(folder / "texts/general.parquet")
    if not (folder / "encoder" / "model.safetensors").exists():
        tiny_encoder(folder / "encoder", [text for text, _ in demo_texts("teachers")], seed=0)
    for name, content in (("with-texts.yaml", TEACHERS), ("amalgam.yaml", EXPERIMENT)):
        if not (folder / name).exists():
            (folder / name).write_text(content)
    if not (folder / "lm").exists():
        console.say("== a language model of general text")
        tiny_language_model(folder / "lm", _general(), seed=0)


def _general() -> list[str]:

    return mixture(GENERAL_TEXTS, seed=0)


def _write_general(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": _general()}), path)


def _run(config: Path, overrides: list[str], *, quiet: bool, target: str | None = None) -> dict[str, Any]:
    run = open_run(config, overrides, console=QuietTables(quiet=quiet))
    with working(run):
        update(STAGES, run, target=target)
        return {} if target else dict(evaluation(run))


def _show(console: Console, evaluations: dict[str, dict[str, Any]]) -> None:
    last = next(iter(evaluations.values()))
    systems = {name: system for name, system in last["systems"].items() if "student" not in name}
    for name, result in evaluations.items():
        systems[name] = next(system for key, system in result["systems"].items() if "student" in key)
    rows = [row(name, system, last["groups"]) for name, system in systems.items()]
    header = ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in last["groups"])]
    console.table(f"\n{last['n']:,} test texts, {len(last['labels'])} labels; accuracy over all labels", header, rows)
