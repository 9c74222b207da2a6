"""Reads a teacher's predictions from a file: a row for each text, with probabilities of all labels, or one label.

Any program may write it. Texts are named by key, id or text, as in a file of labels. Several answers for each text are
averaged: several rows of a text, or a list of labels.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from amalgam.data.arrays import Array, Keys
from amalgam.data.keys import KEY_BYTES, shown, shown_names, text_key
from amalgam.data.lazy import np, pl
from amalgam.data.rows import BOM, FIELD_LIMIT, FIXES, JSON_LINES, check_magic, delimiter_of, opened
from amalgam.pipeline.config.schema import Corpus
from amalgam.pipeline.errors import DataError, ModelError, folded, nearest
from amalgam.pipeline.input_files import in_commands, kind_of, program_of
from amalgam.stages.common.given_labels import (
    ID,
    KEY,
    LABEL,
    MOST_SHOWN,
    SCORES,
    TEXT,
    identity_of,
    naming_columns,
    problem_list,
)

LEAST_PROBABILITY = 1e-4
"""Smaller probabilities count as this one: their logarithm has no bound."""

PERCENTAGES = 10, 100
"""The largest percentage of a file is between them."""

LIST = re.compile(r"""\[\s*(["']).*\1\s*\]""", re.DOTALL)
"""A list of texts that is written as a text."""

MARKS = " .,;:!*`'\""
"""Characters at the ends of an answer that belong to no label."""

LEAST_SHARE = 1.01
"""Least score of a text's one label, as a multiple of equal probabilities: with less, another would be likelier."""

VERSION = 2
"""Raised with every change of the logits that a file gives."""

SUMS = 0.9, 1.1
"""Bounds of the sum of a row's probabilities, which may be rounded."""

EQUAL = 1e-4
"""Largest difference of equal logits, for a text with several rows."""

SEVERAL = 1 / 2
"""Least share of texts with several rows in a file with several answers for each text; fewer are a mistake."""

ONE_ROW = "keep one row of each text; or give more than half of the texts several answers, which are averaged"

INDEX = "", "__index_level_0__"
"""Names of the column of row numbers that pandas writes."""

ROW = "row"
"""Column of row numbers that `amalgam predict` writes next to the keys."""

BESIDES = re.compile(r"(label|probability)_\d+|unknown(_score)?|mass_.*", re.DOTALL)
"""Columns of `amalgam predict --top --unknown --explain`, which are no predictions of a teacher."""

NUMBER = "_row_of_answer_"
"""Column that amalgam adds while it reads lists."""

DUPLICATE = "_duplicated_"
"""Polars adds it, and a number, to the name of a column that a csv has twice."""

SAMPLE_ROWS = 100
"""First rows that decide which columns have numbers, unless a column has no values in them."""


def labels_in(path: Path, labels: Sequence[str] | None, corpus: Corpus | None, where: str) -> list[str]:
    """Returns the labels: without `labels`, all columns of probabilities, or the labels of the rows.

    The first rows are checked. Without a corpus, which `init` does not know, any column may name the text.
    """
    columns = _labels_of(path, labels, corpus, where)
    if corpus is not None:
        read_predictions(path, columns, corpus, where, rows=SAMPLE_ROWS)
    return columns


def _labels_of(path: Path, labels: Sequence[str] | None, corpus: Corpus | None, where: str) -> list[str]:
    frame = _read(path, where, rows=SAMPLE_ROWS)
    if frame.is_empty():
        raise ModelError(f"{path.name} has no rows", where=where, fix="write a row for each text")
    if corpus is not None:
        _naming_columns(frame.columns, corpus, where)
    corpus = corpus or Corpus()
    columns, in_rows = _number_columns(frame, corpus), _label_column(frame, corpus)
    if labels is not None:
        absent = [name for name in labels if name not in frame.columns]
        are_in_rows = len(absent) == len(labels) and _column_of_labels(frame, corpus) is not None
        if absent and in_rows is None and not are_in_rows:
            what = f"labels: {path.name} has no column {shown_names(absent, MOST_SHOWN)}"
            fix = f"name columns of this file: {shown_names(frame.columns, MOST_SHOWN)}"
            raise ModelError(what, where=where, fix=fix)
        return [*labels]
    if in_rows is not None:
        columns = sorted(_as_labels(_read(path, where)[in_rows]).drop_nulls().unique().to_list())
        _check_labels(columns, in_rows, path, where)
    elif empty := [name for name in frame.columns if frame[name].is_null().all()]:  # all rows decide
        columns = [name for name in _number_columns(_read(path, where), corpus) if name in {*columns, *empty}]
    if not columns:
        what = f"{path.name} has no predictions: its columns are {shown_names(frame.columns, MOST_SHOWN)}"
        others = [name for name in frame.columns if name not in _naming(frame, corpus)]
        what += f"; {shown(others[0])} is no number: {shown(_written(frame[others[0]][0]))}" if others else ""
        fix = "write a column for each label, with a probability in each row; "
        fix += "or the column label, with one label or a list of answers"
        raise ModelError(what, where=where, fix=fix)
    return columns


def _check_labels(labels: Sequence[str], column: str, path: Path, where: str) -> None:
    """Refuses labels of the rows that are lists, or one label in several spellings, as of a language model."""
    start, by_plain = f"{path.name}: the column {shown(column)} has", dict[str, list[str]]()
    for label in labels:
        by_plain.setdefault(folded(label).strip(MARKS), []).append(label)
    lists = next(filter(LIST.fullmatch, labels), None)
    if lists is not None:
        fix = "write a row for each answer, or lists in all rows of a jsonl or Parquet file"
        raise ModelError(f"{start} lists written as text, such as {shown(lists)}", where=where, fix=fix)
    if several := [names for names in by_plain.values() if len(names) > 1]:
        names = " and ".join(shown_names([name]) for name in several[0][:2])
        fix = "write each label in one way; if these are two labels, list all labels: `labels: [...]`"
        raise ModelError(f"{start} one label in several spellings, such as {names}", where=where, fix=fix)


def _number_columns(frame: pl.DataFrame, corpus: Corpus) -> list[str]:
    """Returns the columns of numbers that do not name the text or its label."""
    others = [name for name in frame.columns if name not in _naming(frame, corpus)]
    return [name for name in others if _numbers(frame[name]).is_not_null().any()]


def _naming(frame: pl.DataFrame, corpus: Corpus) -> set[str | None]:
    """Returns the names of columns that name the text or its label, number the rows, or are not read."""
    naming = {KEY, ID, TEXT, "text_2", *corpus.text, corpus.id, LABEL, corpus.label, *INDEX}
    if {ROW, KEY, LABEL} <= {*frame.columns}:
        naming.update(name for name in frame.columns if BESIDES.fullmatch(name))
    return naming | ({ROW} if KEY in frame.columns else set())


def _label_column(frame: pl.DataFrame, corpus: Corpus) -> str | None:
    """Returns the column with one label of each text; None for a file with a column for each label."""
    numbers = [name for name in _number_columns(frame, corpus) if not _are_counts(frame[name], least=2)]
    return None if len(numbers) > 1 else _column_of_labels(frame, corpus)


def _score_column(frame: pl.DataFrame, corpus: Corpus) -> str | None:
    """Returns the column of the probabilities of a file with one label in each row."""
    columns = [name for name in _number_columns(frame, corpus) if not _are_counts(frame[name])]
    named = [name for name in columns if name in SCORES]
    return next(iter(named if len(columns) > 1 else columns), None)


def _are_counts(column: pl.Series, least: int = 0) -> bool:
    """Returns whether the numbers are whole, such as rounds or tokens, and the largest is no percentage."""
    numbers = _numbers(column).drop_nulls().to_numpy()
    is_percentage = PERCENTAGES[0] < numbers.max() <= PERCENTAGES[1]
    is_whole = bool((numbers == np.floor(numbers)).all())
    return column.name not in SCORES and is_whole and numbers.max() >= least and not is_percentage


def _column_of_labels(frame: pl.DataFrame, corpus: Corpus) -> str | None:
    """Returns the column with the name of one, unless it has objects."""
    columns = [name for name, kind in frame.schema.items() if not kind.is_nested() or _is_list(kind)]
    return next((name for name in (corpus.label, LABEL) if name in columns), None)


def _is_list(kind: pl.DataType) -> bool:
    """Returns whether values are lists of answers."""
    return isinstance(kind, pl.List | pl.Array) and not kind.inner.is_nested()


@dataclass(frozen=True)
class Predictions:
    """The logits of a file's texts, which are named by keys, or by the keys of their ids."""

    by_id: bool
    names: Keys
    """Sorted."""
    logits: Array
    answers: tuple[int, int]
    """Least and largest number of a text's answers, which are averaged."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Columns with the names of SCORES that are not read -> the reason."""

    def of(self, names: Keys) -> tuple[Array, Array]:
        """Returns the logits [texts, labels] of these texts, and for each whether the file has it."""
        places = self.names.searchsorted(names).clip(max=max(0, len(self.names) - 1))
        is_there = self.names[places] == names if len(self.names) else np.zeros(len(names), bool)
        return self.logits[places[is_there]], is_there


def id_keys(ids: Sequence[str]) -> Keys:
    return np.array([text_key((name,)) for name in ids], f"S{KEY_BYTES}")


def read_predictions(
    path: Path, labels: Sequence[str], corpus: Corpus, where: str, *, rows: int | None = None
) -> Predictions:
    """Reads the file, or its first rows; one error lists the faulty ones."""
    content = _read(path, where, rows)
    kind, columns = _naming_columns(content.columns, corpus, where)
    in_rows = None if {*labels} <= {*content.columns} else _column_of_labels(content, corpus)
    are_lists = in_rows is not None and content.schema[in_rows].is_nested()
    frame, row_of = _by_answer(content, in_rows) if in_rows and are_lists else (content, range(len(content)))
    names, problems = _names(frame, kind, columns)
    score = None
    if in_rows is None:
        probabilities = pl.DataFrame([_numbers(frame[name]) for name in labels]).to_numpy()
    else:
        score = _score_column(content[:SAMPLE_ROWS], corpus)
        probabilities = _of_one_label(frame, in_rows, labels, score)
    problems += _bad_rows(frame, probabilities, labels, in_rows, score)
    distinct, first, text, answers = np.unique(names, return_index=True, return_inverse=True, return_counts=True)
    are_several = are_lists or bool((answers > 1).mean() > SEVERAL)
    may_differ = are_several or rows is not None  # the first rows need not have the other answers
    other = [] if may_differ else _other_predictions(probabilities, first[text])
    other = [row for row in other if names[row]]
    if problems or other:
        places = _places(path, content)
        problems += [(row, f"its {kind} has another prediction in {places[first[text[row]]]}") for row in other]
        listed = [f"{places[row_of[row]]}: {fault}" for row, fault in sorted(problems)]
        name = f"the first {rows} rows of {path.name}" if rows else path.name
        fix = ONE_ROW if len(other) == len(problems) else _fix(probabilities, labels, in_rows, score)
        raise ModelError(problem_list(name, listed), where=where, fix=fix)
    sums = np.add.reduceat(probabilities[np.argsort(text, kind="stable")], answers.cumsum() - answers)
    logits = _logits(sums / answers[:, None])
    fewest_and_most = (int(answers.min()), int(answers.max())) if are_several else (1, 1)
    reason = f"{shown(score)} is the probability of the label" if score else "it has no numbers"
    unread = {name: reason for name in SCORES if in_rows and name in content.columns and name != score}
    return Predictions(kind == ID, distinct, logits, fewest_and_most, unread)


def _by_answer(content: pl.DataFrame, lists: str) -> tuple[pl.DataFrame, Sequence[int]]:
    """Returns a row for each answer of the lists, and the row of the content that has it."""
    numbered = content.with_row_index(NUMBER).explode(lists, empty_as_null=True)
    return numbered.drop(NUMBER), numbered[NUMBER].to_list()


def _logits(probabilities: Array) -> Array:
    logits = np.log(np.clip(probabilities, LEAST_PROBABILITY, SUMS[1]))
    return (logits - logits.mean(axis=1, keepdims=True)).astype(np.float32)


def _other_predictions(probabilities: Array, first: Array) -> list[int]:
    """Returns the rows whose prediction differs from that of the first row with their text."""
    logits = _logits(probabilities)
    return np.flatnonzero(np.abs(logits - logits[first]).max(axis=1) > EQUAL).tolist()


def _of_one_label(frame: pl.DataFrame, in_rows: str, labels: Sequence[str], score: str | None) -> Array:
    """Returns probabilities [texts, labels]: the score of each text's label, or 1, and equal ones for all others."""
    own = _as_labels(frame[in_rows])
    is_own = np.stack([(own == label).fill_null(value=False).to_numpy() for label in labels], axis=1)
    scores: Array = _numbers(frame[score]).to_numpy()[:, None] if score else np.ones((len(frame), 1))
    least = LEAST_SHARE / max(2, len(labels))
    scores = np.where((scores >= 0) & (scores < least), least, scores)
    others = (1 - scores) / max(1, len(labels) - 1)
    return np.where(is_own, scores, np.where(is_own.any(axis=1, keepdims=True), others, 0.0))


def _bad_rows(
    frame: pl.DataFrame, probabilities: Array, labels: Sequence[str], in_rows: str | None, score: str | None
) -> Iterator[tuple[int, str]]:
    """Yields the rows without usable probabilities; those of a label that the teacher does not have are all zero."""
    sums = probabilities.sum(axis=1)
    is_usable = (probabilities >= 0).all(axis=1) & (sums >= SUMS[0]) & (sums <= SUMS[1])  # false for NaN
    for row in np.flatnonzero(~is_usable).tolist():
        bad = [name for name, value in zip(labels, probabilities[row].tolist(), strict=True) if not value >= 0]
        column = (in_rows and score) or next(iter(bad), "")
        if in_rows is not None and sums[row] == 0:
            value = _written(frame[in_rows][row])
            yield row, f"{shown(value)} is no label of this teacher" if value else f"{in_rows} is empty"
        elif not column:
            yield row, f"the probabilities have the sum {sums[row]:.3g}"
        else:
            value = _written(frame[column][row])
            yield row, f"{shown(column)} " + (f"is no probability: {shown(value)}" if value else "has no value")


def _written(value: object) -> str:
    return "" if value is None else str(value).strip()


def _as_labels(column: pl.Series) -> pl.Series:
    """Returns the labels, also of lists, without blanks around them; an empty one is null."""
    column = column.explode(empty_as_null=True) if column.dtype.is_nested() else column
    labels = column.cast(pl.String, strict=False).str.strip_chars()
    return labels.set(labels == "", None)


def _numbers(column: pl.Series) -> pl.Series:
    """Returns the values that are numbers, or texts of numbers; null for all others."""
    if column.dtype == pl.String:
        column = column.str.strip_chars().str.replace(",", ".", literal=True)  # a spreadsheet may write 0,9
    if column.dtype.is_numeric() or column.dtype == pl.String:
        return column.cast(pl.Float64, strict=False)
    return pl.Series(column.name, [None] * len(column), pl.Float64)


def _places(path: Path, frame: pl.DataFrame) -> Sequence[str]:
    """Returns for each row of the frame its line in a jsonl, or its row in a spreadsheet, whose first is the header."""
    if kind_of(path) in JSON_LINES:
        with opened(path) as file:
            return [f"line {number}" for number, line in enumerate(file, 1) if line.removeprefix(BOM).strip()]
    if kind_of(path) == ".parquet":
        return [f"row {number}" for number in range(1, len(frame) + 1)]
    return [f"row {number + 2}" for number in _csv_rows(path).select(_has_value()).to_series().arg_true()]


def _fix(probabilities: Array, labels: Sequence[str], in_rows: str | None, score: str | None) -> str:
    own = f"its labels are {shown_names(labels, MOST_SHOWN)}: "
    if in_rows is None:
        if SUMS[0] <= np.median(probabilities.sum(axis=1)) / 100 <= SUMS[1]:
            return "divide the percentages by 100"
        if np.median(probabilities.min(axis=1)) < 0:
            return "write the softmax of each row, if the numbers are logits or log probabilities"
        fix = f"{own}give each text one row, with a probability for each of them, also if it is 0, and the sum 1. "
        return fix + "If a column is no label, name the labels of this teacher: `labels: [...]`"
    if score and probabilities.max() > SUMS[1]:
        divide = "divide the percentages by 100, or " if PERCENTAGES[0] < probabilities.max() <= PERCENTAGES[1] else ""
        return f"{divide}leave out the column {shown(score)} if it is no probability of the label"
    fix = f"{own}give each text one of them. For no answer, or one that means none of them, write a label such as "
    return fix + "unsure, which `catch_all` names, and `labels` if it is set. Leave out an empty one of several answers"


def _naming_columns(columns: Sequence[str], corpus: Corpus, where: str) -> tuple[str, list[str]]:
    named = naming_columns(columns.__contains__, corpus)
    if named is None:
        what = f"no column names the text: the columns are {shown_names(columns, MOST_SHOWN)}"
        near = [name for name in nearest(corpus.text[0], columns, ratio=0.7) if len(corpus.text) == 1]
        fix = f"add the column {', '.join(map(shown, corpus.text))} with the texts"
        fix = f"rename the column {shown(near[0])} to {shown(corpus.text[0])}" if near else fix
        fix += "; or set corpus.id to id, if the texts have it" if corpus.id == "auto" and ID in columns else ""
        raise ModelError(what, where=where, fix=fix)
    return named


def _names(frame: pl.DataFrame, kind: str, columns: Sequence[str]) -> tuple[Keys, list[tuple[int, str]]]:
    """Returns the key of each row's text or id, and the rows without one."""
    names, problems = np.zeros(frame.height, f"S{KEY_BYTES}"), list[tuple[int, str]]()
    for row, values in enumerate(zip(*(frame[name].to_list() for name in columns), strict=True)):
        key = _key(kind, values)
        if key is None:
            problems.append((row, f"{shown(columns[0])} is empty or has no {kind}"))
        else:
            names[row] = key
    return names, problems


def _key(kind: str, values: Sequence[Any]) -> bytes | None:
    if kind == KEY and isinstance(values[0], bytes):
        return values[0] if len(values[0]) == KEY_BYTES else None
    texts = [str(value) if type(value) is int else value for value in values]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return None
    identity = identity_of(kind, texts)
    return text_key(texts) if kind == ID else identity if isinstance(identity, bytes) else None


def _separator(path: Path) -> str:
    with opened(path) as file:
        header = next((line for line in file if line.strip(BOM + b"\r\n")), b"")
    header.decode()  # which Polars does not check
    return delimiter_of(kind_of(path), header)


def _csv_rows(path: Path, rows: int | None = None) -> pl.DataFrame:
    """Returns all rows, also those of empty lines, as texts."""
    separator = _separator(path)
    with _content(path) as content:
        return pl.read_csv(content, n_rows=rows, infer_schema=False, separator=separator)


def _has_value() -> pl.Expr:
    return ~pl.all_horizontal(pl.all().is_null())


def _read_csv(path: Path, where: str, rows: int | None) -> pl.DataFrame:
    try:
        frame = _csv_rows(path, rows)
    except pl.exceptions.PolarsError as error:
        fault = _fault_in(path)
        if fault is None:
            raise
        fix = "give each row as many fields as the header has, with commas or semicolons between them; "
        fix += "quote a field that has one of these, a quote or a line break"
        raise ModelError(f"{path.name} {fault}", where=where, fix=fix) from error
    parts = [name.rpartition(DUPLICATE) for name in frame.columns]
    again = [name for name, mark, number in parts if mark and number.isdecimal()]
    if again:
        what = f"{path.name} has two columns named {shown(again[0])}"
        raise ModelError(what, where=where, fix="rename one of them, or leave it out")
    return frame.rename(str.strip).filter(_has_value())


def _fault_in(path: Path) -> str | None:
    """Returns the first row of a csv that has more fields than the header, or a quote that does not end."""
    csv.field_size_limit(FIELD_LIMIT)
    with io.TextIOWrapper(opened(path), "utf-8-sig", "replace", newline="") as file:
        rows = csv.reader(file, delimiter=_separator(path), strict=True)
        try:
            fields = len(next((row for row in rows if row), []))
            longer = next((len(row) for row in rows if len(row) > fields), None)
        except csv.Error as error:
            return f"line {rows.line_num} is broken: {error}"
    return None if longer is None else f"line {rows.line_num} has {longer} fields, and the header {fields}"


def _undecoded_line(path: Path) -> int | None:
    """Returns the number of the first line that is not UTF-8."""
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return None


@contextmanager
def _content(path: Path) -> Iterator[IO[bytes]]:
    """Yields the content without a byte order mark; Polars would take a path for a pattern of paths."""
    with opened(path) as file:
        start = file.read(len(BOM))
        if program_of(path) is None and start != BOM:
            file.seek(0)
            yield file
        else:
            yield io.BytesIO(start.removeprefix(BOM) + file.read())


def _read(path: Path, where: str, rows: int | None = None) -> pl.DataFrame:
    try:
        if kind_of(path) == ".parquet":
            return pl.read_parquet(path, n_rows=rows, glob=False)
        check_magic(path, path.name)
        if kind_of(path) not in JSON_LINES:
            return _read_csv(path, where, rows)
        with _content(path) as content:
            return pl.read_ndjson(content, n_rows=rows, infer_schema_length=None)
    except DataError as error:  # of another kind of file, or of one that is not whole
        raise ModelError(error.what, where=where, fix=error.fix) from error
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system; Polars' own have no number
            raise
        if kind_of(path) != ".parquet" and (number := _undecoded_line(path)):
            fix = FIXES["not UTF-8"].format(**in_commands(path))
            raise ModelError(f"{path.name} line {number} is not UTF-8", where=where, fix=fix) from error
        what = f"{path.name} cannot be read: {shown(str(error), 200)}"
        fix = "write it as csv in UTF-8, jsonl or Parquet: a column of texts, and one of probabilities for each label"
        raise ModelError(what, where=where, fix=fix) from error
