"""Fits Gaussians to the states of each teacher's own texts, and reads the logits and states that they need.

A teacher's own texts are those generated for it, else all texts. Of each predicted class the share
`targets.reference_fraction` with the largest logit margin is used, because generated texts drift.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from amalgam.data.arrays import softmax, top_margin
from amalgam.data.keys import text_key
from amalgam.data.parquet import key_list, read_keys, read_table
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.answers.load import family_of
from amalgam.stages.common.load import generated_file, reference_part, teachers_of
from amalgam.stages.common.reference_texts import measure_of
from amalgam.stages.common.states.load import state_of, states_of, statistics_states
from amalgam.stages.common.teachers import ResolvedTeacher
from amalgam.stages.fit_statistics.domain_scores import Statistics, in_parts
from amalgam.stages.fit_statistics.gaussians import Array


def confidences(run: Run, keys: Keys, prefixes: Sequence[str]) -> Array:
    """[n, B, teachers], in the order of teachers_of; `prefixes`: the training buckets that the keys are of."""
    measure = str(measure_of(run.experiment))
    found = []
    pairs = zip(teachers_of(run), states_of(run, keys, statistics_states), strict=True)
    for teacher, states in pairs:
        fitted = _statistics(run, teacher.name)
        logits = cached_logits(run, teacher, list(prefixes), keys) if measure == "msp" else None
        parts = [
            fitted.standardised(some, None if logits is None else logits[rows], measure)
            for rows, some in in_parts(states)
        ]
        found.append(np.concatenate(parts) if parts else np.empty((0, states.blocks)))
    return softmax(-np.stack(found, axis=-1))


def _statistics(run: Run, teacher: str) -> Statistics:
    files = run.result("fit-statistics").files
    file = next(file for file in files if Path(file.path).stem.rsplit("-", 1)[0] == teacher)
    return Statistics.load(run.store.verified_path(file))


Keys = NDArray[np.bytes_]

ROUNDING = 1e-9
"""Of a share times a number of texts: what is whole is not rounded up."""


def fit(run: Run, teacher: ResolvedTeacher) -> tuple[Statistics, dict[str, Any]]:
    buckets = reference_part(run).buckets
    keys: Keys = np.concatenate([read_keys(run.store.verified_path(bucket.file)) for bucket in buckets])
    logits = cached_logits(run, teacher, [bucket.prefix for bucket in buckets], keys)
    states = state_of(run, teacher, keys, statistics_states)
    mine, share, which = (
        _written_for(run, teacher, keys),
        run.experiment.targets.reference_fraction,
        "that it is surest of",
    )
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
    order = np.argsort(-top_margin(logits.astype(np.float64)), kind="stable")
    said = np.where(mine, logits.argmax(axis=1), -1)
    groups = np.full(len(logits), -1, np.int64)
    for label in np.unique(said[mine]):
        those = order[said[order] == label]
        groups[those[: math.ceil(share * len(those) - ROUNDING)]] = label
    return groups


def cached_logits(run: Run, teacher: ResolvedTeacher, prefixes: list[str], keys: Keys) -> NDArray[Any]:
    """[n, labels], dropout off."""
    from amalgam.stages.common.answers.read import logits_of

    wanted = pl.Series("key", key_list(keys), pl.Binary)
    found: NDArray[Any] = logits_of(run, teacher.name, family_of(run, teacher), prefixes, wanted).to_numpy()
    return found


def written(run: Run) -> bool:
    """Whether it is known for which teacher a text was written."""
    said = run.experiment.generate
    return said is not None and said.source != "cross-domain"


def _written_for(run: Run, teacher: ResolvedTeacher, keys: Keys) -> NDArray[np.bool_]:
    """Which texts were; none where nobody knows."""
    if not written(run):
        return np.zeros(len(keys), bool)
    table = read_table(run.store.verified_path(generated_file(run)), ["text", "teacher"])
    texts, whose = (table.column(name).to_pylist() for name in table.column_names)
    own = {text_key((text,)) for text, name in zip(texts, whose, strict=True) if name == teacher.name}
    return np.array([key in own for key in key_list(keys)], bool)
