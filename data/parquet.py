"""Parquet in and out, and sorting by key in bounded memory.

Equal tables give equal bytes. Keys are numpy S16 arrays. Comparing, sorting and searching them is exact, because all
are 16 bytes long. A single element loses its trailing zero bytes: use `key_list` for bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from amalgam.data.keys import KEY_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


ROW_GROUP_BYTES = 64 << 20

RUN_ROWS = 1 << 15

RUN_CHARACTERS = 16 << 20


def write_table(table: Any, path: Path) -> None:
    import pyarrow.parquet as pq

    rows = max(1, table.num_rows * ROW_GROUP_BYTES // max(1, table.nbytes))
    pq.write_table(table, path, row_group_size=rows, **parquet_options(table.schema))


def parquet_options(schema: Any) -> dict[str, Any]:
    """zstd; dictionaries for strings alone; the bytes of floats apart, which zstd then packs better."""
    from pyarrow import types

    strings = [field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)]
    floats = [_leaf(field) for field in schema if types.is_floating(_value_type(field.type))]
    return {"compression": "zstd", "use_dictionary": strings or False, "use_byte_stream_split": floats or False}


def _value_type(arrow_type: Any) -> Any:
    from pyarrow import types

    nested = types.is_list(arrow_type) or types.is_fixed_size_list(arrow_type)
    return arrow_type.value_type if nested else arrow_type


def _leaf(field: Any) -> str:
    return str(field.name) if _value_type(field.type) == field.type else f"{field.name}.list.element"


def read_table(path: Path, columns: Sequence[str] | None = None) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.OSFile(str(path)) as source, pq.ParquetFile(source, pre_buffer=False) as file:
        return file.read(columns=None if columns is None else list(columns), use_threads=False)


def read_keys(path: Path, column: str = "key") -> NDArray[np.bytes_]:
    return key_array(read_table(path, [column]).column(0))


def key_array(column: Any) -> NDArray[np.bytes_]:
    """Returns a view of a fixed-binary column; only a column of several chunks is copied."""
    import numpy as np
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if not len(column):  # no rows may come without a buffer
        return np.empty(0, f"S{KEY_BYTES}")
    return np.frombuffer(column.buffers()[1], f"S{KEY_BYTES}", len(column), column.offset * KEY_BYTES)


def key_column(keys: bytes | NDArray[np.bytes_]) -> Any:
    import pyarrow as pa

    size = len(keys) // KEY_BYTES if isinstance(keys, bytes) else len(keys)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), size, [None, pa.py_buffer(keys)])


def key_list(keys: NDArray[np.bytes_]) -> list[bytes]:
    data = keys.tobytes()
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]


def matrix(column: Any) -> NDArray[Any]:
    """Returns a column of fixed-length arrays as rows of numbers."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    rows: NDArray[Any] = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    return rows


class ExternalKeySort:
    """Takes any number of rows, the key first, and gives them back by the key's leading byte, in key order.

    Rows are gathered into runs; a run is sorted and laid down in a scratch file as one record batch per leading byte.
    A reader then needs memory for a run, or for the rows of the requested bytes. Equal keys keep their order.
    """

    def __init__(self, schema: Any, folder: Path) -> None:
        self._schema = schema
        self._scratch = [folder / "spill.rows", folder / "spill.keys"]
        self._rows_file, self._keys_file = (path.open("w+b") for path in self._scratch)
        self._rows: list[tuple[Any, ...]] = []
        self._characters = 0
        self._runs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._rows_file.close()
        self._keys_file.close()
        for path in self._scratch:
            path.unlink(missing_ok=True)

    def add(self, row: tuple[Any, ...], characters: int) -> None:
        self._rows.append(row)
        self._characters += characters
        if len(self._rows) >= RUN_ROWS or self._characters >= RUN_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        import numpy as np

        batch = _sorted_by_key(self._batch())
        keys = key_array(batch.column(0))
        first_rows = np.searchsorted(keys.view(np.uint8)[::KEY_BYTES], np.arange(257))
        offsets = np.empty(257, np.int64)
        for leading, (start, stop) in enumerate(pairwise(first_rows)):
            offsets[leading] = self._rows_file.tell()
            if stop > start:
                self._rows_file.write(batch.slice(start, stop - start).serialize())
        offsets[256] = self._rows_file.tell()
        self._keys_file.write(keys.tobytes())
        self._runs.append((offsets, first_rows + self.rows))
        self.rows += len(keys)
        self._rows, self._characters = [], 0

    def _batch(self) -> Any:
        import pyarrow as pa

        keys, *others = zip(*self._rows, strict=True)
        fields = list(self._schema)[1:]
        arrays = [pa.array(values, field.type) for values, field in zip(others, fields, strict=True)]
        return pa.record_batch([key_column(b"".join(keys)), *arrays], schema=self._schema)

    def distinct_keys(self, first: int, stop: int) -> int:
        """Returns the number of distinct keys with a leading byte in [first, stop)."""
        import numpy as np

        parts = []
        for _, rows in self._runs:
            self._keys_file.seek(int(rows[first]) * KEY_BYTES)
            parts.append(self._keys_file.read(int(rows[stop] - rows[first]) * KEY_BYTES))
        return len(np.unique(np.frombuffer(b"".join(parts), f"S{KEY_BYTES}")))

    def table(self, first: int, stop: int) -> Any:
        """Returns all rows whose key has a leading byte in [first, stop), sorted by key."""
        import pyarrow as pa

        batches = [batch for offsets, _ in self._runs for batch in self._batches(offsets[first : stop + 1])]
        return _sorted_by_key(pa.Table.from_batches(batches, self._schema).combine_chunks())

    def _batches(self, offsets: NDArray[np.int64]) -> list[Any]:
        import pyarrow as pa

        batches = []
        for start, stop in pairwise(offsets):
            if stop > start:
                self._rows_file.seek(int(start))
                batches.append(pa.ipc.read_record_batch(self._rows_file.read(int(stop - start)), self._schema))
        return batches


def _sorted_by_key(rows: Any) -> Any:
    import numpy as np

    return rows.take(np.argsort(key_array(rows.column(0)), kind="stable")) if len(rows) else rows
