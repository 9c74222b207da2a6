"""Parquet: the columns of every file with dtype, unit and meaning; reading and writing; sorting by key.

Equal tables give equal bytes. Keys are numpy S16 arrays. Comparing, sorting and searching them is exact, because all
are 16 bytes long. A single element loses its trailing zero bytes: use `key_list` for bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from amalgam.data.arrays import Array, Keys
from amalgam.data.keys import KEY_BYTES
from amalgam.data.lazy import np, pa, pc, pq

ROW_GROUP_BYTES = 64 << 20
RUN_ROWS = 1 << 15
RUN_CHARACTERS = 16 << 20


# ---- columns


@dataclass(frozen=True)
class Column:
    name: str
    dtype: str
    """ "key" is 16 fixed bytes; "array<dtype>" has the length that the file's writer sets, "list<dtype>" any length."""
    meaning: str
    nullable: bool = False


CORPUS = (
    Column("key", "key", "blake2b-128 of the text's fields; the file is sorted by it"),
    Column("text", "string", "the text, or the first of a pair"),
    Column("text_2", "string", "the second text of a pair; null where texts are single", nullable=True),
    Column("id", "string", "the id the source gave; null if ids are auto", nullable=True),
    Column("label", "string", "the gold label by name; null if there is none", nullable=True),
)


SKIPPED = (
    Column("source", "string", "the file's name"),
    Column("row", "int64", "csv: line where the record starts; jsonl: line; parquet: row; from 1"),
    Column("id", "string", "the row's id where it could be read", nullable=True),
    Column("field", "string", "the column at fault; null if the whole row is", nullable=True),
    Column("reason", "string", "why the row was left out, from a closed list"),
    Column("value", "string", "the value, escaped, its first 80 characters"),
)


# generate: the texts of a unit as they were written, then all texts with the columns that depend on other texts.
WRITTEN = (
    Column("text", "string", "the text; empty where nothing came of it"),
    Column("index", "int64", "its number among those of its teacher and class, from 0"),
    Column("class_probability", "float32", "the teacher's probability of the class; null without one", nullable=True),
    Column("lm_log_probability", "float32", "natural logarithm, of all its tokens; null without one", nullable=True),
    Column("tokens", "int32", "its length in the language model's tokens, the end included; else in words"),
)

GENERATED = (
    *WRITTEN,
    Column("source", "string", "generate.source of the text"),
    Column("teacher", "string", "the teacher that it was generated for; null if none", nullable=True),
    Column("class", "string", "the class that it was generated for, as its teacher names it", nullable=True),
    Column("seed", "int64", "generate.seed"),
    Column("words", "int32", "its length in words; a character of a script without spaces is one"),
    Column("repetition", "float32", "share of its sequences of three words that it had before"),
    Column("near_duplicate", "float32", "largest share (Jaccard) of such sequences in common with an earlier text"),
    Column(
        "draw", "float64", "a number in [0, 1), the same for equal texts: held out where it is below generate.held_out"
    ),
)


# cache-teachers: a file has the dropout-off logits, a range of passes (its record has the range), or both.
CACHE_TEXTS = (
    Column("key", "key", "the text"),
    Column("tokens", "int32", "its length for this teacher, special tokens included, after truncation"),
    Column("cut", "bool", "it was longer than the limit"),
)

CACHE_LOGITS = (Column("logits", "array<float32>", "dropout off, by the teacher's own labels"),)

CACHE_PASSES = (
    Column("passes", "array<float16>", "the logits of each dropout pass, pass by pass: K x labels"),
    Column("mean_probability", "array<float32>", "mean of the passes' softmax"),
    Column("entropy_nats", "float32", "entropy of the mean probability"),
    Column("confidence", "float32", "1 - entropy / ln(labels)"),
    Column("confidence_se", "float32", "its Monte-Carlo standard error (jackknife); null for one pass", nullable=True),
)


# cache-teachers with cache.adaptive: a decision for a bucket, the last one, and the regressions behind them.
STOPS = (
    Column("key", "key", "the text"),
    Column("passes", "int32", "the passes that suffice, or -1 if more are needed"),
)

STOP_CONFIDENCES = (
    *STOPS,
    Column("confidence", "array<float32>", "of each family, in their order: by K passes, or predicted from fewer"),
)

STOP_REGRESSIONS = (
    Column("family", "string", "the teacher's family"),
    Column("step", "int32", "the passes of a text that it reads"),
    Column("weights", "list<float64>", "of its inputs"),
    Column("deviation", "float64", "of its predictions"),
)


