"""Starting a job of several local processes, and joining one that exists.

A local job stands for a job of several hosts: each process has CPU devices of its own
and they meet over ``jax.distributed`` on the loopback interface. `launch` is the
parent's side, `join_job` that of every process.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grain_sparsecore.errors import ConfigError, CoordinationError

# How a process learns of its job; the names are those that jax.distributed reads.
ADDRESS = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"

# Set for the processes that `launch` starts.
_LAUNCHED = "GRAIN_SPARSECORE_LAUNCHED"

# Exit code of a process that was interrupted from the keyboard: 128 + SIGINT.
INTERRUPTED = 130

# Seconds that the processes get to end by themselves once one has failed or been
# interrupted: long enough to say why, short enough to wait for.
_GRACE_SECONDS = 10.0

# Seconds between the good end of one process and that of the last. They end together,
# so a process that takes longer is stuck.
_END_SECONDS = 60.0

# Seconds between two looks at the processes.
_POLL_SECONDS = 0.05

# Lines of a failed process's log that are shown.
_LOG_LINES = 40

_DEVICE_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S*")

_joined = False


def join_job(*, detect: bool, timeout_seconds: float) -> None:
    """Makes this process part of its job; does nothing where there is none.

    The environment says which: ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and
    ``JAX_PROCESS_ID``, all three. Call it before anything starts a JAX backend.

    Args:
        detect: Let JAX find the job where the environment does not name it, as it can
            on Cloud TPU, Slurm, Kubernetes and under MPI.
        timeout_seconds: How long to wait for the other processes.

    Raises:
        ConfigError: Some of the variables are missing or are no numbers.
        CoordinationError: The processes did not come together.
    """
    global _joined
    _leave_with_parent()
    job = _job_from_environment(os.environ)
    if job is None and not detect:
        return
    import jax

    arguments = {} if job is None else dataclasses.asdict(job)
    try:
        jax.distributed.initialize(
            **arguments, initialization_timeout=max(1, round(timeout_seconds))
        )
        # Starts the backend, in which all processes take part as well: here, where all
        # are known to be alive, and not at some later use of JAX.
        jax.devices()
    except (RuntimeError, ValueError) as error:
        where = "which JAX should detect" if job is None else f"at {job}"
        raise CoordinationError(
            f"could not join the job {where}: {error} Check that all processes were "
            f"started and reach the first, and {ADDRESS}, {NUM_PROCESSES} and "
            f"{PROCESS_ID}."
        ) from error
    _joined = True


def has_joined() -> bool:
    """Whether this process is part of a job by `join_job`."""
    return _joined


@dataclasses.dataclass(frozen=True)
class _Job:
    """Arguments of ``jax.distributed.initialize``."""

    coordinator_address: str
    num_processes: int
    process_id: int

    def __str__(self) -> str:
        return (
            f"{self.coordinator_address} as process {self.process_id} of "
            f"{self.num_processes}"
        )


def _job_from_environment(environment: Mapping[str, str]) -> _Job | None:
    names = (ADDRESS, NUM_PROCESSES, PROCESS_ID)
    missing = [name for name in names if not environment.get(name)]
    if len(missing) == len(names):
        return None
    if missing:
        raise ConfigError(
            f"the environment names a job without {' and '.join(missing)}; set all of "
            f"{', '.join(names)}, or none."
        )
    numbers = []
    for name in (NUM_PROCESSES, PROCESS_ID):
        if not environment[name].isdecimal():
            raise ConfigError(f"{name}={environment[name]!r} must be a whole number.")
        numbers.append(int(environment[name]))
    count, rank = numbers
    if rank >= count:
        raise ConfigError(f"{PROCESS_ID}={rank} must be below {NUM_PROCESSES}={count}.")
    return _Job(environment[ADDRESS], count, rank)


def _leave_with_parent() -> None:
    """Ends this process when `launch` is gone, even if that was killed."""
    if os.environ.pop(_LAUNCHED, None) is None:
        return

    def watch() -> None:
        # The parent never writes: this returns when its end of the pipe is closed.
        os.read(0, 1)
        # This process leads its group; its workers would outlive it.
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


@dataclasses.dataclass(frozen=True)
class _Process:
    """One process of the job."""

    rank: int
    popen: subprocess.Popen[bytes]
    log: Path

    def poll(self) -> int | None:
        """The exit code, or None while it runs; with it go workers it left behind."""
        pid = self.popen.pid
        if self.popen.returncode is None and hasattr(os, "waitid"):
            seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if seen is not None:
                # Not waited for yet, so the number still is that of our own group.
                _kill_group(pid)
        return self.popen.poll()

    def kill(self) -> None:
        """Ends it at once, with its workers."""
        if self.poll() is None:
            _kill_group(self.popen.pid)
            self.popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to it alone, if it still runs."""
        if self.poll() is None:
            self.popen.send_signal(number)

    def describe_exit(self) -> str:
        code = self.popen.returncode
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"failed with exit code {code}"


