"""From statistics to confidences: softmax over the teachers of minus how foreign a text is to each, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amalgam.pipeline.stage import Run
from amalgam.stages.cache_features.families import statistics_states
from amalgam.stages.cache_features.states import states_of
from amalgam.stages.fit_statistics.asked import measure_of
from amalgam.stages.fit_statistics.fitting import cached_logits
from amalgam.stages.fit_statistics.gaussians import Array
from amalgam.stages.fit_statistics.statistics import Statistics, in_parts
from amalgam.stages.teachers import teachers_of

if TYPE_CHECKING:
    from amalgam.stages.fit_statistics.fitting import Keys


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
    return among(np.stack(found, axis=-1))


def among(foreign: NDArray[Any]) -> Array:
    """Softmax over the last axis, the teachers, of minus what is given."""
    raised = np.exp(foreign.min(axis=-1, keepdims=True) - foreign)
    found: Array = raised / raised.sum(axis=-1, keepdims=True)
    return found


def _statistics(run: Run, teacher: str) -> Statistics:
    files = run.result("fit-statistics").files
    file = next(file for file in files if Path(file.path).stem.rsplit("-", 1)[0] == teacher)
    return Statistics.load(run.store.checked(file))
