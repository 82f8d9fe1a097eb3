"""Notes that hosts leave for one another, to name the one that is missing.

They serve error messages only: a round never depends on them. Writing one is not a
collective, and nothing is written while rounds are quick.
"""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from grain_sparsecore.errors import CoordinationError

T = TypeVar("T")

# A note takes about a millisecond. Closing an iterator must return within a second,
# and a time-out come within two of its time, whatever the board does: after one call
# that hangs there is little patience with the next.
_PATIENT_SECONDS = 0.6
_IMPATIENT_SECONDS = 0.05


class Board(Protocol):
    """Where notes are left and read. Both may fail, with any exception."""

    def post(self, key: str, text: str) -> None:
        """Leaves a note; again under the same key is allowed."""
        ...

    def read(self, prefix: str) -> dict[str, str]:
        """All notes whose key starts with ``prefix``, by the rest of their key."""
        ...


class Errands:
    """A daemon thread that does what may hang, so that the caller need not.

    It is started early: Python 3.12 starts no thread while the interpreter ends, which
    is when some of the errands come.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None]
        self._tasks = queue.SimpleQueue()
        self._hangs = False
        # The thread knows the queue only, so that it ends with this object.
        threading.Thread(
            target=_work_off,
            args=(self._tasks,),
            name="grain_sparsecore-errands",
            daemon=True,
        ).start()

    def run(self, call: Callable[[], T], seconds: float) -> T | None:
        """The result of ``call``, or None where it failed or took longer."""
        results: list[T] = []
        done = threading.Event()

        def task() -> None:
            with contextlib.suppress(Exception):
                results.append(call())
            done.set()

        self._tasks.put(task)
        self._hangs = not done.wait(_IMPATIENT_SECONDS if self._hangs else seconds)
        return results[0] if results else None

    def __del__(self) -> None:
        self._tasks.put(None)


def _work_off(tasks: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        # Not kept while waiting for the next one.
        del task


class Notes:
    """A board as one host uses it: nothing here fails, or takes longer than it may.

    Args:
        board: May hang, for example because the host that runs it was stopped.
        host_index: This host; its notes go under its number.
    """

    def __init__(self, board: Board, host_index: int) -> None:
        self._board = board
        self._host_index = host_index

    @functools.cached_property
    def _errands(self) -> Errands:
        return Errands()

    def prepare(self) -> None:
        """Starts the thread. Where there are no other hosts there is none."""
        _ = self._errands

    def post(self, prefix: str, text: str) -> None:
        """Leaves this host's note under ``prefix``, which ends with a slash."""
        key = f"{prefix}{self._host_index}"
        self._errands.run(lambda: self._board.post(key, text), _PATIENT_SECONDS)

    def read(self, prefix: str) -> dict[int, str]:
        """The notes of all hosts under ``prefix``; none where it cannot be read."""
        notes = self._errands.run(lambda: self._board.read(prefix), _PATIENT_SECONDS)
        return {int(host): text for host, text in (notes or {}).items()}


class MemoryBoard:
    """Notes in this process."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()

    def post(self, key: str, text: str) -> None:
        """Leaves a note."""
        with self._lock:
            self._notes[key] = text

    def read(self, prefix: str) -> dict[str, str]:
        """Notes below ``prefix``."""
        with self._lock:
            return {
                key[len(prefix) :]: text
                for key, text in self._notes.items()
                if key.startswith(prefix)
            }


class JaxBoard:
    """Notes in the key-value store of JAX's coordination service.

    JAX does not publish its client, so every use may fail with a new version; the
    callers then do without the names of the missing hosts.
    """

    _ROOT = "grain_sparsecore/"

    def post(self, key: str, text: str) -> None:
        """Leaves a note."""
        self._client().key_value_set(self._ROOT + key, text, allow_overwrite=True)

    def read(self, prefix: str) -> dict[str, str]:
        """Notes below ``prefix``, which must end with a slash."""
        start = self._ROOT + prefix
        return {
            key[len(start) :]: text
            for key, text in self._client().key_value_dir_get(start)
        }

    def _client(self) -> Any:
        from jax._src import distributed

        client = distributed.global_state.client
        if client is None:
            raise CoordinationError("there is no client of JAX's coordination service.")
        return client
