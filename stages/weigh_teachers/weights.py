"""From the cache to weights: each teacher's signal on every text, smoothed over neighbours, made comparable.

Two things are looked at first, in the signals alone. Where one teacher is sure the others should not be: without that,
signals do not tell teachers apart, and MUKA's own weights are taken. And a text's signal should be its neighbours' too:
else the neighbourhood is left out. What was found and done is said, and stands in the manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.stages.weigh_teachers.weighing import Weighing, by_confidence, mixture, standardised

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from amalgam.pipeline.stage import Run
    from amalgam.stages.read_corpus.parts import Bucket

Array = np.ndarray[Any, np.dtype[Any]]

EXCLUSIVE = 0.15
"""Least exclusion: 0 for signals that have nothing to do with each other, 1 where one is high and the others low."""
COHERENT = 0.1
"""Least correlation of the teachers' own signals with those of the neighbours."""
LEAST_SHARE = 0.02


def weigh(run: Run) -> tuple[pa.Table, dict[str, Any]]:
    import pyarrow as pa

    from amalgam.data.schemas import WEIGHTS, arrow_schema
    from amalgam.stages.read_corpus.parts import read_bucket, train_part
    from amalgam.stages.teachers import label_space

    buckets = train_part(run).buckets
    teachers = list(label_space(run).columns)
    confidence, signal = signals(run, buckets)
    facts: dict[str, Any] = {"notes": [], "exclusion": exclusion(signal)}
    if len(teachers) > 1 and facts["exclusion"] < EXCLUSIVE:
        facts["notes"].append(
            f"where one teacher is sure the others are no less so (exclusion {facts['exclusion']:.2f}): signals do "
            "not tell teachers apart here, and each text's own confidences were taken, as muka does"
        )
        found = by_confidence(confidence, run.experiment.targets.temperature)
    else:
        found = _weighed(run, signal, facts)
    keys = pa.concat_tables(read_bucket(run, bucket, ["key"]) for bucket in buckets).column("key").combine_chunks()
    values = pa.array(found.weights.astype(np.float32).reshape(-1))
    columns = [keys, pa.FixedSizeListArray.from_arrays(values, len(teachers))]
    facts["shares"] = dict(zip(teachers, found.shares.round(4).tolist(), strict=True))
    return pa.table(columns, schema=arrow_schema(WEIGHTS, {"weight": len(teachers)})), facts


def _weighed(run: Run, signal: Array, facts: dict[str, Any]) -> Weighing:
    from amalgam.stages.cache_features.stage import features_of
    from amalgam.stages.read_corpus.parts import train_part
    from amalgam.stages.weigh_teachers.neighbours import nearest

    targets, notes = run.experiment.targets, facts["notes"]
    if targets.looks_at_neighbours:
        near = nearest(features_of(run, train_part(run).buckets), targets.neighbours)
        smooth, facts["coherence"] = over_neighbours(signal, near, targets.smoothings)
        if facts["coherence"] >= COHERENT:
            signal = smooth
        else:
            notes.append(
                f"neighbouring texts say nothing of a text's teacher (correlation {facts['coherence']:.2f}): "
                "each text's own signal was taken"
            )
    if targets.weights == "standardised":
        return standardised(signal)
    found = mixture(signal)
    facts["separation"] = found.separation
    if len(found.shares) > 1 and found.shares.min() < LEAST_SHARE:
        notes.append("the mixture leaves a teacher without texts: standardised signals were taken instead")
        return standardised(signal)
    return found


def exclusion(signal: Array) -> float:
    """Minus the mean correlation of two teachers' signals, over the least that so many can have among them."""
    teachers = signal.shape[1]
    if teachers == 1 or len(signal) < 2:
        return 0.0
    pairs = [(one, other) for one in range(teachers) for other in range(one)]
    mean = float(np.mean([_correlation(signal[:, one], signal[:, other]) for one, other in pairs]))
    return float(-mean * (teachers - 1))


def over_neighbours(signal: Array, near: Array, smoothings: int) -> tuple[Array, float]:
    """The smoothed signals, and the mean over teachers of their correlation with the texts' own."""
    from amalgam.stages.weigh_teachers.neighbours import smoothed

    once = smoothed(signal, near)
    smooth = once
    for _ in range(smoothings - 1):
        smooth = smoothed(smooth, near)
    return smooth, float(np.mean([_correlation(signal[:, one], once[:, one]) for one in range(signal.shape[1])]))


def _correlation(one: Array, other: Array) -> float:
    if not len(one) or one.std() == 0 or other.std() == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def signals(run: Run, buckets: Sequence[Bucket]) -> tuple[Array, Array]:
    """[texts, teachers], twice: each teacher's confidence, and the signal that the experiment names."""
    from amalgam.stages.build_targets.stage import neighbouring_buckets
    from amalgam.stages.cache_teachers.stage import families_of
    from amalgam.stages.teachers import label_space

    families = families_of(run)
    parts = [
        np.stack([_signals(run, families[name], name, group) for name in label_space(run).columns], axis=2)
        for group in neighbouring_buckets(buckets)
    ]
    found = np.concatenate(parts)
    return found[:, 0], found[:, 1]


def _signals(run: Run, family: str, teacher: str, buckets: Sequence[Bucket]) -> Array:
    import polars as pl
    import pyarrow as pa

    from amalgam.stages.build_targets.evidence import gather
    from amalgam.stages.read_corpus.parts import read_bucket

    keys = pa.concat_tables(read_bucket(run, bucket, ["key"]) for bucket in buckets).column("key")
    evidence = gather(run, teacher, family, [bucket.prefix for bucket in buckets], pl.Series("key", keys, pl.Binary))
    confidence: Array = evidence.confidence.to_numpy()
    by_margin = run.experiment.targets.signal == "margin"
    return np.stack([confidence, margin(evidence.logits.to_numpy()) if by_margin else confidence], axis=1)


def margin(logits: Array) -> Array:
    """By how much the first logit is above the second; its scale is the teacher's own."""
    ordered = np.partition(logits.astype(np.float64), -2, axis=1)
    found: Array = ordered[:, -1] - ordered[:, -2]
    return found
