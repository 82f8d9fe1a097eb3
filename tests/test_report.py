import builtins
import dataclasses
import html.parser
import itertools
import re

import numpy as np
import pytest

from grain_sparsecore.dropping import cut_batch
from grain_sparsecore.errors import MissingExtraError
from grain_sparsecore.features import COUNTERS
from grain_sparsecore.limits import (
    GrowthPolicy,
    Limits,
    grow_limits,
)
from grain_sparsecore.partition import partition_batch, partition_counts
from grain_sparsecore.repartition import repartition
from grain_sparsecore.report import RunRecord, report_html, write_plots, write_report
from grain_sparsecore.report.charts import (
    BarList,
    Chart,
    Mark,
    Series,
    extent,
    format_value,
    log_ticks,
    ticks,
)
from grain_sparsecore.report.figures import all_figures, all_sections
from grain_sparsecore.report.record import MAX_POINTS, Curve, Section, Table
from grain_sparsecore.report.recorder import RunRecorder
from grain_sparsecore.report.svg import draw, text_width
from tests.report_helpers import example_record
from tests.strategies import random_case, random_features


@pytest.mark.parametrize("how", ["max", "mean"])
@pytest.mark.parametrize("steps", [1, 10, MAX_POINTS, MAX_POINTS + 1, 10_000])
def test_a_curve_keeps_its_size_and_its_meaning(steps, how):
    values = np.random.default_rng(0).random(steps)
    curve = Curve(2, how=how)
    for step, value in enumerate(values):
        curve.add(step + 5, (value, -value))
    assert 1 <= len(curve) <= MAX_POINTS
    length = 1
    while -(-steps // length) > MAX_POINTS:
        length *= 2
    assert curve.x == list(range(5, steps + 5, length))
    parts = [values[i : i + length] for i in range(0, steps, length)]
    reduce = np.max if how == "max" else np.mean
    np.testing.assert_allclose(curve.y(), [reduce(p) for p in parts])
    np.testing.assert_allclose(curve.y(1), [reduce(-p) for p in parts])


def test_curves_may_have_gaps():
    curve = Curve()
    assert (len(curve), curve.x, curve.y()) == (0, [], [])
    for step in (0, 8, 16):
        curve.add(step, step)
    assert (curve.x, curve.y()) == ([0, 8, 16], [0, 8, 16])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "count", "0"),
        (9999, "count", "9999"),
        (12345, "count", "12.3k"),
        (2_500_000, "count", "2.5M"),
        (0.5, "percent", "50%"),
        (0.123456, "percent", "12.3%"),
        (0.00001, "percent", "<0.01%"),
        (0, "percent", "0%"),
        (1, "percent", "100%"),
        (0.0123, "seconds", "12.3 ms"),
        (2, "seconds", "2 s"),
        (3e-6, "seconds", "3 µs"),
        (5e-9, "seconds", "5 ns"),
        (0, "seconds", "0 s"),
        (1536, "bytes", "1.5 KiB"),
        (1023, "bytes", "1023 B"),
        (12, "bytes", "12 B"),
        (3 * 2**20, "bytes", "3 MiB"),
        (3.2 * 2**30, "bytes", "3.2 GiB"),
        (2**50, "bytes", "1024 TiB"),
        (0.69314, "number", "0.693"),
        (float("nan"), "count", "-"),
    ],
)
def test_values_in_few_characters(value, unit, text):
    assert format_value(value, unit) == text


def test_ticks_are_round_and_inside():
    assert ticks(0, 100, 5) == [0, 50, 100]
    assert ticks(0, 1, 5) == pytest.approx([0, 0.5, 1])
    assert ticks(3, 3, 5) == [3]
    rng = np.random.default_rng(0)
    for _ in range(500):
        low = rng.uniform(0, 1000)
        high = low + 10 ** rng.uniform(-3, 6)
        got = ticks(low, high, 6)
        assert len(got) <= 6
        assert all(low - 1e-6 <= t <= high * (1 + 1e-9) for t in got)
    assert log_ticks(1, 1_000_000, 4) == [1, 100, 10_000, 1_000_000]
    assert log_ticks(1, 50, 4) == [1, 10]


