"""Evaluates every system on the labelled test texts over the union of labels; the main metric is accuracy.

Systems: each teacher, the ensemble, zero-shot, the student. Buckets are read in groups, and three numbers per text and
system are kept, so memory does not grow with texts times labels.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from amalgam.data.arrays import Array, softmax
from amalgam.data.keys import LabelSpace, union_of
from amalgam.data.lazy import np, pa, pl, pq
from amalgam.data.parquet import SIMILARITIES, arrow_schema, build_table, parquet_options, places_in
from amalgam.data.tokens import TokenRows
from amalgam.pipeline.errors import DataError, WorkError
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.cached.read import CacheReader
from amalgam.stages.common.corpus import Bucket, Part, fields, neighbouring_buckets, read_bucket
from amalgam.stages.report.json_types import SystemScores

if TYPE_CHECKING:
    from amalgam.stages.common.inference.batches import Classifier
    from amalgam.stages.common.inference.states import Encoder

TIE = 1e-6
"""Weight of a probability that is added to its logit: far less than different logits in half precision differ by."""
MOST_MOVED = 0.02
"""Share of the texts on which student and ensemble differ that may be moved, by rounding; more: another student."""
GROUP_TEXTS = 4096
"""Texts with a score for every label in memory at a time."""


# ---- zero-shot: the label name nearest to the text in the encoder's space


def write_similarities(
    folder: Path, buckets: Iterable[tuple[pa.Table, TokenRows]], encoder: Encoder, names: Sequence[str]
) -> None:
    """Writes the cosine similarity of every text to every label name; a bucket is its keys and tokens."""
    schema, name_states = arrow_schema(SIMILARITIES, {"similarity": len(names)}), encoder.name_states(names)
    with pq.ParquetWriter(folder / "similarities.parquet", schema, **parquet_options(schema)) as writer:
        for rows, tokens in buckets:
            similarity = (encoder.pooled(tokens) @ name_states.T).astype(np.float32)
            writer.write_table(build_table(SIMILARITIES, {"key": rows.column("key"), "similarity": similarity}))


# ---- predictions of all systems


class Picked(IntEnum):
    """How a labelled test text was picked."""

    RANDOM = 0
    """Not selected."""
    DIFFERING = 1
    """Selected because student and ensemble differ."""
    MOVED = 2
    """The same, but one of the two now predicts another label."""
    HARD = 3
    """Selected because a model is unsure of it, or another student differs: there the ensemble is often wrong."""


class SystemPredictions(NamedTuple):
    """Three numbers per text of a model's probabilities, for any number of labels."""

    label: Array
    """The most probable label: the first of equals in the union, for a teacher in its own order."""
    confidence: Array
    """Its probability; nan where some probability of the text is no number."""
    of_gold: Array

    @classmethod
    def of(cls, probabilities: Array, gold: Array) -> Self:
        """Takes probabilities [n, C] and gold [n] by position in the union."""
        usable = np.isfinite(probabilities).all(axis=1)
        confidence = np.where(usable, probabilities.max(axis=1, initial=-np.inf), np.nan)
        return cls(probabilities.argmax(axis=1), confidence, probabilities[np.arange(len(gold)), gold])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def prefixes_and_keys(buckets: Sequence[Bucket], rows: pa.Table) -> tuple[list[str], pl.Series]:
    """Returns the prefixes of the buckets and the keys of the rows, by which `CacheReader` reads predictions."""
    return [bucket.prefix for bucket in buckets], pl.Series("key", rows.column("key"), pl.Binary)


@dataclass(frozen=True, kw_only=True)
class TeacherInputs:
    """The labels and the teachers' cached predictions, resolved from the run."""

    store: Store
    labels: LabelSpace
    reader: CacheReader | None
    """Reads the teachers' cached predictions; None without teachers."""

    def teacher_logits(self, buckets: Sequence[Bucket], rows: pa.Table) -> dict[str, Array]:
        """Returns the cached logits of each teacher on rows of these buckets; empty without teachers."""
        if self.reader is None:
            return {}
        prefixes, keys = prefixes_and_keys(buckets, rows)
        logits = {name: self.reader.logits(name, prefixes, keys) for name in self.labels.columns}
        return {name: column.to_numpy().astype(np.float64) for name, column in logits.items()}

    def own_predictions(
        self, predicted: Mapping[str, Array], buckets: Sequence[Bucket], rows: pa.Table
    ) -> dict[str, Array]:
        """Returns the labels that teachers predict, by position in the union; -1 where it is their catch_all."""
        if self.reader is None:
            return {}
        prefixes, keys = prefixes_and_keys(buckets, rows)
        return {
            name: np.where(self.reader.predicts_none(name, prefixes, keys), -1, labels)
            for name, labels in predicted.items()
        }


