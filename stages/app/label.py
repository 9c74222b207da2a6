"""Writes random training texts to label, and reports the changes by their labels (`amalgam label`)."""

from __future__ import annotations

import csv
import io
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amalgam.data.arrays import Array
from amalgam.data.keys import shown_names
from amalgam.data.lazy import np, pa, pc, pl
from amalgam.data.parquet import matrix
from amalgam.pipeline.config.proposals import as_yaml, file_option
from amalgam.pipeline.config.schema import ExperimentConfig
from amalgam.pipeline.console import Console, counted
from amalgam.pipeline.errors import ExperimentError
from amalgam.pipeline.execution.stage import Run
from amalgam.pipeline.notebook import Printed
from amalgam.pipeline.storage.local import write_new
from amalgam.stages.app import frames
from amalgam.stages.build_targets.stage import read_targets, target_facts
from amalgam.stages.common.cached.load import cache_reader
from amalgam.stages.common.corpus import fields, rows_at
from amalgam.stages.common.given_labels import KEY, RANDOM, GivenLabels, free_name, label_column, why_column
from amalgam.stages.common.intervals import bounds, errors_of, interval, percent
from amalgam.stages.common.load import label_space, part_of, train_part
from amalgam.stages.common.load_labels import given_labels, is_random_sample
from amalgam.stages.report.evaluation import TeacherInputs, teacher_labels
from amalgam.stages.report.label_estimates import estimate, right_texts
from amalgam.stages.report.load import estimate_inputs
from amalgam.stages.report.stage import share_of_unknown
from amalgam.stages.report.tables import print_estimates, sample_words
from amalgam.stages.report.verdict_types import ShareOfUnknown, SystemEstimate
from amalgam.stages.report.verdict_words import outside_line, share_of_unknown_line
from amalgam.stages.target_methods import gives_label_distributions, target_method
from amalgam.stages.weigh_teachers.load import keys_of

LEAST_ERROR = 0.02
"""Distance of a share from an interval that is too small to matter; intervals by many labels are narrow."""

HINT = "hint_"
"""Start of the columns with the teachers' predictions; they are in random order, because the first one is copied."""


# ---- the texts to label


def check_takes_labels(experiment: ExperimentConfig) -> None:
    if not target_method(experiment.targets).takes_labels:
        what = f"targets.mode: {experiment.targets.mode} does not use labels"
        raise ExperimentError(what, where="amalgam label", fix="choose another student.method, such as amalgam")


def texts_to_label(run: Run, count: int, seed: int) -> pl.DataFrame:
    """Returns key, id, text, label (empty), and the distinct predictions of the teachers, for random texts.

    The texts of the experiment's labels come first, with their labels, because `labels` is one file. Some of them are
    drawn as random ones: if they are hard, the others alone are no random sample. Test texts are left out: a test text
    with a label in `labels` is learned, and measures nothing.
    """
    keys, given = keys_of(run, train_part(run).buckets), given_labels(run) or GivenLabels({})
    earlier = _among(keys, pa.array([*given.by_key, *given.unknown, *given.blank], keys.type))
    test = part_of(run, "test")
    is_test = _among(keys, keys_of(run, test.buckets)) if test else np.zeros(len(keys), bool)
    rows = np.flatnonzero(~earlier & ~is_test)
    if not len(rows):
        what = "every training text has a label" + (" or is a test text" if is_test.any() else "")
        command = f"amalgam run{run.options}" if run.file else "experiment.run()"
        raise ExperimentError(what, where="label", fix=f"add training texts, or use the labels: {command}")
    random = np.random.default_rng(seed)
    new = random.choice(rows, min(count, len(rows)), replace=False)
    is_random = _among(keys, pa.array([*(given.random or ()), *given.blank], keys.type))
    labelled = np.flatnonzero(earlier & ~is_test & ~is_random)
    is_random[new] = True
    is_random[labelled] = random.random(len(labelled)) < len(new) / len(rows)  # as likely as the new ones
    return _table(run, np.concatenate([np.flatnonzero(earlier), new]), is_random, random, given)


def _among(keys: pa.Array, others: pa.Array) -> Array:
    return pc.is_in(keys, value_set=others).to_numpy(zero_copy_only=False)


