"""Predicts with a finished student, whose folder is all it needs (`amalgam predict`).

A file is checked before the model loads, then read in blocks; memory does not grow with it.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from amalgam.data.arrays import Array, softmax
from amalgam.data.keys import shown, shown_name, text_key
from amalgam.data.lazy import np, pa, pq
from amalgam.data.parquet import Column, arrow_schema, parquet_options, predictions
from amalgam.data.rows import SUFFIXES, BadRow, Row, has_surrogate, read_lines, read_rows
from amalgam.pipeline.config import proposals
from amalgam.pipeline.config.schema import Corpus, ExperimentConfig
from amalgam.pipeline.console import Console, counted, padded, printing, width_of
from amalgam.pipeline.errors import DataError, ExperimentError, ModelError, nearest
from amalgam.pipeline.signals import InterruptHandler, without_units
from amalgam.pipeline.storage.local import atomic_write
from amalgam.pipeline.user_paths import check_writable, user_path
from amalgam.stages.common.deliveries import METADATA, STUDENTS, check_delivered, read_metadata
from amalgam.stages.common.models.model_folder import EXPORT_FACTS, ONNX_MODEL, SAFETENSORS, UNKNOWN
from amalgam.stages.common.models.read_card import Source, Training
from amalgam.stages.common.models.resolve import check_single_label, read_model
from amalgam.stages.methods import load_with_methods, method_name

if TYPE_CHECKING:
    from amalgam.stages.common.inference.batches import Classifier

T = TypeVar("T")

SHOWN = 200
"""Largest number of characters of a text on a terminal."""

BLOCK_ROWS = 8192
BLOCK_CHARACTERS = 1 << 24
PIPE = "-"
OVERRIDE = re.compile(rf"({'|'.join(ExperimentConfig.model_fields)})\.[a-z_.]+=")
"""The start of an override, which other commands take where `predict` takes texts."""
OUTPUTS = (".parquet", ".csv")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters with which a spreadsheet program takes a cell of csv for a formula; such a cell gets a quote."""
NUMBER = re.compile(r"[-+]?[0-9.]+")
DIGITS = 6
"""Decimals of a probability in csv."""


# ---- the student


@dataclass(frozen=True)
class StudentFolder:
    folder: Path
    teachers: Mapping[str, Sequence[str]]
    """Labels of each teacher; empty if the folder has no metadata."""
    max_tokens: int | None
    device: str = "auto"
    columns: Sequence[str] = ("text",)
    """Names of the text columns in input files, from corpus.text."""
    fingerprint: str | None = None
    """The training that made it; None without metadata."""
    sources: Sequence[Source] = ()
    """The model cards of its encoder and teachers."""
    training: Training | None = None
    learned: Sequence[str] = ()
    """Names of the text columns that it learned; empty if they are not recorded."""
    file_option: str = ""

    def check_pairs(self, texts: int, where: str, fix: str = "", fix_pairs: str = "") -> None:
        """Refuses one text where the student learned pairs of texts, and a pair where it learned single texts."""
        if texts > len(self.learned) > 0:
            what = f"the student classifies single texts ({shown(self.learned[0])}), not pairs of texts"
            raise ExperimentError(
                what, where=where, fix=fix_pairs or f"name one column: --text {shlex.quote(self.learned[0])}"
            )
        if texts < len(self.learned):
            what = f"the student classifies pairs of texts, and the second one is missing: {shown(self.learned[1])}"
            columns = shlex.join(part for name in self.learned for part in ("--text", name))
            fix = fix or f"name both columns of a file: amalgam predict --input FILE {columns}{self.file_option}"
            raise ExperimentError(what, where=where, fix=fix)

    def load(self) -> Classifier:
        from amalgam.stages.common.inference.batches import Classifier

        files, where = read_model(self.folder, "the student"), str(self.folder)
        fix = "name a model that chooses one label per text; for this one, use transformers.pipeline"
        check_single_label(files, "student", where, fix)
        classifier = Classifier(files, device=self.device, max_tokens=self.max_tokens)
        if len(classifier.labels) < 2:
            raise ModelError("the student has one output, so it chooses no label", where=where, fix=fix)
        return classifier

    def positions(self, labels: Sequence[str]) -> dict[str, list[int]]:
        """Returns the positions of each teacher's labels in the student's outputs."""
        position = {label: index for index, label in enumerate(labels)}
        missing = [label for own in self.teachers.values() for label in own if label not in position]
        if missing or not self.teachers:
            what = "the student's folder lists no labels of its teachers"
            if missing:
                what = f"the student lacks the label of a teacher: {shown(missing[0])}"
            command = f"amalgam train-student{self.file_option}"
            fix = f"run `{command}`, which writes the file again and trains nothing, or omit --explain"
            raise ModelError(what, where=str(self.folder / METADATA), fix=fix)
        return {teacher: [position[label] for label in own] for teacher, own in self.teachers.items()}


