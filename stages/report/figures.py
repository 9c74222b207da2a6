"""Draws the page's figures as small SVG files; the page's style sheet sets colours for light and dark.

The same numbers give the same bytes: no fonts, versions or dates. Text is escaped; series differ by dash and colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from amalgam.stages.report.json_types import EvaluationSection, Histogram, ReportJson, StudentQuality, UnknownQuality
from amalgam.stages.report.verdict_types import CoverageCurve

WIDTH, HEIGHT = 360, 240

LEFT, RIGHT, TOP, BOTTOM = 64, 24, 12, 46

LEGEND = 18
"""Height of a line of the legend."""

NEAR = 1e-6
"""Tolerance of a tick, as a share of the step between ticks."""

LEAST_OF_POINT = 10
"""Least texts of a drawn point, in the figures of calibration and coverage."""

MOST_IN_ONE_BIN = 0.9
"""A histogram with a larger share in one bin is not drawn; a sentence states the bin."""

TWO_GROUPS = {"right": "teachers that have the gold label", "wrong": "teachers that do not"}

LEADERS = {"all": "training texts", "right": "leading teacher has the gold label", "wrong": "it does not"}

HISTOGRAMS = {
    "uncertainty": ("uncertainty (0: certain)", "share of the group", TWO_GROUPS),
    "mixture": ("weight of the leading teacher", "share of texts", {"largest": "training texts"}),
    "margins": ("margin, first minus second teacher", "share of the group", LEADERS),
    "weights": ("weight of a text in the loss", "share of texts", {"all": "all training texts"}),
}
"""By figure: the label of each axis, and the name of each series."""


def figures(numbers: ReportJson) -> dict[str, Markup]:
    """Returns the figures that show more than one value."""
    drawn, evaluation, quality = {}, numbers["evaluation"], numbers["student_quality"]
    if evaluation and quality:
        drawn["calibration"] = calibration(evaluation, quality)
    measured = coverage_of(numbers)
    if measured:
        drawn["coverage"] = coverage(measured, _measure(numbers))
    if quality and quality["unknown"] and quality["unknown"]["curve"]:
        drawn["unknown"] = unknown_texts(quality["unknown"])
    for name, series in _histograms(numbers).items():
        drawn[name] = histogram(name, series)
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _measure(numbers: ReportJson) -> str:
    unlabelled = None if numbers["student_quality"] else numbers["unlabelled"]
    return f"agreement with the {unlabelled['agreement']['reference']}" if unlabelled else "accuracy"


def coverage_of(numbers: ReportJson) -> CoverageCurve | None:
    """Returns the coverage on the test texts, or on the training texts without labels; None without a student."""
    measured = (numbers["student_quality"] or numbers["unlabelled"]) if numbers["learns"] else None
    return measured["coverage"] if measured and measured["coverage"]["curve"] else None


def _histograms(numbers: ReportJson) -> dict[str, dict[str, Histogram]]:
    """Returns the series of each histogram that have values."""
    targets = numbers["target_quality"]
    if not targets:
        return {}
    summary = targets["targets"]["summary"]
    weights: Histogram = {"n": summary["texts"], "counts": summary["weight_bins"], "low": 0.0, "high": 1.0}
    uncertainty, mixture = targets.get("uncertainty"), targets.get("mixture")
    sections: dict[str, dict[str, Histogram]] = {
        "uncertainty": {"right": uncertainty["right"], "wrong": uncertainty["wrong"]} if uncertainty else {},
        "mixture": {"largest": mixture["largest"]} if mixture else {},
        "margins": targets["targets"]["margin"] or {},
        "weights": {"all": weights},
    }
    return {name: {key: part for key, part in section.items() if part["n"]} for name, section in sections.items()}


def spikes(numbers: ReportJson) -> list[str]:
    """Returns a sentence for each histogram that is not drawn because nearly all values are in one bin."""
    sentences = []
    for name, series in _histograms(numbers).items():
        totals, low, high = _totals(series)
        follows_one_teacher = name == "mixture" and totals[-1:] == [sum(totals)]  # as every hard target does
        if _is_spike(totals) and not follows_one_teacher:
            place, width = totals.index(max(totals)), (high - low) / len(totals)
            bounds = f"{short_percent(low + place * width)} and {short_percent(low + (place + 1) * width)}"
            share = short_percent(max(totals) / sum(totals))
            label = HISTOGRAMS[name][0]
            sentences.append(f"{label[0].upper()}{label[1:]}: between {bounds} for {share} of the values.")
    return sentences


def _totals(series: Mapping[str, Histogram]) -> tuple[list[int], float, float]:
    """Returns the counts over all series, and the ends of the axis."""
    totals = [sum(counts) for counts in zip(*(values["counts"] for values in series.values()), strict=True)]
    low, high = next(((values["low"], values["high"]) for values in series.values()), (0.0, 1.0))
    return totals, low, high


def _is_spike(totals: Sequence[int]) -> bool:
    return any(totals) and max(totals) > MOST_IN_ONE_BIN * sum(totals)


def coverage(measured: CoverageCurve, unit: str) -> Markup | None:
    """Draws accuracy by the share of texts that are answered, the most probable first; None for few texts."""
    rows = [row for row in measured["curve"] if row["n"] >= LEAST_OF_POINT]
    if len(rows) < 2:
        return None
    points = [(row["n"] / rows[-1]["n"], row["right"] / row["n"]) for row in rows]
    low = min(share for _, share in points)
    across = axis("share of texts answered, the most probable first", 0.0, 1.0)
    figure = Figure("Accuracy by coverage", across, axis(unit, min(low, 0.9), 1.0), {})
    figure.path(points, "line one")
    figure.dot(*points[-1], "one", 3)
    return figure.svg()


def unknown_texts(quality: UnknownQuality) -> Markup:
    """Draws the share of unknown texts that are flagged by the share of others, for all thresholds."""
    across, up = axis("share of other texts flagged", 0.0, 1.0), axis("share of unknown texts flagged", 0.0, 1.0)
    figure = Figure("Unknown texts", across, up, {})
    figure.path([(0.0, 0.0), (1.0, 1.0)], "line chance")
    figure.path([(row["labelled"], row["unknown"]) for row in quality["curve"]], "line one")
    shares = (quality["labelled_flagged"] / quality["labelled"], quality["unknown_flagged"] / quality["unknown"])
    figure.dot(*shares, "one", 3)
    return figure.svg()


def histogram(name: str, series: Mapping[str, Histogram]) -> Markup | None:
    """Draws each series in percent of itself; None if nearly all values are in one bin."""
    label, unit, names = HISTOGRAMS[name]
    totals, low, high = _totals(series)
    if not any(totals) or _is_spike(totals):
        return None
    shares = {key: [count / values["n"] for count in values["counts"]] for key, values in series.items()}
    styles = {key: "two" if key == "wrong" else "one" for key in series}
    legend = {f"{names[key]}, n = {values['n']:,}": styles[key] for key, values in series.items()}
    highest = max(map(max, shares.values()))
    figure = Figure(f"Histogram: {label}", axis(label, low, high), axis(unit, 0.0, highest), legend)
    for key, heights in shares.items():
        width = (high - low) / len(heights)
        steps = [(low + (index + end) * width, height) for index, height in enumerate(heights) for end in (0, 1)]
        figure.path([(low, 0.0), *steps, (high, 0.0)], f"area {styles[key]}", closed=True)
        figure.path(steps, f"line {styles[key]}")
    return figure.svg()


def calibration(evaluation: EvaluationSection, quality: StudentQuality) -> Markup | None:
    """Draws accuracy by predicted probability; None if fewer than two bins have enough texts."""
    bins = {
        name: rows
        for name in (evaluation["system"], "ensemble")
        if (rows := [row for row in quality["calibration"].get(name, ()) if row["n"] >= LEAST_OF_POINT])
    }
    if max(map(len, bins.values()), default=0) < 2:
        return None
    styles = dict(zip(bins, ("one", "two"), strict=False))
    across, up = axis("probability of the prediction", 0, 1), axis("accuracy", 0, 1)
    figure = Figure("Calibration", across, up, styles)
    figure.path([(0.0, 0.0), (1.0, 1.0)], "line chance")
    for name, rows in bins.items():
        figure.path([(row["confidence"], row["accuracy"]) for row in rows], f"line {styles[name]}")
        for row in rows:
            radius = 1.5 + 4 * math.sqrt(row["n"] / max(other["n"] for other in rows))
            figure.dot(row["confidence"], row["accuracy"], styles[name], radius)
    return figure.svg()


# ---- drawing


@dataclass(frozen=True)
class FigureAxis:
    label: str
    ticks: Sequence[float]

    def share(self, value: float) -> float:
        """Returns 0 at the low end and 1 at the high end."""
        return (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0])


def short_percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def axis(label: str, low: float, high: float) -> FigureAxis:
    """Returns an axis in percent with about five round ticks that enclose `low` and `high`."""
    size = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= (high - low) / 4 * (1 - 1e-9))
    first, last = math.floor(low / step + NEAR), math.ceil(high / step - NEAR)
    return FigureAxis(label, [index * step for index in range(first, last + 1)])


class Figure:
    """An SVG with two axes; coordinates are in the units of the axes."""

    def __init__(self, title: str, x: FigureAxis, y: FigureAxis, legend: Mapping[str, str]) -> None:
        self._title, self._x, self._y = title, x, y
        self._top, self._height = TOP + LEGEND * len(legend), HEIGHT + LEGEND * len(legend)
        self._bottom = self._height - BOTTOM
        self._parts: list[Markup] = []
        for row, (name, style) in enumerate(legend.items()):
            down = TOP + LEGEND * row
            self._line([(LEFT, down + 2), (LEFT + 18, down + 2)], f"line {style}")
            self._text(LEFT + 24, down + 6, name, "start")
        self._axes()

    def path(self, points: Sequence[tuple[float, float]], style: str, *, closed: bool = False) -> None:
        self._line([self._at(*point) for point in points], style, "Z" if closed else "")

    def dot(self, x: float, y: float, style: str, radius: float) -> None:
        across, down = self._at(x, y)
        self._add('<circle class="dot {}" cx="{}" cy="{}" r="{}"/>', style, _n(across), _n(down), _n(radius))

    def svg(self) -> Markup:
        head = Markup('<svg class="figure" viewBox="0 0 {} {}" role="img" aria-label="{}">')
        return head.format(WIDTH, self._height, self._title) + Markup("").join(self._parts) + Markup("</svg>")

    def _at(self, x: float, y: float) -> tuple[float, float]:
        across, up = self._x.share(x), self._y.share(y)
        return LEFT + across * (WIDTH - LEFT - RIGHT), self._bottom - up * (self._bottom - self._top)

    def _axes(self) -> None:
        for value in self._y.ticks:
            _, down = self._at(self._x.ticks[0], value)
            self._line([(LEFT, down), (WIDTH - RIGHT, down)], "grid")
            self._text(LEFT - 6, down + 4, short_percent(value), "end")
        for value in self._x.ticks:
            across, _ = self._at(value, self._y.ticks[0])
            self._line([(across, self._bottom), (across, self._bottom + 4)], "axis")
            self._text(across, self._bottom + 17, short_percent(value), "middle")
        self._line([(LEFT, self._bottom), (WIDTH - RIGHT, self._bottom)], "axis")
        self._text((LEFT + WIDTH - RIGHT) / 2, self._height - 8, self._x.label, "middle name")
        turned = '<text class="middle name" transform="translate(12 {}) rotate(-90)">{}</text>'
        self._add(turned, _n((self._top + self._bottom) / 2), self._y.label)

    def _line(self, points: Sequence[tuple[float, float]], style: str, end: str = "") -> None:
        steps = "L".join(f"{_n(across)} {_n(down)}" for across, down in points)
        self._add('<path class="{}" d="M{}{}"/>', style, steps, end)

    def _text(self, across: float, down: float, text: str, style: str) -> None:
        self._add('<text class="{}" x="{}" y="{}">{}</text>', style, _n(across), _n(down), text)

    def _add(self, form: str, *values: object) -> None:
        self._parts.append(Markup(form).format(*values))  # noqa: S704 - constant form, escaped values


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
