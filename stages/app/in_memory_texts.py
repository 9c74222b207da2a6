"""Stores texts of in-memory objects as Parquet files named by their content.

Any object that yields Arrow tables is accepted, and a list of texts. The columns of the corpus section are stored,
class numbers as names. Test texts keep the columns of a file to label with how they were picked.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from amalgam.data.keys import shown, shown_names
from amalgam.data.lazy import pa, pc, pq
from amalgam.data.rows import FIXES, has_surrogate
from amalgam.pipeline.config.load import ExperimentSource, LoadedExperiment
from amalgam.pipeline.config.schema import Corpus, ExperimentConfig
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import AmalgamError, DataError, ExperimentError, nearest
from amalgam.pipeline.input_files import file_digest
from amalgam.pipeline.storage.local import sync, temporary_path
from amalgam.pipeline.storage.paths import GIVEN, GIVEN_NAME
from amalgam.pipeline.storage.store import open_store
from amalgam.pipeline.user_paths import check_writable
from amalgam.stages.common.corpus import IN_MEMORY, MEASURED
from amalgam.stages.common.given_labels import KEY, PREDICTED, free_name, label_column, why_column
from amalgam.stages.methods import load_with_methods

PARTS = ("train", "validation", "test")
FRAME_PART = "labelled"
"""The part that a frame of labels counts as; it is no part of the corpus."""
IDENTIFYING = ("id", "text", "text_2")
"""Columns by which a frame of labels may name its texts, next to the key and the columns of the corpus."""
ROWS = 65_536
SURROGATE_FIX = f"{FIXES['lone surrogate']}; or set corpus.on_bad_row to skip"


def store_texts(source: ExperimentSource, overrides: list[str], texts: Mapping[str, Any]) -> dict[str, Path]:
    """Writes the texts as files into the workspace and returns the file of each part."""
    if not texts:
        return {}
    unknown = [part for part in texts if part not in PARTS]
    if unknown:
        raise ExperimentError(f"no part of a corpus is named {unknown[0]!r}", where="texts", fix=", ".join(PARTS))
    loaded = load_with_methods(source, [*overrides, *(f"corpus.{part}={IN_MEMORY}" for part in texts)])
    folder, corpus = _folder(loaded), loaded.experiment.corpus
    stored = {}
    for part, given in texts.items():
        tables = _even(_selected(table, corpus, part) for table in _tables(given, corpus, part))
        with _tables_of(given, part):
            path = _store(_usable(tables, corpus, part), folder)
        if path is None:
            fix = "add rows, or leave the part out"
            raise DataError(f"the {part} texts have no rows", where=_place(given, part), fix=fix)
        stored[part] = path
    return stored


def store_labels(source: ExperimentSource, overrides: Sequence[str], labels: Any) -> Path:
    """Writes a frame of labels as a file into the workspace and returns the file."""
    is_table = hasattr(labels, "collect") or hasattr(labels, "columns") or isinstance(labels, Mapping)
    if not is_table:
        fix = "give the path of a file, or the frame of experiment.label() with a filled column label"
        raise ExperimentError(f"labels is a {type(labels).__name__}, not a frame", where="labels", fix=fix)
    loaded = load_with_methods(source, overrides)
    corpus = loaded.experiment.corpus
    with _tables_of(labels, FRAME_PART):
        path = _store((_of_labels(table, corpus) for table in _tables(labels, corpus, FRAME_PART)), _folder(loaded))
    if path is None:
        raise DataError("the labels have no rows", where="labels", fix="give the filled frame of experiment.label()")
    return path


def check_stored(experiment: ExperimentConfig, base: Path, workspace: Path) -> None:
    """Refuses an experiment from Python whose stored texts or labels were deleted, such as with the workspace."""
    corpus = experiment.corpus
    sources = [*(corpus.train or ()), *(corpus.validation or ()), *(corpus.test or ())]
    for source in [*sources, *([experiment.labels] if experiment.labels else [])]:
        path = base / source
        if path.parent == workspace / GIVEN and not path.exists():
            fix = "make the experiment again from its texts: Experiment(teachers=..., texts=...)"
            raise DataError("the stored file of texts or labels from Python was deleted", where=str(path), fix=fix)


def name_rows(error: AmalgamError, corpus: Corpus) -> None:
    """Makes an error name rows of the Python object, counted from 0, instead of those of its stored file."""
    sources = [(PurePath(source), part) for part in PARTS for source in getattr(corpus, part) or ()]
    parts = {path.name: part for path, part in sources if path.parent.name == GIVEN}

    def in_object(text: str) -> str:
        stored = re.compile(f"({'|'.join(map(re.escape, parts))}) row (\\d+)")
        return stored.sub(lambda match: f"texts[{parts[match[1]]!r}] row {int(match[2]) - 1:,}", text)

    if parts:
        column = re.search(r"\.parquet row \d+, field (\S+): not text", error.where or "")
        if column:
            fix = f'with pandas: frame["{column[1]}"] = frame["{column[1]}"].astype(str)'
            error.fix = (error.fix or "").replace(FIXES["not text"], f"{FIXES['not text']}, {fix}")
        error.what, error.where = in_object(error.what), error.where and in_object(error.where)


def _folder(loaded: LoadedExperiment) -> Path:
    store = open_store(loaded.experiment.execution.workspace, loaded.base)
    store.claim()
    folder = store.root / GIVEN
    check_writable(folder, "change its permissions, or set execution.workspace=DIR")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _store(tables: Iterable[pa.Table], folder: Path) -> Path | None:
    """Returns the file of these rows, None without any; equal rows give one file for every kind of object."""
    temporary = temporary_path(folder)
    try:
        writer = None
        for table in tables:
            # Without Arrow's own schema, which differs between libraries for equal texts.
            writer = writer or pq.ParquetWriter(temporary, table.schema, compression="zstd", store_schema=False)
            writer.write_table(table)
        if writer is None:
            return None
        writer.close()
        digest = file_digest(temporary)
        path = folder / f"{digest[:GIVEN_NAME]}.parquet"
        if not path.is_file() or file_digest(path) != digest:
            sync(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _tables(given: Any, corpus: Corpus, part: str) -> Iterator[pa.Table]:
    if hasattr(given, "with_format") and hasattr(given, "iter"):  # a datasets.Dataset; its own table ignores selections
        features = getattr(given, "features", None) or {}
        for table in given.with_format("arrow").iter(ROWS):
            yield _with_class_names(table, features)
        return
    if hasattr(given, "collect") and hasattr(given, "collect_schema"):  # a lazy frame
        given = given.collect()
    elif hasattr(given, "to_frame") and not hasattr(given, "columns"):  # a column of Polars or pandas
        given = given.to_frame(name=corpus.text[0])
    elif hasattr(given, "columns") and hasattr(given, "loc"):  # a frame of pandas
        given = given[_columns_read(list(given.columns), corpus, part)]
    elif (values := _values_of(given)) is not None:
        given = _table_of(values, corpus, part)
    elif isinstance(given, Mapping):
        given = _table_of_columns(given, corpus, part)
    if not hasattr(given, "__arrow_c_stream__"):
        kinds = "a Polars or pandas frame, a datasets.Dataset or an Arrow table"
        ways = f"a list of texts, {kinds}; or set corpus.{part} to a path", f"{kinds}; or the path of a file"
        fix = f"pass {ways[part == FRAME_PART]}"
        raise DataError(f"the {part} texts have an unknown type", where=_place(given, part), fix=fix)
    for batch in _arrow_of(lambda: pa.RecordBatchReader.from_stream(given), given, corpus, part):
        yield pa.Table.from_batches([batch])


def _table_of_columns(given: Mapping[Any, Any], corpus: Corpus, part: str) -> Any:
    """Returns a table of a dict of columns; refuses one text as a column, and a dict of tables or parts."""
    are_tables = any(hasattr(column, "columns") or hasattr(column, "column_names") for column in given.values())
    if are_tables or (given and {*given} <= {*PARTS}):
        kind = "table" if are_tables else "part"
        what = f"the {part} texts are {counted(len(given), kind)}: {shown_names(map(str, given))}"
        raise DataError(what, where=_place(given, part), fix=f'pass one of them, such as texts={kind}s["train"]')
    single = next((name for name, column in given.items() if isinstance(column, str | bytes)), None)
    if single is not None:
        what, fix = f"the {part} texts have one text as column {shown(str(single))}", "put the texts into a list"
        raise DataError(what, where=_place(given, part), fix=fix)
    return _arrow_of(lambda: pa.table(dict(given)), given, corpus, part)


def _columns_read(columns: list[str], corpus: Corpus, part: str) -> list[str]:
    """Returns the columns that the corpus reads: Arrow refuses others of mixed types. All if a column is missing."""
    names, read = _columns_of(corpus, part, columns)
    complete = {*columns} >= {name for required in names.values() for name in required}
    return [name for name in dict.fromkeys(columns) if name in read] if complete else columns


def _columns_of(corpus: Corpus, part: str, columns: Sequence[str]) -> tuple[dict[str, Sequence[str]], set[str | None]]:
    """Returns the columns that a part needs, by field of the corpus section, and those that it has and reads."""
    if part == FRAME_PART:
        label = label_column(corpus)
        return {"label": (label,)}, {
            free_name(KEY, corpus),
            *IDENTIFYING,
            *corpus.text,
            label,
            why_column(corpus),
            corpus.id,
        }
    own_id = () if corpus.id == "auto" else (corpus.id,)
    read = {*corpus.text, corpus.id, corpus.label}
    if part == "test" and why_column(corpus) in columns:
        read |= {why_column(corpus), *(free_name(name, corpus) for name in PREDICTED)}
    return {"text": corpus.text, "id": own_id, "label": _labels(corpus, part)}, read


def _values_of(given: Any) -> list[Any] | None:
    """Returns the items of a sequence, an iterator, an array of NumPy or Arrow, or a column of an Arrow table."""
    is_other = isinstance(given, str | bytes) or hasattr(given, "read") or hasattr(given, "read_next_batch")
    if isinstance(given, Sequence | Iterator) and not is_other:  # not the lines of an open file
        return list(given)
    is_table = hasattr(given, "columns")
    method = getattr(given, "tolist", None) or (None if is_table else getattr(given, "to_pylist", None))
    return list(method()) if method else None


def _arrow_of(make: Callable[[], Any], given: Any, corpus: Corpus, part: str) -> Any:
    """Returns the Arrow object; refuses columns of several types or lengths."""
    try:
        return make()
    except (pa.ArrowException, TypeError, ValueError) as error:
        usable = _without_surrogates(given, corpus, part) if isinstance(error, UnicodeEncodeError) else None
        if usable is not None:
            return usable
        raise _no_table(error, given, part) from None


@contextmanager
def _tables_of(given: Any, part: str) -> Iterator[None]:
    """Refuses columns that Arrow cannot read or store, such as texts that are not UTF-8."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _no_table(error, given, part) from None


