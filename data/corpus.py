"""A part of the corpus: sources in, checked and keyed texts out, one Parquet file per bucket of keys.

A source is a path, a folder or a glob; `remote` fetches other addresses. The result depends only on the texts: not on
the order of rows or files, their names, format or duplicates. Memory holds one run of rows, then the rows of one
leading key byte (1/256 of the corpus). An id has 8 bytes, a repeated one 24.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict
from unicodedata import normalize

from amalgam.data import parquet
from amalgam.data.arrays import Array
from amalgam.data.keys import bits_for, keys_digest, overlaps, prefix_name, shown, shown_names, text_key
from amalgam.data.lazy import np, pa, pq
from amalgam.data.rows import (
    BOM,
    FIELD_LIMIT,
    INSTEAD,
    KINDS,
    BadRow,
    Row,
    fix_of_rows,
    listed_reasons,
    no_rows,
    read_rows,
)
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DataError, nearest, without_dots
from amalgam.pipeline.input_files import SUFFIXES, in_commands, is_texts, kind_of, program_of
from amalgam.pipeline.user_paths import expanded, readable, user_path, without_backslashes

PartName = Literal["train", "validation", "test", "teachers", "held-out"]

SKIPPED_FILE = "skipped.parquet"
SKIPPED_ROWS = 10_000
"""Skipped rows that stay in memory until they are written."""
MOST_REPORTED = 5
LOOK_ON = 100_000
"""Rows read past the first bad one, to report others in the same message."""
SUSPECTS = 100_000
"""Hashes of ids of two texts, of which the ids are compared; also rows whose hashes are compared at a time."""
ON_HUB = re.compile(r"\w[\w-]*(/\w[\w.-]*)?")
"""A name without the suffix of a file, which a data set on the Hub may have."""
MISSING_VALUES = frozenset({"NaN", "nan", "NA", "N/A", "#N/A", "<NA>", "NULL", "null", "None"})
"""Texts that programs write for a missing value."""
OBJECT = re.compile(rb"\s*\{.*\}\s*")
"""A line of a file that has an object on each line."""


# ---- sources

JOIN = (
    """run: python -c 'import polars, sys, pathlib; files = sorted(pathlib.Path(sys.argv[1]).rglob("*.txt"));"""
    """ texts = [file.read_text() for file in files]; folders = [file.parent.name for file in files];"""
    """ polars.DataFrame({{"text": texts, "folder": folders}}).write_csv(sys.argv[2])' {file} {stem}.csv"""
)
"""Fix for a folder of .txt files with a text each; folders in it may be named after labels."""


def find_files(source: str, base: Path, taken: Iterable[str] = ()) -> list[Path]:
    """Returns the files of a path, a folder or a glob relative to `base`, in order of name.

    An error proposes no file of the sources in `taken`.
    """
    path = user_path(source, base, DataError)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        with readable(path, DataError):
            files = _files_of(path, source)
    elif path.exists():
        what, fix = f"{shown(source)} is a pipe or a device, not a file", "save the texts in a file, and name it"
        raise DataError(what, where=shown(str(path), 200), fix=fix)
    else:
        matches = glob.glob(_pattern(source, base), root_dir=base, recursive=True)  # noqa: PTH207 - absolute patterns, too
        files = sorted(base / match for match in matches if (base / match).is_file())
    if not files:
        raise _no_files(source, path, {base / expanded(other) for other in taken})
    suffixes = sorted({kind_of(file) for file in files})
    if file := next((file for file in files if not is_texts(file)), None):
        raise DataError(f"{shown(source)} is of no kind that can be read", where=shown(str(file), 200), fix=_fix(file))
    if len(suffixes) > 1:
        start = f"{source.rstrip('/')}/*" if path.is_dir() else source
        kinds = f": [{', '.join(shown(start + suffix) for suffix in suffixes)}]" if start.endswith("*") else ""
        fix = f"name one kind, or a list of patterns, one for each kind{kinds}"
        what = f"{shown(source)} holds files of several kinds: {', '.join(suffixes)}"
        raise DataError(what, where=shown(str(path), 200), fix=fix)
    return files


