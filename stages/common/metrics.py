"""Computes metrics of a classifier's probabilities against gold labels over the union, with numpy only.

The main metric is accuracy over the union of all labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from amalgam.pipeline.errors import DataError, WorkError

Floats = npt.NDArray[np.float64]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Predictions:
    """Three numbers per text of a model's probabilities, for any number of labels."""

    label: Ints
    """The most probable label of the union, the first of equals."""
    confidence: Floats
    """Its probability; nan where some probability of the text is no number."""
    of_gold: Floats

    @classmethod
    def of(cls, probabilities: Floats, gold: Ints) -> Self:
        """Probabilities [n, C] and gold [n] by position in the union."""
        usable = np.isfinite(probabilities).all(axis=1)
        confidence = np.where(usable, probabilities.max(axis=1, initial=-np.inf), np.nan)
        return cls(probabilities.argmax(axis=1), confidence, probabilities[np.arange(len(gold)), gold])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        def together(field: str) -> Any:
            return np.concatenate([getattr(part, field) for part in parts])

        return cls(together("label"), together("confidence"), together("of_gold"))


def evaluate(
    predictions: Predictions, gold: Ints, labels: list[str], groups: dict[str, list[int]], bins: int
) -> dict[str, Any]:
    """Returns the report's figures of one model on labelled texts, ready for JSON.

    gold [n] and groups {teacher: its labels} are by position in `labels`.

    - macro_f1: mean over the labels that occur in gold or in the predictions; one that is never right counts 0.
    - label_f1: the same by label name, None where it occurs in neither.
    - nll_nats: mean negative log-likelihood; None when some gold label has probability 0, which makes it infinite.
      nll_infinite: how many have.
    - ece: expected calibration error over equal bins of confidence, (low, high].
    - slice_accuracy: over the texts whose gold label is the teacher's, predictions over the union; None without texts.
    - confusion: counts, a row per gold label, a column per predicted label.
    """
    _check(predictions, gold)
    correct = predictions.label == gold
    confusion = confusion_of(predictions, gold, len(labels))
    f1 = _f1(confusion)
    slices = {name: np.isin(gold, owned) for name, owned in groups.items()}
    return {
        "n": len(gold),
        "accuracy": float(correct.mean()),
        "macro_f1": float(np.nanmean(f1)),
        "label_f1": {name: None if np.isnan(value) else float(value) for name, value in zip(labels, f1, strict=True)},
        **_likelihood(predictions.of_gold),
        "ece": _calibration_error(predictions.confidence, correct, bins),
        "slice_accuracy": {name: _mean(correct[texts]) for name, texts in slices.items()},
        "slice_n": {name: int(texts.sum()) for name, texts in slices.items()},
        "confusion": confusion.tolist(),
    }


def confusion_of(predictions: Predictions, gold: Ints, labels: int) -> Ints:
    """Returns counts with a row per gold label and a column per predicted one."""
    result = np.zeros((labels, labels), dtype=np.int64)
    np.add.at(result, (gold, predictions.label), 1)
    return result


def _check(predictions: Predictions, gold: Ints) -> None:
    if not len(gold):
        raise DataError("there are no labelled texts to measure on", where="corpus.test", fix="give labelled texts")
    wrong = np.flatnonzero(~np.isfinite(predictions.confidence))
    if len(wrong):
        raise WorkError(
            f"{len(wrong):,} predictions are not numbers" if len(wrong) > 1 else "a prediction is not a number",
            where=f"rows {', '.join(map(str, wrong[:8].tolist()))}",
            fix="train the model again with a lower learning rate",
        )


def _f1(confusion: npt.NDArray[np.int64]) -> Floats:
    """Returns F1 = 2 right / (gold + predicted) by label; nan for labels that occur in neither."""
    occurs = confusion.sum(axis=0) + confusion.sum(axis=1)
    result: Floats = np.full(len(occurs), np.nan)
    np.divide(2.0 * np.diag(confusion), occurs, out=result, where=occurs > 0)
    return result


def _likelihood(of_gold: Floats) -> dict[str, Any]:
    infinite = int((of_gold <= 0).sum())
    return {"nll_nats": None if infinite else float(-np.log(of_gold).mean()), "nll_infinite": infinite}


def _calibration_error(confidence: Floats, correct: npt.NDArray[np.bool_], bins: int) -> float:
    """Mean over texts of |accuracy - mean confidence| of the text's bin."""
    bin_of = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(bin_of, weights=correct - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def _mean(values: npt.NDArray[np.bool_]) -> float | None:
    return float(values.mean()) if len(values) else None