def _no_table(error: Exception, given: Any, part: str) -> DataError:
    fix = "give each column one type and a name of its own, and all columns the same length"
    what = f"the {part} texts cannot be read as a table: {shown(str(error), 200)}"
    return DataError(what, where=_place(given, part), fix=fix)


def _without_surrogates(given: Any, corpus: Corpus, part: str) -> pa.RecordBatchReader | None:
    """Returns the columns with null for each value that has a lone surrogate, if such rows are skipped."""
    columns = {name: list(given[name]) for name in given}
    cells = [(name, row) for name in columns for row, value in enumerate(columns[name]) if has_surrogate(value)]
    if not cells:  # it is in the name of a column
        return None
    if corpus.on_bad_row != "skip":
        name, row = cells[0]
        where = f"row {row:,}, counted from 0, column {shown(name)}: {shown(repr(columns[name][row]))}"
        raise DataError(f"a row of the {part} texts has a lone surrogate", where=where, fix=SURROGATE_FIX)
    for name, row in cells:
        columns[name][row] = None
    return pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()}).to_reader()


def _table_of(given: Sequence[Any], corpus: Corpus, part: str) -> pa.Table:
    """Returns a table of a list of texts, or of pairs of texts if the corpus has two text columns."""
    width = len(corpus.text)
    missing = getattr(sys.modules.get("pandas"), "NA", None)
    given = [None if item is missing or (isinstance(item, float) and math.isnan(item)) else item for item in given]
    rows = [(row,) if isinstance(row, str) or row is None else row for row in given]
    for index, row in enumerate(rows):
        are_texts = isinstance(row, list | tuple) and all(isinstance(text, str | None) for text in row)
        if not are_texts or len(row) != width:
            wanted = "a text" if width == 1 else f"a pair of texts ({' and '.join(corpus.text)})"
            each = "each text as a str" if width == 1 else "each pair as (text, text_2)"
            fix = f'pass {each}, and labelled texts as a frame or {{"text": [...], "label": [...]}}'
            where = f"texts[{index}] = {shown(repr(given[index]))}"
            raise DataError(f"an item of the {part} texts is not {wanted}", where=where, fix=fix)
        if any(map(has_surrogate, row)):
            if corpus.on_bad_row != "skip":
                where = f"texts[{index}] = {shown(repr(given[index]))}"
                raise DataError(f"an item of the {part} texts has a lone surrogate", where=where, fix=SURROGATE_FIX)
            rows[index] = (None,) * width
    columns = zip(*rows, strict=True) if rows else [()] * width
    return pa.table([pa.array(column, pa.large_string()) for column in columns], corpus.text)


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
    needed, read = _columns_of(corpus, part, columns)
    for field, names in needed.items():
        for name in (name for name in names if name not in columns):
            close = shown_names(nearest(name, columns, 3) or columns)
            fix = f"set corpus.{field} to the name of the column; the columns are {close}"
            if field == "label" and {*columns} <= {*corpus.text}:
                fix = f'pass texts with labels: a frame, or {{"{corpus.text[0]}": [...], "{name}": [...]}}'
            raise DataError(f"no column {shown(name)} in the {part} texts", where=f"texts[{part!r}]", fix=fix)
    selected = [name for name in columns if name in read]
    twice = next((name for name in selected if selected.count(name) > 1), None)
    if twice is not None:
        what = f"the {part} texts have two columns named {shown(twice)}"
        raise DataError(what, where=f"texts[{part!r}]", fix="rename or remove one of them")
    table = _plain_columns(table.select(selected), {corpus.id, corpus.label})
    types = {field.name: pa.large_string() if _is_text(field.type) else field.type for field in table.schema}
    return table.cast(pa.schema(types))


