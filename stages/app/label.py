"""Writes random training texts to label, and reports the changes by their labels (`amalgam label`)."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amalgam.data.arrays import Array, softmax
from amalgam.data.lazy import np, pa, pl
from amalgam.data.parquet import matrix
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.user_paths import write_new
from amalgam.stages.build_targets.stage import read_targets, target_facts
from amalgam.stages.common.cached.load import answer_reader
from amalgam.stages.common.corpus import fields, neighbouring_buckets, tables
from amalgam.stages.common.intervals import interval, percent
from amalgam.stages.common.load import given_labels, label_space, train_part
from amalgam.stages.target_methods import target_method
from amalgam.stages.weigh_teachers.stage import keys_of, predictions

RANDOM = "random"
"""Value of the column `why`; the file of texts to label in reports/ has other values too."""

HINT = "hint_"
"""Start of the columns with the teachers' predictions; they are in random order, because the first one is copied."""


# ---- the texts to label


def texts_to_label(run: Run, count: int, seed: int) -> pl.DataFrame:
    """Returns key, id, text, label (empty), and the distinct predictions of the teachers, for random texts."""
    if not target_method(run.experiment.targets).takes_labels:
        what = f"targets.mode: {run.experiment.targets.mode} does not use labels"
        raise ExperimentError(what, where="amalgam label", fix="choose another student.method, such as amalgam")
    answers, given = predictions(run, train_part(run).buckets).labels, given_labels(run)
    keys = keys_of(run, train_part(run).buckets).to_pylist() if given else []
    unlabelled = [row for row in range(len(answers)) if given is None or keys[row] not in given.by_key]
    random = np.random.default_rng(seed)
    rows = random.choice(unlabelled, min(count, len(unlabelled)), replace=False).tolist()
    return _table(run, rows, answers[rows], random)


def _table(run: Run, rows: Sequence[int], answers: Array, random: np.random.Generator) -> pl.DataFrame:
    corpus, names = run.experiment.corpus, label_space(run).names
    texts = _texts(run, rows)
    columns: dict[str, list[Any]] = {"key": [key.hex() for key in texts.column("key").to_pylist()]}
    if corpus.id != "auto":
        columns[corpus.id] = texts.column("id").to_pylist()
    columns |= dict(zip(corpus.text, map(list, zip(*fields(texts), strict=True)), strict=True))
    columns[corpus.label or "label"] = [""] * len(rows)
    hints = [[names[label] for label in random.permutation(np.unique(own))] for own in answers]
    for place in range(max(map(len, hints), default=0)):
        columns[f"{HINT}{place + 1}"] = [own[place] if place < len(own) else "" for own in hints]
    columns["why"] = [RANDOM] * len(rows)
    return pl.DataFrame(columns)


def _texts(run: Run, rows: Sequence[int]) -> pa.Table:
    """Returns these rows of the training texts, in this order; memory holds one bucket."""
    parts, places, start = [], [], 0
    for table in tables(run.store, train_part(run)):
        own = [place for place, row in enumerate(rows) if start <= row < start + len(table)]
        parts.append(table.take([rows[place] - start for place in own]))
        places += own
        start += len(table)
    return pa.concat_tables(parts).take(np.argsort(places))


def write_labels_file(path: Path, table: pl.DataFrame) -> None:
    """Writes the table as csv; refuses to replace a file, which may have labels."""
    file = io.StringIO(newline="")
    csv.writer(file).writerows([table.columns, *table.rows()])
    write_new(path, file.getvalue())


# ---- their effect


@dataclass(frozen=True)
class RandomTexts:
    """Counts on the labelled texts that were drawn at random; only these estimate an accuracy."""

    texts: int
    targets_right: int
    """Targets without labels that have the gold label."""
    ensemble_right: int


