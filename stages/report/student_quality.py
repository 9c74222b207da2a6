"""Describes the reported system on the test texts: by label, by confidence, and its errors.

Every list is cut to a length that a page can show, and states its full length.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amalgam.data.keys import LabelSpace
from amalgam.data.parquet import key_list
from amalgam.pipeline.storage.store import Store
from amalgam.stages.common.corpus import Part, fields, read_bucket
from amalgam.stages.common.metrics import Predictions, confusion_of
from amalgam.stages.report.blocks import (
    CalibrationBin,
    ConfusedPairs,
    ConfusionMatrix,
    LabelQuality,
    OwnAccuracy,
    StudentQuality,
    TeacherQuality,
    WrongPrediction,
)
from amalgam.stages.report.evaluation import EvaluationInputs, TestAnswers

Array = np.ndarray[Any, np.dtype[Any]]

MOST_ERRORS, MOST_PAIRS = 12, 15

MATRIX = 16
"""Most rows of the confusion matrix: the labels with the most errors, and one row for the rest."""

MOST_LETTERS = 280
"""Letters of a text that are kept."""

MOST_COMPARED = 200_000
"""Most texts for which the right predictions are stored, so that two runs can be compared text by text."""


def student_quality(inputs: EvaluationInputs, answers: TestAnswers) -> StudentQuality:
    predictions, labels, gold = answers.systems[inputs.system], inputs.labels, answers.gold
    confusion = confusion_of(predictions, gold, len(labels.names))
    calibrated = [name for name in ("ensemble", inputs.system) if name in answers.systems and name != "zero-shot"]
    right, oracle = predictions.label == gold, _teachers_right(answers)
    return {
        "classes": _classes(confusion, labels, gold, oracle),
        "confusions": confused_pairs(confusion, labels.names),
        "matrix": confusion_matrix(confusion, labels.names),
        "calibration": {
            name: calibration(answers.systems[name], gold, inputs.calibration_bins)
            for name in dict.fromkeys(calibrated)
        },
        "errors": _errors(inputs, answers),
        "wrong": int((~right).sum()),
        "right_hex": np.packbits(right).tobytes().hex() if len(gold) <= MOST_COMPARED else None,
        "teachers": _teachers(labels, answers, oracle),
    }


def calibration(predictions: Predictions, gold: Array, bins: int) -> list[CalibrationBin]:
    """Returns the non-empty bins of confidence, (low, high], with the edges that ECE uses."""
    confidence, right = predictions.confidence, predictions.label == gold
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return [
        {
            "low": index / bins,
            "high": (index + 1) / bins,
            "n": int(inside.sum()),
            "confidence": float(confidence[inside].mean()),
            "accuracy": float(right[inside].mean()),
        }
        for index in range(bins)
        if (inside := place == index).any()
    ]


def _classes(confusion: Array, labels: LabelSpace, gold: Array, oracle: Array | None) -> list[LabelQuality]:
    owners = labels.owners
    return [
        {
            "label": name,
            "teachers": owners[index] if labels.columns else [],
            "n": int(confusion[index].sum()),
            "right": int(confusion[index, index]),
            "predicted": int(confusion[:, index].sum()),
            "teachers_right": None if oracle is None else int((oracle & (gold == index)).sum()),
        }
        for index, name in enumerate(labels.names)
    ]


def _teachers_right(answers: TestAnswers) -> Array | None:
    """Returns whether any teacher predicts the gold label: the upper bound for a choice among teachers."""
    if not answers.own:
        return None
    right: Array = np.any([labels == answers.gold for labels in answers.own.values()], axis=0)
    return right


def _teachers(labels: LabelSpace, answers: TestAnswers, oracle: Array | None) -> TeacherQuality:
    """Counts each teacher's right predictions on the texts with a gold label of its own."""
    own: dict[str, OwnAccuracy] = {}
    for name, columns in labels.columns.items():
        texts = np.isin(answers.gold, columns)
        right = (answers.own[name] == answers.gold) & texts
        own[name] = {"n": int(texts.sum()), "right": int(right.sum())}
    return {"n": len(answers.gold), "oracle": None if oracle is None else int(oracle.sum()), "own": own}


def confused_pairs(confusion: Array, names: tuple[str, ...]) -> ConfusedPairs:
    """Returns the most frequent pairs of gold and predicted label."""
    wrong = confusion * ~np.eye(len(names), dtype=bool)
    order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [divmod(int(place), len(names)) for place in order if wrong.flat[place]]
    return {
        "of": int((wrong > 0).sum()),
        "pairs": [
            {
                "gold": names[gold],
                "predicted": names[label],
                "n": int(wrong[gold, label]),
                "of": int(confusion[gold].sum()),
            }
            for gold, label in pairs
        ],
    }


def confusion_matrix(confusion: Array, names: tuple[str, ...]) -> ConfusionMatrix:
    """Returns the counts; with many labels, those with the most errors and one last row and column for the rest."""
    if len(names) <= MATRIX:
        return {"labels": list(names), "others": 0, "counts": confusion.tolist()}
    wrong = confusion * ~np.eye(len(names), dtype=bool)
    order = np.argsort(-(wrong.sum(axis=0) + wrong.sum(axis=1)), kind="stable")
    kept = sorted(order[: MATRIX - 1].tolist())
    rest = sorted(order[MATRIX - 1 :].tolist())
    rows = np.concatenate([confusion[kept], confusion[rest].sum(axis=0, keepdims=True)])
    counts = np.concatenate([rows[:, kept], rows[:, rest].sum(axis=1, keepdims=True)], axis=1)
    return {"labels": [names[index] for index in kept], "others": len(rest), "counts": counts.tolist()}


def _errors(inputs: EvaluationInputs, answers: TestAnswers) -> list[WrongPrediction]:
    """Returns the wrong predictions with the highest confidence."""
    predictions, names = answers.systems[inputs.system], inputs.labels.names
    wrong = np.flatnonzero(predictions.label != answers.gold)
    worst = wrong[np.argsort(-predictions.confidence[wrong], kind="stable")[:MOST_ERRORS]]
    keys = key_list(answers.keys[worst])
    texts = texts_of(inputs.store, inputs.test, set(keys))
    return [
        {
            "text": texts[key],
            "gold": names[int(answers.gold[row])],
            "predicted": names[int(predictions.label[row])],
            "probability": float(predictions.confidence[row]),
            "gold_probability": float(predictions.of_gold[row]),
        }
        for key, row in zip(keys, worst.tolist(), strict=True)
    ]


def texts_of(store: Store, part: Part, wanted: set[bytes]) -> dict[bytes, str]:
    """Returns shortened texts by key; the two texts of a pair are joined."""
    texts: dict[bytes, str] = {}
    for bucket in part.buckets:
        if len(texts) == len(wanted):
            break
        table = read_bucket(store, bucket)
        keys = table.column("key").to_pylist()
        rows = [row for row, key in enumerate(keys) if key in wanted]
        if rows:
            texts |= zip((keys[row] for row in rows), map(shortened, fields(table.take(rows))), strict=True)
    return texts


def shortened(texts: tuple[str, ...]) -> str:
    text = " ‖ ".join(texts)
    return text if len(text) <= MOST_LETTERS else text[:MOST_LETTERS] + "…"
