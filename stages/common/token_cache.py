"""Caches tokens: each bucket of texts is tokenised once for all teachers and students that share a tokenizer.

Entries are keyed by the tokenizer's behaviour and the bucket's content, so a damaged file is quarantined and rebuilt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from amalgam.data.keys import shown
from amalgam.data.lazy import np, pa
from amalgam.data.parquet import TOKEN_TYPES, TOKENS, arrow_schema, read_table, write_table
from amalgam.data.tokens import Ragged, TokenRows, encode, has_fast_backend, uses_token_types
from amalgam.pipeline.console import Console, counted
from amalgam.pipeline.errors import DamagedError, DataError
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.facts import DECLARED, FactTypes
from amalgam.pipeline.storage.fingerprint import fingerprint
from amalgam.pipeline.storage.paths import CACHED_TOKENS
from amalgam.pipeline.storage.store import Record, Store
from amalgam.stages.common.cached.coverage import UnitRequest
from amalgam.stages.common.corpus import Bucket, fields, read_bucket
from amalgam.stages.common.models.resolve import ModelFiles, ResolvedTeacher

if TYPE_CHECKING:
    from amalgam.stages.common.inference.teacher import Teacher

VERSION = 1

SMALL_PART = 4
"""Less than 1 / SMALL_PART of a bucket is tokenised without storing the tokens."""


class TokenFacts(TypedDict):
    bucket: str


DECLARED[CACHED_TOKENS] = FactTypes(unit=TokenFacts)


@dataclass(frozen=True)
class TokenCache:
    """Reads a bucket's tokens by one tokenizer, or tokenises the bucket and stores them."""

    store: Store
    console: Console
    tokenizer: Any
    digest: str
    """That of tokenizer_digest."""
    limit: int
    types: bool

    def read(self, bucket: Bucket, places: Any) -> tuple[Any, TokenRows]:
        """Returns the bucket's rows at these places, None for all, and their tokens."""
        rows = read_bucket(self.store, bucket)
        if places is None:
            return rows, self.tokens(bucket)
        rows = rows.take(places)
        if SMALL_PART * len(places) < bucket.rows:
            return rows, encode(self.tokenizer, fields(rows), self.limit, types=self.types)
        return rows, self.tokens(bucket).take(places)

    def tokens(self, bucket: Bucket) -> TokenRows:
        types = uses_token_types(self.tokenizer, types=self.types)
        folder = self.store.folder(CACHED_TOKENS, fingerprint([VERSION, self.digest, self.limit, types]))
        name = bucket.file.sha256[:20]
        record = self.store.record(folder / f"{name}.json")
        cached = record and self._cached(record, bucket)
        if cached:
            return cached
        tokens = encode(self.tokenizer, fields(read_bucket(self.store, bucket)), self.limit, types=types)
        with self.store.draft(folder, name, ".parquet") as draft:
            write_table(token_table(tokens), draft.folder / "tokens.parquet")
            draft.facts = {"bucket": bucket.file.sha256}
        return tokens

    def _cached(self, record: Record, bucket: Bucket) -> TokenRows | None:
        if self.store.missing_files(record):
            return None  # the next writer replaces the record
        try:
            path = self.store.verified_path(record.files[0])
        except DamagedError as damage:
            self.console.note(f"{damage.what}; rebuilt")
            return None
        tokens = _read(path)
        return tokens if len(tokens) == bucket.rows else None


def tokenizer_digest(tokenizer: Any, files: ModelFiles) -> str:
    """Returns a digest of the tokenizer's behaviour; without a JSON backend, of all files of its model."""
    kind = type(tokenizer)
    if not has_fast_backend(tokenizer):
        return fingerprint([kind.__module__, kind.__qualname__, files.digest, version("transformers")])
    # `encode` sets truncation and padding itself.
    backend = {**json.loads(tokenizer.backend_tokenizer.to_str()), "truncation": None, "padding": None}
    options = [tokenizer.truncation_side, bool(tokenizer.split_special_tokens)]
    return fingerprint([backend, options, version("tokenizers")])


def token_table(tokens: TokenRows) -> Any:
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


@dataclass(frozen=True)
class TokenizedUnit:
    unit: Unit
    keys: list[bytes]
    tokens: TokenRows


@dataclass(frozen=True)
class UnitTexts:
    store: Store
    console: Console
    buckets: Mapping[tuple[str, str], Bucket]
    """By part and prefix."""
    refuse_long: bool
    """Whether a text longer than `max_tokens` is an error."""

    def tokenizer(self, resolved: ResolvedTeacher, teacher: Teacher) -> Callable[[Unit], TokenizedUnit]:
        """Returns the function that tokenises a unit's texts for this teacher."""
        digest = tokenizer_digest(teacher.tokenizer, resolved.files)
        cache = TokenCache(self.store, self.console, teacher.tokenizer, digest, teacher.limit, teacher.takes_types)
        return partial(self._tokenize, resolved, teacher, cache)

    def _tokenize(self, resolved: ResolvedTeacher, teacher: Teacher, cache: TokenCache, unit: Unit) -> TokenizedUnit:
        request: UnitRequest = unit.payload
        rows, tokens = cache.read(self.buckets[request.part, request.prefix], request.rows)
        teacher.check(tokens, lambda row: str(rows.column("text")[row]))
        if self.refuse_long and tokens.truncated.any():
            first = rows.column("text")[int(tokens.truncated.argmax())].as_py()
            raise long_texts_error(resolved, int(tokens.truncated.sum()), first)
        return TokenizedUnit(unit, rows.column("key").to_pylist(), tokens)


def long_texts_error(teacher: ResolvedTeacher, texts: int, first: str) -> DataError:
    return DataError(
        f"longer than {teacher.max_tokens} tokens of teacher {teacher.name}: {counted(texts, 'text')}",
        where=f"the first: {shown(first)}",
        fix="set cache.on_long_text=truncate, which cuts and counts them, or raise cache.max_tokens",
    )
