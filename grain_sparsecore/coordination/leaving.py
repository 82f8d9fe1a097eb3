"""How a process leaves a job that other hosts have left, or are stuck in.

At exit JAX waits for all hosts at a barrier of its coordination service. With a host
gone it waits until the service notices, 100 seconds by default, and then the process is
aborted. After a failure of ours that barrier gets a few seconds; then the process
leaves without it, with the exit status that it would have had.

The end of the host that runs the service aborts whoever still uses it, so that host
leaves last.

JAX has no public function for this. Whatever does not work here leaves everything as
it is, with JAX's own way to end.
"""

import atexit
import contextlib
import ctypes
import os
import sys
import time
from typing import Any, NoReturn

from grain_sparsecore.coordination.boards import Board, Errands, JaxBoard, Notes

# For JAX's barrier: hosts that can all leave pass it at once.
_BARRIER_SECONDS = 1.5

# How long the host with the service waits for the others that still work, which may
# be saving what they have.
_LAST_HOST_SECONDS = 15.0

# How much later it leaves than the last of them, on whom it would shut the door.
_LAST_HOST_MARGIN_SECONDS = 1.0

# How long it waits where the whole job has failed. Hosts that wait for this one look at
# the board about once a second.
_FAILED_JOB_SECONDS = 5.0

# Attributes of JAX's distributed state that wait for other hosts when they end.
_STATE_FIELDS = ("preemption_sync_manager", "client", "service")

# Where hosts say that their process ends, and why: read by those that wait for them.
LEAVING = "leaving/"


class Departure:
    """Makes the exit of this process independent of hosts that are missing.

    Args:
        board: Where the hosts say that they leave.
        host_index: This host.
        waits_for: The hosts that still work.
    """

    def __init__(self, board: Board, host_index: int, waits_for: set[int]) -> None:
        self._notes = Notes(board, host_index)
        self._waits_for = waits_for
        self._errands = Errands()
        self._notes.prepare()
        # Runs before JAX's own exit function, which was registered earlier.
        atexit.register(self._leave)

    def _leave(self) -> None:
        # None of this is worth an error at exit.
        with contextlib.suppress(Exception):
            from jax._src import distributed

            state = distributed.global_state
            if state.client is None:
                return
            self._notes.post(LEAVING, "ended its process")
            seconds = _BARRIER_SECONDS
            if state.service is not None:
                _wait_for_others(self._notes, self._waits_for, _LAST_HOST_SECONDS)
                seconds += _LAST_HOST_MARGIN_SECONDS
            shut_down = state.client.shutdown
            if not self._errands.run(lambda: (shut_down(), True), seconds):
                _forget(state)
            if state.service is not None:
                _let_them_go()


def exit_failed_job(code: int) -> NoReturn:
    """Ends this process of a job of JAX, now that it has failed, and tells the others.

    Nothing is waited for that may never come, unlike at a normal exit, except that the
    host with the service gives the others a few seconds to say what they saw of it.

    Args:
        code: The exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        import jax
        from jax._src import distributed

        host_index, host_count = jax.process_index(), jax.process_count()
        notes = Notes(JaxBoard(), host_index)
        notes.post(LEAVING, f"ended its process with exit status {code}")
        # No barrier: whoever is in one when the service ends is aborted.
        if distributed.global_state.service is not None:
            others = {*range(host_count)} - {host_index}
            _wait_for_others(notes, others, _FAILED_JOB_SECONDS)
            _let_them_go()
    os._exit(code)


def _let_them_go() -> None:
    """They said that they leave, or passed a barrier, a moment ago."""
    time.sleep(_LAST_HOST_MARGIN_SECONDS)


def _wait_for_others(notes: Notes, others: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if others <= set(notes.read(LEAVING)):
            return
        time.sleep(0.05)


def _forget(state: Any) -> None:
    """Takes from JAX what would wait at exit."""
    for field in _STATE_FIELDS:
        value = getattr(state, field, None)
        if value is not None:
            # Their destructors wait as well, so they are never called.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
            setattr(state, field, None)
