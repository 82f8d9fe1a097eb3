"""The command line: ``python -m grain_sparsecore COMMAND``.

Exit codes: 0 when all went well, 1 when a job failed, 2 when the command line or the
configuration is wrong, 130 after Ctrl-C, 143 after SIGTERM. What this package raises is
shown as its text; anything else is a defect and keeps its traceback.
"""

import argparse
import contextlib
import glob
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

import jax
from absl import flags

from grain_sparsecore import __version__
from grain_sparsecore.cli.output import show_error
from grain_sparsecore.cli.pipes import readers_may_leave
from grain_sparsecore.coordination.leaving import exit_failed_job
from grain_sparsecore.launch import INTERRUPTED, has_joined

# Modules of this package, in the order of ``--help``; each has
# ``add_parser(subparsers)``, whose parser sets ``run``, and ``run(args) -> int``.
COMMANDS = (
    "train",
    "check",
    "stats",
    "replay",
    "plan",
    "simulate",
    "limits",
    "rehearse",
    "bench",
)


# Exit code of a process that was terminated: 128 + SIGTERM.
_TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments; None takes those of the process.

    Returns:
        The exit code. Where arguments do not parse, argparse raises SystemExit(2).
    """
    # Grain reads absl flags in its workers, which fails while nobody parsed them.
    flags.FLAGS.mark_as_parsed()
    _leave_absent_tpu_alone()
    args = _parse(argv)
    with _terminated_like_interrupted(), readers_may_leave():
        code = _run(args)
    if code and has_joined():
        # A normal end would first wait minutes for the other hosts, and then abort.
        exit_failed_job(code)
    return code


class _Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Meanwhile SIGTERM ends processes and workers as Ctrl-C does.

    Schedulers send it; by itself it ends this process alone, at once.
    """

    def terminate(number: int, frame: object) -> None:
        raise _Terminated

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; what a command does not know is said with its own usage."""
    parser, commands = _make_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        options = {text.partition("=")[0] for text in unknown if text.startswith("--")}
        hints = [
            f"; {option} is an option of {', '.join(having)}"
            for option in sorted(options)
            if (having := [c for c, p in commands.items() if _has(p, option)])
        ]
        commands[args.command].error(
            f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}"
        )
    return args


def _has(parser: argparse.ArgumentParser, option: str) -> bool:
    return any(option in action.option_strings for action in parser._actions)


def _leave_absent_tpu_alone() -> None:
    """Keeps JAX from looking for a TPU where libtpu is installed but no TPU is.

    The extra [tpu] brings libtpu for its compiler; JAX would then search for a TPU at
    every start and report at length that there is none.
    """
    if "JAX_PLATFORMS" in os.environ or importlib.util.find_spec("libtpu") is None:
        return
    devices = (*glob.glob("/dev/accel*"), *glob.glob("/dev/vfio/[0-9]*"))
    # Plugins of other accelerators are modules of this name.
    if not devices and importlib.util.find_spec("jax_plugins") is None:
        # For processes that this one starts, and for JAX, which has read it already.
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")


def _make_parser() -> tuple[
    argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]
]:
    """The parser, and those of the commands."""
    parser = argparse.ArgumentParser(
        prog="grain-sparsecore",
        description="SparseCore input preprocessing as a Grain data pipeline.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {__version__}"
    )
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, dest="command"
    )
    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    return parser, subparsers.choices


def _run(args: argparse.Namespace) -> int:
    try:
        return args.run(args)
    except _Terminated:
        print("grain-sparsecore: terminated", file=sys.stderr)
        return _TERMINATED
    except KeyboardInterrupt:
        print("grain-sparsecore: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return show_error(error)
