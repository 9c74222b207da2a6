"""Chooses the training texts to label: random ones, and the most uncertain choices of a teacher (`amalgam label`)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amalgam.data.arrays import Array, entropy_nats
from amalgam.data.lazy import np, pa, pl
from amalgam.data.parquet import key_array, matrix
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.user_paths import write_new
from amalgam.stages.common.cached.load import features_of
from amalgam.stages.common.corpus import fields, tables
from amalgam.stages.common.given_labels import RANDOM, UNCERTAIN, WHY
from amalgam.stages.common.load import given_labels, label_space, train_part
from amalgam.stages.target_methods import target_method
from amalgam.stages.weigh_teachers.stage import keys_of, predictions, weights_of

HINT = "hint_"
"""Start of the columns with the teachers' predictions; they are in random order, because the first one is copied."""

RANDOM_SHARE, LEAST_RANDOM = 0.5, 30
"""Share and least number of the texts that are drawn at random; only these estimate accuracies."""

NEAR = 5
"""Nearest texts of a picked one that are not picked too."""

SEARCHED = 20_000
"""Most uncertain texts among which texts are picked."""

# ---- the table


def texts_to_label(run: Run, count: int, seed: int) -> pl.DataFrame:
    """Returns key, id, text, label (empty), the distinct predictions of the teachers, and why, for each text."""
    if not target_method(run.experiment.targets).takes_labels:
        what = f"targets.mode: {run.experiment.targets.mode} does not use labels"
        raise ExperimentError(what, where="amalgam label", fix="choose another student.method, such as amalgam")
    buckets, given = train_part(run).buckets, given_labels(run)
    answers, keys = predictions(run, buckets).labels, keys_of(run, buckets)
    unlabelled = [row for row, key in enumerate(keys.to_pylist()) if given is None or key not in given.by_key]
    weights = None
    if target_method(run.experiment.targets).weighs_together:
        weights = matrix(weights_of(run).column("weight"))

    def features(rows: Array) -> Array:
        return features_of(run, key_array(keys.take(pa.array(rows))))[:]

    rows, drawn = pick(Candidates(np.array(unlabelled, np.int64), weights, answers, features), count, seed)
    return _table(run, rows.tolist(), answers[rows], drawn, np.random.default_rng(seed))


def _table(run: Run, rows: Sequence[int], answers: Array, drawn: Array, random: np.random.Generator) -> pl.DataFrame:
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
    columns[WHY] = np.where(drawn, RANDOM, UNCERTAIN).tolist()
    return pl.DataFrame(columns)


def _texts(run: Run, rows: Sequence[int]) -> pa.Table:
    """Returns these rows of the training texts, in this order; memory holds one bucket."""
    parts, places, start = [], [], 0
    for table in tables(run.store, train_part(run)):
        own = [place for place, row in enumerate(rows) if start <= row < start + len(table)]
        parts.append(table.take(pa.array([rows[place] - start for place in own], pa.int64())))
        places += own
        start += len(table)
    return pa.concat_tables(parts).take(np.argsort(places))


def write_labels_file(path: Path, table: pl.DataFrame) -> None:
    """Writes the table as csv; refuses to replace a file, which may have labels."""
    file = io.StringIO(newline="")
    csv.writer(file).writerows([table.columns, *table.rows()])
    write_new(path, file.getvalue())


# ---- the choice of texts


@dataclass(frozen=True)
class Candidates:
    """The training texts to choose from."""

    rows: Array
    """Rows without a label."""
    weights: Array | None
    """The teachers' weights of all texts [texts, teachers]; without them all chosen texts are random."""
    answers: Array
    """Each teacher's prediction [texts, teachers], as a position in the union of labels."""
    features: Callable[[Array], Array]
    """Returns the encoder's states of rows; near duplicates are left out."""


def pick(candidates: Candidates, count: int, seed: int) -> tuple[Array, Array]:
    """Returns rows in random order, and which of them are random ones; the others are uncertain."""
    random, count = np.random.default_rng(seed), min(count, len(candidates.rows))
    uncertain = count - max(round(RANDOM_SHARE * count), LEAST_RANDOM)
    rows = _uncertain(candidates, uncertain) if uncertain > 0 else np.array([], np.int64)
    others = random.choice(np.setdiff1d(candidates.rows, rows), count - len(rows), replace=False)
    order = random.permutation(count)
    return np.concatenate([rows, others])[order], order >= len(rows)


def _uncertain(candidates: Candidates, count: int) -> Array:
    """Returns rows where the choice of a teacher is uncertain, without near duplicates; predicted labels take turns."""
    if candidates.weights is None:
        return np.array([], np.int64)
    weights, answers = candidates.weights[candidates.rows], candidates.answers[candidates.rows]
    most = np.argsort(-uncertainty(weights, answers), kind="stable")[:SEARCHED]
    in_turn = most[_turns(answers[most, weights[most].argmax(axis=1)])]
    rows: Array = candidates.rows[in_turn]
    return rows[_apart(candidates.features(rows), count)]


def uncertainty(weights: Array, answers: Array) -> Array:
    """Returns the entropy of the weights in nats; teachers with the same answer count as one."""
    joined = np.zeros(weights.shape)
    for place in range(weights.shape[1]):
        first = (answers[:, : place + 1] == answers[:, [place]]).argmax(axis=1)
        np.add.at(joined, (np.arange(len(weights)), first), weights[:, place])
    return entropy_nats(joined)


def _turns(labels: Array) -> Array:
    """Returns the places of all first texts of a label, then of all second ones, and so on."""
    turns = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        own = labels == label
        turns[own] = np.arange(own.sum())
    return np.argsort(turns, kind="stable")


def _apart(features: Array, count: int) -> list[int]:
    """Returns the first places of which none is among the nearest texts of another; others fill the rest."""
    blocked, chosen = np.zeros(len(features), bool), list[int]()
    for place in range(len(features)):
        if len(chosen) == count:
            break
        if not blocked[place]:
            chosen.append(place)
            similarity = np.asarray(features @ features[place])
            blocked[np.argsort(-similarity)[: NEAR + 1]] = True
    rest = np.setdiff1d(np.arange(len(features)), chosen)[: count - len(chosen)]
    return [*chosen, *rest.tolist()]
