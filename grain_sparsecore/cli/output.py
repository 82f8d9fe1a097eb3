"""What the commands print: tables, and the progress of a job."""

import contextlib
import dataclasses
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from grain_sparsecore.cli.pipes import leavable
from grain_sparsecore.errors import ConfigError, GrainSparseCoreError
from grain_sparsecore.failing import kept_notes
from grain_sparsecore.limits import Limits
from grain_sparsecore.summary import MinibatchSummary, Progress, TrainSummary

# Seconds between two progress lines: on a terminal, where one replaces the other, and
# elsewhere, where they add up.
_TERMINAL_SECONDS = 0.1
_PLAIN_SECONDS = 5.0

_ERASE_LINE = "\r\x1b[K"

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def own_stdout() -> TextIO:
    """Standard output for us alone.

    The native code of a job of several processes writes there too, unasked; from here
    on its lines go to standard error.
    """
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return leavable(ours)


@contextlib.contextmanager
def warnings_on(stream: TextIO) -> Iterator[None]:
    """Prints what the package logs as a warning, instead of on standard error.

    A launched host's standard error is shown where it fails, and only there.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger = logging.getLogger("grain_sparsecore")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)


def counted(count: int, one: str, many: str = "") -> str:
    """``1 host``, ``2 hosts``."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def show_error(error: Exception) -> int:
    """Prints an error to standard error; returns its exit code.

    What this package raises is shown as its text, with where its batch is kept;
    anything else is a defect and keeps its traceback.
    """
    if not isinstance(error, GrainSparseCoreError):
        traceback.print_exception(error)
        return 1
    for text in (str(error), *kept_notes(error)):
        print(f"grain-sparsecore: {text}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def format_bytes(count: int) -> str:
    """``1536`` as ``"1.5 KiB"``."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(_UNITS))
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns two spaces apart: texts to the left, numbers to the right."""
    cells = [
        [f"{v:,}" if isinstance(v, int | float) else str(v) for v in row]
        for row in rows
    ]
    numeric = [
        bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        for i in range(len(header))
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = []
    for row in [header, *cells]:
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


class ProgressPrinter:
    """Prints the progress of a job: one line that changes on a terminal, else lines.

    Args:
        stream: Where to.
        terminal: Whether that is a terminal.
    """

    def __init__(self, stream: TextIO, *, terminal: bool) -> None:
        self._stream = stream
        self._terminal = terminal
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        """Prints what has happened, at most every few seconds."""
        for message in progress.messages:
            self._write_line(message)
        now = time.monotonic()
        last = progress.step == progress.steps
        if now < self._next and not last:
            return
        self._next = now + (_TERMINAL_SECONDS if self._terminal else _PLAIN_SECONDS)
        rate = progress.examples_per_second
        line = (
            f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}  "
            # The first step, which compiles, is not timed.
            + (f"{rate:,.0f} examples/s  " if rate else "")
            + f"recompiles {progress.recompiles}"
        )
        if self._terminal:
            self._stream.write(f"{_ERASE_LINE}{line}")
            self._stream.flush()
        else:
            self._write_line(line)

    def _write_line(self, line: str) -> None:
        start = _ERASE_LINE if self._terminal else ""
        self._stream.write(f"{start}{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Leaves the progress line where it is, and begins a new one."""
        if self._terminal:
            self._stream.write("\n")
            self._stream.flush()


def format_limits(limits: Limits) -> str:
    """The three numbers of every stack."""
    return format_table(
        ("stack", "ids/partition", "unique", "slots/device"),
        [(name, *dataclasses.astuple(stack)) for name, stack in limits.items()],
    )


def _minibatches(found: MinibatchSummary) -> list[str]:
    """A line where minibatching was on."""
    if not found.extra_buffer_bytes:
        return []
    most = counted(max(found.batches, default=1), "minibatch", "minibatches")
    more = format_bytes(found.extra_buffer_bytes)
    return [
        f"batches split      {found.share_split:.1%} (up to {most}; "
        f"{more} more per device and batch)"
    ]


def _troubles(summary: TrainSummary) -> list[str]:
    """A line for each feature whose ids or weights were not all taken as they came."""
    lines = []
    for feature, counts in summary.counters.items():
        found = [f"{n:,} {name}" for name, n in counts.items() if n and name != "ids"]
        if found:
            # Not of the ids that are left: more may have been dropped.
            given = summary.given_ids[feature]
            lines.append(f"{feature:<18} {', '.join(found)} of {given:,} ids")
    return lines


def _drops(summary: TrainSummary) -> list[str]:
    """Lines about what was cut at limits: the share of examples, stacks, features."""
    lines = []
    for stack, lost in summary.drops.items():
        if not lost["dropped_ids"]:
            continue
        lines.append(f"cut, stack {stack}: {_lost(lost)}")
        for feature, mine in lost["features"].items():
            if mine["dropped_ids"]:
                examples = counted(mine["dropped_examples"], "example")
                lines.append(f"  feature {feature}: {_lost(mine)}, in {examples}")
    if lines:
        share = summary.dropped_example_share
        lines.insert(0, f"examples cut       {share:.1%} lost an entry at a limit")
    return lines


def _lost(lost: Mapping[str, Any]) -> str:
    entries = counted(lost["dropped_entries"], "entry", "entries")
    ids = counted(lost["dropped_ids"], "id")
    return f"{ids}, {entries}, weight {lost['lost_weight']:,.1f}"


def _program(summary: TrainSummary) -> str:
    if summary.program_fingerprint is None:
        return "not compared: needs jax-tpu-embedding, and optimizers that it has"
    return f"{summary.program_fingerprint[:16]} on every host"


def format_summary(summary: TrainSummary) -> str:
    """The summary as text."""
    hosts = counted(summary.hosts, "host")
    changes = f"limits changed {counted(summary.limit_changes, 'time')}"
    return "\n".join(
        (
            f"steps              {summary.steps} on {hosts}",
            f"loss               {summary.loss_first:.4f} -> {summary.loss_last:.4f}",
            f"examples/s         {summary.examples_per_second:,.0f}",
            f"recompiles         {summary.recompiles} on every host ({changes})",
            f"ids dropped        {summary.dropped_ids:,}",
            *_drops(summary),
            *_troubles(summary),
            *_minibatches(summary.minibatches),
            f"waiting for input  {summary.input_wait_fraction:.1%}",
            f"TPU program        {_program(summary)}",
            "",
            format_limits(summary.limits),
        )
    )
