"""`amalgam demo --data-free`: the demo's twin, where the students see no text that a person wrote.

Three teachers, and a language model of general text that is trained on the spot. Stage 0 writes texts in four ways,
each once; students learn from them. The labelled test texts are the demo's, and the student that saw real texts is
the ceiling.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amalgam.data.demo_corpus import mixture
from amalgam.pipeline.console import Console
from amalgam.pipeline.execution.runner import update
from amalgam.stages.app.demo.encoder import tiny_encoder
from amalgam.stages.app.demo.language_model import tiny_language_model
from amalgam.stages.app.demo.with_texts import THREE_TEACHERS, QuietTables, demo_texts, refuse_strange, write_texts
from amalgam.stages.app.session import open_run, working
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
"""What a source needs beside its name."""


TEACHERS = (
    """\
# Whoever has texts and labels makes the teachers, and gives them away without the texts. The supervised student, which
# learns from these texts too, is the ceiling of what can be reached without them:
#   amalgam run -c with-texts.yaml
corpus:
  train: texts/train.parquet
  test: texts/test.parquet
  label: label

"""
    + THREE_TEACHERS
    + """
cache:
  passes: 0                        # no method here looks at dropout
  max_tokens: 48

student:
  method: supervised
  name: supervised
  encoder: teacher:desk
  max_tokens: 48
  epochs: 4                        # about as many steps as the others
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
  test: texts/test.parquet         # only measured on
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
    console, found = Console(quiet=quiet), dict[str, Any]()
    console.say("== teachers")
    with_texts, config = folder / "with-texts.yaml", folder / "amalgam.yaml"
    _run(with_texts, [], quiet=quiet, target="train-teachers")
    for method, source in ROWS:
        name = f"{method} on {source} texts" if source else f"{method}, no texts"
        console.say(f"== {name}")
        told = [
            f"student.method={method}",
            f"student.name={method}-{source}" if source else f"student.name={method}",
        ]
        told += [f"generate.source={source}", *SOURCES.get(source, [])] if source else []
        found[name] = _run(config, [*told, *overrides], quiet=quiet)
    console.say("== supervised")
    found["supervised student (saw real texts and labels)"] = _run(with_texts, [], quiet=quiet)
    _run(
        config, overrides, quiet=quiet
    )  # HEAD is the file's own experiment, so that the ordinary commands go on from it
    _show(console, found)
    console.result(f"\nAn ordinary experiment is in {folder}: cd {folder} && amalgam plan")


def write_data_free(folder: Path, console: Console) -> None:
    """Texts, the teachers' encoder, the language model and two experiment files; what is there already stays."""
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
    _, run = open_run(config, overrides, console=QuietTables(quiet=quiet))
    with working(run):
        update(STAGES, run, target=target)
        return {} if target else dict(evaluation(run))


def _show(console: Console, found: dict[str, dict[str, Any]]) -> None:
    last = next(iter(found.values()))
    systems = {name: system for name, system in last["systems"].items() if "student" not in name}
    for name, one in found.items():
        systems[name] = next(system for key, system in one["systems"].items() if "student" in key)
    rows = [row(name, system, last["groups"]) for name, system in systems.items()]
    header = ["", "accuracy", "macro-F1", "NLL", "ECE", *(f"on {name}" for name in last["groups"])]
    console.table(f"\n{last['n']:,} test texts, {len(last['labels'])} labels; accuracy over all labels", header, rows)
