"""Loads the gold labels of a run for stages, and refuses faulty ones: `labels` of the experiment and the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from amalgam.data.corpus import find_files
from amalgam.data.keys import shown, shown_names, union_of
from amalgam.pipeline.config.schema import FROM_CORPUS
from amalgam.pipeline.console import counted
from amalgam.pipeline.errors import DataError, ExperimentError
from amalgam.pipeline.execution.stage import PendingDependencyError, Run, once
from amalgam.pipeline.input_files import in_commands, kind_of
from amalgam.pipeline.storage.paths import GIVEN
from amalgam.pipeline.user_paths import user_path
from amalgam.stages.common import given_labels as label_files
from amalgam.stages.common.corpus import (
    GENERATED,
    IN_MEMORY,
    LABELS_SHOWN,
    LEFT_OUT,
    REMOTE,
    check_gold_labels,
    corpus_for,
    sources_of,
    tables,
)
from amalgam.stages.common.given_labels import GivenLabels, LabelFile
from amalgam.stages.common.load import (
    label_space,
    labels_by_teacher,
    part_files,
    part_of,
    source_files,
    teachers_of,
    train_part,
)
from amalgam.stages.common.models.resolve import ResolvedTeacher
from amalgam.stages.objective_inputs import reads_texts
from amalgam.stages.target_methods import target_method

MOST_SCANNED = 50_000_000
"""Most bytes of texts that `plan` and `doctor` read to look up the texts of given labels, or of a file to label."""

MOST_ESTIMATION, ESTIMATION_SHARE = 500, 0.1
"""Most labelled texts that estimate accuracies, and their largest share of the training texts."""

LEAST_ESTIMATION = 20
"""Fewer labelled texts are too few to estimate an accuracy; students learn them."""


@once
def given_labels(run: Run) -> GivenLabels | None:
    """Returns the labels of `labels` in the experiment; None without them, or if the targets do not use them."""
    source = run.experiment.labels
    if source is None or not _takes_labels(run):
        return None
    part, names = train_part(run), label_space(run).names
    if source == FROM_CORPUS:
        if not part.facts["labels"]:
            fix = "fill the column corpus.label in some rows, or name a file of labels"
            raise DataError("no training text has a label", where="labels: corpus", fix=fix)
        given = label_files.labels_in(tables(run.store, part, ["key", "label"]), names, run.experiment.corpus.unknown)
        _note_absent(run, given, "corpus.train")
        return given
    file = label_file(run, source).matched(names)
    columns, corpus = ["key", "id"] if file.column == "id" else ["key"], corpus_for(run.experiment, "train")
    read, paths = partial(tables, run.store, part, columns), partial(part_files, run, "train")
    keys = label_files.find_texts(file, read, paths, corpus)
    file, note = file.without_skipped(names, keys)
    if note:
        run.console.note(note, always=True)
    file.check(names, keys)
    given = file.by_key(keys)
    _note_absent(run, given, file.name)
    return given


def _note_absent(run: Run, given: GivenLabels, source: str) -> None:
    for note in given.notes_on_absent(label_space(run), source):
        run.console.note(note)


def _takes_labels(run: Run) -> bool:
    """Returns whether the targets use `labels` of the experiment."""
    return target_method(run.experiment.targets).takes_labels and reads_texts(run.experiment)


def labels_identity(run: Run) -> dict[str, str]:
    """Returns the input of the labels for an identity; empty without labels."""
    labels = given_labels(run)
    return {"given labels": labels.digest} if labels else {}


@once
def estimation_texts(run: Run) -> frozenset[bytes]:
    """Returns the labelled texts that estimate accuracies; no student learns them.

    They are the random ones, if the file marks these. Of too many, the last by key are a random sample: the first are
    held out of the training.
    """
    given = given_labels(run)
    if given is None:
        return frozenset()
    keys = given.sample
    most = min(MOST_ESTIMATION, int(ESTIMATION_SHARE * train_part(run).texts))
    is_enough = len(keys) >= LEAST_ESTIMATION <= most
    return frozenset(sorted(keys, key=lambda key: key[8:], reverse=True)[:most] if is_enough else ())


def is_random_sample(run: Run) -> bool:
    """Returns whether the labelled texts are known to be a random sample: marked ones, or all training texts."""
    given = given_labels(run)
    if given is None:
        return False
    return given.random is not None or len(given.by_key) + len(given.unknown) == train_part(run).texts


def excluded_texts(run: Run) -> frozenset[bytes]:
    """Returns the labelled texts that no student learns: those of the estimates, and those with no label of it."""
    given = given_labels(run)
    return estimation_texts(run) | _texts_outside_union(run) | (given.unknown if given else frozenset())


@once
def _texts_outside_union(run: Run) -> frozenset[bytes]:
    """Returns the training texts with gold labels outside the union, if the targets are gold labels."""
    if not target_method(run.experiment.targets).reads_gold:
        return frozenset()
    part, names = train_part(run), {*label_space(run).names}
    rows = tables(run.store, part, ["key", "label"]) if part.facts["labels"].keys() - names else ()
    columns = ((table.column("key").to_pylist(), table.column("label").to_pylist()) for table in rows)
    return frozenset(key for pair in columns for key, label in zip(*pair, strict=True) if label not in names)


@once
def selected_texts(run: Run) -> dict[bytes, Sequence[str | None]]:
    """Returns the selected test texts, which a file of texts to label marks; the values are those of `selected_in`."""
    corpus, selected = corpus_for(run.experiment, "test"), dict[bytes, Sequence[str | None]]()
    for path in part_files(run, "test"):
        selected |= label_files.selected_in(path, corpus) if path.stat().st_size <= MOST_SCANNED else {}
    return selected


@once
def label_file(run: Run, source: str) -> LabelFile:
    where = label_files.WHERE
    path = user_path(source, run.base, DataError, where=where)
    is_frame = path.parent == run.store.root / GIVEN
    how_to_label = f"`amalgam label --count 50{run.file_option}` writes a file of texts to label"
    if is_frame or run.file is None:
        how_to_label = "`experiment.label(50)` returns texts to label"
    if not path.is_file():
        fix = f"name a csv, tsv, jsonl or parquet file, or `corpus`; {how_to_label}"
        raise DataError(f"{shown(source)} {'is no file' if path.exists() else 'does not exist'}", where=where, fix=fix)
    if kind_of(path) == ".txt":  # its lines would be texts
        fix = "if its rows have columns, name it .csv: mv {file} {stem}.csv".format(**in_commands(path))
        raise DataError(f"{shown(source)} is no csv file by its name", where=where, fix=f"{fix}; {how_to_label}")
    file = find_files(source, run.base)[0]
    name = label_files.FRAME if is_frame else ""
    labels = label_files.read_label_file(file, run.experiment.corpus, how_to_label, name)
    for column in labels.scores:
        run.console.note(f"{labels.name}: the column {column} is not read: every label counts as certain")
    return labels


def check_labels(run: Run) -> None:
    """Refuses faulty labels as far as teachers and corpus are known; `given_labels` checks the rest."""
    source, union = run.experiment.labels, None
    if source is None:
        return
    try:
        given_labels(run)
    except PendingDependencyError:
        if source != FROM_CORPUS:
            labels, file = labels_by_teacher(run), label_file(run, source)
            if len(labels) == len(run.experiment.teacher_names):
                union = union_of(labels).names
            keys = _keys_in_sources(run, file)
            file.matched(union).without_skipped(union, keys)[0].check(union, keys)


def _keys_in_sources(run: Run, file: LabelFile) -> dict[bytes | str, bytes] | None:
    """Returns the texts of the file that are in the files of texts; None if these are remote, large or not written."""
    sources = sources_of(run.experiment).get("train", [])
    if any(source.startswith((*REMOTE, GENERATED, IN_MEMORY)) for source in sources):
        return None
    files = [path for source in sources for path in source_files(run, source)]
    are_small = sum(path.stat().st_size for path in files) <= MOST_SCANNED
    return label_files.keys_in_corpus(file, files, corpus_for(run.experiment, "train")) if are_small else None


def check_gold(run: Run) -> None:
    """Refuses gold labels outside the union before any teacher runs: no student can learn or predict them."""
    method = target_method(run.experiment.targets)
    if method.one_label_set:
        check_one_label_set(teachers_of(run), run.experiment.targets.mode)
    if run.experiment.has_catch_all:
        _check_label_counts(teachers_of(run), run.experiment.targets.mode, apart=method.loss == "restricted")
    for note in gold_notes(run, lambda: label_space(run).names):
        run.console.note(note)
    check_unknown(run)


def gold_notes(run: Run, union: Callable[[], Iterable[str]]) -> list[str]:
    """Refuses gold labels outside the union; returns notes on such texts if the settings skip them."""
    notes, corpus = [], run.experiment.corpus
    reads_gold = target_method(run.experiment.targets).reads_gold
    treatments = dict.fromkeys(["test", "validation", *(["train"] if reads_gold else [])], LEFT_OUT)
    if run.experiment.labels == FROM_CORPUS and _takes_labels(run):
        treatments["train"] = "learned without a label"
    for name, treatment in treatments.items():
        if part := part_of(run, name):
            files = partial(part_files, run, name)
            if note := check_gold_labels(part, corpus, set(union()), _renamed(run), files, treatment):
                notes.append(note)
            unknown = part.facts["labels"].get(str(corpus.unknown), 0) if name == "train" and reads_gold else 0
            if unknown and corpus.unknown:
                notes.append(f"{counted(unknown, 'train text')} {treatment}: corpus.unknown is {shown(corpus.unknown)}")
    return notes


def _renamed(run: Run) -> dict[str, str]:
    """Returns the new names of the teachers' labels; none of a label that two teachers rename differently."""
    pairs = {pair for teacher in run.experiment.teachers for pair in teacher.rename.items()}
    counts = Counter(old for old, _ in pairs)
    return {old: new for old, new in pairs if counts[old] == 1}


