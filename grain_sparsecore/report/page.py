"""The report as one HTML file: no script, no network, no font but the reader's own.

The figures are drawn by us as SVG and not by a plotting library: text stays at 12
pixels at any width, colours follow the reader's dark or light setting, and the page
needs no extra. The price is two drawings of each figure, one for narrow screens.
"""

import html
import os
from collections.abc import Mapping
from typing import Any

from grain_sparsecore.atomic import write_atomically
from grain_sparsecore.report.charts import BarList, Figure, Series
from grain_sparsecore.report.figures import all_sections
from grain_sparsecore.report.record import RunRecord, Section, Table
from grain_sparsecore.report.svg import TONES, draw

# Widths that figures are drawn for; the narrow one fits a phone of 360 pixels.
NARROW, WIDE = 304, 560

# Tables of more columns do not fit a phone.
_CARD_COLUMNS = 4

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --card: #f6f7f9; --text: #16181d;
 --soft: #59606c; --rule: #d9dde3; --t0: #0067b1; --t1: #c2410c; --t2: #0b7a5b;
 --t3: #9d3c8f; --t4: #a3aab5; }
@media (prefers-color-scheme: dark) { :root { --back: #14161a; --card: #1d2026;
 --text: #eceef2; --soft: #a3abb8; --rule: #373c46; --t0: #5cb3ff; --t1: #ff9256;
 --t2: #35cfa0; --t3: #e78ad8; --t4: #6b7482; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
 font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 48px 0 8px; padding-top: 16px;
 border-top: 1px solid var(--rule); overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 0 0 4px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; max-width: 46rem; overflow-wrap: anywhere; }
.note { margin: 8px 0 0; }
.soft, figcaption, .note { color: var(--soft); font-size: .875rem; }
nav { margin: 20px 0 0; font-size: .875rem; display: flex; flex-wrap: wrap;
 gap: 4px 16px; }
nav a { color: var(--t0); overflow-wrap: anywhere; }
dl.facts { display: grid; gap: 12px; margin: 20px 0 0;
 grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); }
dl.facts div { background: var(--card); border-radius: 8px; padding: 10px 14px; }
dl.facts dt { color: var(--soft); font-size: .8125rem; }
dl.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600;
 overflow-wrap: anywhere; }
div.grid { display: grid; gap: 24px; grid-template-columns: minmax(0, 1fr);
 margin-top: 16px; }
