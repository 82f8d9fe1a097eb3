"""``rehearse``: compile for a TPU without one."""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

from grain_sparsecore.chips import Chip, FoundFor
from grain_sparsecore.cli.check import describe_topology
from grain_sparsecore.cli.files import Outputs, check_file, check_json, write_json
from grain_sparsecore.cli.options import add_config, add_json, positive
from grain_sparsecore.cli.output import format_bytes, format_table
from grain_sparsecore.config import Config, load_config
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import LimitsFile, load_limits, write_atomically
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.warm_start import minibatches_of

_DEFAULT_BATCHES = 8
_DEFAULT_TIMEOUT = 600


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "rehearse",
        help="compile the SparseCore program for a TPU, without a TPU",
        description=(
            "Compiles lookup and update of every stack of CONFIG for a TPU topology, "
            "with the real compiler, and prints whether it fits and what it takes. "
            "Limits are those of --limits; without it, those that a few batches need; "
            "for a configuration without a source, where they start. Needs the extra "
            "[tpu]. Exit code 1 if anything does not fit."
        ),
    )
    add_config(parser, required="--topology NAME")
    parser.add_argument(
        "--topology",
        metavar="NAME",
        action="append",
        required=True,
        help="for example v6e:2x2 or v5p:2x2x1; may be repeated",
    )
    parser.add_argument("--limits", metavar="FILE", type=Path, help="a limits file")
    parser.add_argument(
        "--batches",
        type=positive,
        metavar="N",
        default=_DEFAULT_BATCHES,
        help="batches to read where there is no limits file (%(default)s)",
    )
    parser.add_argument(
        "--find-caps",
        action="store_true",
        help=(
            "find the largest limits that compile and write them as caps into the "
            "file of --limits, which is made if need be"
        ),
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        metavar="SECONDS",
        default=_DEFAULT_TIMEOUT,
        help="give a compilation up after so long for each of its stacks (%(default)s)",
    )
    parser.add_argument(
        "--cache",
        metavar="DIR",
        type=Path,
        help="folder of what was compiled before (in the user's cache folder)",
    )
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    # Imported here: they pull in what reads the data.
    from grain_sparsecore.rehearse import Compiler, default_cache

    if args.find_caps and args.limits is not None and len(args.topology) > 1:
        args.parser.error("--find-caps writes the caps of one --topology to --limits")
    check_json(args.json)
    if args.find_caps:
        check_file("limits", args.limits)
    outputs = Outputs()
    config = load_config(args.config, overrides=args.set)
    progress = _Progress()
    results: list[dict[str, Any]] = []
    fits = True
    cache = args.cache or default_cache()
    with Compiler(timeout_seconds=args.timeout, cache=cache) as compiler:
        for name in args.topology:
            options: dict[str, Any] = {
                "compiler": compiler,
                "limits": functools.partial(_limits, args, config, name),
                "on_progress": progress,
            }
            if args.find_caps:
                results.append(_caps(args, config, name, options, outputs))
            else:
                results.append(_rehearse(config, name, options))
                fits &= results[-1]["fits"]
    text = json.dumps({"rehearsals": results}, indent=2)
    outputs.write("json", args.json, lambda path: write_json(path, text))
    return outputs.code or (0 if fits else 1)


def _limits(
    args: argparse.Namespace, config: Config, name: str, layout: StackedLayout
) -> Limits:
    from grain_sparsecore.rehearse import sample_limits

    if args.limits is not None and (args.limits.exists() or not args.find_caps):
        return load_limits(
            args.limits, layout=layout, minibatches=minibatches_of(config)
        )
    if config.source is None:
        return Limits.start(layout)
    return sample_limits(config, layout, args.batches, topology=name)


def _rehearse(config: Config, name: str, options: dict[str, Any]) -> dict[str, Any]:
    from grain_sparsecore.rehearse import StackRehearsal, rehearse

    rehearsal = rehearse(config, name, **options)
    options["on_progress"].end()

    def cells(row: StackRehearsal) -> tuple[object, ...]:
        limits = row.limits
        return (
            row.name,
            "yes" if row.fits else "NO",
            "" if limits is None else f"{limits.max_ids_per_partition:,}",
            "" if limits is None else f"{limits.max_unique_ids_per_partition:,}",
            format_bytes(row.buffer_bytes),
            format_bytes(row.argument_bytes) if row.fits else "",
            format_bytes(row.temporary_bytes) if row.fits else "",
            f"{row.seconds:.1f} s{' (cached)' if row.cached else ''}",
        )

    header = (
        "stack",
        "fits",
        "ids/partition",
        "unique",
        "buffers/device",
        "arguments/device",
        "temporaries/device",
        "compiled in",
    )
    print(
        f"{name} ({rehearsal.named.device_kind}): {describe_topology(rehearsal.layout)}"
    )
    print(f"\n{format_table(header, [cells(row) for row in rehearsal.stacks])}\n")
    for row in rehearsal.stacks:
        if row.reason:
            print(f"{row.reason}\n")
    return rehearsal.to_plain()


def _caps(
    args: argparse.Namespace,
    config: Config,
    name: str,
    options: dict[str, Any],
    outputs: Outputs,
) -> dict[str, Any]:
    from grain_sparsecore.rehearse import find_caps, versions, with_caps

    layout, limits, caps = find_caps(config, name, **options)
    found_for = FoundFor(
        topology=name,
        device_kind=options["compiler"].topology(name).device_kind,
        libtpu=versions()["libtpu"],
    )
    options["on_progress"].end()
    header = (
        "stack",
        "ids/partition",
        "at most",
        "unique",
        "at most",
        "compiled",
        "refused",
        "seconds",
    )
    rows = [
        (
            stack,
            limits[stack].max_ids_per_partition,
            cap.max_ids_per_partition,
            limits[stack].max_unique_ids_per_partition,
            cap.max_unique_ids_per_partition,
            cap.compiled,
            cap.refused,
            round(cap.seconds, 1),
        )
        for stack, cap in caps.items()
    ]
    print(f"{name}: {describe_topology(layout)}\n\n{format_table(header, rows)}\n")
    for stack, cap in caps.items():
        over = [
            field
            for field in ("max_ids_per_partition", "max_unique_ids_per_partition")
            if getattr(limits[stack], field) > getattr(cap, field)
        ]
        if over:
            print(f"stack {stack!r} needs more than its cap of {', '.join(over)}.\n")

    def save(path: Path) -> None:
        if not path.exists():
            LimitsFile.of(
                limits, layout=layout, origin={"command": "rehearse --find-caps"}
            ).save(path)
        contents = json.loads(path.read_text(encoding="utf-8"))
        before = LimitsFile.load(path).caps_found_for
        text = json.dumps(with_caps(contents, caps, found_for), indent=1)
        write_atomically(path, f"{text}\n".encode())
        replaced = (
            f", in place of those for {before}"
            if before is not None and Chip(topology=name).is_another(before)
            else ""
        )
        print(f"caps for {found_for} written to {path}{replaced}")

    outputs.write("limits", args.limits, save)
    return with_caps({"topology": name}, caps, found_for)


class _Progress:
    """Progress on standard error: one line that changes on a terminal, else lines."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Takes the line away."""
        if self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