def check_unknown(run: Run) -> None:
    """Refuses corpus.unknown if it is a label of a teacher, because its texts would count as labelled and unknown."""
    unknown = run.experiment.corpus.unknown
    owners = [teacher for teacher, labels in labels_by_teacher(run).items() if unknown in labels] if unknown else []
    if owners:
        what = f"corpus.unknown: {shown(str(unknown))} is a label of teacher {' and '.join(owners)}"
        fix = "name a label that no teacher has, or if it means none of that teacher's others, set its catch_all"
        raise ExperimentError(what, where="corpus.unknown", fix=fix)


def _check_label_counts(teachers: Sequence[ResolvedTeacher], mode: str, *, apart: bool) -> None:
    """Refuses one label of all teachers, and one label of a teacher if the student learns its labels `apart`."""
    single = [teacher for teacher in teachers if len(teacher.labels) == 1]
    if len({label for teacher in teachers for label in teacher.labels}) == 1:
        what = f"all teachers together have one label, {shown(single[0].labels[0])}"
        raise ExperimentError(what, where="teachers", fix="remove catch_all, or add a teacher of another label")
    if apart and single:
        what = f"teacher {single[0].name} has one label, and {mode} compares the labels of each teacher"
        fix = "remove its catch_all, or another method: `amalgam methods`"
        raise ExperimentError(what, where=f"targets.mode: {mode}", fix=fix)


def check_one_label_set(teachers: Sequence[ResolvedTeacher], mode: str) -> None:
    """Refuses teachers with different label sets, for methods that average over one set."""
    first = teachers[0]
    for teacher in teachers[1:]:
        difference = sorted(set(first.labels) ^ set(teacher.labels))
        if difference:
            raise ExperimentError(
                f"{mode} needs teachers with one label set: {first.name} and {teacher.name} do not share "
                f"{shown_names(difference, LABELS_SHOWN)}",
                where=f"targets.mode: {mode}",
                fix="rename labels that mean the same (teachers: rename), or another method: `amalgam methods`",
            )
