"""Every column of every Parquet file, with its dtype, unit and meaning, once.

The dtypes are "key" (16 fixed bytes), "string", "bool", "int32", "int64", "float16", "float32" and "float64".
"array<dtype>" is a list of fixed length, set when the file is written; "list<dtype>" is a list of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amalgam.data.keys import KEY_BYTES


@dataclass(frozen=True)
class Column:
    name: str
    dtype: str
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
    Column("source", "string", "what made it, as generate.source names it"),
    Column("teacher", "string", "the teacher it was made for; null where it was made for none", nullable=True),
    Column("class", "string", "the class it was made for, by the teacher's name for it; null likewise", nullable=True),
    Column("seed", "int64", "generate.seed"),
    Column("words", "int32", "its length in words"),
    Column("repetition", "float32", "share of its sequences of three words that it had before"),
    Column("near_duplicate", "float32", "largest share (Jaccard) of such sequences in common with an earlier text"),
    Column("draw", "float64", "a number of its own in [0, 1): held out where it is below generate.held_out"),
)


# cache-teachers: a file has the dropout-off logits, a range of passes (its record has the range), or both.
CACHE_TEXTS = (
    Column("key", "key", "the text"),
    Column("tokens", "int32", "its length for this teacher, special tokens included, after cutting"),
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
    Column("ids", "list<int32>", "token ids, special tokens included, after cutting"),
    Column("cut", "bool", "it was longer than the limit"),
)

TOKEN_TYPES = (Column("type_ids", "list<int8>", "which text of a pair each token is of"),)


# Stage 2.
WEIGHTS = (
    Column("key", "key", "the text"),
    Column("weight", "array<float32>", "of each teacher, in their order: how probably it is the right one"),
)

TARGETS = (
    Column("key", "key", "the text"),
    Column("target", "array<float32>", "the distribution over the union of labels that the student is to learn"),
    Column("weight", "float32", "of the text in the loss"),
    Column("teacher", "string", "the most confident teacher; null where the rule chooses none", nullable=True),
    Column("margin", "float32", "confidence of the first less that of the second; null likewise", nullable=True),
    Column("confidence", "array<float32>", "of each teacher, in their order; null likewise", nullable=True),
)


# `amalgam predict`. With --top K also label_2, probability_2 and so on; with --explain mass_TEACHER.
PREDICTIONS = (
    Column("row", "int64", "position of the text in its file, counted as in skipped.parquet"),
    Column("key", "key", "the text; in a csv in hexadecimal"),
    Column("id", "string", "the id the file gave; null without --id", nullable=True),
    Column("label", "string", "the likeliest label"),
    Column("probability", "float32", "the student's, of that label"),
)


def predictions(top: int, teachers: Sequence[str]) -> tuple[Column, ...]:
    columns = list(PREDICTIONS)
    for place in range(2, top + 1):
        columns.append(Column(f"label_{place}", "string", "the next likely label"))
        columns.append(Column(f"probability_{place}", "float32", "the student's, of that label"))
    meaning = "sum over this teacher's labels; shared ones count for each"
    return (*columns, *(Column(f"mass_{teacher}", "float32", meaning) for teacher in teachers))


def arrow_schema(columns: Sequence[Column], sizes: Mapping[str, int] | None = None) -> Any:
    """`sizes` gives the length of each array column by name."""
    import pyarrow as pa

    fields = [
        pa.field(column.name, _arrow_type(column.dtype, (sizes or {}).get(column.name)), nullable=column.nullable)
        for column in columns
    ]
    return pa.schema(fields)


def _arrow_type(dtype: str, size: int | None) -> Any:
    import pyarrow as pa

    if dtype == "key":
        return pa.binary(KEY_BYTES)
    if dtype.startswith("array<"):
        if size is None:
            raise ValueError(f"{dtype} needs a size")
        return pa.list_(_arrow_type(dtype[len("array<") : -1], None), size)
    if dtype.startswith("list<"):
        return pa.list_(pa.field("item", _arrow_type(dtype[len("list<") : -1], None), nullable=False))
    return pa.type_for_alias(dtype)
