"""Who takes the maximum: the transport seam, and the two transports without JAX."""

import threading
from collections.abc import Collection
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from grain_sparsecore.coordination.boards import Board, MemoryBoard
from grain_sparsecore.errors import CoordinationError


class Reducer(Protocol):
    """The maximum of an int32 vector over all hosts."""

    @property
    def host_index(self) -> int:
        """This host, from 0."""
        ...

    @property
    def host_count(self) -> int:
        """Hosts of the job."""
        ...

    @property
    def board(self) -> Board:
        """Where hosts leave notes on slow rounds, for error messages."""
        ...

    def start(self, frame: np.ndarray) -> "Future[np.ndarray]":
        """Starts one round without waiting for it.

        Rounds are matched by their order on each host.

        Args:
            frame: int32 [n], of one n on all hosts. Not modified afterwards.

        Returns:
            The maximum, int32 [n], once all hosts have come; an exception where the
            transport broke.
        """
        ...

    def abandon(self, reason: str, missing: Collection[int]) -> None:
        """Gives up a round that was started: no further round can be matched.

        Args:
            reason: What later calls of ``start`` report.
            missing: The hosts that are known to be gone, or stuck.
        """
        ...


class SingleProcessReducer:
    """The reducer of a job of one host: its frame is the maximum. No JAX call."""

    host_index = 0
    host_count = 1

    def __init__(self) -> None:
        self.board = MemoryBoard()

    def start(self, frame: np.ndarray) -> "Future[np.ndarray]":
        """A finished round."""
        future: Future[np.ndarray] = Future()
        future.set_result(frame)
        return future

    def abandon(self, reason: str, missing: Collection[int]) -> None:
        """Nothing: a round of one host is never waited for."""


class LocalGroup:
    """Hosts of a job that live in one process, for tests and simulations.

    ``group.reducer(h)`` is what host h passes to its pipeline. The hosts may run in
    threads of their own, or one after the other where the caller drives the exchanges.
    """

    def __init__(self, host_count: int) -> None:
        self.host_count = host_count
        self.board = MemoryBoard()
        self._lock = threading.Lock()
        self._rounds: dict[int, dict[int, tuple[np.ndarray, Future[np.ndarray]]]] = {}
        self._broken: str | None = None

    def reducer(self, host_index: int) -> "LocalReducer":
        """The reducer of one host."""
        return LocalReducer(self, host_index)

    def break_down(self, reason: str) -> None:
        """Makes all rounds fail from now on, as a lost connection does."""
        with self._lock:
            self._broken = reason
            waiting = [
                f for entries in self._rounds.values() for _, f in entries.values()
            ]
            self._rounds.clear()
        for future in waiting:
            future.set_exception(ConnectionError(reason))

    def join(
        self, number: int, host_index: int, frame: np.ndarray
    ) -> Future[np.ndarray]:
        """Brings a host's frame to round ``number``."""
        future: Future[np.ndarray] = Future()
        with self._lock:
            if self._broken is not None:
                future.set_exception(ConnectionError(self._broken))
                return future
            entries = self._rounds.setdefault(number, {})
            entries[host_index] = (frame.copy(), future)
            if len(entries) < self.host_count:
                return future
            del self._rounds[number]
        result = np.max([f for f, _ in entries.values()], axis=0)
        for _, other in entries.values():
            other.set_result(result.copy())
        return future


class LocalReducer:
    """One host of a `LocalGroup`."""

    def __init__(self, group: LocalGroup, host_index: int) -> None:
        self.host_index = host_index
        self.host_count = group.host_count
        self.board = group.board
        self._group = group
        self._next = 0
        self._abandoned: str | None = None

    def start(self, frame: np.ndarray) -> "Future[np.ndarray]":
        """Joins the next round of the group."""
        if self._abandoned is not None:
            raise CoordinationError(self._abandoned)
        self._next += 1
        return self._group.join(self._next, self.host_index, frame)

    def abandon(self, reason: str, missing: Collection[int]) -> None:
        """No further round from this host."""
        self._abandoned = reason
