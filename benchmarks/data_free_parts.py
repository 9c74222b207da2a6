"""Which part fails without data: the texts, or the choice of teachers? Each is swapped for the truth, one at a time.

python benchmarks/data_free_parts.py --data ../shared/data --language-model LM --general BROWN.parquet [--json]
    [--sources steered real] and options of data_free.py; the same folder, so that teachers and texts are shared

Rows: texts (random-words, cross-domain, prompted, steered, real) by what they are taught: all logits side by side,
amalgam's weights, StrataNet's confidences, and two oracles: the teacher that knows the text's class, and the class
itself. Of generated texts that is the one they were written for. A linear map of the bare encoder's states learns it,
so that seconds judge the material, and no training's luck. right: how often the weightiest teacher is the oracle's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from amalgam.benchmarks.data_free import parsed, train_teachers, up_to_date, write, written_by
from amalgam.benchmarks.protocol import row, show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from amalgam.pipeline.execution.stage import Run

Array = np.ndarray[Any, np.dtype[Any]]

REAL = """\
corpus: {{train: {data}/train.parquet, test: {test}, label: label, rename: {rename}, limit: {count}}}
teachers: [{teachers}]
cache: {{passes: 0, max_tokens: 128}}
student: {{method: vanilla-kd, encoder: "{encoder}"}}
"""
CHOICES = {
    "all logits side by side": ["student.method=vanilla-kd"],
    "amalgam": ["student.method=amalgam"],
    "rmd": ["student.method=stratanet", "targets.kd_temperature=1"],
    "md": ["student.method=stratanet", "targets.kd_temperature=1", "targets.uncertainty=md"],
    "msp": ["student.method=stratanet", "targets.kd_temperature=1", "targets.uncertainty=msp"],
}
SOURCES = ("random-words", "cross-domain", "prompted", "steered", "real")
LENGTH = 10.0
"""Of the states, as the linear map sees them."""
DECAY = 1e-3
ROUNDS = 200


@dataclass(frozen=True)
class Material:
    """Texts in a fixed order, as the encoder sees them, and the oracle's labels, where there is one."""

    keys: list[bytes]
    features: Array
    labels: Array
    """By place in the union; -1: not known."""
    owners: Array
    """The teacher that knows the label, by its place; -1: not known."""


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    own, rest = parser.parse_known_args()
    options = parsed(rest, own)
    rows = (one for name in options.sets for one in _data_set(name, options))
    for some in ([one] for one in rows) if options.json else [list(rows)]:
        show(some, as_json=options.json)