@dataclass(frozen=True, kw_only=True)
class EvaluationInputs(TeacherInputs):
    """Everything that the evaluation reads."""

    test: Part
    similarities: Path
    system: str
    """The system that the report is about."""
    student: Classifier | None
    calibration_bins: int
    unknown_label: str | None
    """Gold label of texts that belong to no label of the union."""
    selected: Mapping[bytes, Sequence[str | None]]
    """The selected test texts by key; the values are those of `selected_in`."""


@dataclass(frozen=True)
class TestAnswers:
    """Predictions of every system on labelled test texts, in key order; labels are positions in the union."""

    rows: Array
    """Positions in the test part."""
    gold: Array
    own: dict[str, Array]
    """By teacher: its prediction among its own labels; -1 where it predicts its catch_all."""
    systems: dict[str, SystemPredictions]
    """By system, in the order of the table."""
    letters: Array
    """Length of each text in letters."""
    seconds: float
    """Time of the student's predictions."""
    scores: Array = field(default_factory=lambda: np.zeros(0))
    """The student's unknown score of each text; empty without a student."""
    unknown_scores: Array = field(default_factory=lambda: np.zeros(0))
    """The scores of the texts with the unknown label."""
    picked: Array = field(default_factory=lambda: np.zeros(0, np.int8))
    """How each text was picked, a `Picked`."""
    unknown_selected: Array = field(default_factory=lambda: np.zeros(0, bool))
    """Whether each text with the unknown label was selected."""
    outside_selected: Array = field(default_factory=lambda: np.zeros(0, bool))
    """Whether each text with another label of no teacher was selected."""

    def where(self, kept: Array) -> TestAnswers:
        return replace(
            self,
            rows=self.rows[kept],
            gold=self.gold[kept],
            own={name: labels_of[kept] for name, labels_of in self.own.items()},
            systems={
                name: SystemPredictions(*(column[kept] for column in predictions))
                for name, predictions in self.systems.items()
            },
            letters=self.letters[kept],
            scores=self.scores[kept] if len(self.scores) else self.scores,
            picked=self.picked[kept],
        )


def without_selected(answers: TestAnswers) -> TestAnswers:
    """Leaves out selected texts, which are harder than others; without other texts returns all."""
    random = answers.picked == Picked.RANDOM
    if not random.any():
        return answers
    unknown, outside = ~answers.unknown_selected, answers.outside_selected[~answers.outside_selected]
    return replace(answers.where(random), unknown_scores=answers.unknown_scores[unknown], outside_selected=outside)


def predict_test(inputs: EvaluationInputs) -> TestAnswers:
    similarities, groups, first = pl.scan_parquet(inputs.similarities, glob=False), [], 0
    for buckets in neighbouring_buckets(inputs.test.buckets, GROUP_TEXTS):
        rows = sum(bucket.rows for bucket in buckets)
        similar = similarities.slice(first, rows).select("similarity").collect()["similarity"]
        groups.append(_predict(inputs, buckets, first, similar.to_numpy().astype("float64")))
        first += rows
    return TestAnswers(
        rows=np.concatenate([group.rows for group in groups]),
        gold=np.concatenate([group.gold for group in groups]),
        own={name: np.concatenate([group.own[name] for group in groups]) for name in groups[0].own},
        systems={
            name: SystemPredictions.joined([group.systems[name] for group in groups]) for name in groups[0].systems
        },
        letters=np.concatenate([group.letters for group in groups]),
        seconds=sum(group.seconds for group in groups),
        scores=np.concatenate([group.scores for group in groups]),
        unknown_scores=np.concatenate([group.unknown_scores for group in groups]),
        picked=_of_this_student(np.concatenate([group.picked for group in groups])),
        unknown_selected=np.concatenate([group.unknown_selected for group in groups]),
        outside_selected=np.concatenate([group.outside_selected for group in groups]),
    )


def gold_indices(labels: LabelSpace, table: pa.Table) -> Array:
    """Returns the position of each text's gold label in the union; -1 without one."""
    return places_in(table.column("label"), labels.names)


