"""Computes teacher weights from signals: makes them comparable, smooths them over neighbours, drops unreliable ones.

All checks use the signals alone. Evidence that does not correlate with the rest is dropped. A single kind of evidence
must be exclusive: high for one teacher, low for the others. A text's signal should correlate with its neighbours'.
Without usable evidence the weights are MUKA's own. Notes and the manifest report the checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from amalgam.data.schemas import WEIGHTS, arrow_schema
from amalgam.stages.target_methods import target_method
from amalgam.stages.weigh_teachers.evidence import (
    AGAINST,
    AGREEING,
    WeighInputs,
    agreement,
    contradicting,
    correlation,
    kinds,
    nearest,
    predictions,
    provenance,
    read_states,
    side_by_side,
    smoothed,
    together,
)
from amalgam.stages.weigh_teachers.mixture import TeacherWeights, by_confidence, mixture, standard, standardised

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
        teacher_weights = by_confidence(answered["confidence"], targets.temperature)
    else:
        teacher_weights = weighed(signal, targets.teacher_weights, facts, shares)
    teachers = inputs.teachers
    values = pa.array(teacher_weights.weights.astype(np.float32).reshape(-1))
    columns = [inputs.keys(), pa.FixedSizeListArray.from_arrays(values, len(teachers))]
    facts["shares"] = dict(zip(teachers, teacher_weights.shares.round(4).tolist(), strict=True))
    return pa.table(columns, schema=arrow_schema(WEIGHTS, {"weight": len(teachers)})), facts


def _of_all(inputs: WeighInputs, answered: Answers, facts: Facts) -> tuple[Array | None, Array | None]:
    """Returns the signal, and the teachers' shares of the texts if provenance determines them."""
    features, states = inputs.read_features(), read_states(inputs)
    kept = agreeing_kinds(kinds(inputs, answered, features, states), facts)
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
    if signal is None or not target_method(targets).reads_neighbours:
        return signal, None
    near = nearest(inputs.read_features(), targets.neighbours)
    smooth, facts["coherence"] = over_neighbours(signal, near)
    if facts["coherence"] < COHERENT and signal.shape[1] > 1:
        facts["notes"].append(
            f"neighbouring texts do not predict a text's teacher (correlation {facts['coherence']:.2f}): "
            "each text's own signal was used"
        )
        return signal, None
    return smooth, None


def agreeing_kinds(evidence: Mapping[str, Array], facts: Facts) -> Mapping[str, Array] | None:
    """Returns the kinds that agree, or None if fewer than two do; drops the kind that agrees least, then repeats."""
    kept, facts["agreement"] = dict(evidence), {}
    if next(iter(evidence.values())).shape[1] == 1:
        return kept
    while len(kept) > 1:
        values = agreement(kept)
        facts["agreement"] |= {kind: round(value, 4) for kind, value in values.items()}
        least = min(values, key=values.__getitem__)
        if values[least] >= AGREEING:
            facts["notes"] += [
                f"{kind} correlate too little with the other evidence for the teachers ({value:.2f}): they were dropped"
                for kind, value in facts["agreement"].items()
                if kind not in kept
            ]
            return kept
        del kept[least]
    correlations = ", ".join(f"{kind} {value:.2f}" for kind, value in facts["agreement"].items())
    facts["notes"].append(
        f"answers, states and names do not agree on the teachers ({correlations}): each text's own confidences were "
        "used, as muka does"
    )
    return None


def with_provenance(kept: Mapping[str, Array], written: Array, facts: Facts) -> Mapping[str, Array]:
    """Adds provenance if it agrees with the kept kinds; it cannot drop them, since a text may miss its class."""
    value = agreement({"provenance": written}, kept)["provenance"]
    facts["agreement"]["provenance"] = round(value, 4)
    if value >= AGREEING:
        return {**kept, "provenance": written}
    facts["notes"].append(
        f"the teachers that texts were generated for correlate too little with the other evidence ({value:.2f}): "
        "they were dropped"
    )
    return kept


