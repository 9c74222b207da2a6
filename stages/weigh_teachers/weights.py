"""From signals to weights: made comparable, smoothed over neighbours, and not believed where they should not be.

What is looked at is seen in the signals alone. Kinds that agree are believed, a kind that does not is left out; of a
single signal, where one teacher is sure the others should not be. A text's signal should be its neighbours' too. Where
nothing is left to believe, MUKA's own weights are taken. What was found and done is said, and stands in the manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.stages.weigh_teachers.signals import AGREEING, agreement, answers, correlation, keys_of, kinds, together
from amalgam.stages.weigh_teachers.weighing import Weighing, by_confidence, mixture, standard, standardised

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from amalgam.pipeline.experiment import Targets
    from amalgam.pipeline.stage import Run

Array = np.ndarray[Any, np.dtype[Any]]

EXCLUSIVE = 0.15
"""Least exclusion: 0 for signals that have nothing to do with each other, 1 where one is high and the others low."""
COHERENT = 0.1
"""Least correlation of the teachers' own signals with those of the neighbours."""
SEPARATE = 1.0
"""Least separation that shares are estimated by."""
LEAST_SHARE = 0.02


def weigh(run: Run) -> tuple[pa.Table, dict[str, Any]]:
    import pyarrow as pa

    from amalgam.data.schemas import WEIGHTS, arrow_schema
    from amalgam.stages.cache_features.stage import features_of
    from amalgam.stages.read_corpus.parts import train_part
    from amalgam.stages.teachers import label_space

    buckets, targets = train_part(run).buckets, run.experiment.targets
    answered = answers(run, buckets)
    features = features_of(run, buckets) if targets.looks_at_encoder else None
    facts: dict[str, Any] = {"notes": []}
    if features is not None and targets.looks_at_states:
        signal = agreed(kinds(run, buckets, answered, features), facts)
    else:
        signal = exclusive(answered[targets.signal], facts)
    if signal is None:
        found = by_confidence(answered["confidence"], targets.temperature)
    else:
        found = weighed(signal, features, targets, facts)
    teachers = list(label_space(run).columns)
    values = pa.array(found.weights.astype(np.float32).reshape(-1))
    columns = [keys_of(run, buckets), pa.FixedSizeListArray.from_arrays(values, len(teachers))]
    facts["shares"] = dict(zip(teachers, found.shares.round(4).tolist(), strict=True))
    return pa.table(columns, schema=arrow_schema(WEIGHTS, {"weight": len(teachers)})), facts


def agreed(found: Mapping[str, Array], facts: dict[str, Any]) -> Array | None:
    """The kinds that agree, together; None where there are no two of them."""
    facts["agreement"] = {kind: round(value, 4) for kind, value in agreement(found).items()}
    kept = [kind for kind, value in facts["agreement"].items() if value >= AGREEING]
    if len(kept) >= 2:
        said = {kind: f"{facts['agreement'][kind]:.2f}" for kind in found if kind not in kept}
        facts["notes"] += [
            f"what {kind} say of the teachers agrees too little with the rest ({value}): they were left out"
            for kind, value in said.items()
        ]
        return together([found[kind] for kind in kept])
    if next(iter(found.values())).shape[1] == 1:
        return together(list(found.values()))
    values = ", ".join(f"{kind} {value:.2f}" for kind, value in facts["agreement"].items())
    facts["notes"].append(
        f"answers, states and names do not agree on the teachers ({values}): each text's own confidences were taken, "
        "as muka does"
    )
    return None


def exclusive(signal: Array, facts: dict[str, Any]) -> Array | None:
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


def weighed(signal: Array, features: Array | None, targets: Targets, facts: dict[str, Any]) -> Weighing:
    if features is not None and targets.looks_at_neighbours:
        signal = _with_neighbours(signal, features, targets, facts)
    if targets.weights == "standardised" or signal.shape[1] == 1:
        return standardised(signal)
    found = mixture(signal)
    facts["separation"] = found.separation
    if found.separation is not None and found.separation < SEPARATE:
        facts["notes"].append(
            f"signals lie too close to estimate shares from (separation {found.separation:.2f}): "
            "standardised signals were taken, as if shares were alike"
        )
        return standardised(signal)
    if found.shares.min() < LEAST_SHARE:
        facts["notes"].append(
            "the mixture leaves a teacher without texts: standardised signals were taken, as if shares were alike"
        )
        return standardised(signal)
    return found


def _with_neighbours(signal: Array, features: Array, targets: Targets, facts: dict[str, Any]) -> Array:
    from amalgam.stages.weigh_teachers.neighbours import nearest

    smooth, facts["coherence"] = over_neighbours(signal, nearest(features, targets.neighbours), targets.smoothings)
    if facts["coherence"] < COHERENT and signal.shape[1] > 1:
        facts["notes"].append(
            f"neighbouring texts say nothing of a text's teacher (correlation {facts['coherence']:.2f}): "
            "each text's own signal was taken"
        )
        return signal
    return standard(signal) + standard(smooth) if targets.neighbourhood == "beside" else smooth


def over_neighbours(signal: Array, near: Array, smoothings: int) -> tuple[Array, float]:
    """The smoothed signals, and the mean over teachers of their correlation with the texts' own."""
    from amalgam.stages.weigh_teachers.neighbours import smoothed

    once = smoothed(signal, near)
    smooth = once
    for _ in range(smoothings - 1):
        smooth = smoothed(smooth, near)
    return smooth, float(np.mean([correlation(signal[:, one], once[:, one]) for one in range(signal.shape[1])]))
