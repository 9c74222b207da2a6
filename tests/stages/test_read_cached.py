"""Cached predictions are read by key; a text may have a row in several files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from amalgam.data.parquet import CACHE_LOGITS, CACHE_PASSES, STATES, build_table, key_column, write_table
from amalgam.pipeline.config.schema import Targets
from amalgam.pipeline.storage.store import Record, StoredFile
from amalgam.stages.common.cached.coverage import PrefixIndex
from amalgam.stages.common.cached.read import CacheReader
from amalgam.tests.workspaces import TRAIN, Workspace

KEYS = [bytes([number]) * 16 for number in range(3)]
Span = tuple[int, int]


def reader_of(folder: Path, units: dict[str, tuple[list[int], float, Span]]) -> CacheReader:
    """Returns a reader of units by name, each of some texts with one logit and a range of passes."""
    for name, (rows, logit, (first, last)) in units.items():
        values: dict[str, Any] = {"key": key_column(b"".join(KEYS[row] for row in rows))}
        values["logits"] = np.full((len(rows), 2), logit, np.float32)
        columns = [STATES[0], *CACHE_LOGITS]
        if last > first:
            columns.append(CACHE_PASSES[0])
            values["passes"] = np.zeros((len(rows), 2 * (last - first)), np.float16)
        write_table(build_table(columns, values), folder / name)
    files = tuple(StoredFile(name, 0, "") for name in units)
    store: Any = SimpleNamespace(verified_paths=lambda chosen: [folder / file.path for file in chosen])
    manifest = Record("MANIFEST", files, {"ranges": {name: span for name, (_, _, span) in units.items()}})
    index = {"family": PrefixIndex([("all", file) for file in files])}
    teacher: Any = SimpleNamespace(outputs=("a", "b"), places=[0, 1], catch_all=frozenset())
    return CacheReader(store, manifest, index, {"first": "family"}, {"first": teacher}, Targets(mode="vanilla-kd"), 0)


@pytest.mark.parametrize("later", [(0, 0), (0, 2), (2, 4)])
def test_a_text_of_two_units_has_the_logits_of_the_first_wherever_they_are_read(tmp_path: Path, later: Span) -> None:
    first, second = ([0, 1], 1.0, (0, 0)), ([1, 2], 2.0, later)
    keys = pl.Series("key", KEYS, pl.Binary)
    for units in ({"a": first, "b": second}, {"b": second, "a": first}):
        reader = reader_of(tmp_path, units)
        logits = reader.logits("first", ["all"], keys)
        assert logits.equals(reader.predictions("first", ["all"], keys).logits)
        is_first = next(iter(units)) == "a" or later > (0, 0)
        assert logits.arr.first().to_list() == [1.0, 1.0 if is_first else 2.0, 2.0]


def test_a_file_of_test_texts_adds_nothing(tmp_path: Path) -> None:
    keys = pl.Series("key", KEYS[:2], pl.Binary)
    reader = reader_of(
        tmp_path, {"tests": ([2], 1.0, (0, 0)), "first": ([0], 2.0, (0, 2)), "second": ([1], 3.0, (0, 2))}
    )
    assert reader.predictions("first", ["all"], keys).logits.arr.first().to_list() == [2.0, 3.0]


def test_a_test_text_that_is_also_a_training_text_is_in_two_units(fresh: Workspace) -> None:
    fresh.write([*fresh.texts("test"), *fresh.texts()], "test")
    fresh("cache-teachers", "cache.passes=0")
    families = {unit.parent for unit in fresh.units()}
    assert len(families) == 2
    for family in families:
        first, second = (set(pl.read_parquet(unit)["key"]) for unit in family.glob("*.parquet"))
        assert len(first & second) == TRAIN