def chart(**options):
    series = [Series(label="a", kind="line", x=[1, 2], y=[3, 4])]
    options = {"series": series, "title": "T", "caption": "", **options}
    return Chart(key="k", x_label="x", y_label="y", **options)


def test_extents():
    assert extent(chart()) == (1, 2, pytest.approx(4.32))
    assert extent(chart(y_top=1.0))[2] == 1.0
    assert extent(chart(series=[])) == (0, 1, 1)
    one = [Series(label="a", kind="bars", x=[5], y=[0])]
    assert extent(chart(series=one)) == (4.5, 5.5, 1)
    point = [Series(label="a", kind="line", x=[5], y=[2])]
    assert extent(chart(series=point))[:2] == (4, 6)
    assert extent(chart(series=point, x_log=True))[:2] == (2.5, 10)


def test_impossible_charts_are_refused():
    short = [Series(label="a", kind="line", x=[1, 2], y=[3])]
    with pytest.raises(ValueError, match="k: a has unequal lengths"):
        draw(chart(series=short), width=300)
    zero = [Series(label="a", kind="line", x=[0, 2], y=[3, 4])]
    with pytest.raises(ValueError, match="x of 0 or less"):
        draw(chart(series=zero, x_log=True), width=300)


def test_every_kind_of_series_leaves_its_mark():
    x, y = [1, 2, 3], [4, 5, 6]
    kinds = ("band", "bars", "line", "step", "dots")
    series = [Series(label=k, kind=k, x=x, y=y, tone=i) for i, k in enumerate(kinds)]
    text = draw(chart(series=series), width=400)
    assert text.count("<rect") == 3
    assert text.count("<circle") == 3
    assert re.findall(r'class="(\w+) t(\d)" d=', text) == [
        ("fill", "0"),
        ("line", "2"),
        ("line", "3"),
    ]
    # A step holds to the end: three values, two risers and the last run.
    assert len(re.findall("[ML]", text.split('t3" d="')[1].split('"')[0])) == 6
    alone = [Series(label="a", kind="line", x=[1], y=[1])]
    assert "<circle" in draw(chart(series=alone), width=400)
    assert "<path" not in draw(
        chart(series=[Series(label="a", kind="line", x=[], y=[])]), width=400
    )


def test_marks_are_all_drawn_and_their_texts_do_not_collide():
    marks = [Mark(x=1 + i / 50, y=3, text=str(i), tip=f"tip {i}") for i in range(50)]
    text = draw(chart(marks=marks), width=400)
    assert text.count('class="mark t0"') == 50
    assert all(f"<title>tip {i}</title>" in text for i in range(50))
    xs = [float(x) for x in re.findall(r'class="marktext" x="([\d.]+)"', text)]
    assert all(b - a > 8 for a, b in itertools.pairwise(xs))


@pytest.mark.parametrize("name", ["a_very_long_stack_name_" * 4, "x" * 90, "short"])
def test_long_names_are_wrapped_and_nothing_is_lost(name):
    text = draw(BarList(key="k", title="t", caption="", rows=[(name, 0.5)]), width=300)
    lines = re.findall(r'class="tick"[^>]*>([^<]*)</text>', text)
    assert "".join(lines) == name
    assert all(text_width(line) <= 300 for line in lines)
    assert f"<title>{name}: 0.5</title>" in text


def test_times_that_would_hide_all_others_go_off_the_scale():
    record = RunRecord(command="train", title="t")
    for step in range(50):
        record.step_seconds.add(step, (30.0 if step == 9 else 0.02, 0.001))
    (figure,) = all_figures(record)
    assert isinstance(figure, Chart)
    assert figure.y_top == pytest.approx(0.04)
    assert "up to 30 s" in figure.caption
    assert 'height="' in draw(figure, width=400)


