"""The choice of teacher before 2026-11-23, as a rival that later versions of amalgam are measured against.

The signal is the sum of standardised kinds. Each kind has its mean over the neighbourhood that improves its agreement.
Only this path is kept here; the arithmetic of single signals is that of amalgam.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.stages.weigh_teachers import neighbours, weigh
from amalgam.stages.weigh_teachers.signals import Fitted, correlation, standard, together
from amalgam.stages.weigh_teachers.weigh import WeightFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amalgam.benchmarks.choice_settings import Setting

Array = np.ndarray[Any, np.dtype[Any]]

CLOSEST = 5
NEIGHBOURS = 10, 50
OWN = "answers", "states"
AGAINST = 0.1


def signal_of(setting: Setting) -> Array | None:
    """Returns the former input of the mixture; None where the kinds do not agree."""
    features, states = setting.features.astype(np.float32), [own.astype(np.float32) for own in setting.states]
    kinds = {
        "answers": together(list(setting.answers.values()), Fitted()),
        "states": standard(np.stack([neighbours.density(own, CLOSEST, own, 0) for own in states], axis=1), Fitted()),
        "names": standard(setting.names, Fitted()),
    }
    kept = weigh.agreeing_kinds(kinds, WeightFacts(notes=[]))
    if kept is None:
        return None
    spaces = (features, neighbours.SideBySide.of([features, *states]))
    nearest = [
        neighbours.nearest_texts(space, max(NEIGHBOURS), space, 0)[0][:, :count]
        for space in spaces
        for count in NEIGHBOURS
    ]
    whole = together(list(kept.values()), Fitted())
    others = whole.sum(axis=1, keepdims=True) - whole
    factors = [_factor(own, others) if kind in OWN else 1.0 for kind, own in kept.items()]
    signals = [standard(_smoothed(kind, kept, nearest), Fitted()) for kind in kept]
    return standard(
        np.sum([factor * signal for factor, signal in zip(factors, signals, strict=True)], axis=0), Fitted()
    )


def _smoothed(kind: str, kept: Mapping[str, Array], nearest: list[Array]) -> Array:
    """Returns the kind as it is or over the neighbours, whichever agrees best with the others."""
    own = kept[kind]
    candidates = [own, *(together([own, weigh.smoothed(own, places, Fitted())], Fitted()) for places in nearest)]
    return max(candidates, key=lambda signal: weigh.agreement({kind: signal}, kept)[kind])


def _factor(own: Array, others: Array) -> Array:
    """Returns 0.5 for a teacher whose evidence is higher where others are right, else 1."""
    against = [correlation(a, b) for a, b in zip(own.T, others.T, strict=True)]
    return np.where(np.array(against) > AGAINST, 0.5, 1.0)
