"""What a figure shows, apart from how it is drawn.

The page draws charts as SVG and ``--plot`` draws the same charts as PNG, so a figure is
described once. Numbers are formatted here too, so that both say the same.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

Kind = Literal["line", "step", "dots", "bars", "band"]
Unit = Literal["count", "percent", "seconds", "bytes", "number"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One set of points.

    Attributes:
        label: Its name in the legend.
        kind: ``"line"``; ``"step"``: a value holds until the next point and the last
            one to the end; ``"dots"``; ``"bars"`` and ``"band"``: from ``low`` to
            ``y``.
        x: Positions, rising.
        y: Values, as many.
        low: Lower ends of bars and bands; 0 where empty.
        tone: Which of the colours, from 0.
        dashed: Broken line, so that it can be told apart without colours.
    """

    label: str
    kind: Kind
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    tone: int = 0
    dashed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A point that is pointed out, for example a change of a limit.

    Attributes:
        x: Where.
        y: Where.
        text: A few characters beside it, left out where there is no room.
        tip: What the pointer shows over it.
        tone: Colour, as in `Series`.
        dot: Whether there is a circle, or only the text.
    """

    x: float
    y: float
    text: str
    tip: str
    tone: int = 0
    dot: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """Series over one pair of axes.

    Attributes:
        key: Unique on a page; name of the PNG file.
        title: What is shown.
        caption: How to read it, one or two sentences.
        x_label: Under the axis.
        y_label: Above the axis.
        series: What is drawn, the first one at the back.
        marks: Drawn on top.
        unit: Of y.
        x_log: Logarithmic x axis; all x are above 0.
        y_top: Where y ends; None for the largest value.
    """

    key: str
    title: str
    caption: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    unit: Unit = "count"
    x_log: bool = False
    y_top: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BarList:
    """Named values as horizontal bars, one below another.

    Attributes:
        key: As in `Chart`.
        title: As in `Chart`.
        caption: As in `Chart`.
        rows: Name and value of each bar.
        unit: Of the values.
        top: Value of a full bar; None for the largest.
    """

    key: str
    title: str
    caption: str
    rows: Sequence[tuple[str, float]]
    unit: Unit = "count"
    top: float | None = None


Figure = Chart | BarList


def format_value(value: float, unit: Unit) -> str:
    """A value in few characters: ``1.2k``, ``35%``, ``12 ms``, ``3.4 MiB``."""
    if not math.isfinite(value):
        return "-"
    if unit == "percent":
        percent = value * 100
        if percent and abs(percent) < 0.01:
            return "<0.01%"
        return f"{_short(percent)}%"
    if unit == "seconds":
        for factor, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= factor:
                return f"{_short(value / factor)} {name}"
        return "0 s" if value == 0 else f"{_short(value * 1e9)} ns"
    if unit == "bytes":
        # As the commands print them.
        for bits, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
            if abs(value) >= 1 << bits:
                return f"{_short(value / (1 << bits))} {name}"
        return f"{_short(value)} B"
    if unit == "count":
        for factor, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
            if abs(value) >= factor:
                scale = 1e3 if name == "k" else factor
                return f"{_short(value / scale)}{name}"
    return _short(value)


def _short(value: float) -> str:
    """Three figures or all of an integer's, without needless zeros."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` round numbers, at least two, in [low, high]."""
    if high <= low:
        return [low]
    rough = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten in [low, high], thinned to at most ``most``."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    every = max(1, math.ceil((last - first + 1) / most))
    return [10.0**i for i in range(first, last + 1, every)]


def extent(chart: Chart) -> tuple[float, float, float]:
    """First and last x, and the top of y; y begins at 0."""
    xs = [x for series in chart.series for x in series.x]
    if any(series.kind == "bars" for series in chart.series):
        half = bar_width(chart) / 2
        xs += [min(xs) - half, max(xs) + half]
    ys = [y for series in chart.series for y in series.y if math.isfinite(y)]
    first, last = (min(xs), max(xs)) if xs else (0.0, 1.0)
    if first == last:
        first, last = (first / 2, last * 2) if chart.x_log else (first - 1, last + 1)
    top = chart.y_top if chart.y_top is not None else max(ys, default=0.0)
    # A little room above the highest value, and an axis where all are 0.
    return first, last, (top if chart.y_top is not None else top * 1.08) or 1.0


def bar_width(chart: Chart) -> float:
    """Width of the bars in units of x: the distance between neighbours."""
    gaps = [
        b - a
        for series in chart.series
        if series.kind == "bars"
        for a, b in itertools.pairwise(series.x)
    ]
    return min(gaps, default=1.0)


def check(figure: Figure) -> None:
    """Raises ValueError where a figure is impossible to draw; a guard for authors."""
    if isinstance(figure, BarList):
        return
    for series in figure.series:
        if len(series.x) != len(series.y) or len(series.low) not in (0, len(series.x)):
            raise ValueError(f"{figure.key}: {series.label} has unequal lengths.")
        if figure.x_log and any(x <= 0 for x in series.x):
            raise ValueError(f"{figure.key}: {series.label} has x of 0 or less.")
