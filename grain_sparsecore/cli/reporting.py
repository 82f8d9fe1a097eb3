"""``--report``, ``--plot`` and ``--limits``: what commands leave behind in files."""

import argparse
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from grain_sparsecore.chip_caps import lowest_caps, one_chip, read_caps
from grain_sparsecore.cli.files import (
    Outputs,
    cannot_write,
    check_file,
    check_folder,
    write_json,
)
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import LimitsFile
from grain_sparsecore.metrics import (
    JsonLinesWriter,
    MetricWriter,
    MultiWriter,
    TensorBoardWriter,
)
from grain_sparsecore.report import RunRecord, write_plots, write_report
from grain_sparsecore.report.figures import all_figures
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.watching import RunWatcher

_logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.5


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds ``--report`` and ``--plot``."""
    parser.add_argument(
        "--report", metavar="FILE", type=Path, help="write one HTML page of pictures"
    )
    parser.add_argument(
        "--plot",
        metavar="DIR",
        type=Path,
        help="write the same pictures as PNG files; needs the extra [plot]",
    )


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Adds ``--limits``."""
    parser.add_argument(
        "--limits",
        metavar="FILE",
        type=Path,
        help="write the limits, for limits.file of a later job",
    )


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """Adds ``--metrics`` and ``--tensorboard``."""
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        type=Path,
        help="append the scalars of every step to FILE, one JSON object a line",
    )
    parser.add_argument(
        "--tensorboard",
        metavar="DIR",
        type=Path,
        help="write them for TensorBoard; needs the extra [tensorboard]",
    )


def make_watcher(
    args: argparse.Namespace, layout: StackedLayout, outputs: Outputs
) -> RunWatcher | None:
    """What watches the run of host 0, or None where nothing of it is asked for.

    Raises:
        ConfigError: A file of scalars cannot be opened.
    """
    writers: list[MetricWriter] = []
    if args.metrics is not None:
        writer = JsonLinesWriter(args.metrics)
        writers.append(outputs.scalars("metrics", args.metrics, writer))
    if args.tensorboard is not None:
        try:
            writer = TensorBoardWriter(args.tensorboard)
        except OSError as error:
            text = cannot_write("tensorboard", args.tensorboard, error)
            raise ConfigError(f"{text}.") from error
        writers.append(outputs.scalars("tensorboard", args.tensorboard, writer))
    if not writers and not wants_report(args):
        return None
    return RunWatcher(
        layout,
        record=wants_report(args),
        writer=MultiWriter(writers) if writers else None,
    )


def forwarded(args: argparse.Namespace) -> list[str]:
    """The options of this module that were given, as arguments."""
    arguments = []
    for option in ("limits", "report", "plot", "metrics", "tensorboard"):
        value = getattr(args, option, None)
        if value is not None:
            arguments += [f"--{option}", str(value)]
    return arguments


def check_outputs(args: argparse.Namespace) -> None:
    """Refuses files that cannot be written, before any work is done.

    Raises:
        ConfigError: A folder does not exist, a file is one, or writing fails.
    """
    for option in ("report", "limits"):
        check_file(option, getattr(args, option, None))
    check_file("metrics", getattr(args, "metrics", None), in_place=True)
    for option in ("plot", "tensorboard"):
        check_folder(option, getattr(args, option, None))
    plot = getattr(args, "plot", None)
    if plot is not None:
        # Says which extra is missing while it costs nothing yet.
        write_plots(plot, [])


def wants_report(args: argparse.Namespace) -> bool:
    """Whether a record of the run is needed."""
    return args.report is not None or args.plot is not None


def write_results(
    args: argparse.Namespace,
    outputs: Outputs,
    text: str,
    limits: Limits,
    *,
    layout: StackedLayout,
    **origin: Any,
) -> None:
    """Writes what ``--json`` and ``--limits`` ask for.

    Args:
        args: The arguments of the command.
        outputs: Says what fails.
        text: The results as JSON.
        limits: The limits that the command found.
        layout: Their stacks.
        **origin: See `save_limits`; the command and its configuration are known.
    """
    origin = {"command": args.command, "config": args.config, **origin}
    outputs.write("json", args.json, lambda path: write_json(path, text))
    outputs.write(
        "limits",
        args.limits,
        lambda path: save_limits(path, limits, layout=layout, **origin),
    )


def write_record(args: argparse.Namespace, record: RunRecord, outputs: Outputs) -> None:
    """Writes the page and the pictures that were asked for."""
    outputs.write("report", args.report, lambda path: write_report(path, record))
    outputs.write(
        "plot", args.plot, lambda path: write_plots(path, all_figures(record))
    )


def save_limits(
    path: str | os.PathLike[str],
    limits: Limits,
    *,
    layout: StackedLayout,
    caps_of: Sequence[str | os.PathLike[str]] | None = None,
    **origin: Any,
) -> None:
    """Writes a limits file; ``origin`` says where the numbers come from.

    It has the lowest caps of the limits files ``caps_of`` that are for this layout; by
    default those of the file that is written over. Of caps that are left out a warning
    is logged.

    Raises:
        ConfigError: The caps were found for several kinds of chips.
    """
    files = read_caps(
        [path] if caps_of is None else caps_of,
        layout=layout,
        on_left_out=_logger.warning,
    )
    LimitsFile.of(
        limits,
        layout=layout,
        origin=origin,
        caps=lowest_caps([file.caps for file in files]),
        caps_found_for=one_chip(files),
    ).save(path)


class Counting:
    """``measured 12 of 40 batches`` on a terminal; nothing elsewhere.

    Args:
        stream: Where to, for example ``sys.stderr``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream if stream.isatty() else None
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Shows how far it is, at most twice a second."""
        now = time.monotonic()
        if self._stream is not None and (now >= self._next or done == total):
            self._next = now + _PROGRESS_SECONDS
            self._stream.write(f"\rmeasured {done:,} of {total:,} batches")
            self._stream.flush()

    def end(self) -> None:
        """Leaves the line."""
        if self._stream is not None:
            self._stream.write("\n")
