"""Describes a student without labelled test texts, and selects the texts whose labels decide about it.

The student predicts a sample of the training texts. Keys are hashes, so the first texts in key order are a random
sample.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from amalgam.data.arrays import Array, Keys, held_out_keys, softmax
from amalgam.data.keys import LabelSpace
from amalgam.data.lazy import np, pa
from amalgam.data.parquet import key_array, matrix
from amalgam.pipeline.config.schema import Corpus
from amalgam.stages.common.corpus import Bucket, Part, fields, first_buckets, read_bucket, rows_at
from amalgam.stages.common.given_labels import (
    DIFFER,
    KEY,
    PREDICTED_COLUMNS,
    RANDOM,
    GivenLabels,
    free_name,
    label_column,
)
from amalgam.stages.report import verdict_types as types
from amalgam.stages.report.evaluation import TeacherInputs, ensemble, prefixes_and_keys, teacher_labels
from amalgam.stages.report.quality import coverage, paired_counts
from amalgam.stages.report.weight_estimates import WeighedTexts, weight_estimates
from amalgam.stages.weigh_teachers import linear_map
from amalgam.stages.weigh_teachers.neighbours import Space
from amalgam.stages.weigh_teachers.signals import AccuracyEstimate

if TYPE_CHECKING:
    from amalgam.stages.common.inference.batches import Classifier

MOST_HELD_OUT = 1_000
"""Most held-out texts among those that the student predicts."""

MOST_READ = 20_000
"""Most training texts whose keys are read."""

LEAST_HELD_OUT = 20
"""Fewer held-out texts are too few for an agreement; it then counts all texts."""

MOST_TO_LABEL, MOST_DIFFERING = 200, 100
"""Texts to label, and most of them on which student and ensemble differ; the others are random."""


@dataclass(frozen=True, kw_only=True)
class LabellingInputs(TeacherInputs):
    """Everything that the description of the student without test texts reads."""

    train: Part
    student: Classifier
    targets: Iterable[pa.Table] | None
    """One table for each bucket, if a target is a distribution over the labels."""
    held_out: float
    corpus: Corpus
    given: GivenLabels
    """The labels in `labels`; their texts are not labelled again."""
    read_weights: Callable[[Sequence[Bucket]], pa.Table] | None
    """Reads the teachers' weights on the texts of buckets, if they estimate accuracies."""
    accuracy: AccuracyEstimate | None
    """The estimated accuracy of the targets."""
    read_features: Callable[[Keys, Sequence[str]], Space] | None
    """Reads the states of the student's encoder before training, by key and bucket, if they are cached."""


@dataclass(frozen=True)
class _FirstTexts:
    """The first training texts by key."""

    buckets: Sequence[Bucket]
    keys: Keys
    held_out: Array
    targets: Array | None
    """[texts, labels], if targets are distributions over the labels."""

    @property
    def has_target(self) -> Array:
        """Returns whether each text has a target; a text with a gold label of no teacher has none [texts]."""
        return np.ones(len(self.keys), bool) if self.targets is None else np.asarray(self.targets.any(axis=1))

    @property
    def predicted_rows(self) -> Array:
        """Returns the rows of the first held-out texts, which the student predicts."""
        return np.flatnonzero(self.held_out & self.has_target)[:MOST_HELD_OUT]


@dataclass(frozen=True)
class _Sample:
    """Training texts, one row each."""

    table: pa.Table
    held_out: Array
    reference: Array
    """Targets, or the ensemble if targets are no distributions over the labels [texts, labels]."""
    reference_name: types.Reference
    ensemble: Array | None
    student: Array
    weighed: WeighedTexts | None


def compared_with_linear_map(inputs: LabellingInputs) -> types.PairedCounts | None:
    """Compares the student with a linear map of its encoder's states that learned the same targets.

    A prediction of a held-out text is right if it is the label of the target.
    """
    return _compared(inputs, _first_texts(inputs), None) if inputs.read_features else None


def _compared(inputs: LabellingInputs, first: _FirstTexts, predicted: Array | None) -> types.PairedCounts | None:
    """`predicted`: the student's labels of the texts `first.predicted_rows`, if it predicted them already."""
    rows = first.predicted_rows
    if first.targets is None or inputs.read_features is None or not LEAST_HELD_OUT <= len(rows) < len(first.keys):
        return None
    if predicted is None:
        texts = fields(rows_at(inputs.store, first.buckets, rows.tolist()))
        predicted = inputs.student.logits(texts).argmax(axis=1)
    features = inputs.read_features(first.keys, [bucket.prefix for bucket in first.buckets])
    labels = first.targets.argmax(axis=1)
    linear = linear_labels(features, labels, first.held_out, len(inputs.labels.names))[: len(rows)]
    return paired_counts(predicted == labels[rows], linear == labels[rows])


