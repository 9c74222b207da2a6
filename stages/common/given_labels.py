"""Reads the gold labels of some training texts, `labels` of the experiment, and finds the texts that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path

from amalgam.data.keys import KEY_BYTES, LabelSpace, of_one_teacher, shown, shown_name, shown_names, text_key
from amalgam.data.lazy import pa, pc
from amalgam.data.rows import JSON_LINES, MissingColumnError, Row, read_rows
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DataError, folded, nearest
from amalgam.pipeline.input_files import kind_of
from amalgam.stages.common.corpus import rename_fix

WHERE, FRAME = "labels", "the frame of labels"
KEY, ID, TEXT = "key", "id", "text"
LABEL = "label"
WHY, RANDOM = "why", "random"
"""The column of a file of texts to label with the reason for each text, and its value for random texts."""

DIFFER = "student and ensemble differ"
"""Value of this column for a selected text, a random one of those on which student and ensemble differ."""
SELECTED = {DIFFER, "student and ensemble disagree", "small margin"}
"""All values for selected texts; older versions wrote the last two."""
PREDICTED = ("student", "ensemble")
"""The columns with the labels that the two predict."""
PREDICTED_COLUMNS = (*PREDICTED, WHY)
"""Columns of a file of texts to label that follow the column to fill."""

LEAST_LABELS = 30
"""Of fewer texts it is no surprise that none has a label of some teacher."""

LEAST_MISSING = 5
"""Least texts that the absent labels of a teacher would have if all labels were equally frequent."""

SCORES = "score", "probability", "confidence"
"""Names of columns with the probability of a label, as a file of predictions has them."""

MOST_SHOWN = 5
SIMILAR = 0.7


@dataclass(frozen=True)
class GivenLabels:
    by_key: Mapping[bytes, str]
    empty: int = 0
    """Rows of the file without a label."""
    random: frozenset[bytes] | None = None
    """Keys of the labelled and unknown texts that the file marks as random; None: it has no reasons."""
    unknown: frozenset[bytes] = frozenset()
    """Keys of the texts with the label `corpus.unknown`: no label of a teacher fits."""
    blank: frozenset[bytes] = frozenset()
    """Keys of the texts without a label that the file marks as random."""
    why: Mapping[bytes, str] = field(default_factory=dict)
    """By key of a labelled or unknown text: another reason in the file."""
    outside_sample: int = 0
    """Texts that are left out because no teacher has their label: random ones, or all if the file has no reasons."""

    def written(self, corpus: Corpus) -> dict[bytes, str]:
        """Returns the labels as in the file, also of unknown texts."""
        return {**self.by_key, **dict.fromkeys(self.unknown, corpus.unknown or "")}

    @property
    def digest(self) -> str:
        """Returns a digest of keys and labels, the same for a file and for a column of the corpus."""
        digest = sha256()
        for key, label in sorted(self.by_key.items()):
            data = label.encode()
            digest.update(key + len(data).to_bytes(4, "big") + data)
        digest.update(b"".join(sorted(self.unknown)))
        return digest.hexdigest()

    @property
    def sample(self) -> frozenset[bytes]:
        """Returns the labelled texts that are random ones, or all if the file has no reasons."""
        keys = frozenset(self.by_key)
        return keys if self.random is None else keys & self.random

    def absent_labels(self, space: LabelSpace) -> dict[str, list[str]]:
        """Returns the labels that only one teacher has, by teacher, if no text has one of them."""
        if len(self.by_key) < LEAST_LABELS:
            return {}
        given, alone = {*self.by_key.values()}, of_one_teacher(zip(space.names, space.owners, strict=True))
        return {teacher: labels for teacher, labels in alone.items() if given.isdisjoint(labels)}

    def notes_on_absent(self, space: LabelSpace, source: str) -> Iterator[str]:
        for teacher, labels in self.absent_labels(space).items():
            if len(labels) * len(self.by_key) >= LEAST_MISSING * len(space.names):
                yield (
                    f"no text of {source} has a label of teacher {teacher} alone ({shown_names(labels, MOST_SHOWN)}): "
                    "labels that are older than this teacher are wrong for such texts"
                )

    @property
    def unknown_sample(self) -> frozenset[bytes]:
        """Returns the unknown texts among the random ones, or all if the file has no reasons."""
        return self.unknown if self.random is None else self.unknown & self.random


@dataclass(frozen=True)
class LabelRow:
    place: str
    """Such as "row 3"."""
    text: bytes | str
    """The key of the text, or its id."""
    shown: str
    label: str
    why: str | None
    """Reason for the text, if the file has the column WHY."""


@dataclass(frozen=True)
class LabelFile:
    name: str
    where: str
    column: str
    """The kind of column that identifies the texts: key, id or text."""
    rows: Sequence[LabelRow]
    problems: Sequence[str]
    corpus: Corpus
    empty: int
    has_reasons: bool
    """Whether the file has the column WHY."""
    how_to_label: str
    """The end of a fix: the call that makes texts to label."""
    blank: Sequence[bytes | str]
    """Key or id of each text without a label that is marked as random."""
    label: str
    """The column of labels."""
    outside: Sequence[LabelRow] = ()
    """Rows that are left out because no teacher has their label."""
    scores: Sequence[str] = ()
    """Columns with the names of SCORES, which are not read."""

    @cached_property
    def texts(self) -> frozenset[bytes | str]:
        """Key or id of each text with a label or marked as random."""
        return frozenset([*(row.text for row in self.rows), *self.blank])

    def matched(self, names: Sequence[str] | None) -> LabelFile:
        """Gives labels the blanks that a teacher's label has around it; None: the teachers are unknown."""
        named = {name.strip(): name for name in names or ()} | {name: name for name in names or ()}
        rows = [replace(row, label=named.get(row.label, row.label)) for row in self.rows]
        return replace(self, rows=rows)

    def without_skipped(
        self, names: Sequence[str] | None, keys: Mapping[bytes | str, bytes] | None
    ) -> tuple[LabelFile, str]:
        """Returns the file without the rows that `corpus.on_bad_row: skip` leaves out, and a note on them.

        A file of which no label would be left stays as it is, and `check` refuses it.
        """
        if self.corpus.on_bad_row != "skip":
            return self, ""
        rows, accepted = self.rows, {self.corpus.unknown, *(names or ())}
        present = rows if keys is None else [row for row in rows if row.text in keys]
        kept = present if names is None else [row for row in present if row.label in accepted]
        if not kept:
            return self, ""
        others = sorted({row.label for row in present} - {row.label for row in kept})
        hints = {label: nearest(label, self._allowed(names or ()), ratio=SIMILAR) for label in others[:MOST_SHOWN]}
        others = [f"{label}: did you mean {hints[label][0]}?" if hints.get(label) else label for label in others]
        counts = {
            "of no training text": len(rows) - len(present),
            f"with a label of no teacher ({shown_names(others, MOST_SHOWN)})": len(present) - len(kept),
            "without a usable text or label": len(self.problems),
        }
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
        left_out = counted(sum(counts.values()), "row")
        note = f"{self.name}: {left_out} left out: {reasons}" if reasons else ""
        outside = [row for row in present if names is not None and row.label not in accepted]
        return replace(self, rows=kept, problems=[], outside=outside), note

    def check(self, names: Sequence[str] | None = None, keys: Mapping[bytes | str, bytes] | None = None) -> None:
        """Refuses all faulty rows in one message.

        `names` are the teachers' labels. `keys` maps the keys or ids of the training texts to keys. None is unknown.
        """
        problems = list(self.problems)
        accepted = {*(names or ()), self.corpus.unknown}
        refused = [row for row in self.rows if names is not None and row.label not in accepted]
        problems += _refusals(refused[:MOST_SHOWN], self._allowed(names or ()))
        problems += [row.place for row in refused[MOST_SHOWN:]]  # only counted: a hint takes a millisecond
        contradictions = list(_contradictions(self.rows, keys or {}))
        problems += contradictions
        if keys is not None:
            has = "is" if self.column == TEXT else f"has the {self.column}"
            absent = [row for row in self.rows if row.text not in keys]
            problems += [f"{row.place}: no training text {has} {row.shown}" for row in absent]
        if problems:
            by_folded = set(map(folded, names or ()))
            in_other_case = [row.label for row in refused if folded(row.label) in by_folded]
            rename = rename_fix(dict.fromkeys(in_other_case), names or (), self.corpus, {}) if in_other_case else ""
            start = self._unknown_fix(refused, names or ())
            can_skip = self.corpus.on_bad_row != "skip" and len(problems) > len(contradictions)
            raise self._error(problems, rename, len(problems) - len(in_other_case), start, can_skip=can_skip)
        if not self.rows:
            fix = f"write a label into the column {shown(self.label)} of some rows"
            raise DataError(f"no row of {self.name} has a label", where=self.where, fix=fix)

    def _allowed(self, names: Sequence[str]) -> list[str]:
        return [*names, self.corpus.unknown] if self.corpus.unknown else [*names]

    def by_key(self, keys: Mapping[bytes | str, bytes]) -> GivenLabels:
        random = frozenset(keys[row.text] for row in self.rows if row.why == RANDOM) if self.has_reasons else None
        labels = {keys[row.text]: row.label for row in self.rows if row.label != self.corpus.unknown}
        unknown = frozenset(keys[row.text] for row in self.rows if row.label == self.corpus.unknown)
        blank = frozenset(keys[text] for text in self.blank if text in keys)
        why = {keys[row.text]: row.why for row in self.rows if row.why and row.why != RANDOM}
        left_out = {row.text for row in self.outside if row.why == RANDOM or not self.has_reasons}
        return GivenLabels(labels, self.empty, random, unknown, blank - labels.keys() - unknown, why, len(left_out))

    def _unknown_fix(self, refused: Sequence[LabelRow], names: Sequence[str]) -> str:
        """Returns the start of a fix if the refused rows have one label, which may mark texts of no label; else ""."""
        labels = {row.label for row in refused}
        if len(labels) != 1 or self.corpus.unknown or nearest(refused[0].label, names, ratio=SIMILAR):
            return ""
        [label] = labels
        return f"if {shown_name(label)} marks texts of no label, set corpus.unknown: {shown_name(label)}; else "

    def _error(self, problems: Sequence[str], rename: str, others: int, start: str, *, can_skip: bool) -> DataError:
        fix = f"correct or remove {'the other' if rename else 'these'} rows; {self.how_to_label}"
        fix += "; or leave such rows out: corpus.on_bad_row=skip" if can_skip else ""
        if rename:
            fix = f"{rename}; {fix}" if others else f"{rename}, or correct these rows"
        return DataError(problem_list(self.name, problems), where=self.where, fix=start + fix)