@media (min-width: 1040px) {
 div.grid { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
figure { margin: 0; align-self: start; background: var(--card); border-radius: 8px;
 padding: 14px 16px; break-inside: avoid; min-width: 0; }
figcaption { margin: 8px 0 0; }
.scroll { overflow-x: auto; margin-top: 16px; }
.scroll.beside { background: var(--card); border-radius: 8px; padding: 14px 16px;
 margin: 0; align-self: start; break-inside: avoid; }
table { border-collapse: collapse; font-size: .875rem; min-width: 100%;
 font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 0 0 6px; font-weight: 600; font-size: 1rem; }
th, td { padding: 5px 12px 5px 0; text-align: right; white-space: nowrap;
 border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 500; }
th:first-child, td:first-child { text-align: left; white-space: normal;
 overflow-wrap: anywhere; min-width: 7rem; }
th:last-child, td:last-child { padding-right: 0; }
@media (max-width: 619px) {
 figure, .scroll.beside { padding: 12px; }
 th, td { padding-right: 8px; white-space: normal; }
 th:first-child, td:first-child { min-width: 3rem; }
 table.cards thead { display: none; }
 table.cards tr { display: block; padding: 8px 0; border-bottom: 1px solid
  var(--rule); }
 table.cards td { display: flex; justify-content: space-between; gap: 16px;
  border: 0; padding: 2px 0; }
 table.cards td:first-child { font-weight: 600; }
 table.cards td:not(:first-child)::before { content: attr(data-head);
  color: var(--soft); } }
svg { display: block; width: 100%; height: auto; font-family: inherit; }
.wide { display: none; }
@media (min-width: 620px) { .wide { display: block; } .narrow { display: none; } }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px;
 margin: 0 0 8px; padding: 0; font-size: .8125rem; }
ul.legend svg { display: inline-block; width: 22px; height: 10px; margin-right: 6px; }
.tick { fill: var(--soft); } .label, .marktext { fill: var(--text); }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
.track { fill: var(--rule); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.dashed { stroke-dasharray: 5 4; }
.mark { fill: var(--card); stroke-width: 2; }
.fill { opacity: .22; }
pre { background: var(--card); border-radius: 8px; padding: 14px 16px; margin: 0;
 font: .8125rem/1.5 ui-monospace, monospace; white-space: pre-wrap;
 overflow-wrap: anywhere; columns: 24rem auto; }
@media print { :root { --back: #fff; --card: #fff; --text: #000; --soft: #444;
 --rule: #bbb; --t0: #0067b1; --t1: #c2410c; --t2: #0b7a5b; --t3: #9d3c8f;
 --t4: #a3aab5; }
 * { print-color-adjust: exact; }
 body { font-size: 11pt; } main { max-width: none; padding: 0; } nav { display: none; }
 figure, .scroll.beside, dl.facts div { border: 1px solid var(--rule); }
 div.grid { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
 .wide { display: none; } .narrow { display: block; }
 .scroll { overflow: visible; } th, td { white-space: normal; } }
"""


def write_report(path: str | os.PathLike[str], record: RunRecord) -> None:
    """Writes the report of a run as one HTML file, atomically."""
    write_atomically(path, report_html(record).encode())


def report_html(record: RunRecord) -> str:
    """The report of a run, a whole HTML document."""
    sections = all_sections(record)
    names = [*(section.title for section in sections)]
    if record.config:
        names.append("Configuration")
    links = "".join(
        f'<a href="#s{i}">{html.escape(name)}</a>' for i, name in enumerate(names)
    )
    facts = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in record.facts
    )
    body = "".join(_section(i, section) for i, section in enumerate(sections))
    if record.config:
        text = "\n".join(_settings(record.config))
        body += (
            f'<section id="s{len(sections)}"><h2>Configuration</h2>'
            f"<pre>{html.escape(text)}</pre></section>"
        )
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in record.notes)
    title = html.escape(f"{record.command}: {record.title}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Browsers ask the network for an icon unless the page says there is none.
        '<link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{_STYLE}{_tone_style()}</style></head>"
        f"<body><main><h1>{html.escape(record.title)}</h1>"
        f'<p class="soft">grain_sparsecore {html.escape(record.command)}</p>'
        f'<dl class="facts">{facts}</dl>{notes}<nav>{links}</nav>{body}'
        "</main></body></html>\n"
    )


def _tone_style() -> str:
    return "".join(
        f".t{i}.line,.t{i}.mark{{stroke:var(--t{i})}}"
        f".t{i}.bar,.t{i}.fill,.t{i}.dot{{fill:var(--t{i})}}"
        for i in range(TONES)
    )


def _section(number: int, section: Section) -> str:
    text = "".join(f"<p>{html.escape(line)}</p>" for line in section.text)
    tables = "".join(_table(table) for table in section.tables if not table.beside)
    figures = "".join(map(_figure, section.figures))
    figures += "".join(_table(table) for table in section.tables if table.beside)
    grid = f'<div class="grid">{figures}</div>' if figures else ""
    return (
        f'<section id="s{number}"><h2>{html.escape(section.title)}</h2>'
        f"{text}{tables}{grid}</section>"
    )


def _figure(figure: Figure) -> str:
    drawings = "".join(
        f'<div class="{kind}">{draw(figure, width=width)}</div>'
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    legend = ""
    if not isinstance(figure, BarList) and len(figure.series) > 1:
        legend = f'<ul class="legend">{"".join(map(_legend_item, figure.series))}</ul>'
    return (
        f'<figure id="{html.escape(figure.key)}"><h3>{html.escape(figure.title)}</h3>'
        f"{legend}{drawings}<figcaption>{html.escape(figure.caption)}</figcaption>"
        "</figure>"
    )


def _legend_item(series: Series) -> str:
    tone = f"t{series.tone % TONES}"
    if series.kind in ("bars", "band"):
        kind = "bar" if series.kind == "bars" else "fill"
        sample = f'<rect class="{kind} {tone}" width="22" height="10" rx="2"/>'
    elif series.kind == "dots":
        sample = "".join(
            f'<circle class="dot {tone}" cx="{x}" cy="5" r="2"/>' for x in (4, 11, 18)
        )
    else:
        dashed = " dashed" if series.dashed else ""
        sample = f'<path class="line {tone}{dashed}" d="M0 5H22"/>'
    return (
        f'<li><svg viewBox="0 0 22 10" aria-hidden="true">{sample}</svg>'
        f"{html.escape(series.label)}</li>"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in table.columns)
    rows = "".join(
        "<tr>{}</tr>".format(
            "".join(
                f'<td data-head="{html.escape(name)}">{html.escape(cell)}</td>'
                for name, cell in zip(table.columns, row, strict=True)
            )
        )
        for row in table.rows
    )
    # Wide tables become a list of rows on a phone.
    kind = ' class="cards"' if len(table.columns) > _CARD_COLUMNS else ""
    note = f'<p class="note">{html.escape(table.caption)}</p>' if table.caption else ""
    return (
        f'<div class="scroll{" beside" if table.beside else ""}"><table{kind}>'
        f"<caption>{html.escape(table.title)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{note}</div>"
    )


def _settings(value: Mapping[str, Any], path: str = "") -> list[str]:
    """Nested settings as lines ``limits.growth.kind = geometric``."""
    lines = []
    for key, inner in value.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(inner, Mapping) and inner:
            lines += _settings(inner, name)
        elif inner is not None:
            lines.append(f"{name} = {inner}")
    return lines