class Checker(html.parser.HTMLParser):
    """Open tags must be closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.ids += [named["id"]] if "id" in named else []
        self.links += [v for k, v in attrs if k in ("href", "src")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_else():
    record = example_record()
    text = report_html(record)
    page = Checker()
    page.feed(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    keys = [figure.key for figure in all_figures(record)]
    assert len(keys) == len(set(keys))
    assert set(keys) <= set(page.ids)
    for link in page.links:
        assert link == "data:," or link[1:] in page.ids
    for word in ("<script", "http://www.w3.org/1999", "@import", "url("):
        assert word not in text
    # The name space of SVG is no address that anybody visits.
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_record_of_a_run_has_every_figure():
    titles = [figure.title for figure in all_figures(example_record())]
    for title in (
        "Padding waste per stack",
        "Input wait against step time",
        "Rounds of agreement",
        "Loss",
        "Limits and what batches needed",
        "Buffer and what batches needed",
        "How evenly partitions fill, batch by batch",
        "Ids per partition",
        "Id skew",
        "Ids lost per feature",
    ):
        assert title in titles


def test_every_change_of_a_limit_is_marked():
    record = example_record()
    text = report_html(record)
    for stack in record.stacks:
        for (_, old), (step, new) in itertools.pairwise(stack.limits):
            if old.max_ids_per_partition != new.max_ids_per_partition:
                tip = (
                    f"step {step}: limit on ids {old.max_ids_per_partition} → "
                    f"{new.max_ids_per_partition}"
                )
                assert tip in text
    assert sum(stack.changes for stack in record.stacks) > 2


def test_names_cannot_break_the_page():
    evil = "<script>alert('x')</script>&\""
    record = RunRecord(
        command="train",
        title=evil,
        facts=[(evil, evil)],
        config={evil: {"a": evil, "b": {}}},
        notes=[evil],
        sections=[
            Section(
                title=evil,
                text=[evil],
                tables=[Table(title=evil, columns=[evil], rows=[[evil]], caption=evil)],
                figures=[
                    BarList(key="k", title=evil, caption=evil, rows=[(evil, 1)]),
                    chart(title=evil, caption=evil),
                ],
            )
        ],
    )
    text = report_html(record)
    assert "<script" not in text
    page = Checker()
    page.feed(text)
    assert page.open == []


def test_stacks_of_similar_names_have_figures_of_their_own(tmp_path):
    one = example_record(steps=8)
    record = dataclasses.replace(
        one,
        stacks=[
            dataclasses.replace(one.stacks[0], name=name)
            for name in ("a_b", "a-b", "a b", "a/b", "a~b", "a~20~b", "../b", "ä")
        ],
    )
    figures = all_figures(record)
    keys = [figure.key for figure in figures]
    assert len(keys) == len(set(keys))
    assert not any("/" in key or " " in key for key in keys)
    written = write_plots(tmp_path / "plots", figures[:12])
    assert len({path.name for path in written}) == 12
    assert {path.parent for path in written} == {tmp_path / "plots"}
    page = Checker()
    page.feed(report_html(record))
    assert len(page.ids) == len(set(page.ids))


def test_an_empty_record_is_a_page_too(tmp_path):
    record = RunRecord(command="stats", title="nothing")
    assert all_sections(record) == []
    write_report(tmp_path / "r.html", record)
    assert "nothing" in (tmp_path / "r.html").read_text()


def test_png_files_of_every_figure(tmp_path):
    record = example_record(steps=40)
    written = write_plots(tmp_path / "plots", all_figures(record))
    assert [p.stem for p in written] == [f.key for f in all_figures(record)]
    for path in written:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width = int.from_bytes(data[16:20], "big")
        assert width == 1120


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"grain_sparsecore\[plot\]"):
        write_plots(tmp_path, [])


@pytest.mark.parametrize("seed", range(6))
def test_the_recorder_counts_what_is_in_the_batches(seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng, max_partitions=16)
    layout = case.layout
    recorder = RunRecorder(RunRecord(command="train", title="t"), layout=layout)
    limits = Limits.start(layout)
    batches, needed = [], []
    for step in range(5):
        features = random_features(rng, layout)
        batch = partition_batch(
            features, layout, counters=case.counters + step, num_samples=1
        )
        limits = grow_limits(
            limits, batch.stats, layout=layout, policy=GrowthPolicy(kind="exact")
        )
        recorder.add_batch(step, repartition(batch, limits, layout))
        batches.append(batch)
        needed.append(batch.stats)
    record = recorder.finish()
    for stack, one in zip(layout.stacks, record.stacks, strict=True):
        for column in range(3):
            wanted = [int(stats[stack.index, column]) for stats in needed]
            assert one.needed.y(column) == wanted
        counts = np.array(
            [partition_counts(b, layout)[stack.index][0] for b in batches]
        )
        np.testing.assert_allclose(one.partition_mean, counts.mean(axis=(0, 1)))
        np.testing.assert_array_equal(one.partition_max, counts.max(axis=(0, 1)))
        assert one.limits[-1][1] == limits[stack.name]
        steps = [step for step, _ in one.limits]
        assert steps == sorted(set(steps))
        assert all(a[1] != b[1] for a, b in itertools.pairwise(one.limits))
    assert record.counters[layout.features[0].name][COUNTERS[0]] == 10
    assert record.drops == {}


def test_the_most_frequent_ids_are_named_as_the_user_knows_them():
    rng = np.random.default_rng(11)
    for _ in range(20):
        case = random_case(rng, max_partitions=16)
        layout = case.layout
        batch = partition_batch(
            case.features, layout, counters=case.counters, num_samples=1
        )
        limits = grow_limits(
            Limits.start(layout), batch.stats, layout=layout, policy=GrowthPolicy()
        )
        recorder = RunRecorder(RunRecord(command="train", title="t"), layout=layout)
        recorder.add_batch(0, repartition(batch, limits, layout))
        for stack, one in zip(layout.stacks, recorder.finish().stacks, strict=True):
            # Distinct (feature, sample, id) triples are the entries.
            entries = []
            for feature in stack.features:
                values = case.features[feature.index]
                splits = values.row_splits
                if splits is None:
                    splits = np.arange(layout.batch_size + 1) * values.width
                samples = np.repeat(np.arange(layout.batch_size), np.diff(splits))
                triples = {(s, i) for s, i in zip(samples, values.ids, strict=True)}
                entries += [(feature.table.name, int(i)) for _, i in triples]
            for top in one.top_ids:
                share = entries.count((top.table, top.id)) / len(entries)
                assert top.share == pytest.approx(share)
            shares = [top.share for top in one.top_ids]
            assert shares == sorted(shares, reverse=True)
            if entries:
                assert one.rank_shares[-1][1] == pytest.approx(1)
                assert one.rank_shares[-1][0] == len(set(entries))


def test_drops_are_summed_up():
    rng = np.random.default_rng(0)
    case = random_case(rng, max_partitions=8, max_ids=30)
    layout = case.layout
    batch = partition_batch(
        case.features, layout, counters=case.counters, num_samples=layout.batch_size
    )
    ceilings = np.maximum(batch.stats // 2, [1, 1, batch.stats[:, 2].max()])
    cut, lost = cut_batch(batch, ceilings.astype(np.int64), layout=layout)
    limits = grow_limits(
        Limits.start(layout), cut.stats, layout=layout, policy=GrowthPolicy()
    )
    result = repartition(cut, limits, layout)
    result = type(result)(**{**vars(result), "drops": lost})
    recorder = RunRecorder(RunRecord(command="train", title="t"), layout=layout)
    recorder.add_batch(0, result)
    recorder.add_batch(1, result)
    record = recorder.finish()
    for feature in layout.features:
        row = record.drops[feature.name]
        assert row["dropped_ids"] == 2 * lost.per_feature[feature.index, 0]
        assert row["lost_weight"] == pytest.approx(2 * lost.lost_weight[feature.index])
    assert record.dropped_share == pytest.approx(int(lost.examples) / layout.batch_size)
    assert "lost at least one entry" in report_html(record)
