"""Units of teacher inference: which texts, which passes, and their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amalgam.data.keys import shown
from amalgam.pipeline.console import Console
from amalgam.pipeline.errors import DataError
from amalgam.pipeline.execution.stage import Unit
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.cached.coverage import UnitRequest
from amalgam.stages.common.corpus import Bucket, fields, read_bucket
from amalgam.stages.common.teachers import ResolvedTeacher

if TYPE_CHECKING:
    import pyarrow as pa

    from amalgam.data.tokens import TokenRows
    from amalgam.stages.common.inference.teacher import Teacher


SMALL_PART = 4
"""Less than 1 / SMALL_PART of a bucket is tokenised without storing the tokens."""


@dataclass(frozen=True)
class Reader:
    """Tokenises a unit's texts for one teacher."""

    store: Store
    console: Console
    resolved: ResolvedTeacher
    teacher: Teacher
    tokenizer: str
    """Digest of the tokenizer."""
    buckets: dict[tuple[str, str], Bucket]
    """By part and prefix."""
    refuse_long: bool
    """Whether a text longer than `max_tokens` is an error."""

    def __call__(self, unit: Unit) -> TokenizedUnit:
        ask: UnitRequest = unit.payload
        bucket = self.buckets[ask.part, ask.prefix]
        rows = read_bucket(self.store, bucket)
        if ask.rows is not None:
            rows = rows.take(ask.rows)
        tokens = self._tokens(bucket, rows, ask.rows)
        self.teacher.check(tokens, lambda row: str(rows.column("text")[row]))
        if self.refuse_long and tokens.truncated.any():
            _refuse_long(rows, tokens, self.resolved)
        return TokenizedUnit(unit, rows.column("key").to_pylist(), tokens)

    def _tokens(self, bucket: Bucket, rows: pa.Table, places: Any) -> TokenRows:
        """Returns stored tokens, or tokenises and stores the whole bucket; a small part is tokenised only."""
        from amalgam.data.tokens import encode
        from amalgam.stages.common.token_cache import tokens_of

        tokenizer, limit, types = self.teacher.tokenizer, self.teacher.limit, self.teacher.takes_types
        if places is not None and SMALL_PART * len(places) < bucket.rows:
            return encode(tokenizer, fields(rows), limit, types=types)
        tokens = tokens_of(self.store, self.console, bucket, tokenizer, digest=self.tokenizer, limit=limit, types=types)
        return tokens if places is None else tokens.take(places)


def _refuse_long(rows: pa.Table, tokens: TokenRows, teacher: ResolvedTeacher) -> None:

    first = int(tokens.truncated.argmax())
    raise DataError(
        f"{int(tokens.truncated.sum())} texts are longer than {teacher.max_tokens} tokens of teacher {teacher.name}",
        where=f"the first: {shown(rows.column('text')[first].as_py())}",
        fix="cache.on_long_text=truncate cuts and counts them, or raise cache.max_tokens",
    )


@dataclass(frozen=True)
class TokenizedUnit:
    """The texts of one unit, ready for the teacher."""

    unit: Unit
    keys: list[bytes]
    tokens: TokenRows

    @property
    def total(self) -> int:
        return len(self.tokens.ids.values)
