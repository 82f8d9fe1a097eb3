"""Drives the exchanges of one pipeline with a reducer, and watches over each round."""

import atexit
import collections
import functools
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from grain_sparsecore.coordination.boards import Notes
from grain_sparsecore.coordination.differences import name_hosts
from grain_sparsecore.coordination.frames import INT31_MASK, Exchange
from grain_sparsecore.coordination.leaving import LEAVING
from grain_sparsecore.coordination.protocol import Host, handshake
from grain_sparsecore.coordination.reducers import Reducer
from grain_sparsecore.errors import (
    CoordinationError,
    HostFailedError,
    HostMismatchError,
    HostTimeoutError,
    StageMisuseError,
)

T = TypeVar("T")

# A round that takes longer than this is worth a note on the board, and a look at it.
_SLOW_ROUND_SECONDS = 1.0

# A lost connection shows on all hosts within milliseconds; they get this long to say
# that they are there, so that the one that is not can be named.
_ROLL_CALL_SECONDS = 1.0

# How often a slow round looks whether another host has left, at most and at least.
_LONGEST_PAUSE_SECONDS = 10.0


class _Pipelines:
    """What a reducer's coordinators have in common.

    Attributes:
        live: The live coordinator of each name: the collectives of two would mix.
            Weak, because an iterator that was dropped is not live.
        notes: What this host posts and reads.
        handshakes: How many each name has had; keeps their notes apart.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.notes = Notes(reducer.board, reducer.host_index)
        self.live: weakref.WeakValueDictionary[str, Coordinator]
        self.live = weakref.WeakValueDictionary()
        self.handshakes: collections.Counter[str] = collections.Counter()


_PIPELINES: weakref.WeakKeyDictionary[Reducer, _Pipelines]
_PIPELINES = weakref.WeakKeyDictionary()


def _pipelines_of(reducer: Reducer) -> _Pipelines:
    if reducer not in _PIPELINES:
        _PIPELINES[reducer] = _Pipelines(reducer)
    return _PIPELINES[reducer]


# Notes of pipelines are below this, apart from those of processes.
_PIPELINES_NOTES = "pipelines/"

# What the others are told of a host that closed its iterator.
_CLOSED = "closed its iterator"


class _ClosedError(ValueError):
    """The iterator was closed while it waited."""


class Coordinator:
    """One pipeline's side of the agreement.

    Args:
        reducer: The transport.
        name: Name of the pipeline, equal on all hosts, of its own in a program.
        configuration: What must be equal on all hosts, JSON-able.
        timeout_seconds: How long a round may take.
        expected_hosts: How many hosts the configuration is for; None: any number.

    Attributes:
        step: Batches handed on so far, for messages; kept up by the owner.
        rounds: Rounds that were finished.
        seconds: Time spent in them.
    """

    def __init__(
        self,
        *,
        reducer: Reducer,
        name: str,
        configuration: Mapping[str, Any],
        timeout_seconds: float,
        expected_hosts: int | None = None,
    ) -> None:
        self.step = 0
        self.rounds = 0
        self.seconds = 0.0
        self._reducer = reducer
        self._name = name
        self._configuration = dict(configuration)
        self._timeout = timeout_seconds
        self._expected_hosts = expected_hosts
        self._session: str | None = None
        self._handshake_notes = ""
        self._pipelines = _pipelines_of(reducer)
        self._open = False
        self._closed = False
        self._given_up = False
        self._wake = threading.Event()
        self._notes = self._pipelines.notes

    @property
    def host(self) -> Host:
        """This host."""
        return Host(index=self._reducer.host_index, count=self._reducer.host_count)

    def run(self, exchange: Exchange[T]) -> T:
        """Runs an exchange to its end; the first one is preceded by the handshake.

        Args:
            exchange: The same on all hosts.

        Raises:
            StageMisuseError: Another iterator of this pipeline is live.
            HostMismatchError: Hosts differ, or are not in the same step.
            HostTimeoutError: A host did not come in time.
            HostFailedError: A host is gone.
        """
        self._claim()
        if self._session is None:
            self._pipelines.handshakes[self._name] += 1
            number = self._pipelines.handshakes[self._name]
            self._handshake_notes = (
                f"{_PIPELINES_NOTES}{self._name}/handshake-{number}/"
            )
            nonce = self._drive(
                handshake(
                    name=self._name,
                    configuration=self._configuration,
                    host=self.host,
                    nonce=secrets.randbits(31) & INT31_MASK,
                )
            )
            self._check_host_count()
            self._session = f"{nonce:x}"
        return self._drive(exchange)

    def release(self) -> None:
        """The pipeline is at its end: another iterator of it may start."""
        self._open = False

    def _check_host_count(self) -> None:
        """After the handshake, so that all hosts expect, and raise, the same."""
        expected, count = self._expected_hosts, self.host.count
        if expected is None or expected == count:
            return
        hint = (
            "call jax.distributed.initialize() before anything else uses JAX"
            if count == 1
            else "start as many processes as the configuration has hosts"
        )
        raise HostMismatchError(
            f"pipeline {self._name!r}: the configuration is for {expected} hosts "
            "(global_device_count / local_device_count), but the job has "
            f"{count} process{'' if count == 1 else 'es'}; {hint}, or correct the "
            "topology. To prepare the input of one host of a larger job alone, pass "
            "reducer=SingleProcessReducer()."
        )

    def leave(self, reason: str) -> None:
        """Tells the other hosts that this one will not come to another round.

        Args:
            reason: What they are told, as in "host 3 <reason> after 17 batches".
        """
        if self._open and not sys.is_finalizing():
            self._open = False
            self._notes.post(
                f"{self._prefix}left/", f"{reason} after {self.step} batches"
            )

    def close(self) -> None:
        """Wakes a waiting round, which raises, and tells the other hosts.

        Returns within a fraction of a second and runs no collective.
        """
        self._closed = True
        self._wake.set()
        self.leave(_CLOSED)

    @property
    def _prefix(self) -> str:
        if self._session is None:
            return self._handshake_notes
        return f"{_PIPELINES_NOTES}{self._name}/{self._session}/"

    def _claim(self) -> None:
        if self._open or self.host.count == 1:
            return
        live = self._pipelines.live
        other = live.get(self._name)
        if other is not None and other is not self and other._open:
            raise StageMisuseError(
                f"pipeline {self._name!r}: another iterator of it is live, and the "
                "collectives of two would mix. Close it or read it to its end first, "
                "or give this pipeline another name, as in "
                'CoordinateLimitsIterDataset(..., name="eval").'
            )
        live[self._name] = self
        self._open = True
        self._notes.prepare()
        _say_farewell_at_exit()

    def _drive(self, exchange: Exchange[T]) -> T:
        try:
            frame = next(exchange)
            while True:
                frame = exchange.send(self._round(frame))
        except StopIteration as stop:
            return stop.value

    def _round(self, frame: np.ndarray) -> np.ndarray:
        start = time.monotonic()
        try:
            future = self._reducer.start(frame)
            if not future.done():
                self._wait(future, start)
            result = future.result()
        except Exception as error:
            if isinstance(error, _ClosedError):
                self._give_up(_CLOSED, missing=[])
                raise
            if isinstance(error, CoordinationError):
                self._give_up(f"failed ({error})", missing=[])
                raise
            raise self._lost(error) from error
        except BaseException:
            # Interrupted: the round goes on without anybody who waits for it.
            self._give_up("interrupted", missing=[])
            raise
        self.rounds += 1
        self.seconds += time.monotonic() - start
        return result

    def _wait(self, future: "Future[np.ndarray]", start: float) -> None:
        """Waits for the round; raises where that is in vain."""
        self._wake.clear()
        future.add_done_callback(lambda _: self._wake.set())
        deadline = start + self._timeout
        pause = _SLOW_ROUND_SECONDS
        noted = False
        while not future.done():
            if self._closed:
                raise _ClosedError(
                    f"{self._here}: the iterator was closed while it waited for other "
                    "hosts."
                )
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late()
            if self._wake.wait(min(pause, left)) or future.done():
                continue
            if not noted:
                self._note_arrival()
                noted = True
            self._raise_if_left()
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    @property
    def _here(self) -> str:
        return f"pipeline {self._name!r} step {self.step}"

    def _note_arrival(self) -> None:
        self._notes.post(f"{self._prefix}{self.rounds}/", str(self.step))

    def _missing(self) -> list[int]:
        arrived = {*self._notes.read(f"{self._prefix}{self.rounds}/"), self.host.index}
        return [h for h in range(self.host.count) if h not in arrived]

    def _raise_if_left(self) -> None:
        # The last says most: its process, since the handshake, in this pipeline. A host
        # can leave between its part of the handshake and the answer.
        prefixes = (LEAVING, f"{self._handshake_notes}left/", f"{self._prefix}left/")
        left: dict[int, str] = {}
        for prefix in dict.fromkeys(prefixes):
            left |= self._notes.read(prefix)
        left.pop(self.host.index, None)
        if left:
            hosts = "; ".join(f"host {h} {text}" for h, text in sorted(left.items()))
            self._give_up(f"found that {hosts}", missing=self._missing())
            raise HostFailedError(
                f"{self._here}: {hosts}, while this host ({self.host.index}) waited. "
                "Look at their logs; all hosts must read equally far."
            )

    def _late(self) -> HostTimeoutError:
        self._note_arrival()
        missing = self._missing()
        which = _which(missing, self.host.count)
        self._give_up(f"waited for {which} in vain", missing=missing)
        return HostTimeoutError(
            f"{self._here}: {which} did not arrive within {self._timeout:g} seconds "
            f"(this is host {self.host.index}). Look at the log of that host; if it is "
            "only slow, raise timeout_seconds."
        )

    def _lost(self, error: Exception) -> HostFailedError:
        self._note_arrival()
        # The end of a host that said so looks like a broken connection as well.
        self._raise_if_left()
        deadline = time.monotonic() + min(_ROLL_CALL_SECONDS, self._timeout)
        while (missing := self._missing()) and time.monotonic() < deadline:
            time.sleep(0.05)
        which = _which(missing, self.host.count)
        self._give_up(f"lost its connection to {which}", missing=missing)
        first_line = str(error).partition("\n")[0]
        return HostFailedError(
            f"{self._here}: the connection to {which} broke (this is host "
            f"{self.host.index}): {first_line}"
        )

    def _give_up(self, reason: str, missing: list[int]) -> None:
        """No further round; the other hosts are told, so that they need not wait."""
        if not self._given_up:
            self._given_up = True
            self.leave(reason)
            self._reducer.abandon(f"{self._here}: {reason}", missing)


def _which(missing: list[int], count: int) -> str:
    """The missing hosts, or that they cannot be told."""
    if 0 < len(missing) < count:
        return name_hosts(missing)
    return "another host (which one is unknown)"


@functools.lru_cache(maxsize=1)
def _say_farewell_at_exit() -> None:
    """Tells the other hosts when this process ends, so that they need not wait."""
    # Registered after JAX's own exit function, so run before it.
    atexit.register(_say_farewell)


def _say_farewell() -> None:
    for pipelines in list(_PIPELINES.values()):
        for coordinator in list(pipelines.live.values()):
            coordinator.leave("ended its process")