def _plain_columns(table: pa.Table, names: set[str | None]) -> pa.Table:
    """Returns the table with categories as text, and floats of the columns `names`, which are ids and labels.

    Arrow cannot cast categories of Polars. pandas stores integers with gaps as floats, so 1.0 becomes 1.
    """
    for index, field in enumerate(table.schema):
        column, decoded = table.column(index), None
        if pa.types.is_dictionary(field.type) and _is_text(field.type):
            parts = [(chunk.indices, chunk.dictionary.cast(pa.large_string())) for chunk in column.chunks]
            chunks = [pa.DictionaryArray.from_arrays(*part).dictionary_decode() for part in parts]
            decoded = pa.chunked_array(chunks, pa.large_string())
        elif field.name in names and pa.types.is_floating(field.type):
            decoded = pa.array([_as_text(value) for value in column.to_pylist()], pa.large_string())
        if decoded is not None:
            table = table.set_column(index, field.name, decoded)
    return table


def _as_text(value: float | None) -> str | None:
    if value is None or math.isnan(value):
        return None
    return f"{value:.0f}" if value.is_integer() else str(value)


def _of_labels(table: pa.Table, corpus: Corpus) -> pa.Table:
    """Returns a table of labels as they are in a file: keys in hexadecimal, as `Experiment.texts` has binary ones."""
    table, name = _plain_columns(table, {corpus.id, "id", label_column(corpus)}), free_name(KEY, corpus)
    keys = table.column(name) if name in table.column_names else pa.chunked_array([], pa.string())
    if not (pa.types.is_binary(keys.type) or pa.types.is_large_binary(keys.type) or pa.types.is_binary_view(keys.type)):
        return table
    values = [key if key is None else key.hex() for key in keys.to_pylist()]
    return table.set_column(table.column_names.index(name), name, pa.array(values, pa.string()))