@dataclass(frozen=True)
class LabelEffect:
    """The changes of the targets by labels."""

    labels: int
    empty: int
    """Rows of the file without a label."""
    texts: int
    """Training texts."""
    changed: int
    """Texts with another label as target."""
    right_before: int
    """Labelled texts whose target without labels is the label."""
    shares: dict[str, tuple[float, float]]
    """By teacher: its share of the texts without and with the labels; empty if the method compares no teachers."""
    random: RandomTexts | None
    """None if the file does not mark the random texts."""

    def lines(self) -> list[str]:
        empty = f", {self.empty:,} rows without one" if self.empty else ""
        lines = [f"{self.labels:,} labels{empty}"]
        lines += [f"without them, {self.right_before:,} of these texts have the right target"]
        if self.random and self.random.texts:
            lines += [_estimate("targets", self.random.targets_right, self.random.texts)]
            lines += [_estimate("the ensemble", self.random.ensemble_right, self.random.texts)]
        lines += [f"with them, {self.changed:,} of {self.texts:,} training texts have another target"]
        return lines


def _estimate(name: str, right: int, texts: int) -> str:
    low, high = interval(right / texts, texts)
    bounds = f"95 % interval {100 * low:.0f} to {100 * high:.0f}"
    return f"accuracy of {name} without labels: {percent(right / texts)} ({bounds}, n = {texts}, random texts)"


def label_effect(before: Run, after: Run, random_keys: set[bytes]) -> LabelEffect:
    """Compares the targets of a run without labels and of one with them."""
    given, names = given_labels(after), target_facts(after)["labels"]
    labels = given.by_key if given else {}
    old, new = _targets(before), _targets(after)
    right = {key for key, label in labels.items() if names[old.labels[old.rows[key]]] == label}
    random = {key for key in random_keys if key in labels}
    ensemble = _ensemble(after, {key: old.rows[key] for key in random})
    return LabelEffect(
        labels=len(labels),
        empty=given.empty if given else 0,
        texts=len(old.labels),
        changed=int((old.labels != new.labels).sum()),
        right_before=len(right),
        shares=_shares(old.teachers, new.teachers, list(label_space(after).columns)),
        random=RandomTexts(len(random), len(right & random), sum(names[ensemble[key]] == labels[key] for key in random))
        if random_keys
        else None,
    )


def random_texts(path: Path) -> set[bytes]:
    """Returns the keys of the texts that a file of `amalgam label` or of the report marks as random."""
    if path.suffix.lower() != ".csv":
        return set()
    table = pl.read_csv(path, infer_schema=False)
    if not {"key", "why"} <= set(table.columns):
        return set()
    return {bytes.fromhex(key) for key in table.filter(pl.col("why") == RANDOM)["key"]}


@dataclass(frozen=True)
class _Targets:
    rows: dict[bytes, int]
    labels: Array
    """The position of each text's largest target."""
    teachers: list[str | None]


def _targets(run: Run) -> _Targets:
    keys, labels, teachers = [], [], []
    for table in read_targets(run):
        keys += table.column("key").to_pylist()
        labels.append(matrix(table.column("target")).argmax(axis=1))
        teachers += table.column("teacher").to_pylist()
    return _Targets({key: row for row, key in enumerate(keys)}, np.concatenate(labels), teachers)


def _shares(
    before: Sequence[str | None], after: Sequence[str | None], teachers: Sequence[str]
) -> dict[str, tuple[float, float]]:
    if None in before:
        return {}
    return {name: (before.count(name) / len(before), after.count(name) / len(after)) for name in teachers}


def _ensemble(run: Run, rows: dict[bytes, int]) -> dict[bytes, int]:
    """Returns the ensemble's label of these texts: the largest logit of all teachers."""
    space, reader = label_space(run), answer_reader(run)
    labels: dict[bytes, int] = {}
    for group in neighbouring_buckets(train_part(run).buckets) if rows else ():
        keys, prefixes = pl.Series("key", keys_of(run, group), pl.Binary), [bucket.prefix for bucket in group]
        logits = [reader.evidence(teacher, prefixes, keys).logits.to_numpy() for teacher in space.columns]
        probability = softmax(np.concatenate(logits, axis=1).astype(np.float64))
        union = np.zeros((len(keys), len(space.names)))
        for place, label in enumerate(label for own in space.columns.values() for label in own):
            union[:, label] += probability[:, place]
        labels |= {key: int(union[row].argmax()) for row, key in enumerate(keys.to_list()) if key in rows}
    return labels


def next_step(path: str) -> str:
    """Returns the command and the line of the experiment file that use the labels."""
    return (
        f"to use them: amalgam run {shlex.quote(f'labels={path}')}, or the line `labels: {path}` in the experiment file"
    )