def _files_of(folder: Path, source: str) -> list[Path]:
    """Returns the files of texts in a folder; refuses texts in folders of it, which a pattern names."""
    visible = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    for inner in (entry for entry in visible if entry.is_dir() and not entry.name.startswith("_")):
        below = (file for file in inner.rglob("[!.]*") if kind_of(file) in SUFFIXES and file.is_file())
        if file := next((file for file in below if "/." not in str(file.relative_to(folder))), None):
            ends = kind_of(file) + (file.suffix if program_of(file) else "")
            what = f"{shown(source)} has texts in folders, such as {shown(str(file.relative_to(folder)), 200)}"
            start = source.rstrip("/")
            fix = f"name the files: {shown(f'{start}/**/*{ends}')}, or without folders {shown(f'{start}/*{ends}')}"
            raise DataError(what, where=shown(str(folder), 200), fix=fix)
    return [entry for entry in visible if kind_of(entry) in SUFFIXES and entry.is_file()]


def _fix(file: Path) -> str:
    """Returns the fix for a file of a kind that cannot be read."""
    suffix = file.suffix.lower()
    fix = INSTEAD.get(suffix, f"name files of these kinds: {KINDS}")
    if suffix == ".json":
        with readable(file, DataError), file.open("rb") as opened:
            if OBJECT.fullmatch(opened.readline(FIELD_LIMIT).removeprefix(BOM)):
                fix = "it has an object on each line, so name it .jsonl: mv {file} {stem}.jsonl"
    return fix.format(**in_commands(file))


def _pattern(source: str, base: Path) -> str:
    """Returns the pattern with the folders that exist taken literally, such as `a[1]` of `a[1]/*.csv`."""
    path = expanded(source)
    depth = next(level for level, folder in enumerate((path.parent, *path.parent.parents)) if (base / folder).is_dir())
    folder = path.parents[depth]
    return str(Path(glob.escape(str(folder))) / path.relative_to(folder))


def _no_files(source: str, path: Path, taken: Collection[Path]) -> DataError:
    if path.is_dir():
        fix = f"put a file of one of these kinds there: {KINDS}"
        if len(list(islice(path.rglob("[!.]*.txt"), 2))) > 1:
            fix = f"join its .txt files; if each is one text, {JOIN.format(**in_commands(path))}"
        elif file := next((entry for entry in sorted(path.iterdir()) if entry.suffix.lower() in INSTEAD), None):
            fix = f"{shown(file.name)}: {_fix(file)}"
        return DataError(f"no file of texts in {shown(source)}", where=shown(str(path), 200), fix=fix)
    missing, parent = path, path.parent
    while not parent.is_dir():
        missing, parent = parent, parent.parent
    is_folder = missing != path
    with readable(parent, DataError):
        entries = [entry for entry in parent.iterdir() if entry.is_dir() or kind_of(entry) in SUFFIXES]
        entries = sorted(entry for entry in entries if entry not in taken and not entry.name.startswith("."))
    is_either = not is_folder and not path.suffix
    names = [entry.name for entry in entries if is_either or entry.is_dir() == is_folder]
    close = nearest(missing.name, names, 3)
    near = [shown(name) for name in close or [entry.name for entry in entries if _has_texts(entry)][:5]]
    fix = f"name one of these: {', '.join(near)}" if near else "put the file there, or name another"
    if any(normalize("NFC", name) == normalize("NFC", missing.name) for name in names):
        fix = "rename the file: its name has other Unicode characters for the same letters (NFC, NFD)"
    if not close and not path.suffix and ON_HUB.fullmatch(source):
        fix += "; a data set on the Hub is hf://datasets/OWNER/NAME/FILE"
    if linux := without_backslashes(source):
        fix = f"write / between folders: {shown(linux, 200)}"
    if "," in source:
        fix = f"write several files as a list: [{', '.join(shown(part.strip()) for part in source.split(','))}]"
    where = f"no {shown(missing.name)} in {shown(without_dots(str(parent)), 200)}"
    return DataError(f"{shown(source)} does not exist", where=where, fix=fix)


