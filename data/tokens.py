"""Encodes texts as token ids with one tokenizer and one limit, in the same way for teachers and the student.

Rows of ids are stored end to end in one array: each text takes its ids and one offset, and no object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any, TypeAlias, overload

from amalgam.data.arrays import Array, RowNumbers
from amalgam.data.lazy import np
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import ModelError

Ids: TypeAlias = "np.ndarray[Any, np.dtype[np.integer[Any]]]"

ENCODING = Lock()
"""A tokenizer stores one limit for all threads, so only one of them sets it and encodes at a time."""


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: Ids
    type_ids: Ids | None
    truncated: bool
    """Whether the text was longer than the limit."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Ragged(Sequence[Ids]):
    """Stores rows of any length end to end; row i is a view of values[offsets[i]:offsets[i + 1]]."""

    values: Ids
    offsets: RowNumbers

    @classmethod
    def of(cls, rows: Sequence[Ids]) -> Ragged:
        if isinstance(rows, Ragged):
            return rows
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.concatenate(rows) if rows else np.zeros(0, np.int32), _offsets(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, row: int) -> Ids: ...
    @overload
    def __getitem__(self, row: slice) -> Ragged: ...
    def __getitem__(self, row: int | slice) -> Ids | Ragged:
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        place = range(len(self))[row]
        return self.values[self.offsets[place] : self.offsets[place + 1]]

    @property
    def lengths(self) -> RowNumbers:
        return np.diff(self.offsets)

    def take(self, rows: Ids) -> Ragged:
        starts = self.offsets[:-1][rows]
        lengths = self.offsets[1:][rows] - starts
        offsets = _offsets(lengths)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(self.values[places], offsets)

    def padded(self, fill: int, width: int = 0) -> tuple[RowNumbers, Array]:
        """Returns a matrix of at least this width, padded on the right with `fill`, and the mask of its values."""
        lengths = self.lengths
        token_mask = np.arange(int(lengths.max(initial=width))) < lengths[:, None]
        filled = np.full(token_mask.shape, fill, np.int64)
        filled[token_mask] = self.values
        return filled, token_mask


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows(Sequence[Tokens]):
    """Stores the tokens of many texts as columns."""

    ids: Ragged
    type_ids: Ragged | None
    truncated: Array

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, row: int) -> Tokens: ...
    @overload
    def __getitem__(self, row: slice) -> TokenRows: ...
    def __getitem__(self, row: int | slice) -> Tokens | TokenRows:
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        return Tokens(self.ids[row], None if self.type_ids is None else self.type_ids[row], bool(self.truncated[row]))

    @property
    def lengths(self) -> RowNumbers:
        return self.ids.lengths

    def take(self, rows: Any) -> TokenRows:
        """Returns the texts with these row numbers."""
        places = np.asarray(rows, np.int64)
        types = None if self.type_ids is None else self.type_ids.take(places)
        return TokenRows(self.ids.take(places), types, self.truncated[places])


def join(parts: Iterable[TokenRows]) -> TokenRows:
    """Joins the parts in order; all of them have token types, or none has."""
    token_rows = list(parts) or [_rows([], None, [])]
    types = [part.type_ids for part in token_rows if part.type_ids is not None]
    truncated = np.concatenate([part.truncated for part in token_rows])
    return TokenRows(_joined([part.ids for part in token_rows]), _joined(types) if types else None, truncated)


def by_count(ids: Sequence[Ids], rows: RowNumbers, token: int | None) -> list[RowNumbers]:
    """Divides rows so that the texts of a part have this token equally often; None: all rows are one part."""
    if token is None:
        return [rows]
    counts = np.array([np.count_nonzero(ids[row] == token) for row in rows], np.int64)
    return [rows[counts == count] for count in np.unique(counts)]


MANY_UNREADABLE = 0.05
"""Share of unreadable texts from which a note names them."""


def unreadable_texts(ids: Ragged, tokenizer: Any) -> int:
    """Returns how many texts have mostly tokens that the tokenizer does not know."""
    if tokenizer.unk_token_id is None:
        return 0
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(ids.values == tokenizer.unk_token_id)])
    unknown, special = np.diff(ends[ids.offsets]), tokenizer.num_special_tokens_to_add()
    return int((2 * unknown > ids.lengths - special).sum())


def unreadable_note(unreadable: int, texts: int, model: str) -> Iterator[str]:
    if unreadable > MANY_UNREADABLE * texts:
        yield (
            f"{unreadable:,} of {counted(texts, 'text')} are mostly unknown tokens for {model}, as in another writing "
            "system: it cannot distinguish them. Use a model of their language"
        )


def uses_token_types(tokenizer: Any, *, types: bool) -> bool:
    return types and "token_type_ids" in tokenizer.model_input_names


