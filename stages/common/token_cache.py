"""Caches tokens: each bucket of texts is tokenised once for all teachers and students that share a tokenizer.

Entries are keyed by the tokenizer's behaviour and the bucket's content, so a damaged file is quarantined and rebuilt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from amalgam.data.parquet import TOKEN_TYPES, TOKENS, arrow_schema, read_table, write_table
from amalgam.data.tokens import Ragged, TokenRows, encode, has_fast_backend, uses_token_types
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.storage.fingerprint import fingerprint, library_versions
from amalgam.pipeline.storage.store import Record, Store
from amalgam.stages.common.corpus import Bucket, fields, read_bucket
from amalgam.stages.common.models.resolve import ModelFiles

ROOM = "tokens"

VERSION = 1

SMALL_PART = 4
"""Less than 1 / SMALL_PART of a bucket is tokenised without storing the tokens."""


def read_tokens(  # noqa: PLR0913 - each a separate input of the tokens
    store: Store,
    console: Console,
    bucket: Bucket,
    places: Any,
    tokenizer: Any,
    *,
    digest: str,
    limit: int,
    types: bool,
) -> tuple[Any, TokenRows]:
    """Returns the bucket's rows at these places, None for all, and their tokens."""
    rows = read_bucket(store, bucket)
    if places is not None:
        rows = rows.take(places)
        if SMALL_PART * len(places) < bucket.rows:
            return rows, encode(tokenizer, fields(rows), limit, types=types)
    tokens = tokens_of(store, console, bucket, tokenizer, digest=digest, limit=limit, types=types)
    return rows, tokens if places is None else tokens.take(places)


def tokens_of(  # noqa: PLR0913 - each a separate input of the tokens
    store: Store, console: Console, bucket: Bucket, tokenizer: Any, *, digest: str, limit: int, types: bool
) -> TokenRows:
    """Returns the bucket's tokens, row by row; `digest` is that of tokenizer_digest."""
    types = uses_token_types(tokenizer, types=types)
    folder = store.folder(ROOM, fingerprint([VERSION, digest, limit, types]))
    name = bucket.file.sha256[:20]
    record = store.record(folder / f"{name}.json")
    cached = record and _cached_tokens(store, console, record, bucket)
    if cached:
        return cached
    tokens = encode(tokenizer, fields(read_bucket(store, bucket)), limit, types=types)
    with store.draft(folder, name, ".parquet") as draft:
        write_table(token_table(tokens), draft.folder / "tokens.parquet")
        draft.facts = {"bucket": bucket.file.sha256, "rows": len(tokens), "tokens": int(tokens.lengths.sum())}
        draft.made = {"libraries": library_versions()}
    return tokens


def tokenizer_digest(tokenizer: Any, files: ModelFiles) -> str:
    """Returns a digest of the tokenizer's behaviour; without a JSON backend, of all files of its model."""
    kind = type(tokenizer)
    if not has_fast_backend(tokenizer):
        return fingerprint([kind.__module__, kind.__qualname__, files.digest, version("transformers")])
    # `encode` sets truncation and padding itself.
    backend = {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    options = [tokenizer.truncation_side, bool(tokenizer.split_special_tokens)]
    return fingerprint([backend, options, version("tokenizers")])


def _cached_tokens(store: Store, console: Console, record: Record, bucket: Bucket) -> TokenRows | None:
    if store.missing_files(record):
        return None  # the next writer replaces the record
    try:
        path = store.verified_path(record.files[0])
    except DamagedError as damage:
        console.note(f"{damage.what}: quarantined and rebuilt")
        return None
    tokens = _read(path)
    return tokens if len(tokens) == bucket.rows else None


def token_table(tokens: TokenRows) -> Any:
    import pyarrow as pa

    columns: Mapping[str, Ragged] = {"ids": tokens.ids} | ({"type_ids": tokens.type_ids} if tokens.type_ids else {})
    arrays = {
        name: pa.ListArray.from_arrays(pa.array(rows.offsets, pa.int32()), pa.array(rows.values))
        for name, rows in columns.items()
    }
    schema = arrow_schema([*TOKENS, *(TOKEN_TYPES if tokens.type_ids else [])])
    return pa.table({**arrays, "cut": pa.array(tokens.truncated)}, schema=schema)


def _read(path: Path) -> TokenRows:
    table = read_table(path)
    types = _ragged(table.column("type_ids")) if "type_ids" in table.column_names else None
    return TokenRows(_ragged(table.column("ids")), types, table.column("cut").to_numpy())


def _ragged(column: Any) -> Ragged:
    lists = column.combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return Ragged(lists.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0])
