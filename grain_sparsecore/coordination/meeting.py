"""Brings all hosts together before their first collective.

XLA connects the hosts when the first collective runs, and gives up 30 seconds after
the first of them came (jaxlib 0.10), whatever time-out the pipeline has. Opening the
data may well take one host longer than another by more than that. So the hosts meet on
the board before, where they may be as far apart as they like.
"""

import threading
import time
from collections.abc import Callable

from grain_sparsecore.coordination.boards import Board

# Host 0 counts those who are here, and says when all are: one reader of the long list.
_HERE = "meeting/here/"
_ALL_HERE = "meeting/all/"

_FIRST_PAUSE_SECONDS = 1e-3
_LAST_PAUSE_SECONDS = 0.25


def meet(
    board: Board,
    host_index: int,
    host_count: int,
    *,
    busy: threading.Lock,
    given_up: Callable[[], bool],
) -> None:
    """Returns when all hosts have called it.

    Without a board that works it returns at once: then the connection decides.

    Args:
        board: Of all hosts.
        host_index: This host.
        host_count: Hosts of the job.
        busy: Is held in every call of the board.
        given_up: Whether nobody waits any more.
    """
    pause = _FIRST_PAUSE_SECONDS
    try:
        with busy:
            board.post(f"{_HERE}{host_index}", "")
        while not given_up():
            with busy:
                if board.read(_ALL_HERE):
                    return
                if host_index == 0 and len(board.read(_HERE)) >= host_count:
                    board.post(f"{_ALL_HERE}{host_index}", "")
                    return
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)
    except Exception:
        # JAX does not publish its board, so anything may come. XLA connects the hosts
        # all the same, and its time-out is an error that names them.
        return
