"""Compares the report's estimates without labels with the accuracies, on the settings of choice.py.

python benchmarks/unlabelled_estimates.py [--folder choice-benchmark] [--only trec6] [--json]

Each setting is measured as it is and thinned. Students are ridge regressions from the states of encoder and teachers
("states") or of the encoder alone ("encoder"). They learn the targets of half of the texts, or of a part of that half:
a small part makes a bad student. 80 of the other texts estimate their accuracy, as in a corpus of 1,600 texts. It is
measured on the whole other half.

bias and error are means of the estimate minus the accuracy, signed and absolute. covered is the share of 95 % intervals
that contain the accuracy. The last counts leave out students whose agreement with the targets decides. clear counts
those below the ensemble by the rule of the verdict, and wrong those of them that are better than the ensemble. below
counts those whose accuracy is at least 5 points below that of the ensemble.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.benchmarks.choice import muka, with_confirmed
from amalgam.benchmarks.choice_settings import load_settings
from amalgam.benchmarks.protocol import row, show
from amalgam.data.arrays import softmax
from amalgam.stages.common.intervals import interval
from amalgam.stages.report.verdict import ESTIMATED_LEAD, LEAST_AGREEMENT
from amalgam.stages.report.weight_estimates import WeighedTexts, weight_estimates
from amalgam.stages.weigh_teachers.weigh import estimated_accuracy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amalgam.benchmarks.choice_settings import Setting
    from amalgam.stages.report.verdict_types import SystemEstimate

Array = np.ndarray[Any, np.dtype[Any]]

PARTS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
HELD_OUT = 80
RIDGE = 0.05
BELOW = 0.05


@dataclass(frozen=True)
class Measurement:
    """An estimate, and the accuracy of the system; of students also the comparison with the ensemble."""

    system: str
    value: float
    covered: bool
    accuracy: float
    is_open: bool = False
    """Whether the agreement with the targets decides nothing."""
    clear: bool = False
    lead: float = 0.0
    """The true accuracy of the ensemble minus that of the student."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("choice-benchmark"))
    parser.add_argument("--only", nargs="+", default=[], help="settings whose name contains one of these")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    groups: dict[str, list[Measurement]] = defaultdict(list)
    for setting in load_settings(options.folder, options.only):
        for variant in (setting, *setting.thinned()):
            if variant.estimated[0] is not None:
                for each in measure(variant):
                    groups[f"{setting.name.partition('-')[0]} {each.system}"].append(each)
                    if " " in each.system:
                        groups["all students"].append(each)
    if not groups:
        raise SystemExit(f"{options.folder}/settings has no such setting: make some with `choice.py make`")
    show([_summary(name, own) for name, own in groups.items()], as_json=options.json)


def measure(setting: Setting) -> Iterator[Measurement]:
    """Yields the targets, the ensemble, MUKA and every student."""
    (weights, confirmed), gold = with_confirmed(setting), setting.gold
    order = np.random.default_rng(0).permutation(len(gold))
    learned, others = order[: len(gold) // 2], order[len(gold) // 2 :]
    held_out = np.zeros(len(gold), dtype=bool)
    held_out[others[:HELD_OUT]] = True
    texts = WeighedTexts(setting.answered, muka(setting), weights, held_out)
    accuracy = estimated_accuracy([confirmed], len(gold))
    leaders = np.argmax([texts.mass(own) for own in texts.predicted.T], axis=0)
    targets = setting.answered[np.arange(len(gold)), leaders]
    labels = {"targets": targets, "ensemble": _ensemble(setting), "muka": texts.muka}
    ensemble_right = (labels["ensemble"] == gold)[others].mean()
    others_measured = False
    for name, student in _students(setting, learned, targets, texts.mass(targets)):
        estimates = weight_estimates(texts, accuracy, len(gold), ensemble=labels["ensemble"], student=student)
        ours, *rest = estimates["systems"]
        right = float((student == gold)[others].mean())
        agreed = float((student == targets)[held_out].mean())
        is_open = interval(agreed, int(held_out.sum()))[1] >= LEAST_AGREEMENT
        clear = is_open and estimates["gap"] is not None and estimates["gap"]["low"] > ESTIMATED_LEAD
        yield Measurement(name, *_figures(ours, right), is_open, clear, float(ensemble_right - right))
        for system in rest if not others_measured else ():
            kind = system["kind"]
            yield Measurement(kind, *_figures(system, float((labels[kind] == gold).mean())))
        others_measured = True


def _figures(system: SystemEstimate, right: float) -> tuple[float, bool, float]:
    return system["mean"], system["low"] <= right <= system["high"], right


def _ensemble(setting: Setting) -> Array:
    """Returns the label with the highest probability of the softmax over all logits; shared labels are summed."""
    probabilities = softmax(np.concatenate(setting.logits, axis=1).astype(np.float64))
    column_of = np.eye(len(setting.labels))[np.concatenate(setting.columns)]
    return (probabilities @ column_of).argmax(axis=1)


def _students(setting: Setting, learned: Array, targets: Array, mass: Array) -> Iterator[tuple[str, Array]]:
    spaces = {"states": [setting.features, *setting.states], "encoder": [setting.features]}
    for name, own in spaces.items():
        states = np.concatenate([_centred(space) for space in own], axis=1) / np.sqrt(len(own))
        for part in PARTS:
            rows = learned[: max(int(part * len(learned)), 5)]
            yield f"{name} {part:g}", _ridge(states, rows, np.eye(len(setting.labels))[targets[rows]], mass[rows])


def _centred(space: Array) -> Array:
    centred = space.astype(np.float64) - space.mean(axis=0, dtype=np.float64)
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-9)


def _ridge(states: Array, rows: Array, labels: Array, weights: Array) -> Array:
    """Returns the labels of all texts by a ridge regression on some, which counts each text by its weight."""
    scale = np.sqrt(weights)[:, None]
    own = states[rows] * scale
    dual = np.linalg.solve(own @ own.T + RIDGE * np.eye(len(rows)), (labels - 1 / labels.shape[1]) * scale)
    return (states @ (own.T @ dual)).argmax(axis=1)


def _summary(name: str, own: list[Measurement]) -> dict[str, Any]:
    errors = np.array([each.value - each.accuracy for each in own])
    figures: dict[str, Any] = {
        "n": len(own),
        "accuracy": round(float(np.mean([each.accuracy for each in own])), 3),
        "bias": round(float(errors.mean()), 3),
        "error": round(float(np.abs(errors).mean()), 3),
        "covered": round(float(np.mean([each.covered for each in own])), 2),
    }
    clear = [each for each in own if each.clear]
    below = sum(each.is_open and each.lead >= BELOW for each in own)
    counts = {"clear": len(clear), "wrong": sum(each.lead < 0 for each in clear), "below": below}
    return row("unlabelled estimates", name, **figures, **counts)


if __name__ == "__main__":
    main()
