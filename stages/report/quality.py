"""Describes the reported system on the test texts, and the targets on a sample of the training texts.

Every list is cut to a length that a page can show, and states its full length. Keys are hashes, so the first texts in
key order are a random sample and the cost does not grow with the texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import combinations, islice, permutations

from amalgam.data.arrays import Array
from amalgam.data.keys import LabelSpace
from amalgam.data.lazy import np, pa
from amalgam.data.parquet import matrix
from amalgam.pipeline.config.schema import TEACHER
from amalgam.pipeline.storage.store import Store
from amalgam.stages.build_targets.stage import TargetFacts
from amalgam.stages.common.corpus import Bucket, Part, fields, first_buckets, read_bucket, rows_at
from amalgam.stages.common.intervals import interval_of_auroc
from amalgam.stages.report import json_types
from amalgam.stages.report.audit import AuditedTexts, AuditInputs, audit_texts, audited_texts
from amalgam.stages.report.evaluation import (
    EvaluationInputs,
    Picked,
    SystemPredictions,
    TestAnswers,
    calibration_bin,
    gold_indices,
    without_selected,
)
from amalgam.stages.report.verdict_types import CoverageCurve, Kind, PairedCounts, RivalCounts, Threshold
from amalgam.stages.target_methods import gives_label_distributions

MOST_ERRORS, MOST_PAIRS, MOST_DISPUTED = 12, 15, 12

MATRIX = 16
"""Most rows of the confusion matrix: the labels with the most errors, and one row for the rest."""

MOST_LETTERS = 280
"""Letters of a text that are kept."""

MOST_COMPARED = 200_000
"""Most texts for which the right predictions are stored, so that two runs can be compared text by text."""

SAMPLE, LEAST_SAMPLE = 20_000, 2_000

MOST_WORK = 4e9
"""Bound on texts x teachers^3 x labels: the audit recomputes the union without each teacher and each pair."""

BINS = 20

THRESHOLDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Least probabilities at which a student may answer, for the table of coverage."""

CURVE = 50
"""Points of the figure of coverage."""

LEAST_GROUP = 10
"""Least texts of a group of similar length."""

ROUNDING = 1e-3


# ---- the reported system on the test texts


def student_quality(
    inputs: EvaluationInputs, all_answers: TestAnswers, confusion_counts: list[list[int]]
) -> json_types.StudentQuality:
    """Describes the system on the texts that were not selected; the confusion is that of these texts."""
    answers = without_selected(all_answers)
    predictions, labels, gold = answers.systems[inputs.system], inputs.labels, answers.gold
    confusion = np.array(confusion_counts)
    calibrated = [name for name in ("ensemble", inputs.system) if name in answers.systems and name != "zero-shot"]
    right, threshold = predictions.label == gold, inputs.student.unknown_threshold if inputs.student else None
    # Whether any teacher predicts the gold label: the upper bound for a choice among teachers.
    oracle = np.any([predicted == gold for predicted in answers.own.values()], axis=0) if answers.own else None
    own_right = {name: (answers.own[name] == gold)[np.isin(gold, columns)] for name, columns in labels.columns.items()}
    return {
        "classes": _classes(confusion, labels, answers, oracle),
        "confusions": confused_pairs(confusion, labels.names),
        "matrix": confusion_matrix(confusion, labels.names),
        "calibration": {name: calibration(answers.systems[name], gold, inputs.calibration_bins) for name in calibrated},
        "errors": _errors(inputs, answers),
        "wrong": int((~right).sum()),
        "right_hex": right_bits(right),
        "rows": None
        if len(gold) == inputs.test.texts
        else hashlib.sha256(answers.rows.astype("<i8").tobytes()).hexdigest()[:20],
        "teachers": {
            "n": len(gold),
            "oracle": None if oracle is None else int(oracle.sum()),
            "own": {name: {"n": len(hits), "right": int(hits.sum())} for name, hits in own_right.items()},
        },
        "rivals": rivals_of_selected(all_answers, labels, inputs.system),
        "coverage": coverage(predictions.confidence, right),
        "lengths": by_length(answers.letters, right),
        "unknown": None if threshold is None else unknown_quality(answers.scores, answers.unknown_scores, threshold),
    }