def finished_student(config: Path, folder: Path | None) -> StudentFolder:
    """Returns the student in `folder`, or that of the experiment file."""
    file_option = proposals.file_option(config)
    if folder is not None:
        fix = f"name the folder of a model, such as students/student, not {shown(str(folder))}"
        return finished_in(folder, fix, file_option)
    loaded = load_with_methods(config)
    fix = f"run `amalgam run{file_option}`, or name a folder with --student FOLDER"
    student = finished_in(loaded.base / STUDENTS / loaded.experiment.student.name, fix, file_option)
    return replace(student, device=loaded.experiment.execution.device, columns=loaded.experiment.corpus.text)


def finished_in(folder: Path, fix: str = "run the experiment", file_option: str = "") -> StudentFolder:
    if not user_path(str(folder), kind=ModelError).is_dir():
        raise ModelError("the student does not exist", where=str(folder.absolute()), fix=fix)
    check_delivered(folder, file_option)
    if (folder / EXPORT_FACTS).is_file() and not (folder / SAFETENSORS[0]).exists():
        use = "`amalgam serve` uses this one" if (folder / ONNX_MODEL).is_file() else "its classify.py uses this one"
        own = shlex.quote(re.sub("-(onnx|numpy)(-int8)?$", "", str(folder)))
        what, fix = (
            "this folder is an export, without the weights of a student",
            f"name the student, such as {own}; {use}",
        )
        raise ModelError(what, where=str(folder.absolute()), fix=fix)
    metadata = read_metadata(folder) or {}
    return StudentFolder(
        folder,
        _of_type(dict[str, list[str]], metadata.get("teachers")) or {},
        _of_type(int, metadata.get("max_tokens")),
        fingerprint=metadata.get("fingerprint"),
        sources=_of_type(list[Source], metadata.get("sources")) or (),
        training=_of_type(Training, metadata.get("training")),
        learned=_of_type(list[str], metadata.get("text")) or (),
        file_option=file_option,
    )


