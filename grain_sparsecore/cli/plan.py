"""``plan``: what a job will need on devices that are not there yet."""

import argparse
import dataclasses
import functools
import glob
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grain_sparsecore.cli.check import describe_topology
from grain_sparsecore.cli.files import Outputs, check_json, write_json
from grain_sparsecore.cli.options import add_config, add_json, positive
from grain_sparsecore.cli.output import counted, format_bytes, format_table
from grain_sparsecore.cli.reporting import (
    Counting,
    add_limits,
    add_report,
    check_outputs,
    save_limits,
    wants_report,
    write_record,
)
from grain_sparsecore.config import Config, load_config
from grain_sparsecore.errors import MissingExtraError
from grain_sparsecore.limits_file import is_limits_file
from grain_sparsecore.specs import Topology


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "plan",
        help="predict limits, memory and recompiles on other devices",
        description=(
            "Reads a sample of the data of CONFIG as the hosts of each topology would, "
            "and prints what every stack needs there: limits, bytes, padding, "
            "recompiles, drops under a cap, skew. Needs none of the devices. A plan "
            "starts anew: limits.file (but for its caps) and limits.frozen do not "
            "count; what a job makes of them is told by simulate."
        ),
    )
    add_config(parser)
    parser.add_argument(
        "--chips", type=_positives, metavar="N,N", help="devices of the whole job"
    )
    parser.add_argument(
        "--num-sc", type=_positives, metavar="S,S", help="SparseCores per device"
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help=(
            "instead of these, a TPU topology such as v6e:4x4; with the extra [tpu] "
            "its compiler then says whether the limits fit; repeatable"
        ),
    )
    parser.add_argument(
        "--batch-size", type=_positives, metavar="B,B", help="samples per host"
    )
    parser.add_argument(
        "--devices-per-host",
        type=positive,
        metavar="L",
        help="devices of each host (as configured, else 4)",
    )
    parser.add_argument(
        "--batches",
        type=positive,
        metavar="N",
        default=32,
        help="steps to look at, rounded up to whole windows (%(default)s)",
    )
    parser.add_argument(
        "--max-hosts",
        type=positive,
        metavar="H",
        default=16,
        help="hosts to look at; the limits of more are estimates (%(default)s)",
    )
    add_json(parser)
    add_limits(parser)
    add_report(parser)
    parser.set_defaults(run=run, parser=parser)


def add_topology(parser: argparse.ArgumentParser) -> None:
    """Adds ``--chips``, ``--num-sc`` and ``--devices-per-host`` of one topology."""
    parser.add_argument(
        "--chips", type=positive, metavar="N", help="devices of the whole job"
    )
    parser.add_argument(
        "--num-sc", type=positive, metavar="S", help="SparseCores per device"
    )
    parser.add_argument(
        "--devices-per-host",
        type=positive,
        metavar="L",
        help="devices of each host (as configured, else 4)",
    )


def one_topology(config: Config, args: argparse.Namespace) -> Topology:
    """The topology that the options of `add_topology` name."""
    from grain_sparsecore.plan import topologies_to_plan

    (topology,) = topologies_to_plan(
        config,
        chips=None if args.chips is None else [args.chips],
        num_sc=None if args.num_sc is None else [args.num_sc],
        devices_per_host=args.devices_per_host,
    )
    return topology


def _positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    check_json(args.json)
    check_outputs(args)
    chosen = (args.chips, args.num_sc, args.devices_per_host)
    if args.topology and any(option is not None for option in chosen):
        args.parser.error(
            "--topology says how many devices and SparseCores there are; leave out "
            "--chips, --num-sc and --devices-per-host"
        )
    config = load_config(args.config, overrides=args.set)
    # Imported here: it pulls in what reads the data.
    from grain_sparsecore.plan import plans_to_json, topologies_to_plan

    if args.topology:
        plans = _plan_and_compile(args, config)
    else:
        topologies = topologies_to_plan(
            config,
            chips=args.chips,
            num_sc=args.num_sc,
            devices_per_host=args.devices_per_host,
        )
        plans = _plan(args, config, topologies)
    print("\n\n".join(describe_plan(one) for one in plans))
    outputs = Outputs()
    text = plans_to_json(plans)
    outputs.write("json", args.json, lambda path: write_json(path, text))
    if args.limits is not None:
        _save_all(args.limits, plans, args.config, outputs)
    if wants_report(args):
        from grain_sparsecore.report.plan_page import plan_record

        record = plan_record(plans, title=args.config, config=config)
        write_record(args, record, outputs)
    return outputs.code


def _plan(
    args: argparse.Namespace,
    config: Config,
    topologies: Sequence[Topology],
    name: str = "",
) -> list[Any]:
    from grain_sparsecore.plan import plan

    progress = Counting(sys.stderr)
    plans = plan(
        config,
        topologies,
        batch_sizes=args.batch_size,
        batches=args.batches,
        max_hosts=args.max_hosts,
        cap_files=_cap_files(args.limits, name),
        topology_name=name,
        on_progress=progress,
    )
    progress.end()
    return plans