def right_bits(right: Array) -> str | None:
    """Returns the bits of the texts that a system predicts right; None for too many texts."""
    return np.packbits(right).tobytes().hex() if len(right) <= MOST_COMPARED else None


def unknown_quality(labelled: Array, unknown: Array, threshold: float) -> json_types.UnknownQuality:
    """Compares the unknown scores of two groups of texts: AUROC with its interval, and shares above thresholds."""
    auroc = low = high = None
    curve: list[json_types.FlaggedShares] = []
    if len(labelled) and len(unknown):
        wins = _share_below(np.sort(labelled), unknown)
        losses = 1 - _share_below(np.sort(unknown), labelled)
        auroc = float(wins.mean())
        low, high = interval_of_auroc(wins, losses)
        thresholds = [np.inf, *np.quantile(labelled, np.linspace(1, 0, CURVE)), -np.inf]
        curve = [
            {"labelled": float((labelled > at).mean()), "unknown": float((unknown > at).mean())} for at in thresholds
        ]
    return {
        "labelled": len(labelled),
        "labelled_flagged": int((labelled > threshold).sum()),
        "unknown": len(unknown),
        "unknown_flagged": int((unknown > threshold).sum()),
        "auroc": auroc,
        "low": low,
        "high": high,
        "curve": curve,
    }


def _share_below(ordered: Array, values: Array) -> Array:
    """Returns the share of the ordered numbers below each value; equal ones count half."""
    below = np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")
    return below / (2 * len(ordered))


def rival_counts(answers: TestAnswers, labels: LabelSpace, system: str) -> list[RivalCounts]:
    """Counts the texts on which the reported system or a rival alone is right."""
    gold = answers.gold
    right = answers.systems[system].label == gold
    kinds: dict[str, Kind] = {"ensemble": "ensemble", "zero-shot": "zero-shot"}
    if len(answers.own) > 1:  # the ensemble of a single teacher is this teacher
        kinds |= {f"{TEACHER}{name}": "teacher" for name in answers.own}
    counts = [
        _rival(name.removeprefix(TEACHER), kind, right, answers.systems[name].label == gold)
        for name, kind in kinds.items()
        if name in answers.systems and name != system
    ]
    for name, predicted in answers.own.items() if len(answers.own) > 1 else ():
        inside = np.isin(gold, labels.columns[name])
        counts.append(_rival(name, "teacher on its own labels", right[inside], (predicted == gold)[inside]))
    frequent = int(np.bincount(gold).argmax())
    counts.append(_rival(labels.names[frequent], "most frequent label", right, gold == frequent))
    return counts


def rivals_of_selected(answers: TestAnswers, labels: LabelSpace, system: str) -> list[RivalCounts]:
    """Compares the ensemble also on texts that were selected at random among those where the two differ.

    All other rivals are compared on random texts alone, and so is the ensemble without such texts.
    """
    random = answers.where(answers.picked == Picked.RANDOM)
    rivals = rival_counts(random, labels, system) if len(random.gold) else []
    if not (answers.picked == Picked.DIFFERING).any():
        return rivals
    fair = rival_counts(answers.where(answers.picked != Picked.HARD), labels, system)
    ensemble: list[RivalCounts] = [{**rival, "selected": True} for rival in fair if rival["kind"] == "ensemble"]
    for rival in (rival for rival in rivals if rival["kind"] == "ensemble"):
        ensemble[0]["on_random"] = (rival["student_right"] - rival["right"]) / rival["n"]
    return [*ensemble, *(rival for rival in rivals if rival["kind"] != "ensemble")]


def _rival(name: str, kind: Kind, ours: Array, theirs: Array) -> RivalCounts:
    """Compares the texts that the reported system and the rival predict right."""
    return {"name": name, "kind": kind, **paired_counts(ours, theirs)}  # type: ignore[typeddict-item]  # no optional key


def paired_counts(ours: Array, theirs: Array) -> PairedCounts:
    """Counts the texts that the student and another system predict right."""
    return {
        "n": len(ours),
        "student_right": int(ours.sum()),
        "right": int(theirs.sum()),
        "gained": int((ours & ~theirs).sum()),
        "lost": int((~ours & theirs).sum()),
    }


