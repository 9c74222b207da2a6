"""Draws the page's figures as small SVG files; the page's style sheet sets colours for light and dark.

The same numbers give the same bytes: no fonts, versions or dates. Text is escaped; series differ by dash and colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from amalgam.stages.report.blocks import CalibrationBin, Histogram, ReportJson, SweepPoint, TargetBlock
from amalgam.stages.report.summary import interval

WIDTH, HEIGHT = 360, 240

LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 46

LEGEND = 18
"""Height of a line of the legend."""

NEAR = 1e-6
"""Tolerance of a tick, as a share of the step between ticks."""


@dataclass(frozen=True)
class Axis:
    label: str
    low: float
    high: float
    ticks: Sequence[float]
    show: Callable[[float], str]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Returns 0 at the low end and 1 at the high end."""
        if self.logarithmic:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def plain(value: float) -> str:
    return f"{value:.4g}"


def percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def axis_to(label: str, high: float, show: Callable[[float], str] = percent) -> Axis:
    """Returns an axis from 0 to the round number above `high`."""
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
    """An SVG with two axes; coordinates are in the units of the axes."""

    def __init__(self, title: str, x: Axis, y: Axis, legend: Sequence[tuple[str, str]] = ()) -> None:
        self._title, self._x, self._y = title, x, y
        self._top = TOP + LEGEND * len(legend)
        self._height = HEIGHT + LEGEND * len(legend)
        self._parts: list[Markup] = []
        for row, (name, style) in enumerate(legend):
            self._legend(TOP + LEGEND * row, name, style)
        self._axes()

    def at(self, x: float, y: float) -> tuple[float, float]:
        across, up = self._x.share(x), self._y.share(y)
        bottom = self._height - BOTTOM
        return LEFT + across * (WIDTH - LEFT - RIGHT), bottom - up * (bottom - self._top)

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        self._path([self.at(*point) for point in points], f"line {style}")

    def area(self, points: Sequence[tuple[float, float]], style: str) -> None:
        self._path([self.at(*point) for point in points], f"area {style}", closed=True)

    def dot(self, x: float, y: float, style: str, radius: float = 4.0) -> None:
        across, down = self.at(x, y)
        self._add('<circle class="dot {}" cx="{}" cy="{}" r="{}"/>', style, _n(across), _n(down), _n(radius))

    def whisker(self, x: float, low: float, high: float, style: str) -> None:
        self._path([self.at(x, low), self.at(x, high)], f"line {style}")

    def across(self, y: float, text: str) -> None:
        """Draws a labelled horizontal line, such as chance; the label is above it if there is room."""
        start, end = self.at(self._x.low, y), self.at(self._x.high, y)
        self._path([start, end], "line chance")
        above = start[1] - 5 if start[1] - 16 > self._top else start[1] + 14
        self._text(end[0], above, text, "end")

    def down(self, x: float, text: str) -> None:
        """Draws a labelled vertical line."""
        start, end = self.at(x, self._y.low), self.at(x, self._y.high)
        self._path([start, end], "line chance")
        left = end[0] < WIDTH * 0.6
        self._text(end[0] + (5 if left else -5), end[1] + 11, text, "start" if left else "end")

    def foot(self, text: str) -> None:
        """Writes a remark above the horizontal axis."""
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

    def _legend(self, down: float, name: str, style: str) -> None:
        if style.startswith("dot"):
            self._add('<circle class="{}" cx="{}" cy="{}" r="4"/>', style, LEFT + 9, _n(down + 2))
        else:
            self._path([(LEFT, down + 2), (LEFT + 18, down + 2)], f"line {style}")
        self._text(LEFT + 24, down + 6, name, "start")

    def _path(self, points: Sequence[tuple[float, float]], style: str, *, closed: bool = False) -> None:
        steps = "L".join(f"{_n(across)} {_n(down)}" for across, down in points)
        self._add('<path class="{}" d="M{}{}"/>', style, steps, "Z" if closed else "")

    def _text(self, across: float, down: float, text: str, style: str) -> None:
        self._add('<text class="{}" x="{}" y="{}">{}</text>', style, _n(across), _n(down), text)

    def _add(self, form: str, *values: object) -> None:
        self._parts.append(Markup(form).format(*values))  # noqa: S704 - constant form, escaped values


