"""Figures as SVG, drawn here: a few hundred bytes each, coloured by the page's style sheet in light and in dark.

Nothing in them depends on fonts, versions or the hour, so that the same numbers are the same bytes. Text is escaped.
A figure is as wide as a phone and grows with the page; series differ by dash as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from amalgam.stages.report.summary import interval

WIDTH, HEIGHT = 360, 240

LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 46

LEGEND = 18
"""Height of a line of the legend."""

NEAR = 1e-6
"""Of a step between ticks: a number so little past one is on it."""


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: Sequence[float]
    show: Callable[[float], str]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.logarithmic:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def plain(value: float) -> str:
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def axis_to(label: str, high: float, show: Callable[[float], str] = percent) -> Axis:
    """From 0 to the round number above `high`."""
    step = _round_step(high / 4)
    count = max(1, math.ceil(high / step - NEAR))
    return Axis(label, 0.0, count * step, [index * step for index in range(count + 1)], show)


def axis_between(label: str, low: float, high: float, show: Callable[[float], str] = plain) -> Axis:
    step = _round_step((high - low) / 4)
    first, last = math.floor(low / step + NEAR), math.ceil(high / step - NEAR)
    return Axis(label, first * step, last * step, [index * step for index in range(first, last + 1)], show)


def _round_step(rough: float) -> float:
    if rough <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(rough))
    return next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= rough * (1 - 1e-9))


class Figure:
    """An SVG with two axes; what is drawn is in the axes' own units."""

    def __init__(self, title: str, x: Axis, y: Axis, legend: Sequence[tuple[str, str]] = ()) -> None:
        self._title, self._x, self._y = title, x, y
        self._top = TOP + LEGEND * len(legend)
        self._height = HEIGHT + LEGEND * len(legend)
        self._parts: list[Markup] = []
        for place, (name, mark) in enumerate(legend):
            self._legend(TOP + LEGEND * place, name, mark)
        self._axes()

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, up = self._x.share(x), self._y.share(y)
        bottom = self._height - BOTTOM
        return LEFT + across * (WIDTH - LEFT - RIGHT), bottom - up * (bottom - self._top)

    def line(self, points: Sequence[tuple[float, float]], mark: str) -> None:
        self._path([self.at(*point) for point in points], f"line {mark}")

    def area(self, points: Sequence[tuple[float, float]], mark: str) -> None:
        self._path([self.at(*point) for point in points], f"area {mark}", closed=True)

    def dot(self, x: float, y: float, mark: str, radius: float = 4.0) -> None:
        across, down = self.at(x, y)
        self._add('<circle class="dot {}" cx="{}" cy="{}" r="{}"/>', mark, _n(across), _n(down), _n(radius))

    def whisker(self, x: float, low: float, high: float, mark: str) -> None:
        self._path([self.at(x, low), self.at(x, high)], f"line {mark}")

    def across(self, y: float, text: str) -> None:
        """A level that is named, such as chance; its name stands on the side where it has room."""
        start, end = self.at(self._x.low, y), self.at(self._x.high, y)
        self._path([start, end], "line chance")
        above = start[1] - 5 if start[1] - 16 > self._top else start[1] + 14
        self._text(end[0], above, text, "end")

    def down(self, x: float, text: str) -> None:
        start, end = self.at(x, self._y.low), self.at(x, self._y.high)
        self._path([start, end], "line chance")
        left = end[0] < WIDTH * 0.6
        self._text(end[0] + (5 if left else -5), end[1] + 11, text, "start" if left else "end")

    def foot(self, text: str) -> None:
        """A word on what lies below the scale."""
        self._text(LEFT + 4, self._height - BOTTOM - 5, text, "start")

    def svg(self) -> Markup:
        head = Markup('<svg class="figure" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            WIDTH, self._height, self._title
        )
        return head + Markup("").join(self._parts) + Markup("</svg>")

    # ---- pieces

    def _axes(self) -> None:
        for value in self._y.ticks:
            start, end = self.at(self._x.low, value), self.at(self._x.high, value)
            self._path([start, end], "grid")
            self._text(start[0] - 6, start[1] + 4, self._y.show(value), "end")
        bottom = self._height - BOTTOM
        for value in self._x.ticks:
            across, _ = self.at(value, self._y.low)
            self._path([(across, bottom), (across, bottom + 4)], "axis")
            self._text(across, bottom + 17, self._x.show(value), "middle")
        self._path([(LEFT, bottom), (WIDTH - RIGHT, bottom)], "axis")
        self._text((LEFT + WIDTH - RIGHT) / 2, self._height - 8, self._x.label, "middle name")
        middle = (self._top + bottom) / 2
        turned = '<text class="middle name" transform="translate(12 {}) rotate(-90)">{}</text>'
        self._add(turned, _n(middle), self._y.label)

    def _legend(self, down: float, name: str, mark: str) -> None:
        if mark.startswith("dot"):
            self._add('<circle class="{}" cx="{}" cy="{}" r="4"/>', mark, LEFT + 9, _n(down + 2))
        else:
            self._path([(LEFT, down + 2), (LEFT + 18, down + 2)], f"line {mark}")
        self._text(LEFT + 24, down + 6, name, "start")

    def _path(self, points: Sequence[tuple[float, float]], mark: str, *, closed: bool = False) -> None:
        steps = "L".join(f"{_n(across)} {_n(down)}" for across, down in points)
        self._add('<path class="{}" d="M{}{}"/>', mark, steps, "Z" if closed else "")

    def _text(self, across: float, down: float, text: str, mark: str) -> None:
        self._add('<text class="{}" x="{}" y="{}">{}</text>', mark, _n(across), _n(down), text)

    def _add(self, form: str, *values: object) -> None:
        self._parts.append(Markup(form).format(*values))  # noqa: S704 - the form is ours, what is put in is escaped


def bar(
    share: float, mark: str = "one", *, low: float | None = None, high: float | None = None, chance: float | None = None
) -> Markup:
    """For a cell of a table: a bar from 0 to 1, its interval and the level of chance."""

    def put(form: str, *values: object) -> None:
        parts.append(Markup(form).format(*values))  # noqa: S704 - the form is ours, what is put in is escaped

    parts = [Markup('<rect class="rest" width="100" height="10"/>')]
    width = _n(100 * min(max(share, 0.0), 1.0))
    put('<rect class="fill {}" width="{}" height="10"/>', mark, width)
    if low is not None and high is not None:
        put('<rect class="interval" x="{}" y="3.5" width="{}" height="3"/>', _n(100 * low), _n(100 * (high - low)))
    if chance is not None:
        put('<rect class="chance" x="{}" y="0" width="1.2" height="10"/>', _n(100 * chance))
    head = Markup('<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">')
    return head + Markup("").join(parts) + Markup("</svg>")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def shown(text: object) -> Markup:
    """Text from data: escaped, and what cannot be seen or would turn the line around is written out."""
    safe = "".join(ch if ch.isprintable() or ch in JOINERS else _written(ch) for ch in str(text))
    return escape(safe)


JOINERS = "\u200c\u200d"
"""Persian, Indic scripts and emoji need them."""


def _written(letter: str) -> str:
    return " " if letter in "\n\r\t" else letter.encode("unicode_escape").decode()


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