def _of_type(kind: type[T], value: Any) -> T | None:
    """Returns the value as this type, or None: the metadata may be of an older version, or edited."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


def name_student(console: Console, student: StudentFolder, config: Path, *, chosen: bool) -> None:
    """Prints the student in one line; unless it was chosen by folder, also how it differs from the experiment."""
    training = student.training
    method = f"{training.method}, " if training else ""
    made = f" ({method}fingerprint {student.fingerprint})" if student.fingerprint else ""
    console.say(f"student: {_shortest(student.folder)}{made}")
    if chosen:
        return
    changes = changes_since(load_with_methods(config).experiment, student)
    if changes:
        listed, update = "; ".join(changes), f"`amalgam run{proposals.file_option(config)}` updates it"
        console.note(f"{config.name} differs from this student's training: {listed}. {update}")
    newer = _newer(student.folder)
    if newer:
        folder = _shortest(newer)
        console.note(f"{folder} is newer than this student: add --student {shlex.quote(folder)} to use it")


def changes_since(experiment: ExperimentConfig, student: StudentFolder) -> list[str]:
    """Returns the method, the teachers and all fields that differ from those of the training, if it is recorded.

    Where the file leaves a field to amalgam (null), the value that amalgam chooses for the same texts is compared.
    """
    training = student.training
    if training is None:
        return []
    now, teachers = experiment.model_dump(mode="json"), experiment.teacher_names
    sections = {name: fields for name, fields in training.settings.items() if isinstance(now.get(name), dict)}
    names = {"method": (training.method, method_name(experiment))}
    if set(teachers) != set(student.teachers):
        names["teachers"] = ", ".join(student.teachers), ", ".join(teachers)
    changes = [f"{name} {before} -> {after}" for name, (before, after) in names.items() if before != after]
    for section, fields in sections.items():
        for name, trained in fields.items():
            value, automatic = now[section].get(name), training.automatic.get(name) if section == "student" else None
            if value is None and automatic not in (None, trained):
                changes.append(f"{section}.{name} {json.dumps(trained)} -> auto ({json.dumps(automatic)})")
            elif value not in (None, trained):
                changes.append(f"{section}.{name} {json.dumps(trained)} -> {json.dumps(value)}")
    return changes


def _newer(folder: Path) -> Path | None:
    """Returns the newest student next to this one, if its training is newer."""
    made = {
        path: (path / "config.json").stat().st_mtime  # publishing keeps the time of the file
        for path in folder.parent.iterdir()
        if not path.name.startswith(".") and read_metadata(path) and (path / "config.json").is_file()
    }
    newest = max(made, key=lambda path: made[path], default=folder)
    return newest if folder in made and made[newest] > made[folder] else None


def _shortest(folder: Path) -> str:
    """Returns the path from the present folder if it is below it."""
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else relative


@dataclass(frozen=True)
class UnknownTexts:
    """Which texts are unlike the texts that the student was trained on."""

    flags: Array
    scores: Array
    threshold: float
    source: str
    """"states" or "logits", of which the scores are."""


@dataclass(frozen=True)
class Predictions:
    """Predictions in the order of the texts, the most likely labels first."""

    labels: list[list[str]]
    probabilities: Array
    masses: Mapping[str, Array]
    """The summed probability of each teacher's labels, with `explain`."""
    unknown: UnknownTexts | None = None

    @property
    def columns(self) -> list[Any]:
        """Returns the values of the columns of `data.parquet.predictions`, from the label on."""
        ranked: list[Any] = []
        for place, probabilities in enumerate(self.probabilities.T):
            ranked += [[labels[place] for labels in self.labels], probabilities]
        unknown = [self.unknown.flags, self.unknown.scores] if self.unknown else []
        return [*ranked, *unknown, *self.masses.values()]


class Student:
    def __init__(self, finished: StudentFolder, *, top: int, explain: bool, unknown: bool = False) -> None:
        if type(top) is not int or top < 1:
            what, fix = f"top is {top!r}, not a whole number from 1 on", "predict(texts, top=3) returns three labels"
            raise ExperimentError(what, where="predict", fix=fix)
        self.finished, self._classifier = finished, finished.load()
        self.labels = self._classifier.labels
        self.top = min(top, len(self.labels))
        self.positions = finished.positions(self.labels) if explain else {}
        self.threshold = _unknown_threshold(self._classifier, finished) if unknown else None

    def __call__(self, texts: Sequence[tuple[str, ...]]) -> Predictions:
        unknown = None
        if self.threshold is None:
            logits = self._classifier.logits(texts)
        else:
            logits, scores = self._classifier.logits_and_scores(texts)
            source = "states" if self._classifier.unknown_states else "logits"
            unknown = UnknownTexts(scores > self.threshold, scores, self.threshold, source)
        probabilities = softmax(logits)
        best = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.top]
        return Predictions(
            [[self.labels[position] for position in row] for row in best],
            np.take_along_axis(probabilities, best, axis=1),
            {teacher: probabilities[:, positions].sum(axis=1) for teacher, positions in self.positions.items()},
            unknown,
        )


def _unknown_threshold(classifier: Classifier, student: StudentFolder) -> float:
    threshold = classifier.unknown_threshold
    if threshold is None:
        what = f"the student has no {UNKNOWN}, and its config.json no unknown_threshold"
        fix = f"train it again on texts: `amalgam train-student{student.file_option}`; or omit --unknown"
        raise ModelError(what, where=str(student.folder), fix=fix)
    return threshold


# ---- the command


