"""What a job prints while it runs."""

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

from grain_sparsecore.cli.output import ProgressPrinter
from grain_sparsecore.summary import Progress


def progress(step: int, *, steps: int = 100, messages: tuple[str, ...] = ()):
    return Progress(
        step=step,
        steps=steps,
        loss=0.5,
        examples_per_second=12345.6,
        recompiles=1,
        messages=messages,
    )


LINE = "  loss 0.5000  12,346 examples/s  recompiles 1"


def test_progress_elsewhere_is_a_line_now_and_then(monkeypatch):
    clock = iter([0.0, 1.0, 4.9, 5.0, 6.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    printer = ProgressPrinter(stream, terminal=False)
    for step in (1, 2, 3, 4, 100):
        printer(progress(step, messages=("odd ids",) if step == 2 else ()))
    printer.end()
    assert stream.getvalue().splitlines() == [
        f"step 1/100{LINE}",
        "odd ids",
        f"step 4/100{LINE}",
        f"step 100/100{LINE}",
    ]


def test_progress_has_no_rate_before_a_step_was_timed():
    stream = io.StringIO()
    printer = ProgressPrinter(stream, terminal=False)
    printer(dataclasses.replace(progress(1), examples_per_second=0.0))
    assert stream.getvalue() == "step 1/100  loss 0.5000  recompiles 1\n"


def test_progress_on_a_terminal_is_one_line_that_changes():
    stream = io.StringIO()
    printer = ProgressPrinter(stream, terminal=True)
    printer(progress(1))
    printer(progress(100, messages=("odd ids",)))
    printer.end()
    erase = "\r\x1b[K"
    assert stream.getvalue() == (
        f"{erase}step 1/100{LINE}{erase}odd ids\n{erase}step 100/100{LINE}\n"
    )


def test_a_job_without_a_tpu_prints_nothing_about_one():
    # libtpu is installed for its compiler, and says much about a TPU that is not there.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "grain_sparsecore", "train"),
            *("configs/quickstart.toml", "--steps", "1"),
        ],
        cwd=Path(__file__).parent.parent,
        env={**environment, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step 1/1")
