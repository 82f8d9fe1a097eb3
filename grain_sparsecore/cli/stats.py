"""``stats``: measure what batches need, and suggest limits."""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import grain

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.chip_caps import overflow_with_file_caps
from grain_sparsecore.cli.check import describe_topology
from grain_sparsecore.cli.files import Outputs, check_json
from grain_sparsecore.cli.options import (
    add_config,
    add_dump_failing,
    add_json,
    positive,
    with_dump_failing,
)
from grain_sparsecore.cli.output import counted, format_limits, format_table
from grain_sparsecore.cli.reporting import (
    add_limits,
    add_report,
    check_outputs,
    wants_report,
    write_record,
    write_results,
)
from grain_sparsecore.config import load_config
from grain_sparsecore.overflow import CAP_FIELDS, OverflowPolicy, cap_ceilings
from grain_sparsecore.report.stats_page import StatsRecord
from grain_sparsecore.stats import ObservedStats, observe

_DEFAULT_BATCHES = 32


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "stats",
        help="measure what batches need and suggest limits",
        description=(
            "Reads batches of the first host of CONFIG and prints, for each stack, "
            "what they needed and the limits that the growth policy makes of it. "
            "Device counts that CONFIG leaves out are those of this machine."
        ),
    )
    add_config(parser)
    parser.add_argument(
        "--batches",
        type=positive,
        metavar="N",
        default=_DEFAULT_BATCHES,
        help="batches to read (%(default)s)",
    )
    add_dump_failing(parser)
    add_json(parser)
    add_limits(parser)
    add_report(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    check_json(args.json)
    check_outputs(args)
    config = load_config(args.config, overrides=args.set)
    config = with_dump_failing(config, args.dump_failing)
    # Imported here: they pull in what reads the data.
    from grain_sparsecore.pipeline.compute import ComputeInputStats
    from grain_sparsecore.sources import make_batches

    layout = config.layout()
    overflow = overflow_with_file_caps(config, layout)
    key = config.pipeline.key
    batches = make_batches(
        config, layout, host_index=0, host_count=layout.topology.num_hosts
    ).map(ComputeInputStats(layout, key=key, dump_failing=config.pipeline.dump_failing))
    options = grain.ReadOptions(
        num_threads=config.pipeline.reader_threads,
        prefetch_buffer_size=config.pipeline.read_ahead,
    )
    stream = itertools.islice(batches.to_iter_dataset(options), args.batches)
    kept = StatsRecord(layout, config) if wants_report(args) else None
    observed = observe(
        (_kept(element[key], kept) for element in stream),
        layout,
        config.limits.growth,
        ceilings=cap_ceilings(overflow.caps, layout=layout),
    )
    print(describe_topology(layout))
    for message in observed.messages:
        print(message)
    print(f"measured {counted(observed.batches, 'batch', 'batches')} of the first host")
    print(f"\n{_observed(observed)}\n\nsuggested limits")
    print(_suggested(observed))
    for line in _above_caps(observed, overflow):
        print(line)
    outputs = Outputs()
    write_results(
        args,
        outputs,
        observed.to_json(),
        observed.suggested,
        layout=layout,
        batches=observed.batches,
    )
    if kept is not None:
        write_record(args, kept.finish(observed, title=args.config), outputs)
    return outputs.code


def _kept(batch: PartitionedBatch, kept: StatsRecord | None) -> PartitionedBatch:
    if kept is not None:
        kept.add(batch)
    return batch


def _observed(observed: ObservedStats) -> str:
    rows = []
    for name, largest in observed.largest.items():
        mean = [round(value, 1) for value in observed.mean[name]]
        rows.append(
            (
                name,
                largest.max_ids_per_partition,
                mean[0],
                largest.max_unique_ids_per_partition,
                mean[1],
                largest.required_buffer_size_per_device,
                mean[2],
            )
        )
    header = (
        "stack",
        "ids/partition",
        "mean",
        "unique",
        "mean",
        "slots/device",
        "mean",
    )
    return format_table(header, rows)


def _suggested(observed: ObservedStats) -> str:
    """The suggestion, with the caps beside it where there are some."""
    if not any(n is not None for cap in observed.caps.values() for n in cap.values()):
        return format_limits(observed.suggested)
    rows = []
    for name, limits in observed.suggested.items():
        cells: list[object] = [name]
        for field, cap in observed.caps[name].items():
            cells += [getattr(limits, field), "-" if cap is None else cap]
        rows.append(cells)
    header = ("stack", "ids/partition", "cap", "unique", "cap", "slots/device", "cap")
    return format_table(header, rows)


def _above_caps(observed: ObservedStats, overflow: OverflowPolicy) -> Iterator[str]:
    """What batches need beyond the caps, and what becomes of them."""
    for name, largest in observed.largest.items():
        needs = dataclasses.astuple(largest)
        caps = observed.caps[name].items()
        for column, (need, (field, cap)) in enumerate(zip(needs, caps, strict=True)):
            if cap is None or need <= cap:
                continue
            what = "a job ends with an error there"
            if overflow.may_drop:
                what = "a job drops what is above it"
            elif overflow.minibatching and column < 2:
                what = "a job splits such a batch"
            origin = overflow.cap_origin(name, column)
            key = origin or f"limits.stack.{name}.{CAP_FIELDS[column]}"
            yield (
                f"stack {name!r}: a batch needs {field}={need:,}, but its cap is "
                f"{cap:,} ({key}); {what} (limits.on_overflow = "
                f'"{overflow.on_overflow}")'
            )