def _usable(tables: Iterable[pa.Table], corpus: Corpus, part: str) -> Iterator[pa.Table]:
    """Refuses a row without a text, or without a label where labels are read."""
    before, names = 0, [] if corpus.on_bad_row == "skip" else [*corpus.text, *_labels(corpus, part)]
    for table in tables:
        for name in names:
            column = table.column(name)
            usable = pc.is_valid(column)
            if _is_text(column.type):
                usable = pc.and_kleene(usable, pc.not_equal(pc.utf8_trim_whitespace(column), ""))
            elif name in corpus.text and column.type != pa.null():
                what = f"column {shown(name)} of the {part} texts has the type {column.type}, not text"
                fix = "store it as text, or set corpus.text to the name of the text column"
                raise DataError(what, where=f"texts[{part!r}]", fix=fix)
            unusable = pc.fill_null(pc.invert(usable), True)
            if pc.any(unusable).as_py():
                row = pc.index(unusable, True).as_py()
                rows = counted(pc.sum(unusable).as_py(), "such row")
                where = f"row {before + row:,}, counted from 0: {shown(repr(column[row].as_py()))}; {rows}"
                fix = "remove these rows, or set corpus.on_bad_row to skip"
                raise DataError(f"a row of the {part} texts has no {shown(name)}", where=where, fix=fix)
        before += table.num_rows
        yield table


def _labels(corpus: Corpus, part: str) -> list[str]:
    """Returns the label column of a part whose labels are read."""
    return [corpus.label] if corpus.label and part in MEASURED else []


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


def _place(given: Any, part: str) -> str:
    kind, argument = type(given), "labels" if part == FRAME_PART else f"texts[{part!r}]"
    return f"{argument}: {'' if kind.__module__ == 'builtins' else kind.__module__ + '.'}{kind.__qualname__}"
