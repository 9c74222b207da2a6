"""Stores texts of in-memory objects as Parquet files named by their content.

Any object that yields Arrow tables is accepted. The columns of the corpus section are stored, class numbers as names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from amalgam.data.keys import shown
from amalgam.data.rows import nearest
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.storage.fingerprint import file_digest
from amalgam.pipeline.storage.local import temporary_path
from amalgam.pipeline.storage.store import open_store
from amalgam.stages.methods import load_with_methods

PARTS = ("train", "validation", "test")
ROWS = 65_536
NAME_LENGTH = 20


def store_texts(path: Path, overrides: list[str], texts: Mapping[str, Any]) -> dict[str, str]:
    """Writes the texts as files into the workspace and returns the overrides that name them."""
    unknown = [part for part in texts if part not in PARTS]
    if unknown:
        raise ExperimentError(f"no part of a corpus is named {unknown[0]!r}", where="texts", fix=", ".join(PARTS))
    loaded = load_with_methods(path, [*overrides, *(f"corpus.{part}=given" for part in texts)])
    folder = open_store(loaded.experiment.execution.workspace, loaded.base).root / "given"
    folder.mkdir(parents=True, exist_ok=True)
    corpus = loaded.experiment.corpus
    return {f"corpus.{part}": str(_store(given, corpus, folder, part)) for part, given in texts.items()}


def _store(given: Any, corpus: Corpus, folder: Path, part: str) -> Path:
    """Returns the file of these texts; equal texts in an equal order give one file for every kind of object."""
    temporary = temporary_path(folder)
    try:
        writer = None
        for table in _even(_selected(table, corpus, part) for table in _tables(given, part)):
            # Without Arrow's own schema, which differs between libraries for equal texts.
            writer = writer or pq.ParquetWriter(temporary, table.schema, compression="zstd", store_schema=False)
            writer.write_table(table)
        if writer is None:
            fix = "add rows, or leave the part out"
            raise DataError(f"the {part} texts have no rows", where=_type_name(given), fix=fix)
        writer.close()
        path = folder / f"{file_digest(temporary)[:NAME_LENGTH]}.parquet"
        if not path.exists():
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _tables(given: Any, part: str) -> Iterator[pa.Table]:
    if hasattr(given, "with_format") and hasattr(given, "iter"):  # a datasets.Dataset; its own table ignores selections
        features = getattr(given, "features", None) or {}
        for table in given.with_format("arrow").iter(ROWS):
            yield _with_class_names(table, features)
        return
    if hasattr(given, "collect") and hasattr(given, "collect_schema"):  # a lazy frame
        given = given.collect()
    if not hasattr(given, "__arrow_c_stream__"):
        fix = f"pass a datasets.Dataset, a Polars or pandas frame, or an Arrow table; set corpus.{part} to a path"
        raise DataError(f"the {part} texts have an unknown type", where=_type_name(given), fix=fix)
    for batch in pa.RecordBatchReader.from_stream(given):
        yield pa.Table.from_batches([batch])


def _with_class_names(table: pa.Table, features: Mapping[str, Any]) -> pa.Table:
    """Replaces class numbers by their names (datasets.ClassLabel)."""
    for position, column in enumerate(table.column_names):
        names = getattr(features.get(column), "names", None)
        if names:
            numbers = table.column(column).to_pylist()
            labels = [names[number] if number is not None and number >= 0 else None for number in numbers]
            table = table.set_column(position, column, pa.array(labels, pa.string()))
    return table


def _selected(table: pa.Table, corpus: Corpus, part: str) -> pa.Table:
    """Selects the corpus columns and casts text to plain strings."""
    columns = table.column_names
    for name in [*corpus.text, *([] if corpus.id == "auto" else [corpus.id])]:
        if name not in columns:
            close = nearest(name, columns)
            fix = f"override corpus.text or corpus.id; the columns are {', '.join(map(shown, close or columns[:20]))}"
            raise DataError(f"no column {shown(name)} in the {part} texts", where=f"texts[{part!r}]", fix=fix)
    table = table.select([name for name in columns if name in (*corpus.text, corpus.id, corpus.label)])
    types = {field.name: pa.large_string() if _is_text(field.type) else field.type for field in table.schema}
    return table.cast(pa.schema(types))


def _is_text(arrow_type: Any) -> bool:
    inner = arrow_type.value_type if pa.types.is_dictionary(arrow_type) else arrow_type
    return bool(pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_string_view(inner))


def _even(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yields the rows in tables of ROWS rows, whatever the sizes of the given tables."""
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


def _type_name(given: Any) -> str:
    return f"{type(given).__module__}.{type(given).__qualname__}"