def problem_list(name: str, problems: Sequence[str]) -> str:
    """Returns the message of an error with the first problems of a file, a line each."""
    lines = [f"{name}: {counted(len(problems), 'problem')}"]
    lines += [f"  {problem}" for problem in problems[:MOST_SHOWN]]
    lines += [f"  and {len(problems) - MOST_SHOWN} more"] if len(problems) > MOST_SHOWN else []
    return "\n".join(lines)


def read_label_file(path: Path, corpus: Corpus, how_to_label: str, name: str) -> LabelFile:
    """Reads the rows with a label; the columns have the names of the corpus, or key, id, text and label.

    `name` is that of a frame in messages; a file has its own.
    """
    names = (corpus.label, free_name(LABEL, corpus), LABEL)
    present = (name for name in names if name and name not in corpus.text and _has_column(path, name))
    label = next(present, label_column(corpus))
    named = naming_columns(partial(_has_column, path), corpus)
    column, columns = named or (TEXT, list(corpus.text))
    settings = Corpus(text=columns, label=label, labels=corpus.labels, rename=corpus.rename, unknown=corpus.unknown)
    if column == ID:
        settings = settings.model_copy(update={"text": [], "id": columns[0]})
    rows, problems, blank, empty = [], [], [], 0
    for needed in (*columns, label):  # a label may be absent from rows, but not its column
        setting = f"rename a column to {shown(needed)}: "
        try:
            next(read_rows(path, corpus=Corpus(text=[needed]), name=name, setting=setting), None)
        except MissingColumnError as error:
            if named is None and corpus.id == "auto" and _has_column(path, ID):
                error.fix = f"set corpus.id: id, if the texts have this column; else add the column {shown(needed)}"
            raise
    unit = "line" if kind_of(path) in JSON_LINES else "row"
    reasons = _column(path, why_column(corpus))
    for row in read_rows(path, corpus=settings, name=name, any_coding=True):
        place = f"{unit} {row.number}"
        if not isinstance(row, Row):
            problems.append(f"{place}: {row.fault}; {row.fix}")
            continue
        fields = row.fields if row.id is None else (row.id,)
        identity, why = identity_of(column, fields), (reasons or {}).get(row.number)
        if row.label is None:
            empty += 1
            blank += [identity] if why == RANDOM else []
        else:
            rows.append(LabelRow(place, identity, shown(fields[0]), row.label, why))
    where = WHERE if name else f"{WHERE}: {shown(str(path), 200)}"
    name = name or shown(path.name, 200)
    scores = [score for score in SCORES if score not in {*columns, label} and _has_values(path, score)]
    return LabelFile(
        name=name,
        where=where,
        column=column,
        rows=rows,
        problems=problems,
        corpus=corpus,
        empty=empty,
        has_reasons=reasons is not None,
        how_to_label=how_to_label,
        blank=blank,
        label=label,
        scores=scores,
    )


