"""Runs a function on several real hosts, for tests of pipelines that coordinate.

Each host is a Python process of its own, joined by ``jax.distributed`` on loopback,
with CPU devices. A test calls `run_hosts`; the function, which must live in a module
that can be imported, gets its `TestHost` and returns something JSON-able:

    def train(host, *, steps):
        ds = make_pipeline(host_index=host.index, host_count=host.count)
        return [int(batch["label"].sum()) for batch in itertools.islice(ds, steps)]

    def test_hosts_read_the_same_number_of_batches():
        first, second = run_hosts(train, hosts=2, arguments={"steps": 3})
        assert len(first.value) == len(second.value) == 3
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

# How long a host gets to end by itself after SIGTERM.
_POLITE_SECONDS = 2.0

# A host whose test has gone ends itself this long after its limit.
_ORPHAN_SECONDS = 20

_POLL_SECONDS = 0.02

# Lines of each host's log that a failure shows.
_SHOWN_LINES = 60


class HostsError(AssertionError):
    """A host failed, or ran into the time limit; the text has the logs of all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostResult:
    """How one host ended.

    Attributes:
        index: The host.
        returncode: Exit status; negative is the signal that ended it.
        value: What its function returned; None where it raised.
        log: Its output, of both streams.
        seconds: Seconds from the start of the process to its end.
    """

    index: int
    returncode: int
    value: Any
    log: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TestHost:
    """What a function learns of its host.

    Attributes:
        index: This host, from 0.
        count: Hosts of the job.
        directory: A directory that all hosts of this run share.
    """

    # Not a test class, whatever its name begins with.
    __test__ = False

    index: int
    count: int
    directory: pathlib.Path

    def barrier(self, name: str, *, timeout_seconds: float = 60.0) -> None:
        """Waits until all hosts have come to the barrier of that name, once."""
        (self.directory / f"barrier-{name}-{self.index}").touch()
        deadline = time.monotonic() + timeout_seconds
        while len(list(self.directory.glob(f"barrier-{name}-*"))) < self.count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all hosts came to barrier {name!r}.")
            time.sleep(_POLL_SECONDS)


def run_hosts(
    function: Callable[..., Any],
    *,
    hosts: int,
    arguments: Mapping[str, Any] | None = None,
    devices_per_host: int = 1,
    timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
    initialize: bool = True,
    check: bool = True,
    not_awaited: Collection[int] = (),
) -> list[HostResult]:
    """Runs ``function(host, **arguments)`` on every host, and waits for all.

    Args:
        function: Of a module that the hosts can import.
        hosts: Number of processes.
        arguments: JSON-able.
        devices_per_host: CPU devices of each process.
        timeout_seconds: Limit for the whole run; hosts that pass it are ended.
        environment: Variables to set, over those of this process.
        initialize: Whether the hosts call ``jax.distributed.initialize`` first.
        check: Whether to raise where a host's exit status is not 0.
        not_awaited: Hosts that are ended as soon as all others have.

    Returns:
        The results by host.

    Raises:
        HostsError: A host failed (with ``check``), or ran into the time limit.
    """
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-"))
        )
        job = {
            "module": function.__module__,
            "function": function.__qualname__,
            "arguments": dict(arguments or {}),
            "hosts": hosts,
            "directory": str(directory),
            "coordinator": f"127.0.0.1:{_free_port()}" if initialize else None,
            "alarm_seconds": int(timeout_seconds) + _ORPHAN_SECONDS,
            "path": [p for p in sys.path if p],
        }
        (directory / "job.json").write_text(json.dumps(job))
        variables = _environment(devices_per_host, environment or {})
        processes = [
            stack.enter_context(_started(directory, index, variables))
            for index in range(hosts)
        ]
        seconds = _wait(processes, timeout_seconds, not_awaited)
        late = [i for i, s in enumerate(seconds) if s is None and i not in not_awaited]
        _end(processes)
        results = [
            HostResult(
                index=index,
                returncode=process.returncode,
                value=_read_value(directory, index),
                log=(directory / f"host-{index}.log").read_text(errors="replace"),
                seconds=timeout_seconds if elapsed is None else elapsed,
            )
            for index, (process, elapsed) in enumerate(
                zip(processes, seconds, strict=True)
            )
        ]
    failed = [
        r.index for r in results if r.returncode != 0 and r.index not in not_awaited
    ]
    if late:
        raise HostsError(
            f"hosts {late} did not end within {timeout_seconds:g} seconds.\n"
            + show_logs(results)
        )
    if check and failed:
        raise HostsError(f"hosts {failed} failed.\n{show_logs(results)}")
    return results


def show_logs(results: Sequence[HostResult]) -> str:
    """The ends of the logs of all hosts, with their exit statuses."""
    parts = []
    for result in results:
        lines = result.log.splitlines()[-_SHOWN_LINES:]
        parts.append(
            f"--- host {result.index}: exit status {result.returncode} after "
            f"{result.seconds:.1f} seconds ---\n" + "\n".join(lines)
        )
    return "\n".join(parts)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(devices: int, more: Mapping[str, str]) -> dict[str, str]:
    # JAX warns of proxies, and would go through them to reach this machine.
    inherited = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
    return {
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONUNBUFFERED": "1",
        **more,
    }


@contextlib.contextmanager
def _started(
    directory: pathlib.Path, index: int, variables: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", __name__, str(directory / "job.json"), str(index)]
    with open(directory / f"host-{index}.log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(variables),
        )
        try:
            yield process
        finally:
            _end([process])


def _wait(
    processes: Sequence["subprocess.Popen[bytes]"],
    timeout_seconds: float,
    not_awaited: Collection[int],
) -> list[float | None]:
    """Seconds until each process ended; None for those that still run."""
    start = time.monotonic()
    seconds: list[float | None] = [None] * len(processes)
    while time.monotonic() - start < timeout_seconds:
        for index, process in enumerate(processes):
            if seconds[index] is None and process.poll() is not None:
                seconds[index] = time.monotonic() - start
        if all(s is not None or i in not_awaited for i, s in enumerate(seconds)):
            break
        time.sleep(_POLL_SECONDS)
    return seconds


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ends processes of ours: first politely, then for certain."""
    running = [p for p in processes if p.poll() is None]
    for process in running:
        process.terminate()
        # A stopped process sees the signal only once it goes on.
        process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + _POLITE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_value(directory: pathlib.Path, index: int) -> Any:
    path = directory / f"value-{index}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _main(job_path: str, index: int) -> None:
    """What each host runs."""
    job = json.loads(pathlib.Path(job_path).read_text())
    faulthandler.enable()
    signal.alarm(job["alarm_seconds"])
    sys.path[:] = [*job["path"], *(p for p in sys.path if p not in job["path"])]
    if job["coordinator"] is not None:
        import jax

        jax.distributed.initialize(job["coordinator"], job["hosts"], index)
    from absl import flags

    # Grain reads absl flags in mp_prefetch; without absl.app.run nobody parses them.
    flags.FLAGS.mark_as_parsed()
    function = getattr(importlib.import_module(job["module"]), job["function"])
    directory = pathlib.Path(job["directory"])
    host = TestHost(index=index, count=job["hosts"], directory=directory)
    value = function(host, **job["arguments"])
    (directory / f"value-{index}.json").write_text(json.dumps(value))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
