"""The transport between hosts: one jitted ``jax.lax.pmax`` over their CPU devices."""

import atexit
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from grain_sparsecore.coordination.boards import JaxBoard
from grain_sparsecore.coordination.leaving import Departure
from grain_sparsecore.coordination.meeting import meet
from grain_sparsecore.coordination.reducers import Reducer, SingleProcessReducer
from grain_sparsecore.errors import CoordinationError

_AXIS = "host"

# How often the thread looks whether a round is done. A round takes about 700 us.
_FIRST_PAUSE_SECONDS = 50e-6
_LAST_PAUSE_SECONDS = 2e-3

# How long the exit of the process waits for the thread to leave XLA: for the compiler,
# mostly, which takes 100 ms where nothing else runs.
_SETTLE_SECONDS = 5.0


def rotated(devices: Sequence[Any]) -> list[Any]:
    """The devices in an order that is all ours.

    XLA keys the connections of a CPU collective by the ordered list of its devices and
    tags nothing. A collective of the training step over the same list, at the same
    time, would silently exchange its data with ours.
    """
    return [*devices[1:], *devices[:1]]


class PmaxReducer:
    """The reducer of a job over ``jax.distributed``.

    All rounds of a process, of all its pipelines, run one after the other on one
    daemon thread, so that their order depends only on the order of the calls. Use
    `process_reducer`, which keeps one of them.

    Raises:
        CoordinationError: JAX has no CPU devices, or its CPU devices do not span the
            processes of the job.
    """

    def __init__(self) -> None:
        import jax

        devices = _one_cpu_device_per_process()
        self.host_index = jax.process_index("cpu")
        self.host_count = len(devices)
        self.board = JaxBoard()
        # Held by the thread while it is in code of XLA.
        self._busy = threading.Lock()
        self._reduce = _make_maximum(rotated(devices), self._busy)
        self._abandoned: str | None = None
        self._process = os.getpid()
        self._tasks: queue.SimpleQueue[tuple[np.ndarray, Future[np.ndarray]]] = (
            queue.SimpleQueue()
        )
        # A daemon thread and no executor: the interpreter joins an executor's threads
        # at its exit, and so would hang in a round that never ends.
        self._thread = threading.Thread(
            target=self._work, name="grain_sparsecore-pmax", daemon=True
        )
        self._thread.start()
        atexit.register(_settle, self._busy)

    def start(self, frame: np.ndarray) -> "Future[np.ndarray]":
        """Queues a round for the thread."""
        if os.getpid() != self._process:
            raise CoordinationError(
                f"this process ({os.getpid()}) was forked from the host's process "
                f"({self._process}) and has no connection to the other hosts; read "
                "the pipeline there, and start helpers with spawn instead of fork."
            )
        if self._abandoned is not None:
            raise CoordinationError(
                f"this process gave up an earlier round ({self._abandoned}); restart "
                "the job to coordinate again."
            )
        future: Future[np.ndarray] = Future()
        self._tasks.put((frame, future))
        return future

    def abandon(self, reason: str, missing: Collection[int]) -> None:
        """No further round in this process: the connection cannot be mended."""
        if self._abandoned is None:
            self._abandoned = reason
            others = {*range(self.host_count)} - {self.host_index, *missing}
            self._departure = Departure(self.board, self.host_index, others)

    def _work(self) -> None:
        have_met = False
        while True:
            frame, future = self._tasks.get()
            try:
                if not have_met:
                    meet(
                        self.board,
                        self.host_index,
                        self.host_count,
                        busy=self._busy,
                        given_up=lambda: self._abandoned is not None,
                    )
                    have_met = True
                if self._abandoned is not None:
                    raise CoordinationError(self._abandoned)
                result = self._reduce(frame)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del frame, future


def _settle(busy: threading.Lock) -> None:
    """At exit: keeps the thread out of XLA from now on.

    A thread that comes back from native code while the interpreter is ending cannot
    take the interpreter's lock, and the process aborts.
    """
    busy.acquire(timeout=_SETTLE_SECONDS)


def _make_maximum(
    devices: Sequence[Any], busy: threading.Lock
) -> Callable[[np.ndarray], np.ndarray]:
    """A function from this process's vector to the maximum over all processes.

    It holds ``busy`` while it is in code of XLA, and not while it waits.
    """
    import jax

    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
    sharding = jax.sharding.NamedSharding(mesh, spec(_AXIS))
    (local,) = (d for d in devices if d.process_index == jax.process_index("cpu"))

    # Built once: a function made per call would be compiled per call.
    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec(_AXIS), out_specs=spec())
    def maximum(rows: Any) -> Any:
        return jax.lax.pmax(rows[0], _AXIS)

    def reduce(vector: np.ndarray) -> np.ndarray:
        with busy:
            row = jax.device_put(vector[None], local)
            rows = jax.make_array_from_single_device_arrays(
                (len(devices), vector.size), sharding, [row]
            )
            result = maximum(rows).addressable_data(0)
        _wait_until_ready(result, busy)
        with busy:
            return np.asarray(result)

    return reduce


def _wait_until_ready(array: Any, busy: threading.Lock) -> None:
    """Waits in Python, not in XLA: at exit, a thread that sleeps is just ended."""
    pause = _FIRST_PAUSE_SECONDS
    while True:
        with busy:
            if array.is_ready():
                return
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)


def _one_cpu_device_per_process() -> list[Any]:
    """The first CPU device of each process, by process."""
    import jax

    platforms = os.environ.get("JAX_PLATFORMS")
    try:
        devices = jax.devices("cpu")
    except RuntimeError as error:
        raise CoordinationError(
            "agreeing on limits needs JAX's CPU backend, which is not there "
            f"(JAX_PLATFORMS is {platforms!r}); add it behind the accelerator, for "
            "example JAX_PLATFORMS=tpu,cpu."
        ) from error
    first: dict[int, Any] = {}
    for device in sorted(devices, key=lambda d: d.id):
        first.setdefault(device.process_index, device)
    if len(first) != jax.process_count():
        raise CoordinationError(
            f"the job has {jax.process_count()} processes, but JAX's CPU devices span "
            f"{len(first)}, so that hosts could not hear of each other; call "
            "jax.distributed.initialize() before anything else uses JAX."
        )
    return [first[index] for index in sorted(first)]


@functools.lru_cache(maxsize=1)
def process_reducer() -> Reducer:
    """The reducer of this process: one for all its pipelines.

    Starts JAX's default backend, to learn whether the job has more processes.

    Raises:
        CoordinationError: JAX cannot start, or see `PmaxReducer`.
    """
    import jax

    try:
        count = jax.process_count()
    except Exception as error:  # Which type it is depends on the release of JAX.
        raise CoordinationError(
            "JAX cannot start, so the number of hosts is unknown (JAX_PLATFORMS is "
            f"{os.environ.get('JAX_PLATFORMS')!r}; agreeing on limits needs the cpu "
            f"platform among them): {str(error) or type(error).__name__}"
        ) from error
    return SingleProcessReducer() if count == 1 else PmaxReducer()
