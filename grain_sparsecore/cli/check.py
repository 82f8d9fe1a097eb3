"""``check``: validate a configuration and show what it amounts to."""

import argparse
from typing import Any

from grain_sparsecore.cli.options import add_config
from grain_sparsecore.cli.output import counted, format_bytes, format_table
from grain_sparsecore.config import load_config
from grain_sparsecore.limits import Limits
from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.stats import buffer_bytes_per_device

_BYTES_PER_FLOAT = 4


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "check",
        help="validate a configuration and show its tables, stacks and buffers",
        description=(
            "Validates CONFIG and prints its tables, its stacks and the bytes of their "
            "buffers where limits start. Device counts that CONFIG leaves out are "
            "those of this machine."
        ),
    )
    add_config(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    layout = load_config(args.config, overrides=args.set).layout()
    print(f"{args.config}: valid")
    print(describe_topology(layout))
    print(f"\n{_tables(layout)}\n\n{_stacks(layout)}")
    return 0


def describe_topology(layout: StackedLayout) -> str:
    """Hosts, devices, partitions and the sizes of a batch, on one line."""
    topology: Topology = layout.topology
    hosts = topology.num_hosts
    return (
        f"{counted(hosts, 'host')} * {counted(topology.local_device_count, 'device')}"
        f" * {counted(topology.num_sc_per_device, 'SparseCore')} = "
        f"{counted(topology.num_partitions, 'partition')}; a batch has "
        f"{layout.batch_size:,} samples per host, {layout.batch_size * hosts:,} in all"
    )


def _tables(layout: StackedLayout) -> str:
    rows = [
        (
            table.spec.name,
            stack.name,
            table.spec.vocabulary_size,
            table.spec.embedding_dim,
            table.spec.combiner,
            ", ".join(f.name for f in stack.features if f.table == table.spec),
        )
        for stack in layout.stacks
        for table in stack.tables
    ]
    header = ("table", "stack", "rows", "dim", "combiner", "features")
    return format_table(header, rows)


def _stacks(layout: StackedLayout) -> str:
    devices = layout.topology.global_device_count
    buffers = 0
    parameters = 0
    rows = []
    for name, limits in Limits.start(layout).items():
        stack = layout.stack_by_name[name]
        size = buffer_bytes_per_device(limits, layout)
        table = stack.vocabulary_size * stack.embedding_dim * _BYTES_PER_FLOAT
        buffers += size
        parameters += table // devices
        rows.append(
            (
                name,
                limits.max_ids_per_partition,
                limits.max_unique_ids_per_partition,
                limits.buffer_size_per_device,
                format_bytes(size),
                format_bytes(table // devices),
            )
        )
    header = (
        "stack",
        "ids/partition",
        "unique",
        "slots/device",
        "buffers/device",
        "rows/device",
    )
    return (
        f"{format_table(header, rows)}\n"
        f"per device: {format_bytes(buffers)} of buffers a batch where limits start, "
        f"{format_bytes(parameters)} of table rows"
    )