def why_column(corpus: Corpus) -> str:
    return free_name(WHY, corpus)


def free_name(name: str, corpus: Corpus) -> str:
    """Returns the name of a column that amalgam adds; no column of the corpus has it."""
    return f"{name}_" if name in {*corpus.text, corpus.id, corpus.label} else name


def selected_in(path: Path, corpus: Corpus) -> dict[bytes, Sequence[str | None]]:
    """Returns the selected texts by key, if the file has the column with the reasons.

    The value has the labels that student and ensemble predict if the text was selected because these differ.
    """
    reasons = _column(path, why_column(corpus)) or {}
    if not SELECTED & set(reasons.values()):
        return {}
    labels = [_column(path, free_name(name, corpus)) or {} for name in PREDICTED]
    rows = ((reasons.get(row.number), row) for row in read_rows(path, corpus=corpus) if isinstance(row, Row))
    return {
        text_key(row.fields): [by_row.get(row.number) for by_row in labels] if why == DIFFER else []
        for why, row in rows
        if why in SELECTED
    }


def label_column(corpus: Corpus) -> str:
    return corpus.label or free_name(LABEL, corpus)


def find_texts(
    file: LabelFile, tables: Callable[[], Iterable[pa.Table]], paths: Callable[[], Iterable[Path]], corpus: Corpus
) -> dict[bytes | str, bytes]:
    """Returns the key of each text in the file that is a training text; the tables have the columns key and id.

    Of equal texts the tables have one id, so the other ids are looked up in the files of texts.
    """
    if file.column != ID:
        return _find_rows(tables(), "key", {text for text in file.texts if isinstance(text, bytes)})
    key_of = _find_rows(tables(), "id", file.texts)
    if file.texts - key_of.keys():
        keys = {identity: key for identity, key in _texts_in(file, paths(), corpus) if identity in file.texts}
        kept = _find_rows(tables(), "key", set(keys.values()))
        key_of |= {text: key for text, key in keys.items() if key in kept}
    return key_of


