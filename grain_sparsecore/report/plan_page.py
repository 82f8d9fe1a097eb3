"""The report of a plan: what each topology needs, side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from grain_sparsecore.config import Config
from grain_sparsecore.report.charts import BarList, format_value
from grain_sparsecore.report.record import RunRecord, Section, Table

if TYPE_CHECKING:
    from grain_sparsecore.planner import TopologyPlan


def plan_record(
    plans: Sequence["TopologyPlan"], *, title: str, config: Config
) -> RunRecord:
    """The record of a plan; the pictures of the batches are those of its last one."""
    last = plans[-1]
    record = last.record
    record.title = title
    record.config = config.canonical()
    record.facts = [
        ("topologies", str(len(plans))),
        ("steps looked at", str(last.steps)),
        (
            "buffers per device",
            format_value(sum(s.buffer_bytes for s in last.stacks.values()), "bytes"),
        ),
        (
            "tables per device",
            format_value(sum(s.table_bytes for s in last.stacks.values()), "bytes"),
        ),
        ("limit changes", str(last.changes[config.limits.growth.kind])),
    ]
    if len(plans) > 1:
        record.notes.append(f"The pictures of batches and stacks are of {last.name}.")
        record.sections.append(_comparison(plans))
    record.sections += [_section(one) for one in plans]
    return record


def _comparison(plans: Sequence["TopologyPlan"]) -> Section:
    return Section(
        title="Topologies",
        figures=[
            BarList(
                key=key,
                title=title,
                caption=caption,
                rows=[
                    (one.name, sum(getattr(s, field) for s in one.stacks.values()))
                    for one in plans
                ],
                unit="bytes",
            )
            for key, field, title, caption in (
                (
                    "plan-buffers",
                    "buffer_bytes",
                    "Buffers per device",
                    "Of one batch, all stacks together, with the limits of the plan.",
                ),
                (
                    "plan-tables",
                    "table_bytes",
                    "Tables per device",
                    "Rows of all tables, float32, without slots of the optimizer.",
                ),
            )
        ],
    )


def _section(one: "TopologyPlan") -> Section:
    needs, sizes = [], []
    for name, stack in one.stacks.items():
        limits = (
            stack.limits.max_ids_per_partition,
            stack.limits.max_unique_ids_per_partition,
            stack.limits.buffer_size_per_device,
        )
        for i, field in enumerate(("ids", "unique ids", "slots")):
            values = [f"{numbers[i]:,}" for numbers in stack.quantiles.values()]
            needs.append([f"{name}: {field}", *values, f"{limits[i]:,}"])
        rates = [format_value(rate, "percent") for rate in stack.drop_rates.values()]
        sizes.append(
            [
                name,
                format_value(stack.buffer_bytes, "bytes"),
                format_value(stack.table_bytes, "bytes"),
                format_value(stack.waste, "percent"),
                f"{stack.skew:.1f}",
                *rates,
                *["-"] * (_most_rates(one) - len(rates)),
            ]
        )
    caps = max((list(s.drop_rates) for s in one.stacks.values()), key=len)
    quantiles = list(next(iter(one.stacks.values())).quantiles)
    hosts = one.layout.topology.num_hosts
    text = [
        f"{one.steps} steps, {one.hosts_seen} of {hosts} hosts looked at."
        + (
            ""
            if one.hosts_seen == hosts
            else " Hosts that were left out may need more."
        )
    ]
    if one.rotation is not None:
        text.append(
            f"topology.rotation = {one.rotation} would make the partitions more even."
        )
    text += [f"TOO LARGE: {why}" for why in one.too_large.values()]
    return Section(
        title=f"Plan for {one.name}",
        text=text,
        tables=[
            Table(
                title="What batches need, and the limits that follow",
                columns=("per partition, or device", *quantiles, "limit"),
                rows=needs,
                caption="Quantiles are over the steps; each is the most that any host "
                "needed.",
            ),
            Table(
                title="Sizes on one device, and drops under a cap",
                columns=(
                    "stack",
                    "buffers",
                    "tables",
                    "padding",
                    "skew",
                    *(f"lost at {cap}" for cap in caps),
                ),
                rows=sizes,
                caption="Lost is the share of the entries that a cap on the ids would "
                "cost, at that quantile or at the cap that is configured.",
            ),
            Table(
                title="Recompiles after the first step",
                columns=("growth policy", "recompiles"),
                rows=[[kind, str(count)] for kind, count in one.changes.items()],
            ),
            *_minibatches(one),
        ],
    )


def _minibatches(one: "TopologyPlan") -> list[Table]:
    if not one.minibatches:
        return []
    caption = "Batches above the caps are split, on all hosts alike."
    if one.unsplittable:
        caption += (
            f" In {one.unsplittable} of the steps a single bucket of ids is above a "
            "cap: the job would stop, or drop ids."
        )
    return [
        Table(
            title="Minibatches",
            columns=("minibatches per batch", "steps"),
            rows=[[str(k), str(n)] for k, n in one.minibatches.items()],
            caption=caption,
        )
    ]


def _most_rates(one: "TopologyPlan") -> int:
    return max(len(stack.drop_rates) for stack in one.stacks.values())
