"""``replay``: prepare a batch again that failed elsewhere."""

import argparse
from typing import Any

from grain_sparsecore.cli.check import describe_topology
from grain_sparsecore.cli.output import show_error
from grain_sparsecore.failing.batch import FailingBatch, type_name


def add_parser(subparsers: Any) -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="prepare batches again that --dump-failing kept",
        description=(
            "Prepares the batch of each FILE for the layout it was kept with, and "
            "shows its error again, or says that the batch is fine now. Exit code 0 if "
            "all are, 1 if one is not, 2 if a file cannot be read. It needs neither "
            "the configuration nor the data nor a TPU, and reading FILE runs no code "
            "from it."
        ),
    )
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="a file that train or stats --dump-failing wrote",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    code = 0
    for path in args.files:
        try:
            _replay(path)
        except Exception as error:
            code = max(code, show_error(error))
    return code


def _replay(path: str) -> None:
    """Prepares the batch of one file; raises what that raises."""
    batch = FailingBatch.load(path)
    # Imported here: they pull in the kernels.
    from grain_sparsecore.columns import TakeColumns
    from grain_sparsecore.pipeline.compute import ComputeInputStats

    print(f"{path}: {describe_topology(batch.layout)}")
    print("kept with " + ", ".join(f"{k} {v}" for k, v in batch.origin.items()))
    if batch.replaced:
        names = ", ".join(sorted(set(batch.replaced)))
        print(f"stand-ins for what could not be kept: {names}")
    element = batch.element
    stage = ComputeInputStats(batch.layout, key=batch.key, cut_above=batch.cut_above)
    recorded = f"{batch.error_type}: {batch.error_text}"
    try:
        if batch.columns is not None:
            element = TakeColumns(batch.layout, *batch.columns).map(element)
        stage.map(element)
    except Exception as error:
        if f"{type_name(error)}: {error}" == recorded:
            print(f"the same error as then, {batch.error_type}", flush=True)
        else:
            print(f"another error than then, {type_name(error)}", flush=True)
            print(f"then it was {recorded}", flush=True)
        raise
    print(f"the batch is fine now; then it was {recorded}", flush=True)
