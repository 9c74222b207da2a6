"""The judged system on the labelled test part, looked at closely: by class, by confidence, and where it is wrong.

Everything is cut to what a page can show, and says of how many it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amalgam.data.parquet import key_list
from amalgam.pipeline.execution.stage import Run
from amalgam.stages.common.corpus import Part, fields, tables
from amalgam.stages.common.metrics import Predictions, confusion_of
from amalgam.stages.report.evaluation import TestAnswers

Array = np.ndarray[Any, np.dtype[Any]]


WORST = 12

PAIRS = 15

MATRIX = 16
"""Labels of the confusion matrix; of more, those with the most errors stand for themselves."""

LETTERS = 280
"""Of a text that is shown."""

KEPT_RIGHT = 200_000
"""Up to so many texts, which of them were answered rightly is kept, for runs to be compared text by text."""


def looked_at(run: Run, test: Part, found: TestAnswers) -> dict[str, Any]:
    answers = found.systems[found.judged]
    names, gold = found.space.names, found.gold
    confusion = confusion_of(answers, gold, len(names))
    calibrated = [name for name in ("ensemble", found.judged) if name in found.systems and name != "zero-shot"]
    bins = run.experiment.report.calibration_bins
    return {
        "classes": _classes(confusion, names, found),
        "confusions": confusion_pairs(confusion, names),
        "matrix": confusion_matrix(confusion, names),
        "calibration": {name: calibration(found.systems[name], gold, bins) for name in dict.fromkeys(calibrated)},
        "errors": _errors(run, test, found),
        "wrong": int((answers.label != gold).sum()),
        "right_hex": np.packbits(answers.label == gold).tobytes().hex() if len(gold) <= KEPT_RIGHT else None,
        "teachers": _teachers(found),
    }


def calibration(answers: Predictions, gold: Array, bins: int) -> list[dict[str, Any]]:
    """By equal bins of confidence, (low, high], as ECE counts them; empty ones are left out."""
    confidence, right = answers.confidence, answers.label == gold
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


def _classes(confusion: Array, names: tuple[str, ...], found: TestAnswers) -> list[dict[str, Any]]:
    """In the order of the union. `known`: of this label's texts, those on which some teacher of it says it."""
    owners, known = found.space.owners, _known(found)
    return [
        {
            "label": name,
            "teachers": owners[place] if found.space.columns else [],
            "n": int(confusion[place].sum()),
            "right": int(confusion[place, place]),
            "predicted": int(confusion[:, place].sum()),
            "known": None if known is None else int((known & (found.gold == place)).sum()),
        }
        for place, name in enumerate(names)
    ]


def _known(found: TestAnswers) -> Array | None:
    """Whether some teacher that has the gold label would give it: as right as any choice among teachers can be."""
    if not found.own:
        return None
    right: Array = np.any(
        [said == found.gold for said in found.own.values()],
        axis=0,
    )
    return right


def _teachers(found: TestAnswers) -> dict[str, Any]:
    """How right teachers are where they could be: of the texts whose gold label is theirs, among their own labels."""
    known = _known(found)
    own = {}
    for name, columns in found.space.columns.items():
        theirs = np.isin(found.gold, columns)
        right = found.own[name] == found.gold
        own[name] = {"n": int(theirs.sum()), "right": int((right & theirs).sum())}
    return {"n": len(found.gold), "oracle": None if known is None else int(known.sum()), "own": own}


def confusion_pairs(confusion: Array, names: tuple[str, ...]) -> dict[str, Any]:
    wrong = confusion * ~np.eye(len(names), dtype=bool)
    order = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
    pairs = [divmod(int(place), len(names)) for place in order if wrong.flat[place]]
    return {
        "of": int((wrong > 0).sum()),
        "pairs": [
            {"gold": names[gold], "said": names[said], "n": int(wrong[gold, said]), "of": int(confusion[gold].sum())}
            for gold, said in pairs
        ],
    }


def confusion_matrix(confusion: Array, names: tuple[str, ...]) -> dict[str, Any]:
    """Of all labels, or of those in most errors, the rest together as the last row and column."""
    if len(names) <= MATRIX:
        return {"labels": list(names), "others": 0, "counts": confusion.tolist()}
    wrong = confusion * ~np.eye(len(names), dtype=bool)
    order = np.argsort(-(wrong.sum(axis=0) + wrong.sum(axis=1)), kind="stable")
    kept = sorted(order[: MATRIX - 1].tolist())
    rest = sorted(order[MATRIX - 1 :].tolist())
    rows = np.concatenate([confusion[kept], confusion[rest].sum(axis=0, keepdims=True)])
    counts = np.concatenate([rows[:, kept], rows[:, rest].sum(axis=1, keepdims=True)], axis=1)
    return {"labels": [names[place] for place in kept], "others": len(rest), "counts": counts.tolist()}


def _errors(run: Run, test: Part, found: TestAnswers) -> list[dict[str, Any]]:
    """The wrong answers that were given with most certainty."""
    answers, names = found.systems[found.judged], found.space.names
    wrong = np.flatnonzero(answers.label != found.gold)
    worst = wrong[np.argsort(-answers.confidence[wrong], kind="stable")[:WORST]]
    keys = key_list(found.keys[worst])
    texts = texts_of(run, test, set(keys))
    return [
        {
            "text": texts[key],
            "gold": names[int(found.gold[place])],
            "said": names[int(answers.label[place])],
            "probability": float(answers.confidence[place]),
            "of_gold": float(answers.of_gold[place]),
        }
        for key, place in zip(keys, worst.tolist(), strict=True)
    ]


def texts_of(run: Run, part: Part, wanted: set[bytes]) -> dict[bytes, str]:
    """Shortened; two texts of a pair stand one after the other."""
    found: dict[bytes, str] = {}
    for table in tables(run, part) if wanted else ():
        keys = table.column("key").to_pylist()
        places = [place for place, key in enumerate(keys) if key in wanted]
        if places:
            found |= zip((keys[place] for place in places), map(shortened, fields(table.take(places))), strict=True)
        if len(found) == len(wanted):
            break
    return found


def shortened(texts: tuple[str, ...]) -> str:
    text = " ‖ ".join(texts)
    return text if len(text) <= LETTERS else text[:LETTERS] + "…"
