"""Computes keys of texts, buckets of keys, printable forms, and the union of the teachers' labels.

A bucket is a binary prefix of the key ("0110", or "all"), so corpora of any two sizes divide along the same lines.
Nothing here needs a heavy library: `plan` reads keys without opening a Parquet file.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import pairwise
from struct import Struct

from amalgam.pipeline.console import printable
from amalgam.pipeline.errors import folded

KEY_BYTES = 16

ALL = "all"

BUCKETS, MOST_BITS, MOST_ROWS = 64, 13, 2048
"""Number of buckets from which they grow with the corpus, the most bits, and the most rows of fewer bits."""

_length = Struct("<Q").pack


def text_key(fields: Sequence[str]) -> bytes:
    """Lengths go in too, so that ("a", "b") and ("ab",) differ. A lone surrogate raises UnicodeEncodeError."""
    digest = blake2b(digest_size=KEY_BYTES)
    for field in fields:
        data = field.encode()
        digest.update(_length(len(data)) + data)
    return digest.digest()


def keys_digest(keys: bytes) -> str:
    """Returns the digest of many keys, concatenated in order."""
    return sha256(keys).hexdigest()


def prefix_name(number: int, bits: int) -> str:
    return format(number, f"0{bits}b") if bits else ALL


def bits_for(rows: int) -> int:
    """Returns the bits of the buckets: up to 512 rows in each, from 64 buckets on more, up to 2,048.

    Small buckets cost little if they are computed again. Large ones need fewer files, at most 2^MOST_BITS.
    """
    rows_per_bucket = min(max(-(-rows // BUCKETS), 512), MOST_ROWS)
    return min(MOST_BITS, (max(rows - 1, 0) // rows_per_bucket).bit_length())


def overlaps(a: str, b: str) -> bool:
    return ALL in (a, b) or a.startswith(b) or b.startswith(a)


def shown(text: str, limit: int = 80) -> str:
    """Formats text for a message: one line of at most `limit` printable characters."""
    escaped = printable(text[: limit + 1], keep="")
    return escaped if len(escaped) <= limit else escaped[: limit - 3] + "..."


def shown_name(name: str) -> str:
    """Formats a name for a list or a table: in quotes if it has a comma, or blanks at its ends."""
    text = shown(name)
    return text if text and text == text.strip() and "," not in text else f'"{text}"'


def shown_names(names: Iterable[str], most: int = 20) -> str:
    """Formats at most `most` names for a message, with the number of the others."""
    return _listed(map(shown_name, names), most)


def _listed(texts: Iterable[str], most: int) -> str:
    listed = list(texts)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


@dataclass(frozen=True)
class LabelSpace:
    """The union of the teachers' labels in first-seen order, teacher by teacher; a shared name is one label."""

    names: tuple[str, ...]
    columns: dict[str, tuple[int, ...]]
    """For each teacher, the indices of its labels in the union."""

    @property
    def shares_labels(self) -> bool:
        """Whether two teachers know the same label."""
        return sum(map(len, self.columns.values())) > len(self.names)

    @property
    def owners(self) -> list[list[str]]:
        """For each label, the teachers that know it."""
        owners: list[list[str]] = [[] for _ in self.names]
        for teacher, columns in self.columns.items():
            for index in columns:
                owners[index].append(teacher)
        return owners


def of_one_teacher(owners: Iterable[tuple[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Returns, by teacher, the labels that no other teacher has; `owners` are labels with their teachers."""
    alone: dict[str, list[str]] = {}
    for label, teachers in owners:
        if len(teachers) == 1:
            alone.setdefault(teachers[0], []).append(label)
    return alone


def union_of(labels: Mapping[str, Sequence[str]]) -> LabelSpace:
    names = list(dict.fromkeys(name for teacher_labels in labels.values() for name in teacher_labels))
    place = {name: index for index, name in enumerate(names)}
    return LabelSpace(
        tuple(names),
        {teacher: tuple(place[name] for name in teacher_labels) for teacher, teacher_labels in labels.items()},
    )


def similar_labels(labels: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Returns pairs of labels of different teachers that differ only by case, coding, separators or a plural."""
    first: dict[str, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    for teacher_labels in labels.values():
        plain = {name: _letters_of(name) for name in teacher_labels}
        stems = {name: stem.removesuffix("s") or name for name, stem in plain.items()}
        pairs |= {(first[stem], name): None for name, stem in stems.items() if first.get(stem, name) != name}
        for name, stem in stems.items():
            first.setdefault(stem, name)
    return list(pairs)


def cut_in_groups(labels: Sequence[str], groups: int) -> list[list[str]]:
    """Labels sorted by name, cut into contiguous groups of equal size, the remainder in the last."""
    ordered = sorted(labels)
    size = len(ordered) // groups
    cuts = [index * size for index in range(groups)] + [len(ordered)]
    return [ordered[start:end] for start, end in pairwise(cuts)]


CATCH_ALL = frozenset(
    {
        *("other", "others", "none", "noneofthese", "noneoftheabove", "neither", "nothing", "misc", "miscellaneous"),
        *("rest", "background", "unknown", "undefined", "irrelevant", "notrelevant", "na"),
        *("outofscope", "oos", "outofdomain", "ood", "sonstiges", "andere", "autre", "autres", "otro", "otros"),
    }
)
"""Names of labels, folded, that usually mean none of a teacher's other labels."""


def is_catch_all(name: str) -> bool:
    """Returns whether labels of this name usually mean none of a teacher's other labels."""
    return _letters_of(name) in CATCH_ALL


def _letters_of(name: str) -> str:
    """Returns the letters and digits of a label, folded."""
    return "".join(filter(str.isalnum, folded(name)))


def label_notes(labels: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields notes on labels of several teachers: nearly the same names, and names that mean none of the others."""
    pairs = [f"{shown_name(a)} and {shown_name(b)}{_coding(a, b)}" for a, b in similar_labels(labels)]
    fix = "to make them one label, use teachers: rename"
    if pairs:
        yield f"labels with nearly the same name count as different: {_listed(pairs, 5)}; {fix}"
    owners: dict[str, list[str]] = {}
    for teacher, teacher_labels in labels.items() if len(labels) > 1 else ():
        for name in filter(is_catch_all, teacher_labels):
            owners.setdefault(name, []).append(teacher)
    for name, teachers in owners.items():
        fix = f"if it means none of their other labels, set catch_all: [{json.dumps(name, ensure_ascii=False)}] there"
        yield f"{shown_name(name)} of {' and '.join(teachers)} counts as a label of the student; {fix}"


def _coding(a: str, b: str) -> str:
    """Returns a remark on two names that look the same."""
    alike = unicodedata.normalize("NFC", a) == unicodedata.normalize("NFC", b)
    return " (the same name with accents in Unicode NFC and NFD)" if alike else ""