def linear_labels(features: Space, labels: Array, is_held_out: Array, count: int) -> Array:
    """Returns the labels of held-out texts by ridge regression on the labels of the others, of `count` labels."""
    training, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    coefficients = linear_map.LinearMap.of(features[training]).coefficients(labels[training], count)
    return linear_map.predicted(features[held_out], coefficients).argmax(axis=1)


def unlabelled_quality(inputs: LabellingInputs) -> tuple[types.UnlabelledQuality, types.PairedCounts | None, str]:
    """Returns the description of the student without test texts, its comparison, and the texts to label as csv."""
    first = _first_texts(inputs)
    sample = _sample(inputs, first)
    keys = sample.table.column("key").to_pylist()
    labels, random = inputs.given.written(inputs.corpus), inputs.given.sample | inputs.given.unknown_sample
    sampled = {row for row, key in enumerate(keys) if key in random}
    labelled = {row for row, key in enumerate(keys) if key in labels} - sampled
    predicted, chosen = sample.student.argmax(axis=1), select(sample.student, sample.ensemble, sampled, labelled)
    same = predicted == sample.reference.argmax(axis=1)
    has_held_out = sample.held_out.sum() >= LEAST_HELD_OUT
    compared = sample.held_out if has_held_out else np.ones(len(predicted), dtype=bool)
    quality: types.UnlabelledQuality = {
        "n": len(predicted),
        "held_out": int(sample.held_out.sum()),
        "agreement": {
            "reference": sample.reference_name,
            "texts": "training texts" if compared.all() else "held-out texts",
            "n": int(compared.sum()),
            "right": int(same[compared].sum()),
        },
        "ensemble": None if sample.ensemble is None else int((predicted == sample.ensemble.argmax(axis=1)).sum()),
        "labels": _shares(inputs.labels, predicted, sample),
        "coverage": coverage(sample.student.max(axis=1)[compared], same[compared]),
        "to_label": sum(row not in labelled for row, _ in chosen),
        "estimates": _estimates(inputs, sample, predicted),
    }
    return quality, _compared(inputs, first, predicted[sample.held_out]), _csv(inputs, sample, chosen)


def _estimates(inputs: LabellingInputs, sample: _Sample, predicted: Array) -> types.WeightEstimates | None:
    if sample.weighed is None or sample.ensemble is None or inputs.accuracy is None:
        return None
    ensemble = sample.ensemble.argmax(axis=1)
    return weight_estimates(sample.weighed, inputs.accuracy, inputs.train.texts, ensemble=ensemble, student=predicted)


def _shares(labels: LabelSpace, predicted: Array, sample: _Sample) -> list[types.LabelShare]:
    counts = partial(np.bincount, minlength=len(labels.names))
    first, mass = counts(sample.reference.argmax(axis=1)).tolist(), sample.reference.sum(axis=0).tolist()
    ensemble = None if sample.ensemble is None else counts(sample.ensemble.argmax(axis=1)).tolist()
    return [
        {
            "label": name,
            "predicted": int((predicted == index).sum()),
            "expected": first[index],
            "mass": mass[index],
            "ensemble": ensemble and ensemble[index],
            "teachers": teachers,
        }
        for index, (name, teachers) in enumerate(zip(labels.names, labels.owners, strict=True))
    ]


# ---- the sample


def _first_texts(inputs: LabellingInputs) -> _FirstTexts:
    buckets = first_buckets(inputs.train, MOST_READ)
    keys = key_array(pa.concat_tables(read_bucket(inputs.store, bucket, ["key"]) for bucket in buckets).column("key"))
    targets = [table.select(["target"]) for table in islice(inputs.targets or (), len(buckets))]
    target = matrix(pa.concat_tables(targets).column("target")) if targets else None
    return _FirstTexts(buckets, keys, held_out_keys(keys, inputs.held_out), target)