FEATURES = (
    Column("key", "key", "the text"),
    Column(
        "features", "array<float16>", "its state in an encoder: the mean of the last block over its tokens, of length 1"
    ),
)


SIMILARITIES = (
    Column("key", "key", "the text"),
    Column("similarity", "array<float32>", "cosine of its state and each label name's, in the order of the union"),
)


# Next to states.npy, fp16 [rows, blocks, width]: the teachers' states, text after text.
STATES = (
    Column("key", "key", "the text"),
    Column("rows", "int32", "its rows there: one, the mean over its tokens, or one for each token"),
)


# Kept by bucket of the corpus, in its order.
TOKENS = (
    Column("ids", "list<int32>", "token ids, special tokens included, after truncation"),
    Column("cut", "bool", "it was longer than the limit"),
)

TOKEN_TYPES = (Column("type_ids", "list<int8>", "which text of a pair each token is of"),)


# Of weigh-teachers.
WEIGHTS = (
    Column("key", "key", "the text"),
    Column("weight", "array<float32>", "of each teacher, in their order: how probably it is the right one"),
    Column("evidence", "float32", "the largest scaled evidence of a teacher; null if none was used", nullable=True),
)

LABELLED_WEIGHTS = (
    Column("key", "key", "a text with a label in `labels` of the experiment"),
    Column("fitted", "array<float32>", "the teachers' weights before the text's label was set"),
    Column("left_out", "array<float32>", "the same, by cross-validation: without the labels of the text's fold"),
)

# Of build-targets.
TARGETS = (
    Column("key", "key", "the text"),
    Column("target", "array<float32>", "the distribution over the union of labels that the student is to learn"),
    Column("weight", "float32", "of the text in the loss"),
    Column("teacher", "string", "the heaviest or most confident one; null where the rule chooses none", nullable=True),
    Column("margin", "float32", "lead of the chosen answer over the best other; null without one", nullable=True),
    Column("confidence", "array<float32>", "or weight of each teacher, in order; null without one", nullable=True),
)


# `amalgam predict`. With --top K also label_2, probability_2 and so on; with --explain mass_TEACHER; with --unknown
# unknown and unknown_score.
PREDICTIONS = (
    Column("row", "int64", "position of the text in its file, counted as in skipped.parquet"),
    Column("key", "key", "the text; in a csv in hexadecimal"),
    Column("id", "string", "the id the file gave; null without --id", nullable=True),
    Column("label", "string", "the likeliest label"),
    Column("probability", "float32", "the student's, of that label"),
)


UNKNOWN = (
    Column("unknown", "bool", "whether the score is above the student's threshold"),
    Column("unknown_score", "float32", "distance from the training texts, or -log of the sum of exp(logits)"),
)


def predictions(top: int, teachers: Sequence[str], *, unknown: bool = False) -> tuple[Column, ...]:
    columns = list(PREDICTIONS)
    for index in range(2, top + 1):
        columns.append(Column(f"label_{index}", "string", "the next likely label"))
        columns.append(Column(f"probability_{index}", "float32", "the student's, of that label"))
    meaning = "sum over this teacher's labels; shared ones count for each"
    masses = (Column(f"mass_{teacher}", "float32", meaning) for teacher in teachers)
    return (*columns, *(UNKNOWN if unknown else ()), *masses)


def arrow_schema(columns: Sequence[Column], sizes: Mapping[str, int] | None = None) -> Any:
    """`sizes` gives the length of each array column by name."""
    fields = [
        pa.field(column.name, _arrow_type(column.dtype, (sizes or {}).get(column.name)), nullable=column.nullable)
        for column in columns
    ]
    return pa.schema(fields)


def build_table(columns: Sequence[Column], values: Mapping[str, Any]) -> Any:
    """Returns a table of these columns; rows of numbers [n, C] become arrays of length C."""
    matrices = {name: rows for name, rows in values.items() if getattr(rows, "ndim", 1) == 2}
    schema = arrow_schema(columns, {name: rows.shape[1] for name, rows in matrices.items()})
    arrays = dict(values)
    for name, rows in matrices.items():
        dtype = schema.field(name).type
        numbers = pa.array(rows.reshape(-1), dtype.value_type)
        arrays[name] = pa.FixedSizeListArray.from_arrays(numbers, dtype.list_size)
    return pa.table(arrays, schema=schema)


def _arrow_type(dtype: str, size: int | None) -> Any:
    if dtype == "key":
        return pa.binary(KEY_BYTES)
    if dtype.startswith("array<"):
        if size is None:
            raise ValueError(f"{dtype} needs a size")
        return pa.list_(_arrow_type(dtype[len("array<") : -1], None), size)
    if dtype.startswith("list<"):
        return pa.list_(pa.field("item", _arrow_type(dtype[len("list<") : -1], None), nullable=False))
    return pa.type_for_alias(dtype)


