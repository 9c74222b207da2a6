"""From signals to weights: made comparable, smoothed over neighbours, and not believed where they should not be.

What is looked at is seen in the signals alone. Kinds that agree are believed, a kind that does not is left out; of a
single signal, where one teacher is sure the others should not be. A text's signal should be its neighbours' too. Where
nothing is left to believe, MUKA's own weights are taken. What was found and done is said, and stands in the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from amalgam.data.schemas import WEIGHTS, arrow_schema
from amalgam.stages.weigh_teachers.evidence import (
    AGAINST,
    AGREEING,
    WeighInputs,
    agreement,
    correlation,
    kinds,
    predictions,
    provenance,
    read_states,
    speaking_against,
    together,
)
from amalgam.stages.weigh_teachers.mixture import TeacherWeights, by_confidence, mixture, standard, standardised
from amalgam.stages.weigh_teachers.neighbours import nearest, side_by_side, smoothed

Answers = Mapping[str, "Array"]
Facts = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]
EXCLUSIVE = 0.15
"""Least exclusion: 0 for signals that have nothing to do with each other, 1 where one is high and the others low."""

COHERENT = 0.1
"""Least correlation of the teachers' own signals with those of the neighbours."""

PART = 5
"""Neighbours are also tried by one in so many of them: small classes have few."""


def weigh(inputs: WeighInputs) -> tuple[pa.Table, dict[str, Any]]:
    targets = inputs.targets
    facts: dict[str, Any] = {"notes": []}
    answered = predictions(inputs)
    signal, shares = (_of_all if targets.weight_signal == "all" else _of_one)(inputs, answered, facts)
    if signal is None:
        found = by_confidence(answered["confidence"], targets.temperature)
    else:
        found = weighed(signal, targets.teacher_weights, facts, shares)
    teachers = inputs.teachers
    values = pa.array(found.weights.astype(np.float32).reshape(-1))
    columns = [inputs.keys(), pa.FixedSizeListArray.from_arrays(values, len(teachers))]
    facts["shares"] = dict(zip(teachers, found.shares.round(4).tolist(), strict=True))
    return pa.table(columns, schema=arrow_schema(WEIGHTS, {"weight": len(teachers)})), facts


def _of_all(inputs: WeighInputs, answered: Answers, facts: Facts) -> tuple[Array | None, Array | None]:
    """The signal, and the teachers' shares of the texts where they are known."""
    features, states = inputs.read_features(), read_states(inputs)
    kept = agreed(kinds(inputs, answered, features, states), facts)
    if kept is None:
        return None, None
    written = provenance(inputs)
    kept = kept if written is None else with_provenance(kept, standard(written), facts)
    spaces: dict[str, Array | Sequence[Array]] = {
        "the encoder's states": features,
        "the encoder's and the teachers' states": [features, *states],
    }
    signal = smooth_over_neighbours(kept, spaces, inputs.targets.neighbours, facts)
    facts["notes"] += downweighted(facts["against"], inputs.teachers)
    return signal, written_shares(written)


def _of_one(inputs: WeighInputs, answered: Answers, facts: Facts) -> tuple[Array | None, None]:
    targets = inputs.targets
    signal = exclusive(answered[targets.weight_signal], facts)
    if signal is None or not targets.looks_at_neighbours:
        return signal, None
    near = nearest(inputs.read_features(), targets.neighbours)
    smooth, facts["coherence"] = over_neighbours(signal, near, targets.smoothing_rounds)
    if facts["coherence"] < COHERENT and signal.shape[1] > 1:
        facts["notes"].append(
            f"neighbouring texts say nothing of a text's teacher (correlation {facts['coherence']:.2f}): "
            "each text's own signal was taken"
        )
        return signal, None
    return smooth, None


def agreed(found: Mapping[str, Array], facts: Facts) -> Mapping[str, Array] | None:
    """The kinds that agree; None where there are no two of them. The one that agrees least goes first, so that it is no
    judge of the others.
    """
    kept, facts["agreement"] = dict(found), {}
    if next(iter(found.values())).shape[1] == 1:
        return kept
    while len(kept) > 1:
        values = agreement(kept)
        facts["agreement"] |= {kind: round(value, 4) for kind, value in values.items()}
        least = min(values, key=values.__getitem__)
        if values[least] >= AGREEING:
            facts["notes"] += [
                f"what {kind} say of the teachers agrees too little with the rest ({value:.2f}): they were left out"
                for kind, value in facts["agreement"].items()
                if kind not in kept
            ]
            return kept
        del kept[least]
    told = ", ".join(f"{kind} {value:.2f}" for kind, value in facts["agreement"].items())
    facts["notes"].append(
        f"answers, states and names do not agree on the teachers ({told}): each text's own confidences were taken, "
        "as muka does"
    )
    return None