def _sample(inputs: LabellingInputs, first: _FirstTexts) -> _Sample:
    """Predicts the first texts, held-out ones first."""
    rows = first.predicted_rows
    others = np.flatnonzero(~first.held_out & first.has_target)[: types.MOST_PREDICTED - len(rows)]
    chosen = np.sort(np.concatenate([rows, others]))
    table = rows_at(inputs.store, first.buckets, chosen.tolist())
    logits = inputs.teacher_logits(first.buckets, table)
    of_ensemble = ensemble(logits, inputs.labels) if logits else None
    reference = of_ensemble if first.targets is None else first.targets[chosen]
    if reference is None:
        raise AssertionError("without teachers, targets are distributions over the labels")
    return _Sample(
        table,
        first.held_out[chosen],
        reference,
        "ensemble" if first.targets is None else "targets",
        of_ensemble,
        softmax(inputs.student.logits(fields(table))),
        _weighed(inputs, first, table, chosen),
    )


def _weighed(inputs: LabellingInputs, first: _FirstTexts, table: pa.Table, chosen: Array) -> WeighedTexts | None:
    """Returns the teachers' predictions and weights on the rows `chosen` of the texts."""
    if inputs.reader is None or inputs.read_weights is None:
        return None
    prefixes, keys = prefixes_and_keys(first.buckets, table)
    answers = {name: inputs.reader.predictions(name, prefixes, keys) for name in inputs.labels.columns}
    predicted = teacher_labels({name: answer.logits.to_numpy() for name, answer in answers.items()}, inputs.labels)
    return WeighedTexts(
        np.stack([*predicted.values()], axis=1),
        np.stack([answer.confidence.to_numpy() for answer in answers.values()], axis=1),
        matrix(inputs.read_weights(first.buckets).take(pa.array(chosen)).column("weight")).astype(np.float64),
        first.held_out[chosen] & (first.held_out[chosen].sum() >= LEAST_HELD_OUT),
    )


# ---- the texts to label


def select(
    student: Array, ensemble: Array | None, sampled: Collection[int] = (), labelled: Collection[int] = ()
) -> list[tuple[int, str]]:
    """Returns the rows to label in order, with the reason: first those where student and ensemble differ.

    Both groups are the first rows by key, so they are random: only then they compare the two and estimate an accuracy.
    `sampled` rows have a label and are random ones; `labelled` rows have a label and are none. Rows between the latter
    are none either, so the groups follow the last one, or contain them.
    """
    rows = [row for row in range(len(student)) if row not in sampled]
    following = [row for row in rows if row > max(labelled, default=-1)]
    rows = following if len(following) >= MOST_TO_LABEL else rows
    free = [row for row in rows if row not in labelled]
    if ensemble is None or len(free) <= MOST_TO_LABEL:
        return [(row, RANDOM) for row in _first(rows, labelled, MOST_TO_LABEL)] if free else []
    differs = student.argmax(axis=1) != ensemble.argmax(axis=1)
    random = _first(rows, labelled, MOST_TO_LABEL - min(int(differs[free].sum()), MOST_DIFFERING))
    differing = _first([row for row in rows[len(random) :] if differs[row]], labelled, MOST_DIFFERING)
    return [*((row, DIFFER) for row in differing), *((row, RANDOM) for row in random)]


def _first(rows: list[int], labelled: Collection[int], count: int) -> list[int]:
    """Returns the first rows, up to the one that completes this many without a label."""
    free = [place for place, row in enumerate(rows) if row not in labelled]
    return rows[: free[count - 1] + 1] if len(free) >= count else rows


def header_of(corpus: Corpus) -> list[str]:
    """Returns the header: the corpus's own columns are named as in its files."""
    own_id = [] if corpus.id == "auto" else [corpus.id]
    predicted = (free_name(name, corpus) for name in PREDICTED_COLUMNS)
    return [free_name(KEY, corpus), *own_id, *corpus.text, label_column(corpus), *predicted]


def _csv(inputs: LabellingInputs, sample: _Sample, chosen: Sequence[tuple[int, str]]) -> str:
    names, labels = inputs.labels.names, inputs.given.written(inputs.corpus)
    texts = sample.table.take(pa.array([row for row, _ in chosen], pa.int64())).to_pylist()
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(header_of(inputs.corpus))
    for (row, why), text in zip(chosen, texts, strict=True):
        columns = [text[name] or "" for name in ("text", "text_2")[: len(inputs.corpus.text)]]
        predicted = names[int(sample.student[row].argmax())]
        by_ensemble = names[int(sample.ensemble[row].argmax())] if sample.ensemble is not None else ""
        key, own_id = text["key"], [] if inputs.corpus.id == "auto" else [text["id"] or text["key"].hex()]
        writer.writerow([key.hex(), *own_id, *columns, labels.get(key, ""), predicted, by_ensemble, why])
    return file.getvalue()