def coverage(confidence: Array, right: Array) -> CoverageCurve:
    """Counts the texts that the student answers if it answers only above a probability, and those answered right."""
    order = np.argsort(-confidence, kind="stable")
    sums = np.cumsum(right[order])
    places = np.unique(np.linspace(1, len(order), min(CURVE, len(order))).round().astype(int)) if len(order) else ()
    thresholds: list[Threshold] = [
        {"probability": least, "n": int((confidence >= least).sum()), "right": int(right[confidence >= least].sum())}
        for least in THRESHOLDS
    ]
    return {"thresholds": thresholds, "curve": [{"n": int(n), "right": int(sums[n - 1])} for n in places]}


def by_length(letters: Array, right: Array) -> list[json_types.LengthGroup]:
    """Counts the right predictions in four groups of texts of similar length; no rows for few texts."""
    if len(letters) < 4 * LEAST_GROUP:
        return []
    edges = np.unique(np.quantile(letters, (0.25, 0.5, 0.75)).round().astype(int))
    group = np.searchsorted(edges, letters)
    rows: list[json_types.LengthGroup] = [
        {
            "low": int(letters[inside].min()),
            "high": int(letters[inside].max()),
            "n": int(inside.sum()),
            "right": int(right[inside].sum()),
        }
        for index in range(len(edges) + 1)
        if (inside := group == index).any()
    ]
    return rows if len(rows) > 1 else []


def calibration(predictions: SystemPredictions, gold: Array, bins: int) -> list[json_types.CalibrationBin]:
    """Returns the non-empty bins of confidence, (low, high], with the edges that ECE uses."""
    place, right = calibration_bin(predictions.confidence, bins), predictions.label == gold
    return [
        {
            "low": index / bins,
            "high": (index + 1) / bins,
            "n": int(inside.sum()),
            "confidence": float(predictions.confidence[inside].mean()),
            "accuracy": float(right[inside].mean()),
        }
        for index in range(bins)
        if (inside := place == index).any()
    ]


def _classes(
    confusion: Array, labels: LabelSpace, answers: TestAnswers, oracle: Array | None
) -> list[json_types.LabelQuality]:
    gold, ensemble = answers.gold, answers.systems.get("ensemble")
    return [
        {
            "label": name,
            "teachers": teachers,
            "n": int(confusion[index].sum()),
            "right": int(confusion[index, index]),
            "predicted": int(confusion[:, index].sum()),
            # Texts on which a teacher of this label predicts it.
            "teachers_right": None if oracle is None else int((oracle & (gold == index)).sum()),
            "ensemble": None if ensemble is None else int((ensemble.label == index).sum()),
        }
        for index, (name, teachers) in enumerate(zip(labels.names, labels.owners, strict=True))
    ]


def confused_pairs(confusion: Array, names: tuple[str, ...]) -> json_types.Confusions:
    wrong = confusion * ~np.eye(len(names), dtype=bool)
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [divmod(int(place), len(names)) for place in order if wrong.flat[place]]
    rows: list[json_types.ConfusedPair] = [
        {"gold": names[gold], "predicted": names[label], "n": int(wrong[gold, label]), "of": int(confusion[gold].sum())}
        for gold, label in pairs
    ]
    return {"of": int((wrong > 0).sum()), "pairs": rows}


def confusion_matrix(confusion: Array, names: tuple[str, ...]) -> json_types.ConfusionMatrix:
    """Returns the counts; with many labels, those with the most errors and one last row and column for the rest."""
    if len(names) <= MATRIX:
        return {"labels": list(names), "others": 0, "counts": confusion.tolist()}
    wrong = confusion * ~np.eye(len(names), dtype=bool)
    order = np.argsort(-(wrong.sum(axis=0) + wrong.sum(axis=1)), kind="stable")
    kept, rest = sorted(order[: MATRIX - 1].tolist()), order[MATRIX - 1 :]
    rows = np.concatenate([confusion[kept], confusion[rest].sum(axis=0, keepdims=True)])
    counts = np.concatenate([rows[:, kept], rows[:, rest].sum(axis=1, keepdims=True)], axis=1)
    return {"labels": [names[index] for index in kept], "others": len(rest), "counts": counts.tolist()}


