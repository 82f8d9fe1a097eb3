"""Draws charts as SVG text. Colours are CSS variables of the page, for dark and light.

Text does not scale: a chart is drawn for the width at which it is shown, so that 12
pixels are 12 pixels on a phone too. The page holds one drawing for each of two widths.
"""

import html
import itertools
import math
import re

from grain_sparsecore.report.charts import (
    BarList,
    Chart,
    Figure,
    Series,
    bar_width,
    check,
    extent,
    format_value,
    log_ticks,
    ticks,
)

FONT_SIZE = 12

# Widths at 12 pixels in DejaVu Sans, the widest of the usual system fonts; nothing
# here can measure text, and what is too long would be cut off.
_CHARACTER = 7.7
_WIDE_CHARACTERS = {"%": 11.5, "m": 11.8, "M": 10.5, "w": 10.0, "W": 12.0, "@": 12.1}

TONES = 5

_TOP, _BOTTOM, _RIGHT = 26, 40, 12


def draw(figure: Figure, *, width: int) -> str:
    """An ``<svg>`` element of ``width`` pixels."""
    check(figure)
    if isinstance(figure, BarList):
        return _draw_list(figure, width)
    return _Drawing(figure, width).text()


class _Drawing:
    def __init__(self, chart: Chart, width: int) -> None:
        self.chart = chart
        self.width = width
        self.height = round(width * (0.62 if width < 450 else 0.5))
        self.first, self.last, self.top = extent(chart)
        self.y_ticks = ticks(0, self.top, 5)
        self.y_texts = [format_value(t, chart.unit) for t in self.y_ticks]
        self.left = 8 + max(map(text_width, self.y_texts))
        self.plot_width = width - self.left - _RIGHT
        self.plot_height = self.height - _TOP - _BOTTOM

    def x(self, value: float) -> float:
        if self.chart.x_log:
            span = math.log(self.last) - math.log(self.first)
            part = (math.log(value) - math.log(self.first)) / span
        else:
            part = (value - self.first) / (self.last - self.first)
        return self.left + self.plot_width * part

    def y(self, value: float) -> float:
        return _TOP + self.plot_height * (1 - min(value, self.top) / self.top)

    def text(self) -> str:
        parts = [self._axes()]
        parts += [self._series(series) for series in self.chart.series]
        parts += self._marks()
        return _svg(self.width, self.height, self.chart, "".join(parts))

    def _axes(self) -> str:
        chart, right = self.chart, self.width - _RIGHT
        parts = [_text(0, 12, chart.y_label, "start", "label")]
        for value, text in zip(self.y_ticks, self.y_texts, strict=True):
            y = self.y(value)
            kind = "grid" if value else "axis"
            parts.append(_line(self.left, y, right, y, kind))
            parts.append(_text(self.left - 6, y + 4, text, "end"))
        parts += self._x_ticks()
        middle = self.left + self.plot_width / 2
        parts.append(_text(middle, self.height - 6, chart.x_label, "middle", "label"))
        return "".join(parts)

    def _x_ticks(self) -> list[str]:
        base = _TOP + self.plot_height
        most = max(2, int(self.plot_width / 70))
        if self.chart.x_log:
            values = log_ticks(self.first, self.last, most)
        else:
            values = ticks(self.first, self.last, most)
            # Positions are steps, partitions and ranks: whole numbers.
            values = [v for v in values if v == int(v)] or [round(self.first)]
        parts = []
        free = 0.0
        for value in values:
            text = format_value(value, "count")
            half = text_width(text) / 2
            x = min(max(self.x(value), half), self.width - half)
            if x - half < free:
                continue
            free = x + half + 6
            parts.append(_line(self.x(value), base, self.x(value), base + 4, "axis"))
            parts.append(_text(x, base + 17, text, "middle"))
        return parts

    def _series(self, series: Series) -> str:
        tone = f"t{series.tone % TONES}"
        dashed = " dashed" if series.dashed else ""
        points = [
            (self.x(a), self.y(b)) for a, b in zip(series.x, series.y, strict=True)
        ]
        if not points:
            return ""
        lows = [self.y(v) for v in series.low] or [self.y(0)] * len(points)
        if series.kind == "bars":
            return self._bars(series, points, lows, tone)
        if series.kind == "band":
            lower = [(x, y) for (x, _), y in zip(points, lows, strict=True)]
            path = _path([*points, *reversed(lower)])
            return f'<path class="fill {tone}" d="{path}Z"/>'
        if series.kind == "dots":
            return "".join(
                f'<circle class="dot {tone}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
                for x, y in points
            )
        if series.kind == "step":
            corners = [points[0]]
            for (_, before), (x, y) in itertools.pairwise(points):
                corners += [(x, before), (x, y)]
            points = [*corners, (self.x(self.last), corners[-1][1])]
        if len(points) == 1:
            # A line of one point would be invisible.
            (x, y) = points[0]
            return f'<circle class="dot {tone}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
        return f'<path class="line {tone}{dashed}" d="{_path(points)}"/>'

    def _bars(
        self,
        series: Series,
        points: list[tuple[float, float]],
        lows: list[float],
        tone: str,
    ) -> str:
        width = self.plot_width * bar_width(self.chart) / (self.last - self.first)
        # Between narrow bars a gap would only flicker.
        gap = min(2.0, width * 0.2) if width > 4 else 0.0
        parts = []
        for (x, y), low, at, value in zip(
            points, lows, series.x, series.y, strict=True
        ):
            tip = f"{series.label}, {self.chart.x_label} {at:g}: " + format_value(
                value, self.chart.unit
            )
            parts.append(
                f'<rect class="bar {tone}" x="{x - width / 2 + gap / 2:.2f}" '
                f'y="{y:.1f}" width="{max(width - gap, 0.5):.2f}" '
                f'height="{max(low - y, 0):.1f}"><title>{html.escape(tip)}</title>'
                "</rect>"
            )
        return "".join(parts)

    def _marks(self) -> list[str]:
        places = [(self.x(m.x), self.y(m.y)) for m in self.chart.marks]
        parts = []
        # Boxes that no text may touch: left, top, right, bottom.
        taken = []
        for mark, (x, y) in zip(self.chart.marks, places, strict=True):
            if mark.dot:
                taken.append((x - 5, y - 5, x + 5, y + 5))
                parts.append(
                    f'<circle class="mark t{mark.tone % TONES}" cx="{x:.1f}" '
                    f'cy="{y:.1f}" r="4"><title>{html.escape(mark.tip)}</title>'
                    "</circle>"
                )
        for mark, (x, y) in zip(self.chart.marks, places, strict=True):
            half = text_width(mark.text) / 2
            middle = min(max(x, self.left + half), self.width - half)
            box = (middle - half - 2, y - 18, middle + half + 2, y - 6)
            if box[1] < _TOP - FONT_SIZE or any(_overlap(box, b) for b in taken):
                continue
            taken.append(box)
            parts.append(_text(middle, y - 8, mark.text, "middle", "marktext"))
        return parts


