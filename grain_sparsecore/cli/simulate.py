"""``simulate``: the agreement of a job of many hosts, in one process."""

import argparse
import sys
from typing import Any

from grain_sparsecore.cli.check import describe_topology
from grain_sparsecore.cli.files import Outputs, check_json
from grain_sparsecore.cli.options import add_config, add_json, positive
from grain_sparsecore.cli.output import counted, format_limits, format_table
from grain_sparsecore.cli.reporting import (
    Counting,
    add_limits,
    add_report,
    check_outputs,
    wants_report,
    write_record,
    write_results,
)
from grain_sparsecore.config import load_config
from grain_sparsecore.report.charts import format_value
from grain_sparsecore.specs import Topology

_DEFAULT_STEPS = 32


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="run the agreement of many hosts in one process",
        description=(
            "Runs the protocol by which hosts agree on limits over the sharded "
            "pipelines of CONFIG, one host after another, and predicts what the "
            "agreement costs."
        ),
    )
    add_config(parser, required="--hosts H")
    parser.add_argument(
        "--hosts", type=positive, metavar="H", required=True, help="hosts of the job"
    )
    parser.add_argument(
        "--devices-per-host",
        type=positive,
        metavar="L",
        help="devices of each host (as configured, else 4)",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        default=_DEFAULT_STEPS,
        help="steps of every host (%(default)s)",
    )
    parser.add_argument(
        "--hop-microseconds",
        type=positive,
        metavar="US",
        default=100,
        help="time of one message between two hosts (%(default)s)",
    )
    add_json(parser)
    add_limits(parser)
    add_report(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    check_json(args.json)
    check_outputs(args)
    config = load_config(args.config, overrides=args.set)
    # Imported here: it pulls in what reads the data.
    from grain_sparsecore.simulate import simulate

    devices = args.devices_per_host or config.topology.local_device_count or 4
    topology = Topology(
        global_device_count=args.hosts * devices,
        local_device_count=devices,
        num_sc_per_device=config.topology.num_sc_per_device,
    )
    progress = Counting(sys.stderr)
    done = simulate(
        config,
        topology,
        steps=args.steps,
        hop_seconds=args.hop_microseconds * 1e-6,
        on_progress=progress,
    )
    progress.end()
    print(_describe(done, args.hop_microseconds))
    outputs = Outputs()
    write_results(
        args,
        outputs,
        done.to_json(),
        done.limits[-1][1],
        layout=done.layout,
        steps=done.steps,
    )
    if wants_report(args):
        from grain_sparsecore.report.simulate_page import simulation_record

        record = simulation_record(done, title=args.config, config=config)
        write_record(args, record, outputs)
    return outputs.code


def _describe(done: Any, hop_microseconds: int) -> str:
    hosts = done.layout.topology.num_hosts
    changed = ", ".join(str(step) for step, _ in done.limits[1:])
    lines = [
        describe_topology(done.layout),
        f"{counted(done.steps, 'step')} on every host"
        + (": the data of a host ended there" if done.stopped else ""),
        f"limits changed {counted(done.changes, 'time')} after the first step"
        + (f" (at step {changed})" if changed else "")
        + "; each recompiles the step on every host",
    ]
    split = sum(n for k, n in done.minibatches.items() if k > 1)
    if split:
        lines.append(
            f"{counted(split, 'step')} split into up to {max(done.minibatches)} "
            "minibatches"
        )
    if done.dropped:
        lines.append(f"{done.dropped:,} entries were dropped under the caps")
    lines += ["", format_limits(done.limits[-1][1]), ""]
    lines.append(
        format_table(
            ("stack", "padding"),
            [(name, f"{share:.1%}") for name, share in done.waste.items()],
        )
    )
    lines += [
        "",
        "A round of agreement is an all-reduce of 4 KiB over "
        f"{counted(hosts, 'host')}. Model: a ring,",
        f"2 * (hosts - 1) hops of {hop_microseconds} us one after another, no waiting "
        f"for slow hosts: {format_value(done.round_seconds, 'seconds')} a round,",
        f"{counted(done.frames_per_window, 'round')} a window.",
        format_table(
            ("window", "agreement per batch"),
            [
                (window, format_value(cost, "seconds"))
                for window, cost in done.cost_per_batch.items()
            ],
        ),
    ]
    return "\n".join(lines)
