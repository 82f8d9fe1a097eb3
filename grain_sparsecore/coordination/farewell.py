"""The note of a process that ends: the others need not wait for it until time-out.

Pipelines say themselves that they end early. This note is for a process that never
came as far as its first round, for example because its data cannot be opened.
"""

import atexit
import contextlib
import functools
import os

from grain_sparsecore.coordination.boards import JaxBoard, Notes
from grain_sparsecore.coordination.leaving import LEAVING


def prepare_farewell() -> None:
    """Makes this process tell the others of the job when it ends; may be repeated.

    Does nothing in a job of one process. Starts no backend of JAX.
    """
    with contextlib.suppress(Exception):
        # JAX does not publish this, so a new version may lack it.
        from jax._src import distributed

        state = distributed.global_state
        if state.client is not None and (state.num_processes or 1) > 1:
            _register(state.process_id)


@functools.lru_cache(maxsize=1)
def _register(host_index: int) -> None:
    notes = Notes(JaxBoard(), host_index)
    notes.prepare()
    # Registered after JAX's own exit function, so run before it.
    atexit.register(_say, notes, os.getpid())


def _say(notes: Notes, process: int) -> None:
    # The end of a fork is not that of the host.
    if os.getpid() == process:
        notes.post(LEAVING, "ended its process")
