"""From a `RunRecord` to the figures and tables of its report."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from grain_sparsecore.report.charts import (
    BarList,
    Chart,
    Figure,
    Mark,
    Series,
    format_value,
)
from grain_sparsecore.report.record import RunRecord, Section, StackRecord, Table

# Bars of the chart of partitions; neighbours are put together above that.
_MAX_BARS = 64

# Longest over usual step from which the axis of times stops short of the longest.
_OFF_SCALE = 5

# Figures of a stack that differ in the limit they show.
_LIMITS = ("max_ids_per_partition", "max_unique_ids_per_partition")

_TITLES = {
    "ids": "looked up",
    "padding_ids": "padding",
    "negative_ids": "below 0",
    "large_ids": "too large",
    "invalid_weights": "bad weights",
    "zero_weight_rows": "zero weight rows",
    "dropped_ids": "ids lost",
    "dropped_entries": "entries lost",
    "dropped_examples": "examples touched",
    "lost_weight": "weight lost",
}


def all_sections(record: RunRecord) -> list[Section]:
    """The report in the order of the page."""
    return [
        *_overview(record),
        *record.sections,
        *(_stack_section(stack) for stack in record.stacks),
        *_counter_sections(record),
    ]


def all_figures(record: RunRecord) -> list[Figure]:
    """Every figure of the report, with unique keys."""
    return [f for section in all_sections(record) for f in section.figures]


def _overview(record: RunRecord) -> list[Section]:
    figures: list[Figure] = []
    if any(len(stack.filled) for stack in record.stacks):
        figures.append(
            BarList(
                key="padding-waste",
                title="Padding waste per stack",
                caption="Share of the buffer slots that hold no entry, the mean over "
                "the batches. Slots are what the device receives and reads.",
                rows=[
                    (stack.name, 1 - float(np.mean(stack.filled.y())))
                    for stack in record.stacks
                    if len(stack.filled)
                ],
                unit="percent",
                top=1.0,
            )
        )
    if len(record.minibatches):
        figures.append(_minibatch_chart(record))
    figures += _timing(record)
    if len(record.loss):
        figures.append(
            Chart(
                key="loss",
                title="Loss",
                caption="Mean over the samples of all hosts.",
                x_label="step",
                y_label="loss",
                series=[
                    Series(
                        label="loss", kind="line", x=record.loss.x, y=record.loss.y()
                    )
                ],
                unit="number",
            )
        )
    tables = [_stack_table(record)] if record.stacks else []
    if not figures and not tables:
        return []
    return [Section(title="Overview", tables=tables, figures=figures)]


def _minibatch_chart(record: RunRecord) -> Chart:
    return Chart(
        key="minibatches",
        title="Minibatches per batch",
        caption="Into how many a batch above the caps was split, on all hosts alike; "
        "the most of each interval. The device works through them one by one.",
        x_label="step",
        y_label="minibatches",
        series=[
            Series(
                label="minibatches",
                kind="line",
                x=record.minibatches.x,
                y=record.minibatches.y(),
                tone=3,
            )
        ],
        unit="number",
    )


def _timing(record: RunRecord) -> list[Figure]:
    figures: list[Figure] = []
    if len(record.step_seconds):
        x, whole = record.step_seconds.x, record.step_seconds.y(0)
        wait = record.step_seconds.y(1)
        # A step that compiles takes a hundred times as long as the others.
        usual, longest = float(np.quantile(whole, 0.9)), max(whole)
        cut = longest > _OFF_SCALE * usual
        beyond = (
            " Bars that reach the top go on, up to "
            f"{format_value(longest, 'seconds')}: steps that were "
            "compiled anew, or interrupted."
        )
        figures.append(
            Chart(
                key="step-time",
                title="Input wait against step time",
                caption="The lower part of each bar is time in which the devices had "
                "nothing to do because the next batch was not ready."
                + (beyond if cut else ""),
                x_label="step",
                y_label="seconds per step",
                series=[
                    Series(label="waiting for input", kind="bars", x=x, y=wait, tone=1),
                    Series(label="computing", kind="bars", x=x, y=whole, low=wait),
                ],
                unit="seconds",
                y_top=2 * usual if cut else None,
            )
        )
    if len(record.coordination_seconds):
        figures.append(
            Chart(
                key="coordination-time",
                title="Rounds of agreement",
                caption="Time that host 0 spent in a round, waiting for slower hosts "
                "included. There is one round for each window of batches.",
                x_label="step",
                y_label="seconds per round",
                series=[
                    Series(
                        label="round",
                        kind="line",
                        x=record.coordination_seconds.x,
                        y=record.coordination_seconds.y(),
                        tone=2,
                    )
                ],
                unit="seconds",
            )
        )
    return figures


def _stack_table(record: RunRecord) -> Table:
    rows = []
    for stack in record.stacks:
        last = stack.limits[-1][1] if stack.limits else None
        skew = _skew(stack)
        rows.append(
            [
                stack.name,
                *(
                    ("-", "-", "-")
                    if last is None
                    else (
                        f"{last.max_ids_per_partition:,}",
                        f"{last.max_unique_ids_per_partition:,}",
                        f"{last.buffer_size_per_device:,}",
                    )
                ),
                str(stack.changes),
                "-" if skew is None else f"{skew:.1f}\u00d7",
            ]
        )
    return Table(
        title="Limits at the end",
        columns=("stack", "ids", "unique ids", "buffer slots", "changes", "skew"),
        rows=rows,
        caption="Ids and unique ids are per (SparseCore, partition), slots per device. "
        "Skew is how much fuller the fullest partition is than the average one.",
    )


def _skew(stack: StackRecord) -> float | None:
    mean = np.asarray(stack.partition_mean)
    return float(mean.max() / mean.mean()) if mean.size and mean.any() else None


def _stack_section(stack: StackRecord) -> Section:
    figures: list[Figure] = []
    if len(stack.needed):
        figures += [_limit_chart(stack), _buffer_chart(stack)]
    if len(stack.spread):
        figures.append(_spread_chart(stack))
    if len(stack.partition_max):
        figures.append(_partition_chart(stack))
    if stack.rank_shares:
        figures.append(_rank_chart(stack))
    tables = []
    if stack.top_ids:
        tables.append(
            Table(
                title="Most frequent ids",
                columns=("table", "id", "partition", "share"),
                rows=[
                    [i.table, str(i.id), str(i.partition), f"{i.share:.2%}"]
                    for i in stack.top_ids
                ],
                caption="Share of the entries of the stack, in the batches looked at.",
                beside=True,
            )
        )
    if stack.changes:
        tables.append(_change_table(stack))
    return Section(
        title=f"Stack {stack.name}",
        text=[
            f"{_listed('table', stack.tables)}. {_listed('feature', stack.features)}."
        ],
        tables=tables,
        figures=figures,
    )


def _listed(kind: str, names: Sequence[str]) -> str:
    plural = "" if len(names) == 1 else "s"
    return f"{kind.capitalize()}{plural} {', '.join(names)}"


def _limit_chart(stack: StackRecord) -> Chart:
    x = stack.needed.x
    series = []
    marks = []
    for tone, (field, name) in enumerate(
        zip(_LIMITS, ("ids", "unique ids"), strict=True)
    ):
        series.append(
            Series(
                label=f"needed {name}",
                kind="dots",
                x=x,
                y=stack.needed.y(tone),
                tone=tone,
            )
        )
        points = [(step, getattr(value, field)) for step, value in stack.limits]
        series.append(_limit_series(f"limit on {name}", points, tone, dashed=tone == 1))
        marks += _change_marks(f"limit on {name}", points, tone)
    return Chart(
        key=f"limits-{_key(stack.name)}",
        title="Limits and what batches needed",
        caption="Every circle is a change of a limit, and so a recompilation of the "
        "step on all hosts.",
        x_label="step",
        y_label="per (SparseCore, partition)",
        series=series,
        marks=marks,
    )


def _buffer_chart(stack: StackRecord) -> Chart:
    points = [(step, v.buffer_size_per_device) for step, v in stack.limits]
    return Chart(
        key=f"buffer-{_key(stack.name)}",
        title="Buffer and what batches needed",
        caption="Slots per device. A slot is 12 bytes: two indices and a gain.",
        x_label="step",
        y_label="slots per device",
        series=[
            Series(
                label="needed",
                kind="dots",
                x=stack.needed.x,
                y=stack.needed.y(2),
                tone=2,
            ),
            _limit_series("buffer size", points, 2),
        ],
        marks=_change_marks("buffer size", points, 2),
    )


def _limit_series(
    label: str, points: list[tuple[int, int]], tone: int, *, dashed: bool = False
) -> Series:
    return Series(
        label=label,
        kind="step",
        x=[x for x, _ in points],
        y=[y for _, y in points],
        tone=tone,
        dashed=dashed,
    )


def _change_marks(label: str, points: list[tuple[int, int]], tone: int) -> list[Mark]:
    marks = [
        Mark(x=x, y=y, text=format_value(y, "count"), tip="", tone=tone, dot=False)
        for x, y in points[:1]
    ]
    for (_, before), (x, y) in itertools.pairwise(points):
        if before != y:
            tip = f"step {x}: {label} {before} → {y}"
            text = format_value(y, "count")
            marks.append(Mark(x=x, y=y, text=text, tip=tip, tone=tone))
    return marks


def _change_table(stack: StackRecord) -> Table:
    names = ("ids", "unique ids", "buffer slots")
    fields = (*_LIMITS, "buffer_size_per_device")
    rows = []
    for (_, old), (step, new) in itertools.pairwise(stack.limits):
        for name, field in zip(names, fields, strict=True):
            one, two = getattr(old, field), getattr(new, field)
            if one != two:
                rows.append([str(step), name, f"{one:,} → {two:,}"])
    return Table(
        title="Changes of limits",
        columns=("step", "limit", "change"),
        rows=rows,
        beside=True,
    )


def _spread_chart(stack: StackRecord) -> Chart:
    x = stack.spread.x
    median, tenth, largest = (stack.spread.y(i) for i in range(3))
    return Chart(
        key=f"spread-{_key(stack.name)}",
        title="How evenly partitions fill, batch by batch",
        caption="Entries of a (SparseCore, partition). The further the largest is "
        "above the median, the more room the limit wastes.",
        x_label="step",
        y_label="entries",
        series=[
            Series(
                label="median to 90 %", kind="band", x=x, y=tenth, low=median, tone=0
            ),
            Series(label="median", kind="line", x=x, y=median, tone=0),
            Series(label="largest", kind="line", x=x, y=largest, tone=1, dashed=True),
        ],
    )


def _partition_chart(stack: StackRecord) -> Chart:
    mean, most = np.asarray(stack.partition_mean), np.asarray(stack.partition_max)
    together = -(-len(mean) // _MAX_BARS)
    x = list(range(0, len(mean), together))
    if together > 1:
        mean = np.maximum.reduceat(mean, x)
        most = np.maximum.reduceat(most, x)
    series = [
        Series(label="largest", kind="bars", x=x, y=most.tolist(), tone=4),
        Series(label="mean", kind="bars", x=x, y=mean.tolist(), tone=0),
    ]
    if stack.limits:
        limit = stack.limits[-1][1].max_ids_per_partition
        ends = [x[0] - together / 2, x[-1] + together / 2]
        series.append(
            Series(
                label="limit", kind="line", x=ends, y=[limit] * 2, tone=1, dashed=True
            )
        )
    merged = (
        f" Each bar is the fullest of {together} neighbouring partitions."
        if together > 1
        else ""
    )
    return Chart(
        key=f"partitions-{_key(stack.name)}",
        title="Ids per partition",
        caption="Over all batches and SparseCores: the mean, and the largest that "
        f"occurred.{merged}",
        x_label="partition",
        y_label="entries",
        series=series,
    )


def _rank_chart(stack: StackRecord) -> Chart:
    return Chart(
        key=f"skew-{_key(stack.name)}",
        title="Id skew",
        caption="Share of all entries that go to the most frequent ids. A curve that "
        "starts high means that few ids decide the limits.",
        x_label="most frequent ids",
        y_label="share of the entries",
        series=[
            Series(
                label="share",
                kind="line",
                x=[rank for rank, _ in stack.rank_shares],
                y=[share for _, share in stack.rank_shares],
                tone=3,
            )
        ],
        unit="percent",
        x_log=True,
        y_top=1.0,
    )


def _counter_sections(record: RunRecord) -> list[Section]:
    sections = []
    if record.counters:
        sections.append(
            Section(
                title="Counters",
                tables=[_feature_table("What became of the ids", record.counters)],
            )
        )
    if record.drops:
        touched = format_value(record.dropped_share, "percent")
        worst = sorted(
            ((name, row["dropped_ids"]) for name, row in record.drops.items()),
            key=lambda item: -item[1],
        )
        figures = []
        if any(value for _, value in worst):
            figures.append(
                BarList(
                    key="drops",
                    title="Ids lost per feature",
                    caption="Ids of the input that did not fit under the caps.",
                    rows=[row for row in worst if row[1]],
                )
            )
        sections.append(
            Section(
                title="Drops",
                text=[f"{touched} of the examples lost at least one entry."],
                tables=[_feature_table("What was lost under the caps", record.drops)],
                figures=figures,
            )
        )
    return sections


def _feature_table(title: str, values: Mapping[str, Mapping[str, float]]) -> Table:
    columns = list(dict.fromkeys(c for row in values.values() for c in row))
    # What never happened needs no column.
    columns = [
        c
        for i, c in enumerate(columns)
        if i == 0 or any(row.get(c) for row in values.values())
    ]
    return Table(
        title=title,
        columns=("feature", *(_TITLES.get(c, c.replace("_", " ")) for c in columns)),
        rows=[
            [
                name,
                *(
                    f"{row.get(c, 0):,.6g}"
                    if isinstance(row.get(c, 0), float)
                    else f"{row.get(c, 0):,}"
                    for c in columns
                ),
            ]
            for name, row in values.items()
        ],
    )


def _key(name: str) -> str:
    """A stack's name as part of a file name and of an anchor; no two are alike."""
    return "".join(c if c.isalnum() or c in "_-." else f"~{ord(c):x}~" for c in name)