# ---- reading and writing


def write_table(table: Any, path: Path) -> None:
    rows = max(1, table.num_rows * ROW_GROUP_BYTES // max(1, table.nbytes))
    pq.write_table(table, path, row_group_size=rows, **parquet_options(table.schema))


def parquet_options(schema: Any) -> dict[str, Any]:
    """zstd; dictionaries for strings alone; the bytes of floats apart, which zstd then packs better."""
    types = pa.types
    strings = [field.name for field in schema if types.is_string(field.type) or types.is_large_string(field.type)]
    floats = []
    for field in schema:
        nested = types.is_list(field.type) or types.is_fixed_size_list(field.type)
        if types.is_floating(field.type.value_type if nested else field.type):
            floats.append(f"{field.name}.list.element" if nested else field.name)
    return {"compression": "zstd", "use_dictionary": strings or False, "use_byte_stream_split": floats or False}


@contextmanager
def opened(path: Path) -> Iterator[Callable[[Sequence[str] | None], Any]]:
    """Yields a function that reads columns of a file, all for None; columns that the file lacks are left out."""
    with pa.OSFile(str(path)) as source, pq.ParquetFile(source, pre_buffer=False) as file:
        yield lambda columns: file.read(columns=None if columns is None else list(columns), use_threads=False)


def read_table(path: Path, columns: Sequence[str] | None = None) -> Any:
    with opened(path) as read:
        return read(columns)


def read_keys(path: Path) -> Keys:
    return key_array(read_table(path, ["key"]).column(0))


def key_array(column: Any) -> Keys:
    """Returns a view of a fixed-binary column; only a column of several chunks is copied."""
    column = _one_chunk(column)
    if not len(column):  # no rows may come without a buffer
        return np.empty(0, f"S{KEY_BYTES}")
    return np.frombuffer(column.buffers()[1], f"S{KEY_BYTES}", len(column), column.offset * KEY_BYTES)


def matrix(column: Any) -> Array:
    """Returns a column of fixed-length arrays as rows of numbers."""
    column = _one_chunk(column)
    return column.flatten().to_numpy().reshape(len(column), column.type.list_size)


def _one_chunk(column: Any) -> Any:
    chunks = getattr(column, "chunks", None)
    if chunks is None:
        return column
    return chunks[0] if len(chunks) == 1 else column.combine_chunks()


def places_in(column: Any, names: Sequence[str]) -> Array:
    """Returns the place of each value of the column in `names`; -1 for another value, and for none."""
    places = pc.index_in(column, value_set=pa.array(names, pa.string())).fill_null(-1)
    return places.to_numpy().astype(np.int64)


def key_column(keys: bytes | Keys) -> Any:
    size = len(keys) // KEY_BYTES if isinstance(keys, bytes) else len(keys)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), size, [None, pa.py_buffer(keys)])


def key_list(keys: Keys) -> list[bytes]:
    data = keys.tobytes()
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]


# ---- sorting


class ExternalKeySort:
    """Takes any number of rows, the key first, and gives them back by the key's leading byte, in key order.

    Rows are gathered into runs; a run is sorted and written to a scratch file as one record batch per leading byte.
    A reader then needs memory for a run, or for the rows of the requested bytes. Equal keys keep their order.
    """

    def __init__(self, schema: Any, folder: Path) -> None:
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
        if self._run:
            self._write_run()
        self._writer.close()
        with self._reader([0]) as reader:
            keys = (key_array(self._rows(reader, byte, byte + 1).column(0)) for byte in range(256))
            return sum(len(np.unique(part)) for part in keys)

    def table(self, first: int, stop: int) -> Any:
        """Returns all rows whose key has a leading byte in [first, stop), sorted by key."""
        with self._reader() as reader:
            return _sorted_by_key(self._rows(reader, first, stop).combine_chunks())

    @contextmanager
    def _reader(self, columns: Sequence[int] | None = None) -> Iterator[Any]:
        options = pa.ipc.IpcReadOptions(included_fields=columns)
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_file(file, options=options) as reader:
            yield reader

    def _rows(self, reader: Any, first: int, stop: int) -> Any:
        numbers = (256 * run + byte for run in range(self._runs) for byte in range(first, stop))
        return pa.Table.from_batches([reader.get_batch(number) for number in numbers], reader.schema)


def _sorted_by_key(rows: Any) -> Any:
    return rows.take(np.argsort(key_array(rows.column(0)), kind="stable")) if len(rows) else rows