def _data_set(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    teachers, config, real = write(name, options, {"real.yaml": REAL})
    train_teachers(teachers, options)
    test: list[Material] = []
    for source in options.sources:
        if source == "cross-domain" and not options.general:
            continue
        where = {choice: _where(source, config, real, options, said) for choice, said in CHOICES.items()}
        runs = {choice: up_to_date(*one, target="build-targets") for choice, one in where.items()}
        run = next(iter(runs.values()))
        material = _material(run, "train")
        test = test or [_material(run, "test")]
        about = {"data": name, "texts": source, "count": len(material.keys)}
        taught = {choice: _taught(one) for choice, one in runs.items()}
        taught |= {choice: (target, np.ones(len(target)), None) for choice, target in _oracles(run, material).items()}
        for choice, one in taught.items():
            yield row("data_free_parts", choice, **about, **_judged(*one, material, *test))


def _where(
    source: str, config: Path, real: Path, options: argparse.Namespace, said: list[str]
) -> tuple[Path, list[str]]:
    """The experiment of these texts, and what it is told."""
    if source == "real":
        return real, said
    return config, [f"student.encoder={options.encoder}", *written_by(source, options), *said]


# ---- what is learned from


def _material(run: Run, name: str) -> Material:
    from amalgam.data.tokens import encode
    from amalgam.stages.common.corpus import fields, part_of, tables
    from amalgam.stages.common.states.encoder import Encoder
    from amalgam.stages.common.teachers import label_space

    part = part_of(run, name)
    if part is None:
        raise AssertionError(name)  # the experiment names it
    rows = list(tables(run, part))
    texts = [text for table in rows for text in fields(table)]
    encoder = Encoder.of(run)
    how = encoder.how
    features = encoder.pooled(encode(how.tokenizer, texts, how.limit, types=how.types))
    names = list(label_space(run).names)
    keys = [key for table in rows for key in table.column("key").to_pylist()]
    gold = [label for table in rows for label in table.column("label").to_pylist()]
    known = _written_for(run) if run.experiment.generate and name == "train" else dict(zip(keys, gold, strict=True))
    labels = [-1 if known.get(key) is None else names.index(str(known[key])) for key in keys]
    owner = {label: place for place, own in enumerate(label_space(run).columns.values()) for label in own}
    owners = [owner.get(label, -1) for label in labels]
    return Material(keys, LENGTH * features.astype(np.float64), np.array(labels), np.array(owners))


def _written_for(run: Run) -> dict[bytes, str | None]:
    from amalgam.data.keys import text_key
    from amalgam.data.parquet import read_table
    from amalgam.stages.common.generated_texts import generated_file

    table = read_table(run.store.checked(generated_file(run)), ["text", "class"])
    texts, labels = (table.column(one).to_pylist() for one in table.column_names)
    return {text_key((text,)): label for text, label in zip(texts, labels, strict=True)}


def _taught(run: Run) -> tuple[Array, Array, Array | None]:
    """Targets, their weights, and the weightiest teacher by its place."""
    from amalgam.data.parquet import matrix
    from amalgam.stages.build_targets.read import read_targets
    from amalgam.stages.common.teachers import label_space

    tables = list(read_targets(run))
    target = np.concatenate([matrix(table.column("target")) for table in tables]).astype(np.float64)
    weight = np.concatenate([table.column("weight").to_numpy() for table in tables]).astype(np.float64)
    names = list(label_space(run).columns)
    chosen = [name for table in tables for name in table.column("teacher").to_pylist()]
    places = None if None in chosen else np.array([names.index(name) for name in chosen])
    return target, weight, places


def _oracles(run: Run, material: Material) -> dict[str, Array]:
    """None where texts were made for no class. Of texts whose label two teachers know, both are right."""
    from amalgam.stages.common.corpus import train_part
    from amalgam.stages.common.teachers import label_space, teachers_of
    from amalgam.stages.fit_statistics.fit import cached_logits

    if (material.labels < 0).any():
        return {}
    space, prefixes = label_space(run), [bucket.prefix for bucket in train_part(run).buckets]
    keys = np.array(material.keys, "S16")
    by_teacher, by_label = (np.zeros((len(keys), len(space.names))) for _ in range(2))
    by_label[np.arange(len(keys)), material.labels] = 1.0
    for known in teachers_of(run):
        own = list(space.columns[known.name])
        logits = torch.tensor(cached_logits(run, known, prefixes, keys), dtype=torch.float64)
        mine = np.isin(material.labels, own)
        rows = np.flatnonzero(mine)
        by_teacher[rows[:, None], own] += torch.softmax(logits, 1).numpy()[rows]
    by_teacher /= by_teacher.sum(axis=1, keepdims=True)
    return {"oracle: the teacher": by_teacher, "oracle: the class": by_label}


# ---- the judge


def _judged(
    target: Array, weight: Array, chosen: Array | None, material: Material, test: Material
) -> dict[str, float | None]:
    found = linear(material.features, target, weight)
    said = (test.features @ found[:-1] + found[-1]).argmax(axis=1)
    known, right = material.owners >= 0, None
    if chosen is not None and known.any():
        right = round(float((chosen == material.owners)[known].mean()), 3)
    return {"accuracy": round(float((said == test.labels).mean()), 4), "right": right}


def linear(features: Array, target: Array, weight: Array) -> Array:
    """[width + 1, labels]: weights and a bias, by cross-entropy to the targets."""
    inputs = torch.from_numpy(np.concatenate([features, np.ones((len(features), 1))], axis=1))
    wanted, share = torch.from_numpy(target), torch.from_numpy(weight / weight.sum())
    found = torch.zeros(inputs.shape[1], target.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([found], max_iter=ROUNDS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        each = -(wanted * torch.log_softmax(inputs @ found, 1)).sum(1)
        value: torch.Tensor = (share * each).sum() + DECAY * found[:-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return found.detach().numpy()


if __name__ == "__main__":
    main()
