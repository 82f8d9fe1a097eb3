"""Draws the same charts as PNG files with matplotlib, the extra ``[plot]``."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grain_sparsecore.errors import MissingExtraError
from grain_sparsecore.report.charts import (
    BarList,
    Chart,
    Figure,
    bar_width,
    check,
    extent,
    format_value,
)

# The light colours of the page.
COLOURS = ("#0067b1", "#c2410c", "#0b7a5b", "#9d3c8f", "#6b7280")

_DPI = 160


def write_plots(
    directory: str | os.PathLike[str], figures: Iterable[Figure]
) -> list[Path]:
    """Writes ``<key>.png`` for every figure; the directory is made if need be.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        # Not pyplot: it keeps figures alive and may want a display.
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError(
            "PNG figures need matplotlib: pip install 'grain_sparsecore[plot]'."
        ) from error
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in figures:
        check(figure)
        rows = len(figure.rows) if isinstance(figure, BarList) else 0
        height = max(1.4, 0.4 * rows + 0.9) if rows else 3.8
        canvas = Canvas(figsize=(7, height), dpi=_DPI, layout="constrained")
        axes = canvas.subplots()
        axes.set_title(figure.title, loc="left", fontsize=11, pad=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if isinstance(figure, BarList):
            _draw_list(axes, figure)
        else:
            _draw_chart(axes, figure)
        path = folder / f"{figure.key}.png"
        canvas.savefig(path)
        written.append(path)
    return written


def _draw_chart(axes: Any, chart: Chart) -> None:
    first, last, top = extent(chart)
    if chart.x_log:
        axes.set_xscale("log")
    axes.set_xlim(first, last)
    axes.set_ylim(0, top)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.yaxis.set_major_formatter(lambda value, _: format_value(value, chart.unit))
    axes.grid(axis="y", color="#e5e7eb")
    axes.set_axisbelow(True)
    for series in chart.series:
        colour = COLOURS[series.tone % len(COLOURS)]
        low = list(series.low) or [0] * len(series.x)
        style = {"color": colour, "label": series.label}
        if series.kind == "bars":
            heights = [y - base for y, base in zip(series.y, low, strict=True)]
            width = bar_width(chart) * 0.9
            axes.bar(series.x, heights, width=width, bottom=low, **style)
        elif series.kind == "band":
            axes.fill_between(series.x, low, series.y, alpha=0.25, lw=0, **style)
        elif series.kind == "dots":
            axes.plot(series.x, series.y, ".", markersize=3, **style)
        else:
            x, y = list(series.x), list(series.y)
            if series.kind == "step" and x:
                x, y = [*x, last], [*y, y[-1]]
            drawn = "steps-post" if series.kind == "step" else "default"
            line = "--" if series.dashed else "-"
            dot = "o" if len(x) == 1 else None
            axes.plot(x, y, line, drawstyle=drawn, marker=dot, lw=1.6, **style)
    for mark in chart.marks:
        if not mark.dot:
            continue
        colour = COLOURS[mark.tone % len(COLOURS)]
        axes.plot([mark.x], [mark.y], "o", color=colour, markersize=4)
    if len(chart.series) > 1:
        axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_list(axes: Any, figure: BarList) -> None:
    names = [name for name, _ in figure.rows]
    values = [value for _, value in figure.rows]
    bars = axes.barh(range(len(names)), values, color=COLOURS[0], height=0.6)
    axes.bar_label(bars, [format_value(v, figure.unit) for v in values], padding=4)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, (figure.top or max(values, default=0) or 1) * 1.12)
    axes.xaxis.set_major_formatter(lambda value, _: format_value(value, figure.unit))