def _predict(inputs: EvaluationInputs, buckets: Sequence[Bucket], first: int, similar: Array) -> TestAnswers:
    """Leaves out texts with a gold label of no teacher: an earlier stage refused them or was set to skip them."""
    labels = inputs.labels
    table = pa.concat_tables(read_bucket(inputs.store, bucket) for bucket in buckets)
    gold = gold_indices(labels, table)
    kept = gold >= 0
    is_unknown = np.array([label == inputs.unknown_label for label in table.column("label").to_pylist()], bool)
    unknown, outside = table.filter(pa.array(is_unknown)), table.filter(pa.array(~kept & ~is_unknown))
    table, gold, similar = table.filter(pa.array(kept)), gold[kept], similar[kept]
    systems: dict[str, SystemPredictions] = {}
    logits = inputs.teacher_logits(buckets, table)
    predicted = teacher_labels(logits, labels)
    for name, own in predicted.items():
        # Labels of other teachers get 0, so their NLL is infinite.
        union = np.zeros((len(gold), len(labels.names)))
        union[:, list(labels.columns[name])] = softmax(logits[name])
        systems[f"teacher:{name}"] = SystemPredictions.of(union, gold)._replace(label=own)
    if logits:
        systems["ensemble"] = SystemPredictions.of(ensemble(logits, labels), gold)
    systems["zero-shot"] = SystemPredictions.of(softmax(similar), gold)
    texts, began = fields(table), time.perf_counter()
    scores, unknown_scores, unknown_selected = np.zeros(0), np.zeros(0), np.zeros(0, bool)
    if inputs.student is not None:
        student_logits, scores = inputs.student.logits_and_scores(texts)
        systems[inputs.system] = SystemPredictions.of(softmax(student_logits), gold)
    seconds, letters = time.perf_counter() - began, np.array([sum(map(len, text)) for text in texts], np.int64)
    if inputs.student is not None and inputs.unknown_label is not None:
        _, unknown_scores = inputs.student.logits_and_scores(fields(unknown))
        unknown_selected = _are_selected(unknown, inputs.selected)
    return TestAnswers(
        rows=first + np.flatnonzero(kept),
        gold=gold,
        own=inputs.own_predictions(predicted, buckets, table),
        systems=systems,
        letters=letters,
        seconds=seconds,
        scores=scores,
        unknown_scores=unknown_scores,
        picked=_picked(inputs, table, systems),
        unknown_selected=unknown_selected,
        outside_selected=_are_selected(outside, inputs.selected),
    )


def _are_selected(table: pa.Table, selected: Collection[bytes]) -> Array:
    return np.array([key in selected for key in table.column("key").to_pylist()], bool)


def _picked(inputs: EvaluationInputs, table: pa.Table, systems: Mapping[str, SystemPredictions]) -> Array:
    """Returns how each text was picked."""
    picked = np.full(len(table), Picked.RANDOM, np.int8)
    names, pair = inputs.labels.names, [systems.get(name) for name in (inputs.system, "ensemble")]
    for row, key in enumerate(table.column("key").to_pylist()):
        if key in inputs.selected:
            labels = [system and names[int(system.label[row])].strip() for system in pair]
            written = inputs.selected[key]
            picked[row] = Picked.HARD if not written else Picked.DIFFERING if labels == written else Picked.MOVED
    return picked


def _of_this_student(picked: Array) -> Array:
    """Makes texts hard that were selected because another student differs; no text remains a moved one."""
    differing = np.isin(picked, (Picked.DIFFERING, Picked.MOVED))
    is_another = (picked == Picked.MOVED).sum() > MOST_MOVED * differing.sum()
    return np.where(differing, np.int8(Picked.HARD if is_another else Picked.DIFFERING), picked)


def teacher_labels(logits: Mapping[str, Array], labels: LabelSpace) -> dict[str, Array]:
    """Returns the first label of each teacher by position in the union."""
    return {name: np.array(labels.columns[name])[scores.argmax(axis=1)] for name, scores in logits.items()}


def ensemble(logits: Mapping[str, Array], labels: LabelSpace) -> Array:
    """Applies one softmax to the concatenated logits of all teachers, then sums the entries of shared labels.

    In half precision logits of two teachers are often equal. The teacher's own probability decides, not their order.
    """
    values = [scores + TIE * softmax(scores) for scores in logits.values()]
    probabilities = softmax(np.concatenate(values, axis=1))
    union = np.zeros((len(probabilities), len(labels.names)))
    columns = [label for teacher in logits for label in labels.columns[teacher]]
    for column, label in enumerate(columns):
        union[:, label] += probabilities[:, column]
    return union


