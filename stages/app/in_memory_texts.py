"""Stores texts of in-memory objects as Parquet files named by their content.

Any object that yields Arrow tables is accepted. The columns of the corpus section are stored, class numbers as names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amalgam.data.keys import shown
from amalgam.data.sources import nearest
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError
from amalgam.pipeline.storage.fingerprint import file_digest
from amalgam.pipeline.storage.local import temporary_path

if TYPE_CHECKING:
    import pyarrow as pa


ROWS = 65_536

NAME_LENGTH = 20


def keep(texts: Any, corpus: Corpus, folder: Path, part: str) -> Path:
    """Returns the file of these texts; equal texts in an equal order give one file for every kind of object."""
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(folder)
    try:
        writer = None
        for table in _even(_kept(table, corpus, part) for table in _tables(texts, part)):
            # Without Arrow's own schema, which differs between libraries for equal texts.
            writer = writer or pq.ParquetWriter(temporary, table.schema, compression="zstd", store_schema=False)
            writer.write_table(table)
        if writer is None:
            raise DataError(f"the {part} texts have no rows", where=_kind(texts), fix="add rows, or leave the part out")
        writer.close()
        path = folder / f"{file_digest(temporary)[:NAME_LENGTH]}.parquet"
        if not path.exists():
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _tables(given: Any, part: str) -> Iterator[pa.Table]:
    import pyarrow as pa

    if hasattr(given, "with_format") and hasattr(given, "iter"):  # a datasets.Dataset; its own table ignores selections
        names = _class_names(given)
        for table in given.with_format("arrow").iter(ROWS):
            yield _named(table, names)
        return
    if hasattr(given, "collect") and hasattr(given, "collect_schema"):  # a lazy frame
        given = given.collect()
    if not hasattr(given, "__arrow_c_stream__"):
        fix = f"pass a datasets.Dataset, a Polars or pandas frame, or an Arrow table; set corpus.{part} to a path"
        raise DataError(f"the {part} texts have an unknown type", where=_kind(given), fix=fix)
    for batch in pa.RecordBatchReader.from_stream(given):
        yield pa.Table.from_batches([batch])


def _class_names(given: Any) -> dict[str, list[str]]:
    """Returns the class names of the columns of class numbers (datasets.ClassLabel)."""
    features = getattr(given, "features", None) or {}
    named = {column: getattr(feature, "names", None) for column, feature in features.items()}
    return {column: list(names) for column, names in named.items() if names}


def _named(table: pa.Table, names: dict[str, list[str]]) -> pa.Table:
    import pyarrow as pa

    for column in names.keys() & set(table.column_names):
        numbers = table.column(column).to_pylist()
        labels = [names[column][number] if number is not None and number >= 0 else None for number in numbers]
        table = table.set_column(table.column_names.index(column), column, pa.array(labels, pa.string()))
    return table


def _kept(table: pa.Table, corpus: Corpus, part: str) -> pa.Table:
    """Selects the corpus columns and casts text to plain strings."""
    import pyarrow as pa

    columns = table.column_names
    for name in [*corpus.text, *([] if corpus.id == "auto" else [corpus.id])]:
        if name not in columns:
            close = nearest(name, columns)
            fix = f"override corpus.text or corpus.id; the columns are {', '.join(map(shown, close or columns[:20]))}"
            raise DataError(f"no column {shown(name)} in the {part} texts", where=f"texts[{part!r}]", fix=fix)
    wanted = [*corpus.text, corpus.id, corpus.label]
    table = table.select([name for name in columns if name in wanted])
    plain = [
        field.with_type(pa.large_string()) if _is_text(field.type) else field.with_nullable(True)
        for field in table.schema
    ]
    return table.cast(pa.schema([pa.field(field.name, field.type) for field in plain]))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_string_view(inner))


def _even(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yields the rows in tables of ROWS rows, whatever the sizes of the given tables."""
    import pyarrow as pa

    waiting, rows = list[Any](), 0
    for table in tables:
        waiting.append(table)
        rows += table.num_rows
        while rows >= ROWS:
            whole = pa.concat_tables(waiting)
            yield whole.slice(0, ROWS).combine_chunks()
            waiting, rows = [whole.slice(ROWS)], rows - ROWS
    if rows:
        yield pa.concat_tables(waiting).combine_chunks()


def _kind(given: Any) -> str:
    return f"{type(given).__module__}.{type(given).__qualname__}"
