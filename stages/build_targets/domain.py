"""Weighs teachers by how far a text lies from the texts of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from amalgam.pipeline.execution.stage import Run
from amalgam.stages.fit_statistics.fit import Keys, confidences
from amalgam.stages.target_methods import Evidence


def comparative_confidence(
    run: Run, evidence: Sequence[Evidence], prefixes: Sequence[str], keys: Keys
) -> list[Evidence]:
    """The same, each teacher's confidence by how foreign the texts are to it beside the others; of the last block."""
    found = confidences(run, keys, prefixes)[:, -1]
    columns = [pl.Series("confidence", np.ascontiguousarray(column)) for column in found.T]
    return [replace(one, confidence=column) for one, column in zip(evidence, columns, strict=True)]
