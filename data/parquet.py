"""Parquet in and out, and sorting by key in bounded memory.

Equal tables give equal bytes. Keys are numpy S16 arrays. Comparing, sorting and searching them is exact, because all
are 16 bytes long. A single element loses its trailing zero bytes: use `key_list` for bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
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
    floats = []
    for field in schema:
        nested = types.is_list(field.type) or types.is_fixed_size_list(field.type)
        if types.is_floating(field.type.value_type if nested else field.type):
            floats.append(f"{field.name}.list.element" if nested else field.name)
    return {"compression": "zstd", "use_dictionary": strings or False, "use_byte_stream_split": floats or False}


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

    column = _one_chunk(column)
    if not len(column):  # no rows may come without a buffer
        return np.empty(0, f"S{KEY_BYTES}")
    return np.frombuffer(column.buffers()[1], f"S{KEY_BYTES}", len(column), column.offset * KEY_BYTES)


def matrix(column: Any) -> NDArray[Any]:
    """Returns a column of fixed-length arrays as rows of numbers."""
    column = _one_chunk(column)
    rows: NDArray[Any] = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    return rows


def _one_chunk(column: Any) -> Any:
    chunks = getattr(column, "chunks", None)
    if chunks is None:
        return column
    return chunks[0] if len(chunks) == 1 else column.combine_chunks()


def key_column(keys: bytes | NDArray[np.bytes_]) -> Any:
    import pyarrow as pa

    size = len(keys) // KEY_BYTES if isinstance(keys, bytes) else len(keys)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), size, [None, pa.py_buffer(keys)])


def key_list(keys: NDArray[np.bytes_]) -> list[bytes]:
    data = keys.tobytes()
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]


class ExternalKeySort:
    """Takes any number of rows, the key first, and gives them back by the key's leading byte, in key order.

    Rows are gathered into runs; a run is sorted and written to a scratch file as one record batch per leading byte.
    A reader then needs memory for a run, or for the rows of the requested bytes. Equal keys keep their order.
    """

    def __init__(self, schema: Any, folder: Path) -> None:
        import pyarrow as pa

        self._schema = schema
        self._path = folder / "spill.arrow"
        self._writer = pa.ipc.new_file(str(self._path), schema)
        self._run: list[tuple[Any, ...]] = []
        self._characters = 0
        self._runs = 0
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self._path.unlink()

    def add(self, row: tuple[Any, ...], characters: int) -> None:
        self._run.append(row)
        self._characters += characters
        if len(self._run) >= RUN_ROWS or self._characters >= RUN_CHARACTERS:
            self._write_run()

    def _write_run(self) -> None:
        import numpy as np
        import pyarrow as pa

        keys, *others = zip(*self._run, strict=True)
        arrays = [pa.array(values, field.type) for values, field in zip(others, list(self._schema)[1:], strict=True)]
        batch = _sorted_by_key(pa.record_batch([key_column(b"".join(keys)), *arrays], schema=self._schema))
        leading_bytes = key_array(batch.column(0)).view(np.uint8)[::KEY_BYTES]
        for start, stop in pairwise(np.searchsorted(leading_bytes, np.arange(257)).tolist()):
            self._writer.write_batch(batch.slice(start, stop - start))
        self._runs += 1
        self.rows += len(batch)
        self._run, self._characters = [], 0

    def finish(self) -> int:
        """Ends the writing, so that tables can be read; returns the number of distinct keys."""
        import numpy as np

        if self._run:
            self._write_run()
        self._writer.close()
        keys = (key_array(self._read(byte, byte + 1, [0]).column(0)) for byte in range(256))
        return sum(len(np.unique(own)) for own in keys)

    def table(self, first: int, stop: int) -> Any:
        """Returns all rows whose key has a leading byte in [first, stop), sorted by key."""
        return _sorted_by_key(self._read(first, stop).combine_chunks())

    def _read(self, first: int, stop: int, columns: Sequence[int] | None = None) -> Any:
        import pyarrow as pa

        options = pa.ipc.IpcReadOptions(included_fields=columns)
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_file(file, options=options) as reader:
            numbers = (256 * run + byte for run in range(self._runs) for byte in range(first, stop))
            return pa.Table.from_batches([reader.get_batch(number) for number in numbers], reader.schema)


def _sorted_by_key(rows: Any) -> Any:
    import numpy as np

    return rows.take(np.argsort(key_array(rows.column(0)), kind="stable")) if len(rows) else rows