def predict(  # noqa: PLR0913 - the options of the command
    texts: Sequence[str],
    source: str | None,
    out: Path | None,
    *,
    config: Path,
    student: Path | None,
    columns: Sequence[str],
    id_column: str | None,
    top: int,
    explain: bool,
    unknown: bool,
    skip_bad_rows: bool,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    if bool(texts) == (source is not None):
        what = "give texts, or a file of them with --input" + (", not both" if texts else "")
        fix = f'amalgam predict "some text"{proposals.file_option(config)}, or --input texts.csv; for a pipe, --input -'
        raise ExperimentError(what, where="amalgam predict", fix=fix)
    if source is None:
        of_files = {"--out": out, "--id": id_column, "--text": columns, "--skip-bad-rows": skip_bad_rows}
        _check_typed(texts, config, [name for name, value in of_files.items() if value])
        finished = finished_student(config, student)
        finished.check_pairs(1, "amalgam predict")
        name_student(Console(quiet=quiet), finished, config, chosen=student is not None)
        with without_units("the output is incomplete"):
            model = Student(finished, top=top, explain=explain, unknown=unknown)
            _predict_texts(texts, model, finished.fingerprint, as_json=as_json)
        return
    if as_json:
        raise ExperimentError("--json is for texts that are typed", where="amalgam predict", fix="--out FILE.parquet")
    _check_output(out, source, force=force)
    finished = finished_student(config, student)
    lines = source == PIPE or source.lower().endswith(".txt")
    inputs = InputTexts(source, columns or (["text"] if lines else finished.columns), id_column, skip_bad_rows)
    finished.check_pairs(len(inputs.columns), f"--input {shown(source)}")
    signals, console = InterruptHandler(), Console(quiet=quiet)
    # A read that waits for a pipe continues after a signal, unless the handler raises.
    end = "no output was written" if out else "the output is incomplete"
    with without_units(end), nullcontext() if source == PIPE else signals.listening():
        total = inputs.check()
        name_student(console, finished, config, chosen=student is not None)
        model = Student(finished, top=top, explain=explain, unknown=unknown)
        with (
            _output(out, predictions(model.top, list(model.positions), unknown=unknown)) as write,
            console.progress("predict", "texts", total or 0, 0),
        ):
            for block in inputs.blocks():
                values = _columns(block, model([row.fields for row in block]))
                signals.check()
                write(values)
                console.advance(len(block))
    if inputs.skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in inputs.skipped.most_common())
        console.note(f"rows left out: {reasons}")
    console.say(f"{counted(inputs.predicted, 'text')} -> {out or 'stdout'}")


def _predict_texts(texts: Sequence[str], student: Student, fingerprint: str | None, *, as_json: bool) -> None:
    result, console = student([(text,) for text in texts]), Console()
    entries: list[dict[str, Any]] = []
    for row, text in enumerate(texts):
        shares = dict(zip(result.labels[row], result.probabilities[row].tolist(), strict=True))
        masses = {teacher: float(mass[row]) for teacher, mass in result.masses.items()}
        ranked = [{"label": label, "probability": share} for label, share in shares.items()]
        entry = {"text": text, "key": text_key((text,)).hex(), "student": fingerprint, "labels": ranked}
        entries.append(entry | ({"mass": masses} if masses else {}) | _unknown_entry(result.unknown, row))
        if not as_json:
            console.result(shown(text, SHOWN))
            named = [(shown_name(label), share) for label, share in shares.items()]
            named += [(f"labels of {teacher}", mass) for teacher, mass in masses.items()]
            width = max(width_of(name) for name, _ in named)
            for name, value in named:
                console.result(f"  {padded(name, width)}  {value:.3f}")
            if result.unknown:
                flag = "yes" if result.unknown.flags[row] else "no"
                figures = f"score {result.unknown.scores[row]:.3f}, threshold {result.unknown.threshold:.3f}"
                console.result(f"  unknown: {flag} ({figures})")
    if as_json:
        console.json(entries)


def _unknown_entry(unknown: UnknownTexts | None, row: int) -> dict[str, Any]:
    if unknown is None:
        return {}
    flag, score = bool(unknown.flags[row]), float(unknown.scores[row])
    return {"unknown": {"flag": flag, "score": score, "threshold": unknown.threshold, "source": unknown.source}}


# ---- texts from a file