def _kill_group(pid: int) -> None:
    # Gone already, or, on macOS, nothing left in it but what has ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def launch(
    arguments: Sequence[str], *, processes: int, devices_per_process: int | None
) -> int:
    """Runs ``python -m grain_sparsecore ARGUMENTS`` as a job of local processes.

    Process 0 writes to this process's standard output; what the others write, and all
    errors, goes to logs, of which the end is shown when a process fails. When one
    fails, or on Ctrl-C, all are ended; none is left behind.

    Args:
        arguments: The command line of every process.
        processes: Number of processes.
        devices_per_process: CPU devices of each; None leaves it to JAX, which is 1
            unless ``XLA_FLAGS`` says otherwise.

    Returns:
        The exit code: 0, 2 where a process ended with 2, or 1.

    Raises:
        KeyboardInterrupt: On Ctrl-C, after all processes have ended.
    """
    with (
        tempfile.TemporaryDirectory(prefix="grain_sparsecore_") as folder,
        _free_port() as port,
        contextlib.ExitStack() as stack,
    ):
        running: list[_Process] = []
        stack.callback(_stop, running)
        for rank in range(processes):
            environment = _environment(
                os.environ, rank, processes, port, devices_per_process
            )
            log = Path(folder, f"host_{rank}.log")
            running.append(_start(arguments, rank, environment, log))
        try:
            failed = _wait(running)
        except KeyboardInterrupt:
            for process in running:
                process.signal(signal.SIGINT)
            _wait_for(running, _GRACE_SECONDS)
            raise
        for process in failed:
            _show_log(process)
        return _exit_code(failed)


def local_device_count(devices_per_process: int | None) -> int | None:
    """Devices that each process of `launch` will have; None where only JAX knows.

    Args:
        devices_per_process: As for `launch`.
    """
    if os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        return None
    if devices_per_process is not None:
        return devices_per_process
    told = "JAX_NUM_CPU_DEVICES" in os.environ or _DEVICE_COUNT_FLAG.search(
        os.environ.get("XLA_FLAGS", "")
    )
    return None if told else 1


def _start(
    arguments: Sequence[str], rank: int, environment: Mapping[str, str], log: Path
) -> _Process:
    with log.open("wb") as file:
        popen = subprocess.Popen(
            [sys.executable, "-m", "grain_sparsecore", *arguments],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=None if rank == 0 else file,
            stderr=file,
            # A group of its own: Ctrl-C in the terminal reaches the parent alone,
            # which then tells the processes, and workers can be ended with them.
            start_new_session=True,
        )
    return _Process(rank, popen, log)


def _environment(
    base: Mapping[str, str],
    rank: int,
    processes: int,
    port: int,
    devices_per_process: int | None,
) -> dict[str, str]:
    environment = {"JAX_PLATFORMS": "cpu", **base, _LAUNCHED: "1"}
    if processes > 1:
        environment |= {
            ADDRESS: f"127.0.0.1:{port}",
            NUM_PROCESSES: str(processes),
            PROCESS_ID: str(rank),
        }
    if devices_per_process is not None:
        flags = _DEVICE_COUNT_FLAG.sub("", environment.get("XLA_FLAGS", ""))
        count = f"--xla_force_host_platform_device_count={devices_per_process}"
        environment["XLA_FLAGS"] = f"{flags} {count}".strip()
    return environment


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A port of the loopback interface that nobody else is given meanwhile."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        # Where the system has SO_REUSEPORT, JAX's coordination service can bind a port
        # that is held here but not listened on; without it, let go and hope.
        shared = hasattr(socket, "SO_REUSEPORT")
        if shared:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if not shared:
            holder.close()
        yield port


def _wait(running: Sequence[_Process]) -> list[_Process]:
    """Waits for all to end; returns those that failed by themselves."""
    first_end: float | None = None
    while True:
        codes = [process.poll() for process in running]
        if any(codes):
            # Let the others say what they saw of it.
            _wait_for(running, _GRACE_SECONDS)
            return [p for p in running if p.poll()]
        if None not in codes:
            return []
        if 0 in codes:
            first_end = first_end or time.monotonic()
            if time.monotonic() - first_end > _END_SECONDS:
                stuck = [p for p in running if p.poll() is None]
                for process in stuck:
                    process.signal(signal.SIGTERM)
                _wait_for(stuck, _GRACE_SECONDS)
                return stuck
        time.sleep(_POLL_SECONDS)


def _wait_for(running: Sequence[_Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(p.poll() is None for p in running) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _stop(running: Sequence[_Process]) -> None:
    """Ends what still runs: politely, then with the workers of each."""
    for process in running:
        process.signal(signal.SIGTERM)
    _wait_for(running, _GRACE_SECONDS)
    for process in running:
        process.kill()
        if process.popen.stdin is not None:
            process.popen.stdin.close()


def _show_log(process: _Process) -> None:
    lines = process.log.read_text(errors="replace").splitlines()
    print(f"host {process.rank} {process.describe_exit()}:", file=sys.stderr)
    for line in lines[-_LOG_LINES:]:
        print(f"  {line}", file=sys.stderr)


def _exit_code(failed: Sequence[_Process]) -> int:
    if not failed:
        return 0
    return 2 if any(p.popen.returncode == 2 for p in failed) else 1