def _errors(inputs: EvaluationInputs, answers: TestAnswers) -> list[json_types.ConfidentError]:
    """Returns the wrong predictions with the highest confidence."""
    predictions, names = answers.systems[inputs.system], inputs.labels.names
    wrong = np.flatnonzero(predictions.label != answers.gold)
    worst = wrong[np.argsort(-predictions.confidence[wrong], kind="stable")[:MOST_ERRORS]]
    texts = texts_at(inputs.store, inputs.test, answers.rows[worst].tolist())
    return [
        {
            "text": texts[answers.rows[row]],
            "gold": names[int(answers.gold[row])],
            "predicted": names[int(predictions.label[row])],
            "probability": float(predictions.confidence[row]),
            "gold_probability": float(predictions.of_gold[row]),
        }
        for row in worst.tolist()
    ]


def texts_at(store: Store, part: Part, rows: Sequence[int]) -> dict[int, str]:
    """Returns shortened texts by their row in the part."""
    if not rows:
        return {}
    ordered = sorted(rows)
    return dict(zip(ordered, map(shortened, fields(rows_at(store, part.buckets, ordered))), strict=True))


def shortened(texts: tuple[str, ...]) -> str:
    """Cuts a long text; the two texts of a pair are joined."""
    text = " ‖ ".join(texts)
    return text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS] + "…"


# ---- the targets on a sample of the training texts


def target_quality(
    inputs: AuditInputs, train: Part, targets: Iterable[pa.Table], facts: TargetFacts
) -> json_types.TargetQuality:
    """Describes the targets, one table for each bucket of `train`."""
    work = max(len(inputs.labels.columns) ** 3 * len(inputs.labels.names), 1)
    buckets = first_buckets(train, min(SAMPLE, max(LEAST_SAMPLE, MOST_WORK / work)))
    keys = pa.concat_tables(read_bucket(inputs.store, bucket, ["key"]) for bucket in buckets).column("key")
    unset = ~inputs.are_learned([bucket.prefix for bucket in buckets], keys)
    quality: json_types.TargetQuality = {
        "texts": train.texts,
        "sample": sum(bucket.rows for bucket in buckets),
        "targets": _targets(inputs, buckets, pa.concat_tables(islice(targets, len(buckets))), facts, unset),
    }
    if inputs.labels.columns:
        parts = list(audited_texts(inputs, buckets))
        quality["audit"] = audit_texts(inputs, parts)
        quality |= _teachers(inputs, train, parts)
    return quality


def _targets(
    inputs: AuditInputs, buckets: Sequence[Bucket], table: pa.Table, facts: TargetFacts, unset: Array
) -> json_types.TargetCounts:
    """Returns the margins, and how often the target's first label is the gold label.

    `unset`: texts whose label neither target nor teachers learned; only these count as labelled.
    """
    labels, store = inputs.labels, inputs.store
    right: int | None = None
    margins: dict[str, json_types.Histogram] | None = None
    gold = gold_indices(labels, pa.concat_tables(read_bucket(store, bucket, ["label"]) for bucket in buckets))
    labelled = (gold >= 0) & unset
    if gives_label_distributions(facts["objective"]) and labelled.any():
        right = int((matrix(table.column("target")).argmax(axis=1) == gold)[labelled].sum())
    margin = table.column("margin").to_numpy().astype(np.float64)
    if np.isfinite(margin).all() and len(labels.columns) > 1:
        rows = zip(table.column("teacher").to_pylist(), gold.tolist(), strict=True)
        leader_is_right = np.array([label in labels.columns[teacher] for teacher, label in rows])
        margins = {"all": histogram(margin, _limits(margin))}
        if labelled.any():
            right_margin, wrong_margin = _split(margin, labelled & leader_is_right, labelled & ~leader_is_right)
            margins = {"right": right_margin, "wrong": wrong_margin}
    return {"labelled": int(labelled.sum()), "right": right, "margin": margins, "summary": facts["summary"]}