def _overlap(
    a: tuple[float, float, float, float], b: tuple[float, float, float, float]
) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _draw_list(figure: BarList, width: int) -> str:
    top = figure.top or max((value for _, value in figure.rows), default=0) or 1
    texts = [format_value(value, figure.unit) for _, value in figure.rows]
    room = width - max(map(text_width, texts), default=0) - 10
    parts = []
    y = 0
    for (name, value), text in zip(figure.rows, texts, strict=True):
        parts.append(f"<g><title>{html.escape(f'{name}: {text}')}</title>")
        for line in _wrapped(name, width):
            parts.append(_text(0, y + 13, line, "start"))
            y += 16
        length = room * min(max(value, 0) / top, 1)
        bar = f'x="0" y="{y + 4}" height="8" rx="4"'
        parts += [
            f'<rect class="track" {bar} width="{room:.1f}"/>',
            f'<rect class="bar t0" {bar} width="{length:.1f}"/>',
            _text(width, y + 12, text, "end", "label"),
            "</g>",
        ]
        y += 26
    return _svg(width, max(y - 8, 20), figure, "".join(parts))


def _wrapped(text: str, room: float) -> list[str]:
    """Lines of at most ``room`` pixels, broken behind blanks, ``_``, ``-``, ``,``."""
    lines = [""]
    for part in re.findall(r"[^ _,-]*[ _,-]?", text):
        while text_width(part) > room:
            part = _fill(lines, part, room)
        if text_width((lines[-1] + part).rstrip()) > room:
            lines.append("")
        lines[-1] += part
    return lines


def _fill(lines: list[str], part: str, room: float) -> str:
    """Puts of a part that is longer than a line what fits; returns the rest."""
    count = 0
    while text_width(lines[-1] + part[: count + 1]) <= room:
        count += 1
    lines[-1] += part[:count]
    lines.append("")
    return part[count:]


def text_width(text: str) -> float:
    """Upper bound of the width of a text in pixels."""
    return sum(_WIDE_CHARACTERS.get(c, _CHARACTER) for c in text)


def _svg(width: int, height: int, figure: Figure, inner: str) -> str:
    name = html.escape(figure.title, quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{name}" font-size="{FONT_SIZE}">{inner}</svg>'
    )


def _path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return (
        f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" '
        f'y2="{y2:.1f}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )
