"""From the cache to weights: each teacher's signal on every text, smoothed over neighbours, made comparable.

Neighbours help where texts that look alike belong to the same teacher. Whether they do is seen in the signals alone:
where a text's own signal has nothing to do with its neighbours', the neighbourhood is left out, and said to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.stages.weigh_teachers.weighing import Weighing, mixture, standardised

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from amalgam.pipeline.stage import Run
    from amalgam.stages.read_corpus.parts import Bucket

Array = np.ndarray[Any, np.dtype[Any]]

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
    found, facts = _weighed(run, signals(run, buckets))
    keys = pa.concat_tables(read_bucket(run, bucket, ["key"]) for bucket in buckets).column("key").combine_chunks()
    values = pa.array(found.weights.astype(np.float32).reshape(-1))
    columns = [keys, pa.FixedSizeListArray.from_arrays(values, len(teachers))]
    facts["shares"] = dict(zip(teachers, found.shares.round(4).tolist(), strict=True))
    return pa.table(columns, schema=arrow_schema(WEIGHTS, {"weight": len(teachers)})), facts


def _weighed(run: Run, signal: Array) -> tuple[Weighing, dict[str, Any]]:
    from amalgam.stages.cache_features.stage import features_of
    from amalgam.stages.read_corpus.parts import train_part
    from amalgam.stages.weigh_teachers.neighbours import nearest

    targets, notes = run.experiment.targets, list[str]()
    facts: dict[str, Any] = {"notes": notes}
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
        return standardised(signal), facts
    found = mixture(signal)
    facts["separation"] = found.separation
    if len(found.shares) > 1 and found.shares.min() < LEAST_SHARE:
        notes.append("the mixture leaves a teacher without texts: standardised signals were taken instead")
        return standardised(signal), facts
    return found, facts


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


def signals(run: Run, buckets: Sequence[Bucket]) -> Array:
    """[texts, teachers]: how sure each teacher is of each text."""
    from amalgam.stages.build_targets.stage import neighbouring_buckets
    from amalgam.stages.cache_teachers.stage import families_of
    from amalgam.stages.teachers import label_space

    families = families_of(run)
    parts = [
        np.stack([_signal(run, families[name], name, group) for name in label_space(run).columns], axis=1)
        for group in neighbouring_buckets(buckets)
    ]
    return np.concatenate(parts)


def _signal(run: Run, family: str, teacher: str, buckets: Sequence[Bucket]) -> Array:
    import polars as pl
    import pyarrow as pa

    from amalgam.stages.build_targets.evidence import gather
    from amalgam.stages.read_corpus.parts import read_bucket

    keys = pa.concat_tables(read_bucket(run, bucket, ["key"]) for bucket in buckets).column("key")
    evidence = gather(run, teacher, family, [bucket.prefix for bucket in buckets], pl.Series("key", keys, pl.Binary))
    if run.experiment.targets.signal == "margin":
        return margin(evidence.logits.to_numpy())
    found: Array = evidence.confidence.to_numpy()
    return found


def margin(logits: Array) -> Array:
    """By how much the first logit is above the second; its scale is the teacher's own."""
    ordered = np.partition(logits.astype(np.float64), -2, axis=1)
    found: Array = ordered[:, -1] - ordered[:, -2]
    return found