def _table(run: Run, rows: Array, is_random: Array, random: np.random.Generator, given: GivenLabels) -> pl.DataFrame:
    corpus, space, buckets = run.experiment.corpus, label_space(run), train_part(run).buckets
    texts = rows_at(run.store, buckets, np.sort(rows).tolist()).take(rows.argsort().argsort())
    own_keys = texts.column("key").to_pylist()
    columns: dict[str, list[Any]] = {free_name(KEY, corpus): [key.hex() for key in own_keys]}
    if corpus.id != "auto":
        columns[corpus.id] = texts.column("id").to_pylist()
    columns |= dict(zip(corpus.text, map(list, zip(*fields(texts), strict=True)), strict=True))
    labels = given.written(corpus)
    columns[label_column(corpus)] = [labels.get(key, "") for key in own_keys]
    places = np.unique(np.searchsorted(np.cumsum([bucket.rows for bucket in buckets]), rows, side="right"))
    inputs = TeacherInputs(store=run.store, labels=space, reader=cache_reader(run))
    logits = inputs.teacher_logits([buckets[place] for place in places], texts)
    predicted = zip(*teacher_labels(logits, space).values(), strict=True)
    hints = [[space.names[label] for label in random.permutation(np.unique(row))] for row in predicted]
    for place in range(max(map(len, hints), default=0)):
        name = free_name(f"{HINT}{place + 1}", corpus)
        columns[name] = [names[place] if place < len(names) else "" for names in hints]
    reasons = zip(own_keys, is_random[rows].tolist(), strict=True)
    columns[why_column(corpus)] = [RANDOM if marked else given.why.get(key, "") for key, marked in reasons]
    return pl.DataFrame(columns)


def write_labels_file(path: Path, table: pl.DataFrame) -> None:
    """Writes the table as csv; refuses to replace a file, which may have labels."""
    file = io.StringIO(newline="")
    csv.writer(file).writerows([table.columns, *table.rows()])
    write_new(path, file.getvalue())


# ---- their effect


@dataclass(frozen=True)
class Estimates:
    """Accuracies of targets, ensemble and teachers by labelled texts; no text's own label is used."""

    texts: int
    """Labelled texts that are marked as random; all, if the file marks none."""
    random: bool
    """Whether they are known to be a random sample of the training texts."""
    left_out: int
    """Further ones whose label no teacher has."""
    systems: list[SystemEstimate]

    @property
    def frame(self) -> pl.DataFrame:
        """system, n, accuracy, accuracy_low and accuracy_high: the 95 % interval."""
        return frames.estimates(self.systems)

    @property
    def title(self) -> str:
        texts = f"{counted(self.texts, 'labelled text')}, {sample_words(is_random=self.random)}"
        return f"accuracy on {texts}{outside_line(self.left_out)}"


@dataclass(frozen=True, repr=False)
class LabelEffect(Printed):
    """The changes of the targets by labels."""

    labels: int
    unknown: ShareOfUnknown | None
    """Labelled texts of no label; None without `corpus.unknown` in the experiment."""
    empty: int
    """Rows of the file without a label."""
    earlier: int
    """Labels that the experiment has without the file; the changes are those to its targets."""
    dropped: int
    """Those of them whose texts have no label in the file."""
    texts: int
    """Training texts."""
    moved: int | None
    """Texts with another chosen teacher; None if the method compares no teachers."""
    changed: int
    """Texts with another label as target."""
    right_before: int | None
    """Newly labelled texts whose target before is the label.

    None without such texts, and if a target is no distribution over labels.
    """
    shares: dict[str, tuple[float, float]]
    """By teacher: its share of the texts before and with the labels; empty if the method compares no teachers."""
    by_labels: dict[str, tuple[float, float, float]]
    """By teacher: the share of its labels among random labelled texts, and its 95 % interval for all teachers together.

    Empty without random ones, with unknown texts, and if teachers share labels.
    """
    estimates: Estimates | None
    """None if no labelled text is a random one."""

    def lines(self) -> list[str]:
        labels = counted(self.labels, "label") + (f", {counted(self.empty, 'row')} without one" if self.empty else "")
        unknown = share_of_unknown_line(self.unknown) if self.unknown else ""
        labels += f"; the experiment has {counted(self.earlier, 'earlier label')}" if self.earlier else ""
        new = self.labels - self.earlier + self.dropped
        texts = "the labelled texts" if not self.earlier else f"the {counted(new, 'newly labelled text')}"
        before = "with the earlier labels" if self.earlier else "without them"
        right = f"{before}, {_of(self.right_before or 0, texts)} the right target"
        targets = f"with them, {_of(self.changed, f'{self.texts:,} training texts')} another target"
        moved = f", {self.moved:,} another teacher" if self.moved is not None else ""
        dropped = f"{counted(self.dropped, 'earlier label')} would no longer be used: the text has no label here"
        lines = [labels, unknown, right if self.right_before is not None else "", targets + moved]
        return [line for line in (*lines, dropped if self.dropped else "") if line]

    def print_to(self, console: Console) -> None:
        for line in self.lines():
            console.result(line)
        if self.estimates:
            print_estimates(console, self.estimates.title, self.estimates.systems)
        rows = [[name, *map(percent, shares), *self._row(name)] for name, shares in self.shares.items()]
        if rows:
            share = "share with earlier labels" if self.earlier else "share without labels"
            more = ["share of labels", "95 % interval"] if self.by_labels else []
            console.table("", ["teacher", share, "share with labels", *more], rows)
        before = "with earlier labels" if self.earlier else "without labels"
        for when, place, fix in ((before, 0, "use the labels"), ("with labels", 1, "label more texts")):
            if teachers := self._contradicted(place):
                console.result(f"shares {when} are outside their intervals ({shown_names(teachers)}): {fix}")

    def _row(self, teacher: str) -> list[str]:
        if not self.by_labels:
            return []
        share, low, high = self.by_labels[teacher]
        return [percent(share), bounds(low, high)]

    def _contradicted(self, place: int) -> list[str]:
        """Returns the teachers whose share, before or with the labels, is outside the interval."""
        return [name for name, (_, *ends) in self.by_labels.items() if not _is_near(self.shares[name][place], *ends)]