@dataclass
class InputTexts:
    source: str
    columns: Sequence[str]
    id_column: str | None
    skip_bad_rows: bool
    skipped: Counter[str] = field(default_factory=Counter)
    predicted: int = 0

    def check(self) -> int | None:
        """Reads every row once and returns their number, or None for a pipe."""
        if self.source == PIPE:
            return None
        path = user_path(self.source, kind=DataError, where="--input")
        if path.is_dir():
            names = sorted(file.name for file in path.iterdir() if file.suffix.lower() in (*SUFFIXES, ".txt"))
            fix = f"name a file in it, such as {shlex.quote(str(Path(self.source) / (names or ['texts.csv'])[0]))}"
            raise DataError("the input is a folder, not a file", where=str(path.absolute()), fix=fix)
        if not path.is_file():
            here = [file.name for file in path.parent.glob("*.*")]
            near = [shlex.quote(str(Path(self.source).with_name(name))) for name in nearest(path.name, here, ratio=0.6)]
            fix = f"did you mean --input {near[0]}?" if near else "set --input FILE, or - for a pipe"
            raise DataError("the input file does not exist", where=str(path.absolute()), fix=fix)
        if path.suffix.lower() not in (*SUFFIXES, ".txt"):
            fix = f"name a file of type {', '.join(SUFFIXES)} or .txt (one text per line)"
            raise DataError(f"{shown(path.name)} has no supported file type", where=str(path), fix=fix)
        if path.suffix.lower() == ".txt" and (self.id_column or len(self.columns) > 1):
            raise ExperimentError("a .txt file has no columns", where=str(path), fix="omit --id, and give --text once")
        count = sum(isinstance(row, Row) for row in self._rows())
        if not count:
            raise DataError(f"no rows in {shown(path.name)}", where=str(path), fix="fill it, or name another")
        return count

    def blocks(self) -> Iterator[list[Row]]:
        """Yields the usable rows in blocks of bounded size, and counts them and the others."""
        block, characters = list[Row](), 0
        for row in self._rows():
            if isinstance(row, BadRow):
                self.skipped[row.reason] += 1
                continue
            block.append(row)
            characters += sum(map(len, row.fields))
            self.predicted += 1
            if len(block) == BLOCK_ROWS or characters >= BLOCK_CHARACTERS:
                yield block
                block, characters = [], 0
        if block:
            yield block

    def _rows(self) -> Iterator[Row | BadRow]:
        """Yields every row; a row that cannot be used is an error without --skip-bad-rows."""
        for row in self._read():
            if isinstance(row, BadRow) and not self.skip_bad_rows:
                what = f"a row cannot be used: {row.reason}"
                raise DataError(what, where=row.where, fix=f"{row.fix}; or skip such rows with --skip-bad-rows")
            yield row

    def _read(self) -> Iterator[Row | BadRow]:
        if self.source == PIPE:
            yield from read_lines(sys.stdin.buffer, "the pipe")
        else:
            corpus = Corpus(train=None, text=list(self.columns), id=self.id_column or "auto")
            yield from read_rows(Path(self.source), corpus=corpus, setting="--{} ")


# ---- texts from Python


