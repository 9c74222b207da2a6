"""From the cache to a teacher's statistics: which texts are its own, and of which class each is.

Its own may be those that were written for it, or any where nobody knows. Of each class that it says those are taken
that it is surest of by the margin of its logits, a share (`targets.surest`) of what is its own if all teachers have
equally many: written texts drift, and of others more would be others'. Over all classes the loudest would be all.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amalgam.data.keys import text_key
from amalgam.data.shards import key_list, read_keys, read_table
from amalgam.pipeline.stage import Run
from amalgam.stages.cache_features.families import statistics_states
from amalgam.stages.cache_features.states import state_of
from amalgam.stages.fit_statistics.asked import reference_part
from amalgam.stages.fit_statistics.statistics import Statistics
from amalgam.stages.read_corpus.generated import generated_file
from amalgam.stages.teachers import KnownTeacher, teachers_of

Keys = NDArray[np.bytes_]
ROUNDING = 1e-9
"""Of a share times a number of texts: what is whole is not rounded up."""


def fit(run: Run, teacher: KnownTeacher) -> tuple[Statistics, dict[str, Any]]:
    buckets = reference_part(run).buckets
    keys: Keys = np.concatenate([read_keys(run.store.checked(bucket.file)) for bucket in buckets])
    logits = cached_logits(run, teacher, [bucket.prefix for bucket in buckets], keys)
    states = state_of(run, teacher, keys, statistics_states)
    mine, share, which = _written_for(run, teacher, keys), run.experiment.targets.surest, "that it is surest of"
    if mine.any():
        which += ", of those written for it"
    else:
        mine, share = ~mine, share / len(teachers_of(run))
    groups = surest(logits, mine, share)
    found = Statistics.of(states, logits, groups)
    present = np.unique(groups[groups >= 0])
    facts = {
        "texts": int((groups >= 0).sum()),
        "which": which,
        "background": len(keys),
        "absent": [label for place, label in enumerate(teacher.labels) if place not in present],
        "width": states.width,
        "shrinkage": [round(max(float(pair[place].shrinkage) for pair in found.pairs), 4) for place in (0, 1)],
        "same": [bool((found.deviation[place] == 0).all()) for place in range(len(found.deviation))],
    }
    return found, facts


def surest(logits: NDArray[Any], mine: NDArray[np.bool_], share: float) -> NDArray[np.int64]:
    """Of each class that is said of `mine` the surest share, rounded up: the class; -1 for every other text."""
    ordered = np.partition(logits.astype(np.float64), -2, axis=1)
    order = np.argsort(ordered[:, -2] - ordered[:, -1], kind="stable")
    said = np.where(mine, logits.argmax(axis=1), -1)
    groups = np.full(len(logits), -1, np.int64)
    for label in np.unique(said[mine]):
        those = order[said[order] == label]
        groups[those[: math.ceil(share * len(those) - ROUNDING)]] = label
    return groups


def cached_logits(run: Run, teacher: KnownTeacher, prefixes: list[str], keys: Keys) -> NDArray[Any]:
    """[n, labels], dropout off."""
    import polars as pl

    from amalgam.stages.build_targets.evidence import logits_of
    from amalgam.stages.cache_teachers.stage import family_of

    wanted = pl.Series("key", key_list(keys), pl.Binary)
    found: NDArray[Any] = logits_of(run, teacher.name, family_of(run, teacher), prefixes, wanted).to_numpy()
    return found


def written(run: Run) -> bool:
    """Whether it is known for which teacher a text was written."""
    said = run.experiment.generate
    return said is not None and said.source != "cross-domain"


def _written_for(run: Run, teacher: KnownTeacher, keys: Keys) -> NDArray[np.bool_]:
    """Which texts were; none where nobody knows."""
    if not written(run):
        return np.zeros(len(keys), bool)
    table = read_table(run.store.checked(generated_file(run)), ["text", "teacher"])
    texts, whose = (table.column(name).to_pylist() for name in table.column_names)
    own = {text_key((text,)) for text, name in zip(texts, whose, strict=True) if name == teacher.name}
    return np.array([key in own for key in key_list(keys)], bool)
