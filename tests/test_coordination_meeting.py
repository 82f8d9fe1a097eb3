"""The board before the first round and at the end of a process."""

import threading
import time

import numpy as np
import pytest

from grain_sparsecore.coordination import LocalGroup, PmaxReducer
from grain_sparsecore.coordination import pmax as pmax_module
from grain_sparsecore.coordination.boards import MemoryBoard
from grain_sparsecore.coordination.meeting import meet
from grain_sparsecore.errors import CoordinationError, HostFailedError
from tests.coordination_helpers import coordinated, layout_of


def arrive(board, host_index, host_count, *, given_up=lambda: False):
    """Starts a host in a thread of its own."""
    arguments = {"busy": threading.Lock(), "given_up": given_up}
    thread = threading.Thread(
        target=meet, args=(board, host_index, host_count), kwargs=arguments
    )
    thread.start()
    return thread


@pytest.mark.parametrize("last", [0, 1, 2])
def test_nobody_goes_on_before_the_last_has_come(last):
    board = MemoryBoard()
    early = [arrive(board, h, 3) for h in range(3) if h != last]
    time.sleep(0.1)
    assert all(thread.is_alive() for thread in early)
    early.append(arrive(board, last, 3))
    for thread in early:
        thread.join(5)
        assert not thread.is_alive()


def test_who_has_given_up_waits_no_longer():
    gone = threading.Event()
    thread = arrive(MemoryBoard(), 0, 2, given_up=gone.is_set)
    time.sleep(0.05)
    assert thread.is_alive()
    gone.set()
    thread.join(5)
    assert not thread.is_alive()


def test_without_a_board_the_connection_decides():
    class Broken(MemoryBoard):
        def read(self, prefix):
            raise OSError("no service")

    thread = arrive(Broken(), 1, 2)
    thread.join(5)
    assert not thread.is_alive()


def test_at_exit_the_thread_stays_out_of_xla():
    reducer = PmaxReducer()
    frame = np.arange(4, dtype=np.int32)
    assert reducer.start(frame).result(30).tolist() == [0, 1, 2, 3]
    pmax_module._settle(reducer._busy)
    future = reducer.start(frame)
    time.sleep(0.2)
    assert not future.done()
    reducer._busy.release()
    assert future.result(30).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["leaving", "meeting", "pipelines", "left"])
def test_a_pipeline_may_have_any_name(name):
    layout = layout_of(2)
    group = LocalGroup(2)
    iterators = [
        iter(coordinated(layout, [1] * 4, group.reducer(h), window=1, name=name))
        for h in range(2)
    ]
    other = threading.Thread(target=lambda: [next(iterators[1]), iterators[1].close()])
    other.start()
    next(iterators[0])
    with pytest.raises(HostFailedError, match="host 1 closed its iterator after 1"):
        next(iterators[0])
    other.join(5)


def test_a_fork_is_told_that_it_is_no_host(monkeypatch):
    reducer = PmaxReducer()
    monkeypatch.setattr(pmax_module.os, "getpid", lambda: 1)
    with pytest.raises(CoordinationError, match=r"this process \(1\) was forked from"):
        reducer.start(np.zeros(4, np.int32))