def _has_texts(entry: Path) -> bool:
    """Returns whether an entry of a folder is a file of texts, or a folder that has one."""
    with suppress(OSError):
        return kind_of(entry) in SUFFIXES or any(kind_of(file) in SUFFIXES for file in entry.iterdir())
    return False


# ---- the part


class BucketFacts(TypedDict):
    prefix: str
    rows: int
    keys_digest: str
    file: str


class MissingText(TypedDict):
    rows: int
    first: str
    """File and row."""


def count_missing(row: Row, missing: dict[str, MissingText]) -> None:
    """Adds the texts of a row that are one of MISSING_VALUES."""
    for value in MISSING_VALUES.intersection(row.fields):
        missing.setdefault(value, {"rows": 0, "first": f"{row.source} row {row.number}"})["rows"] += 1


def missing_notes(missing: Mapping[str, MissingText], rows: str) -> Iterator[str]:
    """Yields a note for each text that looks like a missing one; `rows` names a row."""
    for text, texts in missing.items():
        first = f"{texts['first']}{' is the first' * (texts['rows'] > 1)}"
        counts = counted(texts["rows"], rows, "has", "have")
        yield f"{counts} the text {text} ({first}): if it is a missing one, fill it in, or remove these rows"


class PartFacts(TypedDict):
    """rows = texts + duplicates + over_limit + all skipped."""

    rows: int
    texts: int
    duplicates: int
    over_limit: int
    conflicts: int
    """Kept texts whose copies had different labels; the most frequent label is kept, or the first by name if equal."""
    skipped: dict[str, int]
    labels: dict[str, int]
    """Texts by gold label."""
    texts_digest: str
    labels_digest: str | None
    bits: int
    buckets: list[BucketFacts]
    files: list[str]
    unused_files: NotRequired[list[str]]
    """Files without a usable row."""
    missing_texts: NotRequired[dict[str, MissingText]]
    """Rows whose text is one of MISSING_VALUES."""
    contradictions: NotRequired[list[str]]
    """Of test and validation texts: the labels of one text with their rows, for the first such texts by key."""


def read_part(
    sources: Sequence[Path], corpus: Corpus, *, part: PartName, folder: Path, require_label: bool = False
) -> PartFacts:
    """Reads local files (find_files, fetch_remote) into an existing, empty folder."""
    labelled = require_label or part not in {"train", "held-out"}
    with (
        parquet.ExternalKeySort(_spill_schema(), folder) as spill,
        closing(_SkippedFile(folder / SKIPPED_FILE)) as skipped_file,
    ):
        reader = _PartReader(_names(sources), corpus, part, labelled, skipped_file)
        reader.read(spill)
        distinct = spill.finish()
        most = min(distinct, corpus.limit or distinct) if part in {"train", "teachers"} else distinct
        buckets = _BucketWriter(folder, bits_for(distinct))  # a limit keeps the lowest keys, and the buckets' sizes
        buckets.write(spill, most)
    facts = PartFacts(
        rows=reader.rows,
        texts=most,
        duplicates=spill.rows - distinct,
        over_limit=distinct - most,
        conflicts=buckets.conflicts,
        skipped=dict(sorted(reader.skipped.items())),
        labels=dict(sorted(buckets.labels.items())),
        texts_digest=buckets.texts_digest.hexdigest(),
        labels_digest=buckets.labels_digest.hexdigest() if buckets.labels else None,
        bits=buckets.bits,
        buckets=buckets.written,
        files=sorted([bucket["file"] for bucket in buckets.written] + ([SKIPPED_FILE] if reader.skipped else [])),
    )
    if reader.unused:
        facts["unused_files"] = reader.unused
    if reader.missing:
        facts["missing_texts"] = dict(sorted(reader.missing.items()))
    if labelled and buckets.contradicting:
        facts["contradictions"] = _contradictions(buckets.contradicting, sources, corpus)
    return facts


def leaks(train: Path, test: Path) -> tuple[int, list[bytes]]:
    """Returns the number of texts that two parts share, and the first five keys."""
    count, examples = 0, list[bytes]()
    for bucket in _bucket_files(test):
        keys = parquet.read_keys(bucket)
        shared = np.zeros(len(keys), bool)
        for train_bucket in _bucket_files(train):
            if overlaps(bucket.stem, train_bucket.stem):
                shared |= np.isin(keys, parquet.read_keys(train_bucket))
        count += int(shared.sum())
        examples += parquet.key_list(keys[shared][: MOST_REPORTED - len(examples)])
    return count, examples


