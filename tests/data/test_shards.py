"""Parquet files come back as they went in, for pyarrow and for Polars, and equal tables are equal bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amalgam.data import parquet as shards
from amalgam.data.keys import text_key
from amalgam.data.parquet import (
    Column,
    ExternalKeySort,
    arrow_schema,
    key_array,
    key_column,
    key_list,
    read_keys,
    read_table,
    write_table,
)

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = (
    Column("key", "key", ""),
    Column("name", "string", "", nullable=True),
    Column("entropy_nats", "float32", ""),
    Column("passes", "array<float16>", ""),
)


def _table(rows: int = 50) -> Any:
    keys = np.sort(np.frombuffer(b"".join(text_key([str(row)]) for row in range(rows)), "S16"))
    values = np.random.default_rng(0).standard_normal(rows * 6)
    passes = pa.FixedSizeListArray.from_arrays(pa.array(values.astype(np.float16)), 6)
    arrays = [key_column(keys), pa.array([f"n{row % 3}" for row in range(rows)]), pa.array(values[:rows], pa.float32())]
    return pa.Table.from_arrays([*arrays, passes], schema=arrow_schema(COLUMNS, {"passes": 6}))


def test_a_table_comes_back_whole(tmp_path: Path) -> None:
    write_table(_table(), tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet").equals(_table())
    assert read_table(tmp_path / "a.parquet", ["name"]).column_names == ["name"]


def test_polars_reads_the_same_values(tmp_path: Path) -> None:
    write_table(_table(), tmp_path / "a.parquet")
    seen = pl.read_parquet(tmp_path / "a.parquet")
    assert seen.schema["passes"] == pl.Array(pl.Float16, 6)
    assert seen["key"].to_list() == _table()["key"].to_pylist()
    assert seen["passes"].to_list() == _table()["passes"].to_pylist()
    assert seen["entropy_nats"].to_list() == _table()["entropy_nats"].to_pylist()


def test_floats_are_split_and_keys_are_plain(tmp_path: Path) -> None:
    write_table(_table(), tmp_path / "a.parquet")
    group = pq.read_metadata(tmp_path / "a.parquet").row_group(0)
    coding = {group.column(at).path_in_schema: group.column(at) for at in range(4)}
    assert "PLAIN" in coding["key"].encodings
    assert "RLE_DICTIONARY" in coding["name"].encodings
    assert "BYTE_STREAM_SPLIT" in coding["entropy_nats"].encodings
    assert "BYTE_STREAM_SPLIT" in coding["passes.list.element"].encodings
    assert {column.compression for column in coding.values()} == {"ZSTD"}


def test_equal_tables_are_equal_bytes_however_they_are_chunked(tmp_path: Path) -> None:
    write_table(_table(), tmp_path / "a.parquet")
    write_table(pa.concat_tables([_table().slice(0, 20), _table().slice(20)]), tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROW_GROUP_BYTES", _table().nbytes // 4)
    write_table(_table(), tmp_path / "a.parquet")
    assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups >= 4
    assert read_table(tmp_path / "a.parquet").equals(_table())


def test_keys_that_end_in_zero_bytes_stay_apart_and_whole(tmp_path: Path) -> None:
    raw = [b"a" * 15 + b"\0", b"a" * 14 + b"\0\0", b"\0" * 16]
    write_table(pa.table({"key": pa.array(sorted(raw), pa.binary(16))}), tmp_path / "a.parquet")
    keys = read_keys(tmp_path / "a.parquet")
    assert keys.dtype == "S16"
    assert len(np.unique(keys)) == 3
    assert key_list(keys) == sorted(raw)
    assert key_list(np.sort(keys[::-1])) == sorted(raw)


def test_a_file_of_no_rows_has_no_keys(tmp_path: Path) -> None:
    write_table(_table(0), tmp_path / "a.parquet")
    assert len(read_keys(tmp_path / "a.parquet")) == 0


def test_keys_are_read_from_a_slice_without_a_copy() -> None:
    column = _table()["key"].combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    part = key_array(column.slice(7, 3))
    assert key_list(part) == column.to_pylist()[7:10]
    assert not part.flags.owndata


@pytest.mark.parametrize("run_rows", [1, 7, 1000])
def test_a_spill_gives_rows_back_in_key_order_and_equal_keys_in_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_rows: int
) -> None:
    monkeypatch.setattr(shards, "RUN_ROWS", run_rows)
    rows = [(text_key([str(row % 30)]), row) for row in range(100)]
    with ExternalKeySort(pa.schema([("key", pa.binary(16)), ("at", pa.int64())]), tmp_path) as spill:
        for row in rows:
            spill.add(row, 1)
        assert spill.finish() == 30
        table = pa.concat_tables([spill.table(0, 64), spill.table(64, 256)])
        assert list(zip(*table.to_pydict().values(), strict=True)) == sorted(rows)
    assert list(tmp_path.iterdir()) == []


def test_an_array_column_without_its_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size"):
        arrow_schema(COLUMNS)