def encode(tokenizer: Any, texts: Sequence[tuple[str, ...]], limit: int, *, types: bool) -> TokenRows:
    """Returns token ids with special tokens, truncated to `limit` tokens (of a pair the longer text first).

    The tokenizer's own limit is ignored.
    """
    types = uses_token_types(tokenizer, types=types)
    if not texts:
        return _rows([], [] if types else None, [])
    if len(texts[0]) > 1:
        _check_room(tokenizer, limit)
    encode_with = _encode_by_backend if has_fast_backend(tokenizer) else _encode_by_call
    with ENCODING:
        return encode_with(tokenizer, texts, limit, types=types)


def _check_room(tokenizer: Any, limit: int) -> None:
    """Refuses a limit without a token of each text of a pair, where different pairs would be equal."""
    special = tokenizer.num_special_tokens_to_add(pair=True)
    if limit < special + 2:
        what = f"{limit} tokens leave no room for both texts of a pair next to {special} special ones"
        raise ModelError(what, where=str(tokenizer.name_or_path), fix=f"set max_tokens to at least {special + 2}")


def has_fast_backend(tokenizer: Any) -> bool:
    """Returns whether the tokenizer's Rust backend, called directly, gives the same tokens as the tokenizer."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus")
    )


def _encode_by_backend(tokenizer: Any, texts: Sequence[tuple[str, ...]], limit: int, *, types: bool) -> TokenRows:
    """Encodes on all cores, without character offsets and without a Python list per text."""
    backend = tokenizer.backend_tokenizer
    truncation = {"max_length": limit, "stride": 0, "strategy": "only_first", "direction": tokenizer.truncation_side}
    if backend.padding is not None:
        backend.no_padding()
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    if len(texts[0]) > 1:
        pairs = encode_truncated(backend, texts, limit, tokenizer.truncation_side)
        ids, type_ids, truncated = map(list, zip(*pairs, strict=True))
        return _rows(ids, type_ids if types else None, truncated)
    if backend.truncation != truncation:
        backend.enable_truncation(**truncation)
    encoded = backend.encode_batch_fast([text for (text,) in texts], add_special_tokens=True)
    # Only a text that fills the limit can be truncated, and reading the overflow is slow.
    truncated = [len(each) >= limit and bool(each.overflowing) for each in encoded]
    return _rows([each.ids for each in encoded], [each.type_ids for each in encoded] if types else None, truncated)


def encode_truncated(
    backend: Any, texts: Sequence[Any], limit: int, side: str
) -> Iterator[tuple[Sequence[int], Sequence[int], bool]]:
    """Yields the token ids of each text or pair, its types, and whether it was truncated: the longer text first.

    The backend's own truncation keeps each rest of one text with each rest of the other: gigabytes for a long pair.
    """
    if backend.truncation is not None:
        backend.no_truncation()
    for each in backend.encode_batch_fast(list(texts)):
        if len(each) <= limit:
            yield each.ids, each.type_ids, False
            continue
        parts = np.array([-1 if part is None else part for part in each.sequence_ids])
        kept = parts < 0  # special tokens
        places = [np.flatnonzero(parts == part) for part in (0, 1)]
        room, lengths = limit - int(kept.sum()), [len(part) for part in places]
        fewer = min(*lengths, room // 2)
        sizes = (room - fewer, fewer) if lengths[0] > lengths[1] else (fewer, room - fewer)
        for part, size in zip(places, sizes, strict=True):
            kept[part[len(part) - size :] if side == "left" else part[:size]] = True
        yield np.array(each.ids)[kept].tolist(), np.array(each.type_ids)[kept].tolist(), True


def _encode_by_call(tokenizer: Any, texts: Sequence[tuple[str, ...]], limit: int, *, types: bool) -> TokenRows:
    fields = [list(field) for field in zip(*texts, strict=True)]
    options = {"add_special_tokens": True, "return_attention_mask": False, "verbose": False}
    options["return_token_type_ids"] = types
    truncation = {"truncation": "longest_first" if len(fields) > 1 else "only_first", "max_length": limit}
    encoded = tokenizer(*fields, **options, **truncation)
    if encoded.encodings is not None:
        truncated = [bool(each.overflowing) for each in encoded.encodings]
    else:  # a tokenizer in Python does not report truncation
        truncated = [len(whole) > limit for whole in tokenizer(*fields, **options)["input_ids"]]
    return _rows(encoded["input_ids"], encoded.get("token_type_ids") if types else None, truncated)


def _rows(ids: list[list[int]], types: list[list[int]] | None, truncated: list[bool]) -> TokenRows:
    """Builds the columns; token types are small numbers and take one byte each."""
    return TokenRows(
        _ragged(ids, np.int32), None if types is None else _ragged(types, np.int8), np.array(truncated, np.bool_)
    )


def _ragged(rows: list[list[int]], dtype: type[np.integer[Any]]) -> Ragged:
    offsets = _offsets(np.fromiter(map(len, rows), np.int64, len(rows)))
    return Ragged(np.fromiter(chain.from_iterable(rows), dtype, int(offsets[-1])), offsets)


def _joined(parts: list[Ragged]) -> Ragged:
    lengths = np.concatenate([part.lengths for part in parts])
    return Ragged(np.concatenate([part.values for part in parts]), _offsets(lengths))


def _offsets(lengths: RowNumbers) -> RowNumbers:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