def smooth_over_neighbours(
    kept: Mapping[str, Array], spaces: Mapping[str, Array | Sequence[Array]], count: int, facts: Facts
) -> Array:
    """Returns the sum of the kinds, each with its mean over the neighbours where that improves it.

    The noise of two kinds is independent. A kind uses the neighbourhood with which it predicts the other kinds best, or
    none if the text alone does.
    """
    near = _neighbourhoods(spaces, count) if next(iter(kept.values())).shape[1] > 1 else {}
    smoothed_kinds = {kind: _in_the_best(kind, kept, near) for kind in kept}
    facts["neighbours"] = {kind: where for kind, (_, where, _) in smoothed_kinds.items()}
    facts["foretold"] = {
        kind: {"alone": round(agreement({kind: own}, kept)[kind], 4), "with them": round(smoothed_kinds[kind][2], 4)}
        for kind, own in kept.items()
    }
    against = contradicting(kept)
    facts["against"] = {kind: values.round(4).tolist() for kind, values in against.items()}
    factors = {kind: np.where(values > AGAINST, 0.5, 1.0) for kind, values in against.items()}
    weighted = [factors.get(kind, 1.0) * standard(signal) for kind, (signal, _, _) in smoothed_kinds.items()]
    return standard(np.sum(weighted, axis=0))


def downweighted(against: Mapping[str, Sequence[float]], teachers: Sequence[str]) -> list[str]:
    return [
        f"teacher {teacher}: its evidence from {kind} is higher where others are right ({value:.2f}); "
        "its weight was halved"
        for kind, values in against.items()
        for teacher, value in zip(teachers, values, strict=True)
        if value > AGAINST
    ]


def _neighbourhoods(spaces: Mapping[str, Array | Sequence[Array]], count: int) -> dict[str, Array]:
    neighbourhoods: dict[str, Array] = {}
    for space, states in spaces.items() if count else ():
        near = nearest(states if isinstance(states, np.ndarray) else side_by_side(states), count)
        neighbourhoods |= {f"{width} by {space}": near[:, :width] for width in sorted({max(1, count // PART), count})}
    return neighbourhoods


def _in_the_best(kind: str, kept: Mapping[str, Array], near: Mapping[str, Array]) -> tuple[Array, str, float]:
    """Returns the kind's signal with its best neighbourhood, the neighbourhood, and its agreement with the others."""
    tried = [("none", kept[kind])]
    tried += [(where, together([kept[kind], smoothed(kept[kind], those)])) for where, those in near.items()]
    judged = [(signal, where, agreement({kind: signal}, kept)[kind]) for where, signal in tried]
    return max(judged, key=lambda one: one[2])


def exclusive(signal: Array, facts: Facts) -> Array | None:
    """Returns the signal, or None if it does not separate the teachers."""
    facts["exclusion"] = exclusion(signal)
    if signal.shape[1] == 1 or facts["exclusion"] >= EXCLUSIVE:
        return signal
    facts["notes"].append(
        f"the signals do not separate the teachers (exclusion {facts['exclusion']:.2f}): each text's own confidences "
        "were used, as muka does"
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
    """Returns the fraction of texts generated for each teacher."""
    many = None if written is None else (written > 0).sum(axis=0)
    return many / many.sum() if many is not None and many.all() else None


def weighed(signal: Array, how: str, facts: Facts, shares: Array | None = None) -> TeacherWeights:
    if how == "standardised" or signal.shape[1] == 1:
        return standardised(signal)
    weights = mixture(signal, shares)
    facts["separation"] = weights.separation
    return weights


def over_neighbours(signal: Array, near: Array) -> tuple[Array, float]:
    """Returns the smoothed signals, and the mean over teachers of their correlation with the texts' own."""
    smooth = smoothed(signal, near)
    return smooth, float(np.mean([correlation(own, mean) for own, mean in zip(signal.T, smooth.T, strict=True)]))
