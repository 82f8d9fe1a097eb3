"""The report in a real browser: nothing missing, nothing cut off, nothing fetched."""

import json

import pytest

from grain_sparsecore.config import read_config
from grain_sparsecore.plan import plan, topologies_to_plan
from grain_sparsecore.report import write_report
from grain_sparsecore.report.figures import all_figures
from grain_sparsecore.report.plan_page import plan_record
from tests.browser import browse
from tests.report_helpers import example_record

# What sticks out: text of drawings beyond their edges, elements wider than their
# place, tables that would have to be scrolled.
_CUT_OFF = """
(() => {
  const found = [];
  const seen = e => e.getClientRects().length > 0;
  for (const svg of document.querySelectorAll('figure svg')) {
    if (!seen(svg)) continue;
    const box = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll('text')) {
      const at = text.getBoundingClientRect();
      if (at.left < box.left - 0.5 || at.right > box.right + 0.5 ||
          at.top < box.top - 0.5 || at.bottom > box.bottom + 0.5)
        found.push('text ' + text.textContent + ' of ' + svg.ariaLabel);
    }
  }
  for (const e of document.querySelectorAll('body *')) {
    if (!seen(e) || e.closest('svg')) continue;
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0)
      found.push('inside of ' + e.tagName + ' ' + e.textContent.slice(0, 40));
    if (e.getBoundingClientRect().right > innerWidth + 0.5)
      found.push('right end of ' + e.tagName + ' ' + e.textContent.slice(0, 40));
  }
  return JSON.stringify(found);
})()
"""

# Ticks of one axis that touch.
_OVERLAPS = """
(() => {
  const found = [];
  for (const svg of document.querySelectorAll('figure svg')) {
    if (!svg.getClientRects().length) continue;
    const boxes = [...svg.querySelectorAll('text')].map(t =>
      [t.textContent, t.getBoundingClientRect()]);
    for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
      const [one, a] = boxes[i], [two, b] = boxes[j];
      if (a.left < b.right - 1 && b.left < a.right - 1 &&
          a.top < b.bottom - 3 && b.top < a.bottom - 3)
        found.push(svg.ariaLabel + ': ' + one + ' over ' + two);
    }
  }
  return JSON.stringify(found);
})()
"""

# Keys of the figures that show a drawing of some size.
_FIGURES = """
JSON.stringify([...document.querySelectorAll('figure')].filter(f =>
  [...f.querySelectorAll('div > svg')].filter(s => {
    const box = s.getBoundingClientRect();
    return box.width > 200 && box.height > 30;
  }).length === 1).map(f => f.id))
"""

_TEXT_SIZES = """
JSON.stringify([...document.querySelectorAll('figure svg text')]
  .filter(t => t.getClientRects().length)
  .map(t => parseFloat(getComputedStyle(t).fontSize) *
    t.ownerSVGElement.getBoundingClientRect().width /
    t.ownerSVGElement.viewBox.baseVal.width))
"""

_CONTRASTS = """
(() => {
  const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const figure = document.querySelector('figure');
  const back = getComputedStyle(figure).backgroundColor;
  const result = {};
  for (const kind of ['tick', 'label', 'bar.t0', 'line.t0', 'line.t1', 'dot.t2']) {
    const e = document.querySelector('figure svg .' + kind);
    if (!e) continue;
    const style = getComputedStyle(e);
    result[kind] = ratio(back, kind.startsWith('line') ? style.stroke : style.fill);
  }
  return JSON.stringify(result);
})()
"""


def plan_of_an_example():
    """Of two topologies, with a long name of a stack."""
    name = "user_country_and_region_code_of_the_last_visit_too"
    data = {
        "topology": {"num_sc_per_device": 2},
        "pipeline": {"batch_size": 32, "window": 4},
        "source": {"kind": "synthetic", "num_records": 4000},
        "table": [{"name": name, "vocabulary_size": 5000, "embedding_dim": 8}],
        "feature": [{"name": "visit", "table": name}],
        "limits": {"stack": {name: {"max_ids_cap": 20}}},
    }
    config = read_config(data, origin="plan.toml")
    shapes = topologies_to_plan(config, chips=[2, 16], num_sc=None, devices_per_host=2)
    plans = plan(config, shapes, batches=8)
    return plan_record(plans, title="plan.toml", config=config)


@pytest.fixture(scope="module", params=["train", "plan"])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    record = example_record() if request.param == "train" else plan_of_an_example()
    write_report(folder / "report.html", record)
    with browse(folder / "report.html", folder / "profile") as page:
        page.keys = [figure.key for figure in all_figures(record)]
        yield page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("media", "width"),
    [
        ("screen", 360),
        ("screen", 390),
        ("screen", 768),
        ("screen", 1280),
        ("print", 718),
    ],
)
def test_every_figure_is_there_and_no_text_is_cut_off(page, media, width, scheme):
    page.emulate(media=media, scheme=scheme)
    page.resize(width)
    assert json.loads(page.evaluate(_FIGURES)) == page.keys
    assert json.loads(page.evaluate(_CUT_OFF)) == []
    assert json.loads(page.evaluate(_OVERLAPS)) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert min(json.loads(page.evaluate(_TEXT_SIZES))) >= 11


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_background(page, scheme):
    page.emulate(scheme=scheme)
    page.resize(1280)
    contrasts = json.loads(page.evaluate(_CONTRASTS))
    assert {"tick", "label", "bar.t0"} <= set(contrasts)
    # Of the accessibility guidelines: 4.5 for text, 3 for lines and areas.
    for kind, ratio in contrasts.items():
        assert ratio >= (4.5 if kind in ("tick", "label") else 3), kind


def test_dark_is_dark(page):
    page.resize(1280)
    backs = []
    for scheme in ("light", "dark"):
        page.emulate(scheme=scheme)
        backs.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert backs == ["rgb(255, 255, 255)", "rgb(20, 22, 26)"]


def test_links_lead_to_their_sections(page):
    missing = page.evaluate(
        "[...document.querySelectorAll('nav a')]"
        ".filter(a => !document.querySelector(a.getAttribute('href'))).length"
    )
    assert missing == 0
    assert page.evaluate("document.querySelectorAll('nav a').length") >= 5


def test_the_console_is_silent_and_nothing_is_fetched(page):
    assert page.complaints == []
    assert len(page.requests) == 1
    assert page.requests[0].startswith("file://")