def _teachers(inputs: AuditInputs, train: Part, parts: Sequence[AuditedTexts]) -> json_types.TargetQuality:
    """Compares the teachers' confidences and weights with the gold labels."""
    columns = [np.array(positions) for positions in inputs.labels.columns.values()]
    predicted = np.concatenate([texts.predicted_NT for texts in parts])
    confidence = np.concatenate([texts.confidence_NT for texts in parts])
    weights = np.concatenate([texts.shares_NT for texts in parts])
    leading = np.concatenate([texts.leader_N for texts in parts])
    gold = np.concatenate([texts.gold_N for texts in parts])
    owns = np.stack([np.isin(gold, positions) for positions in columns], axis=1)
    labelled = owns.any(axis=1)
    counted = labelled & np.concatenate([texts.counted_N >= 0 for texts in parts])
    return {
        "labelled": int(labelled.sum()),
        "uncertainty": _uncertainty(confidence[labelled], owns[labelled]),
        "choice": {
            "by": "confidence" if inputs.read_weights is None else "weights",
            "n": int(counted.sum()),
            "right": int((owns[np.arange(len(leading)), leading] & counted).sum()),
            "chance": float(owns[counted].mean()) if counted.any() else None,
            "oracle": int(((predicted == gold[:, None]).any(axis=1) & counted).sum()),
        },
        "mixture": {
            "mean": dict(zip(inputs.labels.columns, weights.mean(axis=0).tolist(), strict=True)),
            "largest": histogram(weights.max(axis=1), (0.0, 1.0)),
        },
        "disputed": _disputed(inputs, train, predicted, confidence, gold),
    }


def _disputed(
    inputs: AuditInputs, train: Part, predicted: Array, confidence: Array, gold: Array
) -> list[json_types.DisputedText]:
    """Returns the texts on which two teachers with different labels have the highest lower confidence."""
    strength = np.full(len(predicted), -np.inf)
    pair = np.zeros((len(predicted), 2), np.int64)
    for a, b in combinations(range(predicted.shape[1]), 2):
        lower = np.where(predicted[:, a] == predicted[:, b], -np.inf, confidence[:, [a, b]].min(axis=1))
        higher = lower > strength
        strength[higher], pair[higher] = lower[higher], (a, b)
    order = np.argsort(-strength, kind="stable")[:MOST_DISPUTED]
    rows = [row for row in order.tolist() if np.isfinite(strength[row])]
    texts = texts_at(inputs.store, train, rows)
    teachers, labels = list(inputs.labels.columns), inputs.labels.names
    return [
        {
            "text": texts[row],
            "gold": labels[int(gold[row])] if gold[row] >= 0 else None,
            "sides": [
                {
                    "teacher": teachers[teacher],
                    "label": labels[int(predicted[row, teacher])],
                    "confidence": float(confidence[row, teacher]),
                }
                for teacher in pair[row].tolist()
            ],
        }
        for row in rows
    ]


def _uncertainty(confidence: Array, owns: Array) -> json_types.TeacherUncertainty | None:
    """Splits uncertainty, 1 - confidence, by whether the teacher has the text's gold label."""
    if not owns.any():
        return None
    values = 1 - confidence
    right, wrong = _split(values, owns, ~owns)
    return {"right": right, "wrong": wrong, "separation": separation(values, owns)}


def _split(values: Array, right: Array, wrong: Array) -> tuple[json_types.Histogram, json_types.Histogram]:
    limits = _limits(values)
    return histogram(values[right], limits), histogram(values[wrong], limits)


def _limits(values: Array) -> tuple[float, float]:
    """Returns 0 and 1, or the range of a measure with other bounds."""
    low, high = float(values.min()), float(values.max())
    return min(low, 0.0) if low < -ROUNDING else 0.0, max(high, 1.0) if high > 1 + ROUNDING else 1.0


def separation(values: Array, owns: Array) -> float | None:
    """Returns how often a right teacher is less uncertain than a wrong teacher of the same text; ties count half."""
    wins = pairs = 0.0
    for a, b in permutations(range(values.shape[1]), 2):
        both = owns[:, a] & ~owns[:, b]
        right, wrong = values[both, a], values[both, b]
        wins += float((right < wrong).sum() + 0.5 * (right == wrong).sum())
        pairs += len(right)
    return wins / pairs if pairs else None


def histogram(values: Array, limits: tuple[float, float]) -> json_types.Histogram:
    """Counts all values; one that is outside the limits by rounding counts in the outer bin."""
    counts, _ = np.histogram(values.clip(*limits), bins=BINS, range=limits)
    mean = float(values.mean()) if len(values) else None
    return {"n": len(values), "low": limits[0], "high": limits[1], "counts": counts.tolist(), "mean": mean}
