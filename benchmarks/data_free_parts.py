"""Finds the component that fails without data: replaces texts and the choice of teachers by the truth, one at a time.

python benchmarks/data_free_parts.py --data PATH --language-model LM --general BROWN.parquet [--json]
    [--sources steered real] [options of data_free.py]

Use the folder of data_free.py to share teachers and texts. Each row has a source of texts (random-words, cross-domain,
prompted, steered, real) and targets. The targets are concatenated logits, amalgam's weights, StrataNet's confidences
and two oracles: the teacher of the text's class, and the class. A generated text has its intended class.
A linear map of the encoder's states learns the targets in seconds and without random initialisation.
`right` is the share of texts whose most heavily weighted teacher is that of the oracle.
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
    "concatenated logits": ["student.method=vanilla-kd"],
    "amalgam": ["student.method=amalgam"],
    "rmd": ["student.method=stratanet", "targets.kd_temperature=1"],
    "md": ["student.method=stratanet", "targets.kd_temperature=1", "targets.uncertainty=md"],
    "msp": ["student.method=stratanet", "targets.kd_temperature=1", "targets.uncertainty=msp"],
}
SOURCES = ("random-words", "cross-domain", "prompted", "steered", "real")
LENGTH = 10.0
"""Length of the states as inputs of the linear map."""
DECAY = 1e-3
ROUNDS = 200


@dataclass(frozen=True)
class Material:
    """Holds the encoder's states of texts in a fixed order, and the oracle's labels."""

    keys: list[bytes]
    features: Array
    labels: Array
    """Index in the union, or -1 without a label."""
    owners: Array
    """Index of the teacher with the label, or -1."""


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    own, rest = parser.parse_known_args()
    options = parsed(rest, own)
    show((figures for name in options.sets for figures in _data_set(name, options)), as_json=options.json)


def _data_set(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    teachers, config, real = write(name, options, {"real.yaml": REAL})
    train_teachers(teachers, options)
    test: list[Material] = []
    for source in options.sources:
        if source == "cross-domain" and not options.general:
            continue
        experiments = {
            choice: _experiment(source, config, real, options, overrides) for choice, overrides in CHOICES.items()
        }
        runs = {choice: up_to_date(*experiment, target="build-targets") for choice, experiment in experiments.items()}
        run = next(iter(runs.values()))
        material = _material(run, "train")
        test = test or [_material(run, "test")]
        about = {"data": name, "texts": source, "count": len(material.keys)}
        targets = {choice: _targets(built) for choice, built in runs.items()}
        targets |= {choice: (target, np.ones(len(target)), None) for choice, target in _oracles(run, material).items()}
        for choice, trained_on in targets.items():
            yield row("data_free_parts", choice, **about, **_scores(*trained_on, material, *test))


def _experiment(
    source: str, config: Path, real: Path, options: argparse.Namespace, overrides: list[str]
) -> tuple[Path, list[str]]:
    """Returns the experiment of these texts and its overrides."""
    if source == "real":
        return real, overrides
    return config, [f"student.encoder={options.encoder}", *written_by(source, options), *overrides]


# ---- training data


def _material(run: Run, name: str) -> Material:
    from amalgam.data.tokens import encode
    from amalgam.stages.common.cached.load import load_encoder
    from amalgam.stages.common.corpus import fields, tables
    from amalgam.stages.common.load import label_space, part_of

    part = part_of(run, name)
    if part is None:
        raise AssertionError(name)  # the experiment has this part
    rows = list(tables(run.store, part))
    texts = [text for table in rows for text in fields(table)]
    encoder = load_encoder(run)
    how = encoder.classifier
    features = encoder.pooled(encode(how.tokenizer, texts, how.limit, types=how.types))
    names = list(label_space(run).names)
    keys = [key for table in rows for key in table.column("key").to_pylist()]
    gold = [label for table in rows for label in table.column("label").to_pylist()]
    classes = _written_for(run) if run.experiment.generate and name == "train" else dict(zip(keys, gold, strict=True))
    labels = [-1 if classes.get(key) is None else names.index(str(classes[key])) for key in keys]
    owner = {label: place for place, own in enumerate(label_space(run).columns.values()) for label in own}
    owners = [owner.get(label, -1) for label in labels]
    return Material(keys, LENGTH * features.astype(np.float64), np.array(labels), np.array(owners))


def _written_for(run: Run) -> dict[bytes, str | None]:
    from amalgam.data.keys import text_key
    from amalgam.data.parquet import read_table
    from amalgam.stages.common.load import generated_file

    table = read_table(run.store.verified_path(generated_file(run)), ["text", "class"])
    texts, labels = (table.column(name).to_pylist() for name in table.column_names)
    return {text_key((text,)): label for text, label in zip(texts, labels, strict=True)}


def _targets(run: Run) -> tuple[Array, Array, Array | None]:
    """Returns targets, weights, and the index of the most heavily weighted teacher."""
    from amalgam.data.parquet import matrix
    from amalgam.stages.build_targets.stage import read_targets
    from amalgam.stages.common.load import label_space

    tables = list(read_targets(run))
    target = np.concatenate([matrix(table.column("target")) for table in tables]).astype(np.float64)
    weight = np.concatenate([table.column("weight").to_numpy() for table in tables]).astype(np.float64)
    names = list(label_space(run).columns)
    chosen = [name for table in tables for name in table.column("teacher").to_pylist()]
    places = None if None in chosen else np.array([names.index(name) for name in chosen])
    return target, weight, places


def _oracles(run: Run, material: Material) -> dict[str, Array]:
    """Returns the oracles' targets, or none for texts without a class. Teachers that share a label share the target."""
    from amalgam.stages.common.load import label_space, teachers_of, train_part
    from amalgam.stages.fit_statistics.stage import cached_logits

    if (material.labels < 0).any():
        return {}
    space, prefixes = label_space(run), [bucket.prefix for bucket in train_part(run).buckets]
    keys = np.array(material.keys, "S16")
    by_teacher, by_label = (np.zeros((len(keys), len(space.names))) for _ in range(2))
    by_label[np.arange(len(keys)), material.labels] = 1.0
    for teacher in teachers_of(run):
        own = list(space.columns[teacher.name])
        logits = torch.tensor(cached_logits(run, teacher.name, prefixes, keys), dtype=torch.float64)
        mine = np.isin(material.labels, own)
        rows = np.flatnonzero(mine)
        by_teacher[rows[:, None], own] += torch.softmax(logits, 1).numpy()[rows]
    by_teacher /= by_teacher.sum(axis=1, keepdims=True)
    return {"oracle: the teacher": by_teacher, "oracle: the class": by_label}


# ---- linear map


def _scores(
    target: Array, weight: Array, chosen: Array | None, material: Material, test: Material
) -> dict[str, float | None]:
    weights = linear(material.features, target, weight)
    predicted = (test.features @ weights[:-1] + weights[-1]).argmax(axis=1)
    labelled, right = material.owners >= 0, None
    if chosen is not None and labelled.any():
        right = round(float((chosen == material.owners)[labelled].mean()), 3)
    return {"accuracy": round(float((predicted == test.labels).mean()), 4), "right": right}


def linear(features: Array, target: Array, weight: Array) -> Array:
    """Fits weights and a bias [width + 1, labels] by cross-entropy to the targets."""
    inputs = torch.from_numpy(np.concatenate([features, np.ones((len(features), 1))], axis=1))
    targets, share = torch.from_numpy(target), torch.from_numpy(weight / weight.sum())
    weights = torch.zeros(inputs.shape[1], target.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=ROUNDS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        each = -(targets * torch.log_softmax(inputs @ weights, 1)).sum(1)
        value: torch.Tensor = (share * each).sum() + DECAY * weights[:-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach().numpy()


if __name__ == "__main__":
    main()