def _find_rows(tables: Iterable[pa.Table], name: str, wanted: Collection[bytes | str]) -> dict[bytes | str, bytes]:
    """Returns the keys of the rows with one of these values in a column, by value."""
    key_of: dict[bytes | str, bytes] = {}
    for table in tables:
        column = table.column(name)
        rows = table.filter(pc.is_in(column, value_set=pa.array(list(wanted), column.type)))
        key_of |= dict(zip(rows.column(name).to_pylist(), rows.column("key").to_pylist(), strict=True))
    return key_of


def keys_in_corpus(file: LabelFile, paths: Iterable[Path], corpus: Corpus) -> dict[bytes | str, bytes]:
    """Returns the key of each text in the file that is in these files; corpus.limit keeps the lowest keys."""
    texts = list(_texts_in(file, paths, corpus))
    kept = set(sorted({key for _, key in texts})[: corpus.limit])
    return {identity: key for identity, key in texts if identity in file.texts and key in kept}


def _texts_in(file: LabelFile, paths: Iterable[Path], corpus: Corpus) -> Iterator[tuple[bytes | str, bytes]]:
    """Yields the id or key by which the file names each text, and its key."""
    for row in (row for path in paths for row in read_rows(path, corpus=corpus) if isinstance(row, Row)):
        key = text_key(row.fields)
        yield (row.id if file.column == ID else None) or key, key


