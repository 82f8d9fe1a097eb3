"""``limits``: merge, adapt and convert files of limits."""

import argparse
from pathlib import Path
from typing import Any

from grain_sparsecore.cli.check import describe_topology
from grain_sparsecore.cli.files import Outputs, check_folder
from grain_sparsecore.cli.options import add_config
from grain_sparsecore.cli.output import format_limits
from grain_sparsecore.cli.plan import add_topology, one_topology
from grain_sparsecore.cli.reporting import add_limits, check_outputs, save_limits
from grain_sparsecore.config import load_config
from grain_sparsecore.fdo import export_fdo
from grain_sparsecore.warm_start import load_start_limits, minibatches_of


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "limits",
        help="merge, adapt and convert files of limits",
        description=(
            "Reads limits of any kind for the tables of CONFIG, takes the maximum, "
            "prints it, and writes it as a limits file or for jax-tpu-embedding."
        ),
    )
    add_config(parser, required="FILE [FILE ...]")
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="a limits file, a checkpoint state, or a directory of FDO files",
    )
    parser.add_argument(
        "--adapt",
        action="store_true",
        help="turn limits of other tables or devices into upper bounds",
    )
    add_topology(parser)
    add_limits(parser)
    parser.add_argument(
        "--fdo", metavar="DIR", type=Path, help="write an FDO file into DIR"
    )
    parser.add_argument(
        "--fdo-format",
        choices=("npz", "csv"),
        default="npz",
        help="its format (%(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    check_outputs(args)
    check_folder("fdo", args.fdo)
    config = load_config(args.config, overrides=args.set)
    layout = config.layout(one_topology(config, args))
    limits = load_start_limits(
        args.files,
        layout=layout,
        adapt=args.adapt,
        minibatches=minibatches_of(config),
    )
    print(describe_topology(layout))
    print(format_limits(limits))
    outputs = Outputs()
    outputs.write(
        "limits",
        args.limits,
        lambda path: save_limits(
            path,
            limits,
            layout=layout,
            caps_of=args.files,
            command="limits",
            config=args.config,
            files=args.files,
        ),
    )

    def write_fdo(folder: Path) -> None:
        path = export_fdo(folder, limits, layout=layout, format=args.fdo_format)
        print(f"written to {path}")

    outputs.write("fdo", args.fdo, write_fdo)
    return outputs.code