def places_of(keys: Collection[bytes], sources: Sequence[Path], corpus: Corpus) -> list[str]:
    """Returns the file and row where the text of each key is first, in the order of the files."""
    places = dict[bytes, str]()
    for row in _usable_rows(sources, corpus):
        key = text_key(row.fields)
        if key in keys:
            places.setdefault(key, f"{row.source} row {row.number}")
            if len(places) == len(keys):
                break
    return list(places.values())


def _contradictions(keys: Collection[bytes], sources: Sequence[Path], corpus: Corpus) -> list[str]:
    """Returns for each key the different labels of its text, with the first row of each label."""
    rows: dict[bytes, dict[str, str]] = {key: {} for key in keys}
    for row in _usable_rows(sources, corpus):
        key = text_key(row.fields)
        if key in rows and row.label is not None:
            rows[key].setdefault(row.label, f"{shown(row.label)} in {row.source} row {row.number}")
    return [", ".join(places.values()) for places in rows.values()]


def labelled_places(labels: Collection[str], sources: Sequence[Path], corpus: Corpus) -> list[str]:
    """Returns the file and row of the first texts with one of these gold labels."""
    rows = (row for row in _usable_rows(sources, corpus) if row.label in labels)
    return [f"{row.source} row {row.number}" for row in islice(rows, MOST_REPORTED)]


def _usable_rows(sources: Sequence[Path], corpus: Corpus) -> Iterator[Row]:
    for path, name in _names(sources).items():
        yield from (row for row in read_rows(path, corpus=corpus, name=name) if isinstance(row, Row))


def _bucket_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.parquet") if path.name != SKIPPED_FILE)


def _spill_schema() -> Any:
    """Returns a schema for more than 2 GB of text, the limit of a plain Arrow string column."""
    schema = parquet.arrow_schema(parquet.CORPUS)
    wide = [field.with_type(pa.large_string()) if field.type == pa.string() else field for field in schema]
    return pa.schema(wide)


def _names(sources: Sequence[Path]) -> dict[Path, str]:
    """Returns each file once, under the shortest unique name, in order of name."""
    paths = list(dict.fromkeys(sources))
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        above = os.path.commonpath([path.absolute().parent for path in paths])
        names = [path.absolute().relative_to(above).as_posix() for path in paths]
    return dict(sorted(zip(paths, names, strict=True), key=lambda pair: pair[1]))