def bar(
    share: float,
    style: str = "one",
    *,
    low: float | None = None,
    high: float | None = None,
    chance: float | None = None,
) -> Markup:
    """Returns a bar for a table cell: a share from 0 to 1, its interval and the level of chance."""

    def put(form: str, *values: object) -> None:
        parts.append(Markup(form).format(*values))  # noqa: S704 - constant form, escaped values

    parts = [Markup('<rect class="rest" width="100" height="10"/>')]
    width = _n(100 * min(max(share, 0.0), 1.0))
    put('<rect class="fill {}" width="{}" height="10"/>', style, width)
    if low is not None and high is not None:
        put('<rect class="interval" x="{}" y="3.5" width="{}" height="3"/>', _n(100 * low), _n(100 * (high - low)))
    if chance is not None:
        put('<rect class="chance" x="{}" y="0" width="1.2" height="10"/>', _n(100 * chance))
    head = Markup('<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">')
    return head + Markup("").join(parts) + Markup("</svg>")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def printable(text: object) -> Markup:
    """Escapes text from data; invisible and direction-changing letters become escape sequences."""
    return escape("".join(ch if ch.isprintable() or ch in JOINERS else _escaped(ch) for ch in str(text)))


JOINERS = "\u200c\u200d"
"""Persian, Indic scripts and emoji need these letters."""


def _escaped(letter: str) -> str:
    return " " if letter in "\n\r\t" else letter.encode("unicode_escape").decode()


LEAST_TEXTS = 10
"""Least texts of a calibration bin that is drawn."""

MOST_IN_ONE_BIN = 0.98
"""A histogram with a larger share in one bin is not drawn."""

QUARTERS = [0.0, 0.25, 0.5, 0.75, 1.0]

Series = tuple[str, Histogram, str]
"""Name, counts, style."""


def figures(numbers: ReportJson) -> dict[str, Markup]:
    """Returns the figures that show more than one value."""
    drawn = {"calibration": _calibration(numbers), "sweep": _sweep(numbers["sweep"], numbers["chance"])}
    quality = numbers["target_quality"]
    if quality:
        uncertainty, mixture, targets = quality.get("uncertainty"), quality.get("mixture"), quality["targets"]
        drawn["margins"], drawn["weights"] = _margins(targets["margin"]), _weights(targets)
        if uncertainty:
            series: list[Series] = [
                ("teachers that have the gold label", uncertainty["right"], "one"),
                ("teachers that do not", uncertainty["wrong"], "two"),
            ]
            title = "Histogram of the uncertainty of teachers that have a text's gold label and of those that do not"
            drawn["uncertainty"] = _svg(_histogram(title, "uncertainty (0: certain)", series, "share of the group"))
        if mixture:
            drawn["mixture"] = _mixture(mixture["largest"], len(mixture["mean"]))
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _svg(figure: Figure | None) -> Markup | None:
    return figure.svg() if figure else None


def _histogram(title: str, label: str, series: Sequence[Series], unit: str) -> Figure | None:
    """Draws each series in percent of itself; None if nearly all values are in one bin."""
    drawn = [part for part in series if part[1]["n"]]
    total = [sum(counts) for counts in zip(*(part[1]["counts"] for part in drawn), strict=True)]
    if not total or max(total) > MOST_IN_ONE_BIN * sum(total):
        return None
    low, high = drawn[0][1]["low"], drawn[0][1]["high"]
    shares = [[count / counts["n"] for count in counts["counts"]] for _, counts, _ in drawn]
    legend = [(f"{name}, n = {counts['n']:,}", style) for name, counts, style in drawn]
    figure = Figure(title, axis_between(label, low, high), axis_to(unit, max(map(max, shares))), legend)
    for (_, _, style), heights in zip(drawn, shares, strict=True):
        width = (high - low) / len(heights)
        edges = [low + index * width for index in range(len(heights) + 1)]
        steps = [(edges[index + end], height) for index, height in enumerate(heights) for end in (0, 1)]
        figure.area([(low, 0.0), *steps, (high, 0.0)], style)
        figure.line(steps, style)
    return figure


