"""Measures the choice of teachers with a few gold labels of random texts.

python benchmarks/few_labels.py --folder choice-benchmark [--counts 10 50] [--draws 5] [--only trec6] [--json]

The settings are those of benchmarks/choice.py. Each draw is a seed of the random texts.
right is the share of texts whose most heavily weighted teacher has the gold label, with labelled texts. labels is
the share of targets that are the gold label. others is that share on texts without a label. probe is the accuracy of
ridge regression there: it learns from the encoder's states and the same labels alone.
targets_error is the estimated accuracy of the targets minus that of other texts. targets_covered is the share of 95 %
intervals that have the latter. student_error and student_covered are the same for ridge regression on the targets of
texts without a label, instead of a student. fitted_error is targets_error without cross-validation.
within is half of the 95 % interval of the mean, by a bootstrap over pools.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from amalgam.benchmarks.choice import amalgam, within
from amalgam.benchmarks.choice_settings import load_settings
from amalgam.benchmarks.estimates import ridge
from amalgam.benchmarks.protocol import row, show
from amalgam.stages.report.label_estimates import RightTexts
from amalgam.stages.weigh_teachers.few_labels import Corrected, with_known
from amalgam.stages.weigh_teachers.labelled_states import PartlyLabelled, fit_labels

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amalgam.benchmarks.choice_settings import Setting

Array = np.ndarray[Any, np.dtype[Any]]

FOLDS = 5
ESTIMATES = ("targets_error", "targets_covered", "fitted_error", "student_error", "student_covered")
FIGURES = ("right", "labels", "others", "probe", *ESTIMATES)


@dataclass(frozen=True)
class Measurement:
    setting: str
    pool: str
    count: int
    draw: int
    figures: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("choice-benchmark"), help="folder of benchmarks/choice.py")
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 50], help="numbers of labels")
    parser.add_argument("--draws", type=int, default=5, help="draws of the labelled texts")
    parser.add_argument("--only", nargs="+", default=[], help="settings whose name contains one of these")
    parser.add_argument("--each", action="store_true", help="also a row for each setting")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = [
        measurement
        for setting in load_settings(options.folder, options.only)
        for measurement in measure(setting, options.counts, options.draws)
    ]
    if not measured:
        raise SystemExit(f"{options.folder}/settings has no such setting: make some with `choice.py make`")
    if options.each:
        show(list(_each(measured)), as_json=options.json)
    show(list(_summaries(measured)), as_json=options.json)


def measure(setting: Setting, counts: Sequence[int], draws: int) -> Iterator[Measurement]:
    """Yields the figures without labels (count 0), and for each count and draw."""
    weights = amalgam(setting)
    base = {"right": setting.right(weights), "labels": setting.labelled(weights)}
    yield Measurement(setting.name, setting.pool, 0, 0, base)
    for count in counts:
        for draw in range(draws):
            rows = np.random.default_rng([draw, count]).choice(len(weights), min(count, len(weights)), replace=False)
            yield Measurement(setting.name, setting.pool, count, draw, _figures(setting, weights, rows, draw))


def _figures(setting: Setting, weights: Array, rows: Array, draw: int) -> dict[str, float]:
    evidence, has_label = setting.evidence, setting.has_gold[rows]
    kinds, gold = list(evidence.kinds.values()), setting.gold[rows]
    texts = PartlyLabelled(weights, kinds, setting.answered, evidence.spaces, rows, has_label, gold)
    fit = fit_labels(texts, [], len(setting.labels))
    after, result = with_known(fit.weights, rows, has_label), fit.result
    targets = setting.answered[np.arange(len(after)), after.argmax(axis=1)]
    targets[rows] = setting.gold[rows]
    others = np.setdiff1d(np.arange(len(after)), rows)
    return {
        "right": setting.right(after),
        "labels": float((targets == setting.gold).mean()),
        "others": float((targets == setting.gold)[others].mean()),
        "probe": float((_ridge(setting, rows, setting.gold[rows]) == setting.gold)[others].mean()),
        **_errors(setting, result, targets, rows, draw),
    }


def _errors(setting: Setting, result: Corrected, targets: Array, rows: Array, draw: int) -> dict[str, float]:
    """Compares the estimates by random labels with the accuracies on the other texts."""
    learned = np.setdiff1d(np.arange(len(targets)), rows)
    fold, student = np.random.default_rng(draw).integers(FOLDS, size=len(targets)), np.empty_like(targets)
    for number in range(FOLDS):
        own = learned[fold[learned] != number]
        student[fold == number] = _ridge(setting, own, targets[own])[fold == number]
    fitted, cross_validated = (
        setting.answered[rows, weights.argmax(axis=1)] == setting.gold[rows]
        for weights in (result.fitted, result.cross_validated)
    )
    right = RightTexts({}, {}, None, fitted, cross_validated, student[rows] == setting.gold[rows])
    true = {
        name: float((own == setting.gold)[learned].mean()) for name, own in (("targets", targets), ("student", student))
    }
    errors = {"fitted_error": float(fitted.mean()) - true["targets"]}
    for system in right.systems():
        name, accuracy = system["name"], true[system["name"]]
        errors |= {
            f"{name}_error": system["mean"] - accuracy,
            f"{name}_covered": float(system["low"] <= accuracy <= system["high"]),
        }
    return errors


def _ridge(setting: Setting, rows: Array, labels: Array) -> Array:
    """Returns the labels that ridge regression on some texts predicts for all texts."""
    features = setting.features.astype(np.float64)
    gold = np.eye(len(setting.labels))[labels]
    return (ridge(features[rows], gold, features) + gold.mean(axis=0)).argmax(axis=1)


# ---- tables


def _means(measured: Sequence[Measurement]) -> dict[int, dict[str, Measurement]]:
    """Returns by count the mean over draws of each setting."""
    groups: dict[tuple[int, str], list[Measurement]] = defaultdict(list)
    for each in measured:
        groups[each.count, each.setting].append(each)
    means: dict[int, dict[str, Measurement]] = defaultdict(dict)
    for (count, setting), own in groups.items():
        figures = {name: float(np.mean([each.figures[name] for each in own])) for name in own[0].figures}
        means[count][setting] = Measurement(setting, own[0].pool, count, 0, figures)
    return means


def _summaries(measured: Sequence[Measurement]) -> Iterator[dict[str, Any]]:
    means = _means(measured)
    draws = len({each.draw for each in measured})
    for count, settings in means.items():
        pools = [each.pool for each in settings.values()]
        figures: dict[str, Any] = {}
        for name in (name for name in FIGURES if name in next(iter(settings.values())).figures):
            values = np.array([each.figures[name] for each in settings.values()])
            figures |= {name: round(float(values.mean()), 3), f"{name}_within": within(pools, values)}
        right = np.array([each.figures["right"] for each in settings.values()])
        gain = right - np.array([means[0][name].figures["right"] for name in settings])
        worst = {"worst": round(float(right.min()), 3), "least_gain": round(float(gain.min()), 3)}
        yield row("few-labels", f"{count} labels", **figures, **worst, settings=len(settings), draws=draws)


def _each(measured: Sequence[Measurement]) -> Iterator[dict[str, Any]]:
    means = _means(measured)
    for name in means[0]:
        yield row(
            "few-labels",
            name,
            **{f"{count} labels": round(own[name].figures["right"], 3) for count, own in means.items()},
        )


if __name__ == "__main__":
    main()
