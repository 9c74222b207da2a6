"""From the cache to a teacher's statistics: which texts are its own, and of which class each is.

Generated texts are the teacher's they were written for, of the class they were written for. Of other texts those are
its own, of each class that it says, that it is surest of by the margin of its logits: half as many as were its own if
all teachers had equally many, since of more too many are others'. Over all classes the loudest would be all there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Mapping

Keys = NDArray[np.bytes_]


def fit(run: Run, teacher: KnownTeacher) -> tuple[Statistics, dict[str, Any]]:
    buckets = reference_part(run).buckets
    keys: Keys = np.concatenate([read_keys(run.store.checked(bucket.file)) for bucket in buckets])
    logits = cached_logits(run, teacher, [bucket.prefix for bucket in buckets], keys)
    states = state_of(run, teacher, keys, statistics_states)
    groups = _written_for(run, teacher, keys, logits)
    how = "written for it"
    if not (groups >= 0).any():
        groups, how = surest(logits, len(teachers_of(run))), "that it is surest of"
    found = Statistics.of(states, logits, groups)
    present = np.unique(groups[groups >= 0])
    facts = {
        "texts": int((groups >= 0).sum()),
        "which": how,
        "background": len(keys),
        "absent": [label for place, label in enumerate(teacher.labels) if place not in present],
        "width": states.width,
        "shrinkage": [round(max(float(pair[place].shrinkage) for pair in found.pairs), 4) for place in (0, 1)],
        "same": [bool((found.deviation[place] == 0).all()) for place in range(len(found.deviation))],
    }
    return found, facts


def surest(logits: NDArray[Any], teachers: int) -> NDArray[np.int64]:
    """The class that is said of each of the texts; of each class -1 but for one in twice as many as are teachers."""
    ordered = np.partition(logits.astype(np.float64), -2, axis=1)
    order = np.argsort(ordered[:, -2] - ordered[:, -1], kind="stable")
    said = logits.argmax(axis=1)
    groups = np.full(len(logits), -1, np.int64)
    for label in np.unique(said):
        mine = order[said[order] == label]
        groups[mine[: -(-len(mine) // (2 * teachers))]] = label
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


def _written_for(run: Run, teacher: KnownTeacher, keys: Keys, logits: NDArray[Any]) -> NDArray[np.int64]:
    """-1 where a text was not; of texts for no class, what the teacher says."""
    groups = np.full(len(keys), -1, np.int64)
    if not written(run):
        return groups
    classes = _classes(run, teacher.name)
    places = {label: place for place, label in enumerate(teacher.labels)}
    said = logits.argmax(axis=1)
    for row, key in enumerate(key_list(keys)):
        if key in classes:
            label = classes[key]
            groups[row] = said[row] if label is None else places[label]
    return groups


def _classes(run: Run, teacher: str) -> Mapping[bytes, str | None]:
    """By key, of the texts that were written for this teacher; the first of equal ones counts."""
    table = read_table(run.store.checked(generated_file(run)), ["text", "teacher", "class"])
    found: dict[bytes, str | None] = {}
    for text, whose, label in zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True):
        if whose == teacher:
            found.setdefault(text_key((text,)), label)
    return found