def _plan_and_compile(args: argparse.Namespace, config: Config) -> list[Any]:
    """Plans for named topologies, whose compiler is then asked about the limits."""
    from grain_sparsecore.rehearse import (
        Compiler,
        default_cache,
        rehearse,
        topology_by_name,
    )

    plans = []
    try:
        asked = Compiler(cache=default_cache())
    except MissingExtraError as error:
        print(f"no compiler, so only caps are checked: {error}", file=sys.stderr)
        for name in args.topology:
            plans += _plan(args, config, [topology_by_name(name)], name)
        return plans
    with asked as compiler:
        for name in args.topology:
            topology = compiler.topology(name).topology
            for one in _plan(args, config, [topology], name):
                options = dataclasses.replace(
                    config.pipeline, batch_size=one.layout.batch_size
                )
                compiled = rehearse(
                    dataclasses.replace(config, pipeline=options),
                    name,
                    compiler=compiler,
                    limits=one.limits,
                )
                refused = {s.name: s.reason for s in compiled.stacks if not s.fits}
                too_large = {**one.too_large, **refused}
                plans.append(dataclasses.replace(one, too_large=too_large))
    return plans


def _cap_files(path: Path | None, name: str) -> list[Path]:
    """The files that limits are going to be written to, as far as they exist."""
    if path is None:
        return []
    where = glob.escape(_file_part(name)) if name else "*x*"
    stem, suffix = glob.escape(path.stem), glob.escape(path.suffix)
    several = path.parent.glob(f"{stem}-{where}-b*{suffix}")
    return [file for file in (path, *sorted(several)) if is_limits_file(file)]


def _file_part(name: str) -> str:
    # A colon is no part of a file's name everywhere.
    return name.replace(":", "-")


def _save_all(path: Path, plans: Sequence[Any], config: str, outputs: Outputs) -> None:
    for one in plans:
        topology = one.layout.topology
        target = path
        if len(plans) > 1:
            # By name where there is one: two kinds of chips may have equal counts.
            where = _file_part(one.topology_name) or (
                f"{topology.global_device_count}x{topology.num_sc_per_device}"
            )
            name = f"{path.stem}-{where}-b{one.layout.batch_size}{path.suffix}"
            target = path.with_name(name)
        save = functools.partial(
            save_limits,
            limits=one.limits,
            layout=one.layout,
            command="plan",
            config=config,
            steps=one.steps,
            hosts_seen=one.hosts_seen,
        )
        if outputs.write("limits", target, save):
            print(f"limits written to {target}")


def describe_plan(one: Any) -> str:
    """A plan as text."""
    layout = one.layout
    hosts = layout.topology.num_hosts
    seen = "all hosts" if one.hosts_seen == hosts else f"{one.hosts_seen} of its hosts"
    name = f"{one.topology_name}: " if one.topology_name else ""
    lines = [
        f"{name}{describe_topology(layout)}",
        f"{counted(one.steps, 'step')} of {seen}",
    ]
    lines += ["", _needs(one), "", _sizes(one)]
    lines += [f"{_too_large()}  {why}" for why in one.too_large.values()]
    changes = ", ".join(f"{kind} {count}" for kind, count in one.changes.items())
    lines.append(f"recompiles after the first step, by growth policy: {changes}")
    split = sum(n for k, n in one.minibatches.items() if k > 1)
    if split:
        lines.append(
            f"{counted(split, 'step')} above the caps, split into up to "
            f"{max(one.minibatches)} minibatches"
        )
    if one.unsplittable:
        lines.append(
            f"{counted(one.unsplittable, 'step')} too full for any split; raise caps"
        )
    if one.hosts_seen < hosts:
        lines.append("other hosts may need more: the limits are an estimate")
    if one.rotation is not None:
        lines.append(
            f"topology.rotation = {one.rotation} would even out the partitions"
        )
    for name, stack in one.stacks.items():
        if stack.top_ids:
            top = ", ".join(
                f"{i.table} {i.id} ({i.share:.1%})" for i in stack.top_ids[:3]
            )
            lines.append(
                f"{name}: fullest partition {stack.skew:.1f} times the mean; most "
                f"frequent {top}"
            )
    return "\n".join(lines)


def _too_large() -> str:
    """Red on a terminal."""
    return "\x1b[1;31mTOO LARGE\x1b[0m" if sys.stdout.isatty() else "TOO LARGE"


def _needs(one: Any) -> str:
    names = list(next(iter(one.stacks.values())).quantiles)
    rows = []
    for name, stack in one.stacks.items():
        fields = ("ids/partition", "unique", "slots/device")
        limits = (
            stack.limits.max_ids_per_partition,
            stack.limits.max_unique_ids_per_partition,
            stack.limits.buffer_size_per_device,
        )
        for i, field in enumerate(fields):
            needs = [stack.quantiles[q][i] for q in names]
            rows.append((name if i == 0 else "", field, *needs, limits[i]))
    return format_table(("stack", "need", *names, "limit"), rows)


def _sizes(one: Any) -> str:
    rows = [
        (
            name,
            format_bytes(stack.buffer_bytes),
            format_bytes(stack.table_bytes),
            f"{stack.waste:.1%}",
            "  ".join(f"{cap} {rate:.2%}" for cap, rate in stack.drop_rates.items()),
        )
        for name, stack in one.stacks.items()
    ]
    header = (
        "stack",
        "buffers/device",
        "rows/device",
        "padding",
        "entries lost with a cap at",
    )
    return format_table(header, rows)