def with_provenance(kept: Mapping[str, Array], written: Array, facts: Facts) -> Mapping[str, Array]:
    """Judged by the kinds that agree, and no judge of them: a text written towards a teacher may be about nothing."""
    value = agreement({"provenance": written}, kept)["provenance"]
    facts["agreement"]["provenance"] = round(value, 4)
    if value >= AGREEING:
        return {**kept, "provenance": written}
    facts["notes"].append(
        f"the teachers that texts were written for agree too little with what else speaks for teachers ({value:.2f}): "
        "they were left out"
    )
    return kept


def smooth_over_neighbours(
    kept: Mapping[str, Array], spaces: Mapping[str, Array | Sequence[Array]], count: int, facts: Facts
) -> Array:
    """The kinds together, each beside its mean over the neighbours that are worth it.

    Noise of one kind is not that of another. So where what a kind says of a text and of its neighbours foretells the
    other kinds better than what it says of the text alone, the neighbours are like the text; each kind takes the
    neighbourhood that does so best for it.
    """
    near = _neighbourhoods(spaces, count) if next(iter(kept.values())).shape[1] > 1 else {}
    found = {kind: _in_the_best(kind, kept, near) for kind in kept}
    facts["neighbours"] = {kind: where for kind, (_, where, _) in found.items()}
    facts["foretold"] = {
        kind: {"alone": round(agreement({kind: own}, kept)[kind], 4), "with them": round(found[kind][2], 4)}
        for kind, own in kept.items()
    }
    against = speaking_against(kept)
    facts["against"] = {kind: values.round(4).tolist() for kind, values in against.items()}
    heard = {kind: np.where(values > AGAINST, 0.5, 1.0) for kind, values in against.items()}
    return standard(np.sum([heard.get(kind, 1.0) * standard(one) for kind, (one, _, _) in found.items()], axis=0))


def downweighted(against: Mapping[str, Sequence[float]], teachers: Sequence[str]) -> list[str]:
    return [
        f"teacher {teacher}: what its {kind} say is higher where others are right ({value:.2f}), and was heard half"
        for kind, values in against.items()
        for teacher, value in zip(teachers, values, strict=True)
        if value > AGAINST
    ]


def _neighbourhoods(spaces: Mapping[str, Array | Sequence[Array]], count: int) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for space, states in spaces.items() if count else ():
        near = nearest(states if isinstance(states, np.ndarray) else side_by_side(states), count)
        found |= {f"{width} by {space}": near[:, :width] for width in sorted({max(1, count // PART), count})}
    return found


def _in_the_best(kind: str, kept: Mapping[str, Array], near: Mapping[str, Array]) -> tuple[Array, str, float]:
    """Its signal there, which it is, and how well others are foretold."""
    tried = [("none", kept[kind])]
    tried += [(where, together([kept[kind], smoothed(kept[kind], those)])) for where, those in near.items()]
    judged = [(signal, where, agreement({kind: signal}, kept)[kind]) for where, signal in tried]
    return max(judged, key=lambda one: one[2])


def exclusive(signal: Array, facts: Facts) -> Array | None:
    """None where the one signal does not tell teachers apart."""
    facts["exclusion"] = exclusion(signal)
    if signal.shape[1] == 1 or facts["exclusion"] >= EXCLUSIVE:
        return signal
    facts["notes"].append(
        f"where one teacher is sure the others are no less so (exclusion {facts['exclusion']:.2f}): signals do "
        "not tell teachers apart here, and each text's own confidences were taken, as muka does"
    )
    return None


def exclusion(signal: Array) -> float:
    """Minus the mean correlation of two teachers' signals, over the least that so many can have among them."""
    teachers = signal.shape[1]
    if teachers == 1 or len(signal) < 2:
        return 0.0
    pairs = [(one, other) for one in range(teachers) for other in range(one)]
    mean = float(np.mean([correlation(signal[:, one], signal[:, other]) for one, other in pairs]))
    return float(-mean * (teachers - 1))


def written_shares(written: Array | None) -> Array | None:
    """Of texts that were written for a teacher each: how many for which."""
    many = None if written is None else (written > 0).sum(axis=0)
    return many / many.sum() if many is not None and many.all() else None


def weighed(signal: Array, how: str, facts: Facts, shares: Array | None = None) -> TeacherWeights:
    if how == "standardised" or signal.shape[1] == 1:
        return standardised(signal)
    found = mixture(signal, shares)
    facts["separation"] = found.separation
    return found


def over_neighbours(signal: Array, near: Array, smoothings: int) -> tuple[Array, float]:
    """The smoothed signals, and the mean over teachers of their correlation with the texts' own."""
    once = smoothed(signal, near)
    smooth = once
    for _ in range(smoothings - 1):
        smooth = smoothed(smooth, near)
    return smooth, float(np.mean([correlation(signal[:, one], once[:, one]) for one in range(signal.shape[1])]))