class _SkippedFile:
    """The table of skipped rows, created with the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: Any = None
        self._rows: list[BadRow] = []

    def add(self, bad: BadRow) -> None:
        self._rows.append(bad)
        if len(self._rows) >= SKIPPED_ROWS:
            self._flush()

    def close(self) -> None:
        if self._rows:
            self._flush()
        if self._writer is not None:
            self._writer.close()

    def _flush(self) -> None:
        schema = parquet.arrow_schema(parquet.SKIPPED)
        self._writer = self._writer or pq.ParquetWriter(self._path, schema, **parquet.parquet_options(schema))
        rows = [dict(zip(schema.names, bad, strict=False)) for bad in self._rows]  # BadRow has three more fields
        self._writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        self._rows.clear()


@dataclass
class _PartReader:
    """Reads the sources into the spill; counts, refuses or skips rows that cannot be used."""

    names: dict[Path, str]
    corpus: Corpus
    part: PartName
    require_label: bool
    skipped_file: _SkippedFile
    rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    fixes: dict[str, str] = field(default_factory=dict)
    """The fix of the first bad row of each reason."""
    unused: list[str] = field(default_factory=list)
    """Files without a usable row."""
    missing: dict[str, MissingText] = field(default_factory=dict)

    def read(self, spill: parquet.ExternalKeySort) -> None:
        id_hashes = bytearray()
        usable = 0
        for row in self._usable_rows():
            usable += 1
            if row.id is not None:
                id_hashes += _id_hash(row.id)
            text, second = row.fields[0], row.fields[1] if len(row.fields) > 1 else None
            count_missing(row, self.missing)
            spill.add((text_key(row.fields), text, second, row.id, row.label), len(text) + len(second or ""))
        if not self.rows:
            raise no_rows(*next(iter(self.names.items())))
        if not usable:
            names = shown_names(self.names.values(), MOST_REPORTED)
            what = f"no rows left in {names}: {listed_reasons(self.skipped)}"
            raise DataError(what, where=f"the {self.part} texts", fix=f"{fix_of_rows(self.fixes)}; or name other files")
        repeated = _repeated(np.frombuffer(id_hashes, np.uint64))
        of_two_texts = self._of_two_texts(repeated) if len(repeated) else set()
        if of_two_texts:
            self._check_ids(of_two_texts)

    def _rows_of(self, path: Path) -> Iterator[Row | BadRow]:
        return read_rows(path, corpus=self.corpus, name=self.names[path], require_label=self.require_label)

    def _usable_rows(self) -> Iterator[Row]:
        bad: list[BadRow] = []
        last = 0
        for path, name in self.names.items():
            before, is_used = self.rows, False
            for row in self._rows_of(path):
                self.rows += 1
                if isinstance(row, Row):
                    is_used = True
                    yield row
                else:
                    self.fixes.setdefault(row.reason, row.fix)
                    if self.corpus.on_bad_row == "skip":
                        self.skipped[row.reason] += 1
                        self.skipped_file.add(row)
                    else:
                        last = last or self.rows + LOOK_ON
                        if len(bad) < MOST_REPORTED:
                            bad.append(row)
                if bad and self.rows >= last:
                    raise self._unusable(bad)
            if self.rows == before and self.corpus.on_bad_row != "skip":
                raise no_rows(path, name)
            if not is_used:
                self.unused.append(shown(name, 200))
        if bad:
            raise self._unusable(bad)

    def _unusable(self, bad: list[BadRow]) -> DataError:
        first, count = bad[0], len(bad)
        what = f"a row of the {self.part} texts cannot be used: {first.reason}"
        if count > 1:
            reasons = "; ".join(f"{row.source} row {row.number} {row.reason}" for row in bad)
            what = f"{count} rows of the {self.part} texts cannot be used: {reasons}"
            if count == MOST_REPORTED:
                what = f"rows of the {self.part} texts cannot be used, the first {count} are: {reasons}"
        return DataError(
            what, where=first.where, fix=f"{fix_of_rows(self.fixes)}; or leave such rows out, corpus.on_bad_row: skip"
        )

    def _of_two_texts(self, repeated: Array) -> set[bytes]:
        """Reads the rows again; returns the hashes of ids with different texts: a row may be delivered twice."""
        rows = (row for path in self.names for row in self._rows_of(path))
        given = ((row.id, row.fields) for row in rows if isinstance(row, Row) and row.id is not None)
        pairs = [np.zeros((0, 2), np.uint64)]
        while batch := list(islice(given, SUSPECTS)):
            hashes = np.frombuffer(b"".join(_id_hash(identity) for identity, _ in batch), np.uint64)
            kept = np.flatnonzero(np.isin(hashes, repeated)).tolist()
            keys = np.frombuffer(b"".join(text_key(batch[at][1])[:8] for at in kept), np.uint64)
            pairs.append(np.column_stack([hashes[kept], keys]))
        distinct = np.unique(np.concatenate(pairs), axis=0)
        return {number.tobytes() for number in _repeated(distinct[:, 0])[:SUSPECTS]}

    def _check_ids(self, repeated: set[bytes]) -> None:
        """Reads the rows again to compare the ids with equal hashes."""
        first: dict[str, tuple[bytes, str]] = {}
        twice: dict[str, str] = {}
        for row in (row for path in self.names for row in self._rows_of(path)):
            if isinstance(row, Row) and row.id is not None and _id_hash(row.id) in repeated:
                key, place = text_key(row.fields), f"{row.source} row {row.number}"
                earlier_key, earlier = first.setdefault(row.id, (key, place))
                if earlier_key != key:
                    twice.setdefault(row.id, f"{shown(row.id)} in {earlier} and {place}")
            if len(twice) == MOST_REPORTED:
                break
        if twice:
            ids = f"{len(twice)} or more ids" if len(twice) == MOST_REPORTED else counted(len(twice), "id")
            are = "is" if len(twice) == 1 else "are"
            what = f"{ids} in {shown(self.corpus.id)} {are} given to different texts"
            raise DataError(what, where="; ".join(twice.values()), fix="make each id unique, or corpus.id: auto")


def _id_hash(identity: str) -> bytes:
    return blake2b(identity.encode(), digest_size=8).digest()


def _repeated(hashes: Array) -> Array:
    """Returns the hashes that occur more than once."""
    ordered = np.sort(hashes)
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


class _BucketWriter:
    """Cuts the sorted rows into buckets, equal texts made one."""

    def __init__(self, folder: Path, bits: int) -> None:
        self.folder, self.bits = folder, bits
        self.conflicts = 0
        self.contradicting: list[bytes] = []
        """Keys of the first texts whose copies have different labels."""
        self.labels: Counter[str] = Counter()
        self.texts_digest, self.labels_digest = sha256(), sha256()
        self.written: list[BucketFacts] = []

    def write(self, spill: parquet.ExternalKeySort, most: int) -> None:
        """Writes the first `most` texts."""
        span = 256 >> min(self.bits, 8)
        for first in range(0, 256, span):
            rows = spill.table(first, first + span)
            if len(rows) and most:
                texts = self._one_of_each(rows, most)
                most -= len(texts)
                self._digest(texts)
                self._write_buckets(texts)

    def _one_of_each(self, rows: Any, most: int) -> Any:
        """Returns the first `most` texts; of several copies the one with the smallest id, then the first read."""
        keys = parquet.key_array(rows.column("key"))
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        stops = np.append(starts[1:], len(keys))[:most]
        chosen = starts[:most].copy()
        voted: dict[int, str | None] = {}
        for at in np.flatnonzero(stops - chosen > 1).tolist():
            copies = rows.slice(chosen[at], stops[at] - chosen[at])
            ids = copies.column("id").to_pylist()
            conflicts, voted[at] = self.conflicts, self._vote(copies.column("label").to_pylist())
            if self.conflicts > conflicts and len(self.contradicting) < MOST_REPORTED:
                self.contradicting.append(copies.column("key")[0].as_py())
            chosen[at] += ids.index(min(ids, key=lambda identity: identity or ""))
        texts = rows.take(chosen)
        if voted and rows.column("label").null_count < len(rows):
            labels = [voted.get(at, label) for at, label in enumerate(texts.column("label").to_pylist())]
            place, field = texts.schema.get_field_index("label"), texts.schema.field("label")
            texts = texts.set_column(place, field, pa.array(labels, field.type))
        return texts

    def _vote(self, labels: list[str | None]) -> str | None:
        votes = Counter(label for label in labels if label is not None)
        self.conflicts += len(votes) > 1
        return min(votes, key=lambda label: (-votes[label], label), default=None)

    def _digest(self, texts: Any) -> None:
        keys = parquet.key_array(texts.column("key"))
        self.texts_digest.update(keys.tobytes())
        labels = texts.column("label").to_pylist()
        self.labels.update(label for label in labels if label is not None)
        for key, label in zip(parquet.key_list(keys), labels, strict=True) if self.labels else ():
            if label is not None:
                data = label.encode()
                self.labels_digest.update(key + len(data).to_bytes(4, "big") + data)

    def _write_buckets(self, texts: Any) -> None:
        keys = parquet.key_array(texts.column("key"))
        leading = np.frombuffer(keys.tobytes(), ">u2")[::8]
        numbers = leading.astype(np.uint32) >> (16 - self.bits)
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        final = texts.cast(parquet.arrow_schema(parquet.CORPUS))
        for start, stop in pairwise(edges):
            prefix = prefix_name(int(numbers[start]), self.bits)
            digest, file = keys_digest(keys[start:stop].tobytes()), f"{prefix}.parquet"
            parquet.write_table(final.slice(start, stop - start), self.folder / file)
            self.written.append({"prefix": prefix, "rows": stop - start, "keys_digest": digest, "file": file})