def _is_near(share: float, low: float, high: float) -> bool:
    return low - LEAST_ERROR <= share <= high + LEAST_ERROR


def _of(count: int, texts: str) -> str:
    return f"{count:,} of {texts} {'has' if count == 1 else 'have'}"


def label_effect(before: Run, after: Run) -> LabelEffect:
    """Compares the targets of a run without labels, or with the earlier ones, and of one with them."""
    earlier, given = (given_labels(run) or GivenLabels({}) for run in (before, after))
    old, new = _targets(before, given), _targets(after, given)
    compared, over_union = not old.teachers.null_count(), gives_label_distributions(target_facts(after)["objective"])
    added = {key: label for key, label in given.by_key.items() if key not in earlier.by_key}
    right = _right(after, old, added) if over_union and added else None
    return LabelEffect(
        labels=len(given.by_key),
        unknown=share_of_unknown(after, given),
        empty=given.empty,
        earlier=len(earlier.by_key),
        dropped=len(earlier.by_key.keys() - given.by_key.keys()),
        texts=len(old.labels),
        moved=int((old.teachers != new.teachers).sum()) if compared else None,
        changed=int((old.labels != new.labels).sum()),
        right_before=None if right is None else int(right.sum()),
        shares=_shares(old.teachers, new.teachers, list(label_space(after).columns)) if compared else {},
        by_labels=_by_labels(after, given) if compared else {},
        estimates=_estimates(after, None if earlier.by_key else old, given),
    )


def _right(run: Run, targets: _Targets, labels: Mapping[bytes, str]) -> Array:
    """Returns whether the targets of these texts have their labels first."""
    names = label_space(run).names
    return np.array([names[targets.labels[targets.rows[key]]] == label for key, label in labels.items()])


def _estimates(run: Run, old: _Targets | None, given: GivenLabels) -> Estimates | None:
    """Returns the estimates; `old` are targets of which no label is used."""
    gold = {key: given.by_key[key] for key in given.sample}
    if not gold:
        return None
    right = right_texts(estimate_inputs(run, train_part(run), gold))
    systems: list[SystemEstimate] = [
        {**system, "name": "targets with labels"} if system["kind"] == "targets" else system
        for system in right.systems()
    ]
    if right.cross_validated is not None and old is not None:
        before = _right(run, old, gold)
        systems.insert(0, estimate("targets without labels", "targets", before))
    return Estimates(len(gold), is_random_sample(run), given.outside_sample, systems)


@dataclass(frozen=True)
class _Targets:
    rows: dict[bytes, int]
    """The row of each labelled text."""
    labels: Array
    """The position of each text's largest target."""
    teachers: pl.Series


def _targets(run: Run, given: GivenLabels) -> _Targets:
    rows, labels, teachers, start = dict[bytes, int](), list[Array](), list[pl.Series](), 0
    for table in read_targets(run):
        keys = enumerate(table.column("key").to_pylist(), start)
        rows |= {key: row for row, key in keys if key in given.by_key}
        labels.append(matrix(table.column("target")).argmax(axis=1))
        teachers.append(pl.Series(table.column("teacher"), dtype=pl.String))
        start += len(table)
    return _Targets(rows, np.concatenate(labels), pl.concat(teachers))


def _shares(before: pl.Series, after: pl.Series, teachers: Sequence[str]) -> dict[str, tuple[float, float]]:
    counts = {name: [int((texts == name).sum()) for texts in (before, after)] for name in teachers}
    return {name: (old / len(before), new / len(after)) for name, (old, new) in counts.items()}


def _by_labels(run: Run, given: GivenLabels) -> dict[str, tuple[float, float, float]]:
    space, texts = label_space(run), len(given.sample)
    if space.shares_labels or given.unknown or not texts or not is_random_sample(run):
        return {}
    counts, errors = Counter(given.by_key[key] for key in given.sample), errors_of(len(space.columns))
    totals = {name: sum(counts[space.names[place]] for place in own) for name, own in space.columns.items()}
    return {name: (total / texts, *interval(total / texts, texts, errors)) for name, total in totals.items()}


def how_to_use(path: str, overrides: Sequence[str], config: Path) -> str:
    """Returns the command, and the fields of the experiment file, that use the labels."""
    labels = as_yaml(path)
    others = [override for override in overrides if not override.startswith("labels=")]
    command = f"amalgam run {shlex.join([f'labels={labels}', *others])}{file_option(config)}"
    fields = [f"`labels: {labels}`", *(f"`{override}`" for override in others)]
    return f"to use them: {command}, or set {', '.join(fields)} in the experiment file"
