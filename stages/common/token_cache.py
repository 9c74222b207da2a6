"""Tokens that are kept: a bucket of texts is put through a tokenizer once, for all teachers and students that share it.

A tokenizer is known by what it does, not by where it lies, and a bucket by its content; what is kept is only ever the
answer to both, so a damaged file is set aside and made again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from amalgam.data.parquet import read_table, write_table
from amalgam.data.schemas import TOKEN_TYPES, TOKENS, arrow_schema
from amalgam.data.tokens import Ragged, TokenRows, encode, gives_types, speaks_plainly
from amalgam.pipeline.errors import DamagedError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.execution.versions import library_versions
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.store import Record
from amalgam.stages.common.corpus import Bucket, fields, read_bucket
from amalgam.stages.common.models.resolve import ModelFiles

ROOM = "tokens"

VERSION = 1


def tokens_of(  # noqa: PLR0913 - what tokens are a function of, each by name
    run: Run, bucket: Bucket, tokenizer: Any, *, digest: str, limit: int, types: bool
) -> TokenRows:
    """The bucket's tokens, row by row; `digest` is tokenizer_digest's."""
    types = gives_types(tokenizer, types=types)
    folder = run.store.folder(ROOM, fingerprint([VERSION, digest, limit, types]))
    name = bucket.file.sha256[:20]
    record = run.store.record(folder / f"{name}.json")
    kept = record and _kept(run, record, bucket)
    if kept:
        return kept
    tokens = encode(tokenizer, fields(read_bucket(run, bucket)), limit, types=types)
    with run.store.draft(folder, name, ".parquet") as draft:
        write_table(token_table(tokens), draft.folder / "tokens.parquet")
        draft.facts = {"bucket": bucket.file.sha256, "rows": len(tokens), "tokens": int(tokens.lengths.sum())}
        draft.made = {"libraries": library_versions()}
    return tokens


def tokenizer_digest(tokenizer: Any, files: ModelFiles) -> str:
    """What its tokens depend on. One whose ids are made outside its own JSON is known by all its model's files."""
    kind = type(tokenizer)
    if not speaks_plainly(tokenizer):
        return fingerprint([kind.__module__, kind.__qualname__, files.digest, version("transformers")])
    # How the last call cut and padded is no part of it: `encode` says both itself.
    backend = {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    options = [tokenizer.truncation_side, bool(tokenizer.split_special_tokens)]
    return fingerprint([backend, options, version("tokenizers")])


def is_of(record: Record, buckets: set[str]) -> bool:
    """Whether these tokens are of one of the buckets, given by their files' sha256."""
    return record.facts.get("bucket") in buckets


def _kept(run: Run, record: Record, bucket: Bucket) -> TokenRows | None:
    if run.store.missing_files(record):
        return None  # the next writer's record takes its place
    try:
        path = run.store.verified_path(record.files[0])
    except DamagedError as damage:
        run.console.note(f"{damage.what}: set aside and made again")
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
    return pa.table({**arrays, "cut": pa.array(tokens.cut)}, schema=schema)


def _read(path: Path) -> TokenRows:
    table = read_table(path)
    names = table.column_names
    types = _ragged(table.column("type_ids")) if "type_ids" in names else None
    return TokenRows(_ragged(table.column("ids")), types, table.column("cut").to_numpy())


def _ragged(column: Any) -> Ragged:

    lists = column.combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return Ragged(lists.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0])