def labels_in(tables: Iterable[pa.Table], names: Sequence[str], unknown: str | None) -> GivenLabels:
    """Returns the labels of the union in the corpus's own column; `unknown` is that of unknown texts."""
    table, union = pa.concat_tables(table.drop_null() for table in tables), set(names)
    pairs = list(zip(*(table.column(name).to_pylist() for name in ("key", "label")), strict=True))
    labels = {key: label for key, label in pairs if label in union}
    unknowns = frozenset(key for key, label in pairs if label == unknown)
    return GivenLabels(labels, unknown=unknowns, outside_sample=len(pairs) - len(labels) - len(unknowns))


def identity_of(kind: str, fields: Sequence[str]) -> bytes | str:
    """Returns the key or the id of a text by the fields that name it; fields that are no key stay as they are."""
    if kind == TEXT:
        return text_key(fields)
    if kind == ID:
        return fields[0]
    try:
        key = bytes.fromhex(fields[0])
    except ValueError:
        key = b""
    return key if len(key) == KEY_BYTES else fields[0]  # no text has it


def naming_columns(has_column: Callable[[str], bool], corpus: Corpus) -> tuple[str, list[str]] | None:
    """Returns the kind and names of the columns that name a text: keys, else ids, else texts, which editors change."""
    own_id = [] if corpus.id == "auto" else [corpus.id, "id"]
    single = ["text"] if len(corpus.text) == 1 else ["text", "text_2"]
    candidates = [
        (KEY, [free_name(KEY, corpus)]),
        *((ID, [name]) for name in own_id),
        (TEXT, list(corpus.text)),
        (TEXT, single),
    ]
    return next(((kind, names) for kind, names in candidates if all(map(has_column, names))), None)


def _has_column(path: Path, name: str) -> bool:
    try:
        next(read_rows(path, corpus=Corpus(text=[name])), None)
    except MissingColumnError:
        return False
    return True


def _has_values(path: Path, name: str) -> bool:
    """Returns whether some row has a text or a number in this column."""
    rows = read_rows(path, corpus=Corpus(text=[name]), any_coding=True) if _has_column(path, name) else ()
    return any(isinstance(row, Row) or row.reason == "not text" for row in rows)


def _column(path: Path, name: str) -> dict[int, str] | None:
    """Returns the values of a column by row number, without rows that lack one; None if the file has no such column."""
    if not _has_column(path, name):
        return None
    rows = read_rows(path, corpus=Corpus(text=[name]), any_coding=True)
    return {row.number: row.fields[0].strip() for row in rows if isinstance(row, Row)}


def _refusals(rows: Iterable[LabelRow], names: Sequence[str]) -> Iterator[str]:
    """Yields the rows, whose labels are other ones; the first without a hint has the list of labels."""
    listed = f"; the labels are {shown_names(names)}"
    for row in rows:
        similar = nearest(row.label, names, ratio=SIMILAR)
        hint, listed = (f"; did you mean {shown_name(similar[0])}?", listed) if similar else (listed, "")
        yield f"{row.place}: no teacher has the label {shown_name(row.label)}{hint}"


def _contradictions(rows: Sequence[LabelRow], keys: Mapping[bytes | str, bytes]) -> Iterator[str]:
    """Yields the rows whose text has another label in an earlier row; two ids may have one key."""
    first: dict[bytes | str, LabelRow] = {}
    for row in rows:
        earlier = first.setdefault(keys.get(row.text, row.text), row)
        if earlier.label != row.label:
            labels = f"{shown_name(row.label)} here, {shown_name(earlier.label)} in {earlier.place}"
            yield f"{row.place}: {row.shown} has two labels: {labels}"
