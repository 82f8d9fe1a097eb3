"""The report of a simulation: limits of all hosts, and the cost of agreeing on them."""

from typing import TYPE_CHECKING

from grain_sparsecore.config import Config
from grain_sparsecore.report.charts import BarList, Chart, Series, format_value
from grain_sparsecore.report.record import RunRecord, Section, StackRecord

if TYPE_CHECKING:
    from grain_sparsecore.simulate import Simulation


def simulation_record(done: "Simulation", *, title: str, config: Config) -> RunRecord:
    """The record of a simulation."""
    record = RunRecord(command="simulate", title=title, config=config.canonical())
    hosts = done.layout.topology.num_hosts
    record.facts = [
        ("hosts", f"{hosts:,}"),
        ("steps", f"{done.steps:,}"),
        ("limit changes", str(done.changes)),
        ("round of agreement", format_value(done.round_seconds, "seconds")),
    ]
    for stack in done.layout.stacks:
        one = StackRecord(
            name=stack.name,
            tables=tuple(table.spec.name for table in stack.tables),
            features=tuple(feature.name for feature in stack.features),
        )
        for step, limits in done.limits:
            if not one.limits or one.limits[-1][1] != limits[stack.name]:
                one.limits.append((step, limits[stack.name]))
        record.stacks.append(one)
    windows = list(done.cost_per_batch)
    record.sections.append(
        Section(
            title="All hosts",
            text=[
                "The cost is a model: an all-reduce over a ring takes 2 * (hosts - 1) "
                "messages one after another, and no host is waited for."
            ],
            figures=[
                BarList(
                    key="simulated-waste",
                    title="Padding waste per stack",
                    caption="Share of the slots of all hosts that hold no entry.",
                    rows=list(done.waste.items()),
                    unit="percent",
                    top=1.0,
                ),
                Chart(
                    key="agreement-cost",
                    title="Agreement per batch",
                    caption="Predicted for windows of 1 to 64 batches. A longer window "
                    "holds more batches in memory and costs less.",
                    x_label="batches per window",
                    y_label="seconds per batch",
                    series=[
                        Series(
                            label="agreement",
                            kind="line",
                            x=windows,
                            y=list(done.cost_per_batch.values()),
                            tone=2,
                        )
                    ],
                    unit="seconds",
                ),
            ],
        )
    )
    return record