def checked_texts(texts: Any) -> list[tuple[str, ...]]:
    """Returns the fields of each text; refuses anything but non-empty texts, or pairs of them."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        fix = 'pass a list: experiment.predict(["a text"])'
        raise DataError(f"predict takes a list of texts, got {type(texts).__name__}", where="predict", fix=fix)
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):
        fix = 'pass one column: experiment.predict(frame["text"])'
        raise DataError(f"predict takes a list of texts, got {type(texts).__name__}", where="predict", fix=fix)
    rows = [tuple(text) if isinstance(text, tuple | list) else (text,) for text in texts]
    for number, row in enumerate(rows):
        fault = next(filter(None, map(_fault, row)), None)
        if fault is None and (len(row) not in (1, 2) or len(row) != len(rows[0])):
            fault = f"the entry has {counted(len(row), 'text')}, the first has {len(rows[0])}"
        if fault:
            fix = "pass non-empty texts, or pairs (text, text_2), but not both"
            raise DataError(fault, where=f"predict, texts[{number}]", fix=fix)
    return rows


def _fault(text: Any) -> str | None:
    if not isinstance(text, str):
        return f"{shown(repr(text))} is no text"
    if not text.strip():
        return "the text is empty"
    return "the text has a lone surrogate" if has_surrogate(text) else None


# ---- predictions to a file


def _check_typed(texts: Sequence[str], config: Path, of_files: Sequence[str]) -> None:
    """Refuses typed texts that are no texts (blank ones, settings, names of files), and options for files."""
    if not all(text.strip() for text in texts):
        raise ExperimentError("a text is empty", where="amalgam predict", fix="remove it")
    if any(map(has_surrogate, texts)):
        fix = "type it in UTF-8, or read it from a file with --input"
        raise ExperimentError("a text is not UTF-8", where="amalgam predict", fix=fix)
    for text in texts:
        if OVERRIDE.match(text):
            fix = "amalgam predict TEXT --student students/NAME chooses the student; --input FILE reads such texts"
            raise ExperimentError(f"{shown(text)} is a setting, not a text", where="amalgam predict", fix=fix)
        if text == PIPE:
            fix = f"amalgam predict --input {PIPE}{proposals.file_option(config)}"
            raise ExperimentError("- is a pipe, and was given as a text", where="amalgam predict", fix=fix)
        if not text.lower().endswith((".txt", *SUFFIXES)):
            continue
        if os.path.isfile(text):  # noqa: PTH113 - no error of a long text
            fix = f"amalgam predict --input {shlex.quote(text)}{proposals.file_option(config)}"
            raise ExperimentError(f"{text} is a file, and was given as a text", where="amalgam predict", fix=fix)
        if len(text.split()) == 1:
            what, fix = f"{shown(text)} looks like a file, and does not exist", "name a file with --input FILE"
            raise ExperimentError(what, where="amalgam predict", fix=f"{fix}; pipe such a text to --input {PIPE}")
    if of_files:
        what, fix = f"{of_files[0]} is for texts that come from a file", "--input FILE, or --json > FILE"
        raise ExperimentError(what, where="amalgam predict", fix=fix)


def _check_output(out: Path | None, source: str, *, force: bool) -> None:
    """Refuses an output file that could not be written or that is the input, before the model loads."""
    if out is None:
        return
    if out.suffix.lower() not in OUTPUTS:
        what = f"{shown(str(out))} has no supported file type"
        raise ExperimentError(what, where=f"--out {out}", fix=f"end it in {' or '.join(OUTPUTS)}")
    if not user_path(str(out), where="--out").absolute().parent.is_dir():
        fix = f"mkdir -p {shlex.quote(str(out.parent))}"
        raise ExperimentError("the folder does not exist", where=f"--out {out}", fix=fix)
    check_writable(out.absolute().parent, "change its permissions, or name a file in another folder with --out")
    if out.is_dir():
        what = f"{shown(out.name)} is a folder"
        raise ExperimentError(what, where=f"--out {out}", fix=f"name a file, such as {out / 'labels.csv'}")
    if out.exists() and source != PIPE and os.path.realpath(out) == os.path.realpath(source):
        raise ExperimentError("the output is the input", where=f"--out {out}", fix="name another file")
    if out.exists() and not force:
        raise ExperimentError(f"{shown(out.name)} exists", where=f"--out {out}", fix="add --force, or name another")


Values = Sequence[Sequence[Any]]
"""The values of each column, in the order of data.parquet.predictions."""


def _columns(rows: Sequence[Row], result: Predictions) -> Values:
    own = [[row.number for row in rows], [text_key(row.fields) for row in rows], [row.id for row in rows]]
    return [*own, *(values.tolist() if isinstance(values, np.ndarray) else values for values in result.columns)]


@contextmanager
def _output(out: Path | None, columns: Sequence[Column]) -> Iterator[Callable[[Values], None]]:
    """Yields a function that writes values to a temporary file, which replaces the output once it is complete."""
    if out is None:
        with printing(sys.stdout):
            write_rows = csv_writer(sys.stdout, columns)

        def write(values: Values) -> None:
            with printing(sys.stdout):
                write_rows(values)

        yield write
        return
    with atomic_write(out) as temporary:
        if out.suffix.lower() == ".csv":
            with temporary.open("w", encoding="utf-8", newline="") as file:
                yield csv_writer(file, columns)
        else:
            schema = arrow_schema(columns)
            # Opened here: Arrow takes a relative path such as file:x for an address.
            with temporary.open("wb") as opened, pq.ParquetWriter(opened, schema, **parquet_options(schema)) as writer:
                yield lambda values: writer.write_table(pa.table(list(values), schema=schema))


def csv_writer(file: TextIO, columns: Sequence[Column]) -> Callable[[Values], None]:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.name for column in columns])

    on_terminal = file.isatty()

    def cell(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str):
            value = f"'{value}" if value.startswith(FORMULA) and not NUMBER.fullmatch(value) else value
            return shown(value, len(value)) if on_terminal else value
        return round(value, DIGITS) if isinstance(value, float) else value

    return lambda values: writer.writerows(map(cell, row) for row in zip(*values, strict=True))
