"""The page's figures, each from the numbers that stand in report.json beside it."""

from __future__ import annotations

import math
from typing import Any

from markupsafe import Markup

from amalgam.stages.report.drawing import Axis, Figure, axis_between, axis_to, percent, plain
from amalgam.stages.report.verdict import interval

Found = dict[str, Any]

FEWEST = 10
"""Texts of a bin of the calibration curve: the share of fewer says nothing."""
TENTHS = [0.0, 0.25, 0.5, 0.75, 1.0]


def figures(numbers: Found) -> dict[str, Markup]:
    taught, judged = numbers["taught"] or {}, numbers["judged"] or {}
    targets = taught.get("targets", {})
    drawn: dict[str, Markup | None] = {
        "uncertainty": _uncertainty(taught.get("uncertainty")),
        "mixture": _mixture(taught.get("mixture")),
        "margins": _margins(targets.get("margin")),
        "weights": _weights(targets.get("summary")),
        "calibration": _calibration(judged.get("calibration"), numbers),
        "sweep": _sweep(numbers["sweep"], numbers),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _histogram(title: str, label: str, series: list[tuple[str, Found, str]], whose: str) -> Figure:
    """Each series in percent of itself, so that groups of different size can be compared."""
    low, high = series[0][1]["low"], series[0][1]["high"]
    shares = [[count / max(one["n"], 1) for count in one["counts"]] for _, one, _ in series]
    x = axis_between(label, low, high)
    y = axis_to(whose, max(max(side) for side in shares))
    legend = [(f"{name}, n = {one['n']:,}", mark) for name, one, mark in series]
    figure = Figure(title, x, y, legend)
    for (_, one, mark), side in zip(series, shares, strict=True):
        points = _steps(side, one["low"], one["high"])
        figure.area([(low, 0.0), *points, (high, 0.0)], mark)
        figure.line(points, mark)
    return figure


def _steps(shares: list[float], low: float, high: float) -> list[tuple[float, float]]:
    width = (high - low) / len(shares)
    edges = [low + index * width for index in range(len(shares) + 1)]
    return [point for index, share in enumerate(shares) for point in ((edges[index], share), (edges[index + 1], share))]


def _two(found: Found, right: str, wrong: str) -> list[tuple[str, Found, str]]:
    sides = [(right, found["right"], "one"), (wrong, found["wrong"], "two")]
    return [side for side in sides if side[1]["n"]]


def _uncertainty(found: Found | None) -> Markup | None:
    if not found:
        return None
    sides = _two(found, "teachers that have the gold label", "teachers that do not")
    title = "Histogram of the teachers' uncertainty, those that have a text's gold label beside those that do not"
    return _histogram(title, "uncertainty (0: certain)", sides, "share of the group").svg()


def _mixture(found: Found | None) -> Markup | None:
    if not found or len(found["mean"]) < 2 or found["largest"]["counts"][-1] == found["largest"]["n"]:
        return None  # of one teacher, or of one alone on each text, there is no mixture
    series = [("training texts", found["largest"], "one")]
    figure = _histogram(
        "Histogram of the leading teacher's weight", "weight of the leading teacher", series, "share of texts"
    )
    figure.down(1 / len(found["mean"]), "all alike")
    return figure.svg()


def _margins(found: Found | None) -> Markup | None:
    if not found:
        return None
    if "all" in found:
        sides = [("training texts", found["all"], "one")]
    else:
        sides = _two(found, "leading teacher has the gold label", "it does not")
    title = "Histogram of the margin between the first and the second teacher"
    return _histogram(title, "margin, first less second teacher", sides, "share of the group").svg()


def _weights(summary: Found | None) -> Markup | None:
    """Nothing is drawn where every text weighs the same."""
    if not summary or max(summary["weight_bins"]) == summary["texts"]:
        return None
    whole = {"n": summary["texts"], "counts": summary["weight_bins"], "low": 0.0, "high": 1.0}
    title = "Histogram of the weights of the texts in the student's loss"
    return _histogram(
        title, "weight of a text in the loss", [("all training texts", whole, "one")], "share of texts"
    ).svg()


def _calibration(found: dict[str, list[Found]] | None, numbers: Found) -> Markup | None:
    if not found:
        return None
    judged = numbers["evaluation"]["judged"]
    across, up = (Axis(label, 0.0, 1.0, TENTHS, plain) for label in ("probability it gives its answer", "share right"))
    order = [name for name in (judged, "ensemble") if name in found]
    marks = dict(zip(order, ("one", "two"), strict=False))
    figure = Figure("Calibration", across, up, [(name, marks[name]) for name in order])
    figure.line([(0.0, 0.0), (1.0, 1.0)], "chance")
    for name in order:
        rows = [row for row in found[name] if row["n"] >= FEWEST]
        if not rows:
            continue
        most = max(row["n"] for row in rows)
        figure.line([(row["confidence"], row["accuracy"]) for row in rows], marks[name])
        for row in rows:
            figure.dot(row["confidence"], row["accuracy"], marks[name], 1.5 + 4 * math.sqrt(row["n"] / most))
    return figure.svg()


def _sweep(rows: list[Found], numbers: Found) -> Markup | None:
    if len(rows) < 2:
        return None
    spans = [interval(row["accuracy"], row["n"]) for row in rows]
    temperatures = sorted({row["temperature"] for row in rows})
    room = 1.25
    x = Axis("temperature τ (logarithmic)", temperatures[0] / room, temperatures[-1] * room, temperatures, plain, True)
    y = axis_between("test accuracy", min(low for low, _ in spans), max(high for _, high in spans), percent)
    own = [("this student", "dot three")] if any(row["ours"] for row in rows) else []
    figure = Figure("Accuracy by temperature", x, y, [("students of muka-soft, 95 % intervals", "one"), *own])
    figure.line([(row["temperature"], row["accuracy"]) for row in rows], "one")
    for row, (low, high) in zip(rows, spans, strict=True):
        figure.whisker(row["temperature"], low, high, "thin")
        figure.dot(row["temperature"], row["accuracy"], "three" if row["ours"] else "one")
    chance = numbers["chance"]
    if chance is not None and chance >= y.low:
        figure.across(chance, "chance")
    elif chance is not None:
        figure.foot(f"chance, {percent(chance)}, is below this scale")
    return figure.svg()
