"""Closes what may take long to close, and goes on meanwhile."""

import _thread
import atexit
import threading
from collections.abc import Callable

# Of what is still being closed. Sets change in one step, whoever is interrupted.
_unfinished: set[threading.Event] = set()


def close_for_a_while(close: Callable[[], None], seconds: float) -> None:
    """Calls ``close`` on a thread of its own and waits for it, but not for ever.

    Grain waits for its workers, 25 seconds each if need be. The interpreter does not
    end before all that is being closed here is closed: Grain would end the same
    workers at the same time.

    Args:
        close: What may take long.
        seconds: How long to wait for it.
    """
    done = threading.Event()
    _unfinished.add(done)
    try:
        # No threading.Thread: iterators also close when they are collected, and that
        # may come to pass where threading holds the locks that starting one takes.
        _thread.start_new_thread(_close, (close, done))
    except RuntimeError:
        # The interpreter ends, and starts no thread any more.
        _close(close, done)
    else:
        done.wait(seconds)


def _close(close: Callable[[], None], done: threading.Event) -> None:
    try:
        close()
    finally:
        _unfinished.discard(done)
        done.set()


def _wait_for_all() -> None:
    for done in list(_unfinished):
        done.wait()


# As concurrent.futures does for its own threads. Functions of atexit run when threads
# have ended, and Grain's workers, closed as late as that, leave shared memory behind.
getattr(threading, "_register_atexit", atexit.register)(_wait_for_all)
