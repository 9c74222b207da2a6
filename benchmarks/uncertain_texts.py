"""Picks texts whose teacher is uncertain, a rival of the random texts of `amalgam label`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from amalgam.data.arrays import Array, entropy_nats

RANDOM = 0.5
"""Share of the texts that are drawn at random."""

NEAR = 5
"""Nearest texts of a picked one that are not picked too."""

SEARCHED = 20_000
"""Most uncertain texts among which texts are picked."""

UNCERTAIN, DRAWN = "uncertain", "random"


class Picked(NamedTuple):
    row: int
    why: str
    probability: float
    """Probability with which the text was picked: 1 for an uncertain text."""


@dataclass(frozen=True)
class Candidates:
    """The training texts."""

    weights: Array
    """The teachers' weights [texts, teachers]."""
    answers: Array
    """Each teacher's prediction [texts, teachers], as a position in the union of labels."""
    features: Array | None
    """The encoder's states, to leave out near duplicates."""
    labelled: Sequence[int] = ()
    """Rows that have a label already; they are not picked."""


def pick(candidates: Candidates, count: int, seed: int) -> list[Picked]:
    """Returns rows to label: the most uncertain choices of a teacher, without near duplicates, and random texts.

    Predictions of the leading teacher take turns.
    """
    weights, answers, labelled = candidates.weights, candidates.answers, set(candidates.labelled)
    unlabelled = np.setdiff1d(np.arange(len(weights)), np.array(candidates.labelled, np.int64))
    count = min(count, len(unlabelled))
    drawn = round(RANDOM * count)
    order = [row for row in _in_turn(weights, answers) if row not in labelled]
    uncertain = _spread(order, candidates.features, count - drawn)
    rest = np.setdiff1d(unlabelled, uncertain)
    random = np.random.default_rng(seed)
    drawn_rows = np.sort(random.choice(rest, drawn, replace=False)).tolist()
    rows = [Picked(row, UNCERTAIN, 1.0) for row in uncertain]
    rows += [Picked(row, DRAWN, drawn / len(rest)) for row in drawn_rows]
    return [rows[place] for place in random.permutation(len(rows))]


def uncertainty(weights: Array, answers: Array) -> Array:
    """Returns the entropy of the weights in nats; teachers with the same answer count as one."""
    joined = np.zeros(weights.shape)
    for place in range(weights.shape[1]):
        first = (answers[:, : place + 1] == answers[:, [place]]).argmax(axis=1)
        np.add.at(joined, (np.arange(len(weights)), first), weights[:, place])
    return entropy_nats(joined)


def _in_turn(weights: Array, answers: Array) -> list[int]:
    """Returns the most uncertain rows; the predicted labels take turns."""
    order = np.argsort(-uncertainty(weights, answers), kind="stable")[:SEARCHED]
    label = answers[order, weights[order].argmax(axis=1)]
    turns: dict[int, int] = {}
    places = []
    for place, name in enumerate(label.tolist()):
        turns[name] = turns.get(name, -1) + 1
        places.append((turns[name], place))
    return [int(order[place]) for _, place in sorted(places)]


def _spread(order: Sequence[int], features: Array | None, count: int) -> list[int]:
    """Returns the first rows of which none is among the nearest texts of another; others fill the rest."""
    chosen = list(_apart(order, features, count))
    missing = count - len(chosen)
    taken = set(chosen)
    return chosen + [row for row in order if row not in taken][:missing]


def _apart(order: Sequence[int], features: Array | None, count: int) -> Iterator[int]:
    blocked: set[int] = set()
    for row in order:
        if count and row not in blocked:
            yield row
            count -= 1
            if features is not None:
                similarity = features @ features[row]
                blocked |= set(np.argsort(-similarity)[: NEAR + 1].tolist())