def measure_student(
    student: Classifier, inputs: TeacherInputs, test: Part, selected: Collection[bytes], bins: int
) -> tuple[Array, SystemScores | None]:
    """Measures a finished student on the texts that the report measures; its labels may differ from the union.

    Returns the texts that it predicts right, and its scores; no scores if all texts were `selected`.
    """
    union = union_of({"teachers": inputs.labels.names, "student": student.labels})
    columns, groups = list(union.columns["student"]), []
    for buckets in neighbouring_buckets(test.buckets, GROUP_TEXTS):
        table = pa.concat_tables(read_bucket(inputs.store, bucket) for bucket in buckets)
        gold = gold_indices(inputs.labels, table)
        kept = (gold >= 0) & ~_are_selected(table, selected)
        probabilities = np.zeros((int(kept.sum()), len(union.names)))
        probabilities[:, columns] = softmax(student.logits(fields(table.filter(pa.array(kept)))))
        predictions = SystemPredictions.of(probabilities, gold[kept])
        groups.append((predictions, gold[kept]))
    joined = SystemPredictions.joined([predictions for predictions, _ in groups])
    gold = np.concatenate([labels for _, labels in groups])
    scores = evaluate(joined, gold, LabelSpace(union.names, {}), bins) if len(gold) else None
    return joined.label == gold, scores


# ---- metrics


def evaluate_systems(inputs: EvaluationInputs, answers: TestAnswers) -> dict[str, SystemScores]:
    systems = {
        name: evaluate(predictions, answers.gold, inputs.labels, inputs.calibration_bins)
        for name, predictions in answers.systems.items()
    }
    # A similarity has an order and no scale, so its probabilities mean nothing.
    systems["zero-shot"] |= {"nll_nats": None, "nll_infinite": 0, "ece": None}
    return systems


def evaluate(predictions: SystemPredictions, gold: Array, labels: LabelSpace, bins: int) -> SystemScores:
    """Returns the report's figures of one model on labelled texts; gold [n] is by position in the union.

    - macro_f1: mean over the labels that occur in gold or in the predictions; one that is never right counts 0.
    - label_f1: the same by label name, None where it occurs in neither.
    - nll_nats: mean negative log-likelihood; None when some gold label has probability 0, which makes it infinite.
      nll_infinite: how many have.
    - ece: expected calibration error over equal bins of confidence: the mean over texts of |accuracy - mean confidence|
      of the text's bin.
    - slice_accuracy: over the texts whose gold label is the teacher's, predictions over the union; None without texts.
    - confusion: counts, a row per gold label, a column per predicted label.
    """
    _check(predictions, gold)
    right = predictions.label == gold
    confusion = np.zeros((len(labels.names), len(labels.names)), np.int64)
    np.add.at(confusion, (gold, predictions.label), 1)
    occurs = confusion.sum(axis=0) + confusion.sum(axis=1)
    f1 = np.full(len(occurs), np.nan)
    np.divide(2.0 * np.diag(confusion), occurs, out=f1, where=occurs > 0)
    bin_of = calibration_bin(predictions.confidence, bins)
    gaps = np.bincount(bin_of, weights=right - predictions.confidence, minlength=bins)
    infinite = int((predictions.of_gold <= 0).sum())
    slices = {teacher: right[np.isin(gold, columns)] for teacher, columns in labels.columns.items()}
    return {
        "n": len(gold),
        "accuracy": float(right.mean()),
        "macro_f1": float(np.nanmean(f1)),
        "label_f1": {
            name: None if np.isnan(value) else float(value) for name, value in zip(labels.names, f1, strict=True)
        },
        "nll_nats": None if infinite else float(-np.log(predictions.of_gold).mean()),
        "nll_infinite": infinite,
        "ece": float(np.abs(gaps).sum() / len(gold)),
        "slice_accuracy": {teacher: float(texts.mean()) if len(texts) else None for teacher, texts in slices.items()},
        "slice_n": {teacher: len(texts) for teacher, texts in slices.items()},
        "confusion": confusion.tolist(),
    }


def calibration_bin(confidence: Array, bins: int) -> Array:
    """Returns the bin (low, high] of each confidence."""
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def _check(predictions: SystemPredictions, gold: Array) -> None:
    if not len(gold):
        raise DataError("there are no labelled texts to measure on", where="corpus.test", fix="give labelled texts")
    wrong = np.flatnonzero(~np.isfinite(predictions.confidence))
    if len(wrong):
        raise WorkError(
            f"{len(wrong):,} predictions are not numbers" if len(wrong) > 1 else "a prediction is not a number",
            where=f"rows {', '.join(map(str, wrong[:8].tolist()))}",
            fix="train the model again with a lower learning rate",
        )