def _mixture(largest: Histogram, teachers: int) -> Markup | None:
    title, label = "Histogram of the leading teacher's weight", "weight of the leading teacher"
    figure = _histogram(title, label, [("training texts", largest, "one")], "share of texts")
    if figure is None or teachers < 2:
        return None
    figure.down(1 / teachers, "equal weights")
    return figure.svg()


def _margins(margins: dict[str, Histogram] | None) -> Markup | None:
    names = {
        "all": ("training texts", "one"),
        "right": ("leading teacher has the gold label", "one"),
        "wrong": ("it does not", "two"),
    }
    series = [(names[key][0], counts, names[key][1]) for key, counts in (margins or {}).items()]
    title = "Histogram of the margin between the first and the second teacher"
    return _svg(_histogram(title, "margin, first minus second teacher", series, "share of the group"))


def _weights(targets: TargetBlock) -> Markup | None:
    summary = targets["summary"]
    counts: Histogram = {"n": summary["texts"], "counts": summary["weight_bins"], "low": 0.0, "high": 1.0}
    title, label = "Histogram of the weights of the texts in the student's loss", "weight of a text in the loss"
    return _svg(_histogram(title, label, [("all training texts", counts, "one")], "share of texts"))


def _calibration(numbers: ReportJson) -> Markup | None:
    quality, evaluation = numbers["student_quality"], numbers["evaluation"]
    if not quality or not evaluation:
        return None
    order = [name for name in (evaluation["system"], "ensemble") if name in quality["calibration"]]
    styles = dict(zip(order, ("one", "two"), strict=False))
    bins: dict[str, list[CalibrationBin]] = {
        name: [row for row in quality["calibration"][name] if row["n"] >= LEAST_TEXTS] for name in order
    }
    if max(map(len, bins.values()), default=0) < 2:
        return None
    across, up = (Axis(label, 0.0, 1.0, QUARTERS, plain) for label in ("probability of the prediction", "accuracy"))
    figure = Figure("Calibration", across, up, list(styles.items()))
    figure.line([(0.0, 0.0), (1.0, 1.0)], "chance")
    for name, rows in bins.items():
        if rows:
            figure.line([(row["confidence"], row["accuracy"]) for row in rows], styles[name])
        for row in rows:
            radius = 1.5 + 4 * math.sqrt(row["n"] / max(other["n"] for other in rows))
            figure.dot(row["confidence"], row["accuracy"], styles[name], radius)
    return figure.svg()


def _sweep(points: list[SweepPoint], chance: float | None) -> Markup | None:
    if len(points) < 2:
        return None
    spans = [interval(point["accuracy"], point["n"]) for point in points]
    temperatures = sorted({point["temperature"] for point in points})
    room = 1.25
    x = Axis("temperature τ (logarithmic)", temperatures[0] / room, temperatures[-1] * room, temperatures, plain, True)
    y = axis_between("test accuracy", min(low for low, _ in spans), max(high for _, high in spans), percent)
    own = [("this student", "dot three")] if any(point["ours"] for point in points) else []
    figure = Figure("Accuracy by temperature", x, y, [("students of muka-soft, 95 % intervals", "one"), *own])
    figure.line([(point["temperature"], point["accuracy"]) for point in points], "one")
    for point, (low, high) in zip(points, spans, strict=True):
        figure.whisker(point["temperature"], low, high, "thin")
        figure.dot(point["temperature"], point["accuracy"], "three" if point["ours"] else "one")
    if chance is not None and chance >= y.low:
        figure.across(chance, "chance")
    elif chance is not None:
        figure.foot(f"chance, {percent(chance)}, is below this scale")
    return figure.svg()
