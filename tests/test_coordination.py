"""The coordinator, the transports and the notes, in one process."""

import threading
import time
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from grain_sparsecore.coordination import (
    Coordinator,
    LocalGroup,
    PmaxReducer,
    SingleProcessReducer,
    process_reducer,
)
from grain_sparsecore.coordination import pmax as pmax_module
from grain_sparsecore.coordination.boards import MemoryBoard, Notes
from grain_sparsecore.coordination.frames import Kind, Tag, exchange
from grain_sparsecore.errors import (
    CoordinationError,
    HostFailedError,
    HostMismatchError,
    HostTimeoutError,
    StageMisuseError,
)


def coordinator(reducer, *, name="train", timeout_seconds=20.0, **options):
    return Coordinator(
        reducer=reducer,
        name=name,
        configuration=options.pop("configuration", {"a": 1}),
        timeout_seconds=timeout_seconds,
        **options,
    )


def maximum(one, value, name="train"):
    """One round of a coordinator."""
    tag = Tag(name=name, kind=Kind.WINDOW)
    return one.run(exchange(tag, np.array([value], np.int32))).tolist()


def on_hosts(*functions):
    """Runs one function per host in threads; the result, or the exception, of each."""
    results = [None] * len(functions)

    def run(index):
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_one_process_needs_no_jax_and_agrees_with_itself(monkeypatch):
    monkeypatch.setattr(jax, "jit", None)
    one = coordinator(SingleProcessReducer())
    assert maximum(one, 7) == [7]
    assert one.rounds == 2
    assert one.seconds < 1


def test_the_process_decides_once_how_it_agrees():
    assert isinstance(process_reducer(), SingleProcessReducer)
    assert process_reducer() is process_reducer()


def test_hosts_agree_on_the_maximum():
    group = LocalGroup(3)
    each = [coordinator(group.reducer(h)) for h in range(3)]
    results = on_hosts(*(lambda h=h: maximum(each[h], 10 * h) for h in range(3)))
    assert results == [[20]] * 3


def test_a_pmax_over_one_process_is_its_vector():
    reducer = PmaxReducer()
    assert (reducer.host_index, reducer.host_count) == (0, 1)
    frame = np.arange(-5, 1019, dtype=np.int32)
    np.testing.assert_array_equal(reducer.start(frame).result(30), frame)


def test_the_mesh_is_rotated():
    assert pmax_module.rotated([0, 1, 2]) == [1, 2, 0]
    assert pmax_module.rotated([0]) == [0]


def test_a_missing_cpu_backend_is_named(monkeypatch):
    def devices(platform):
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(CoordinationError) as caught:
        PmaxReducer()
    assert "JAX_PLATFORMS is 'tpu'" in str(caught.value)
    assert "JAX_PLATFORMS=tpu,cpu" in str(caught.value)


def test_cpu_devices_that_do_not_span_the_job_are_named(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda *args: 4)
    with pytest.raises(CoordinationError) as caught:
        PmaxReducer()
    assert "the job has 4 processes, but JAX's CPU devices span 1" in str(caught.value)
    assert "call jax.distributed.initialize() before" in str(caught.value)


def test_a_host_that_does_not_come_is_named_in_time():
    group = LocalGroup(3)
    each = [coordinator(group.reducer(h), timeout_seconds=1.5) for h in range(2)]
    started = time.monotonic()
    results = on_hosts(*(lambda h=h: maximum(each[h], h) for h in range(2)))
    assert time.monotonic() - started < 1.5 + 2
    assert any(isinstance(error, HostTimeoutError) for error in results)
    for host, error in enumerate(results):
        assert isinstance(error, HostTimeoutError | HostFailedError)
        assert "host 2" in str(error)
        assert f"(this is host {host})" in str(error) or "in vain" in str(error)


def test_after_a_time_out_the_process_does_not_coordinate_again():
    reducer = LocalGroup(2).reducer(0)
    with pytest.raises(HostTimeoutError, match=r"host 1 did not arrive within 0\.2"):
        maximum(coordinator(reducer, timeout_seconds=0.2), 1)
    with pytest.raises(CoordinationError, match="waited for host 1 in vain"):
        maximum(coordinator(reducer, timeout_seconds=0.2), 1)


def test_a_lost_connection_names_the_host_that_does_not_answer():
    group = LocalGroup(3)
    each = [coordinator(group.reducer(h)) for h in range(2)]

    def lose():
        time.sleep(0.3)
        group.break_down("Connection closed by peer\nmany details")

    results = on_hosts(lambda: maximum(each[0], 0), lambda: maximum(each[1], 1), lose)
    for host, error in enumerate(results[:2]):
        assert isinstance(error, HostFailedError)
        text = str(error)
        if "lost its connection" not in text:
            assert (
                "pipeline 'train' step 0: the connection to host 2 broke (this is host "
                f"{host}): Connection closed by peer" in text
            )
            assert "many details" not in text


def test_a_host_that_closes_is_named_long_before_the_time_out():
    group = LocalGroup(2)
    each = [coordinator(group.reducer(h)) for h in range(2)]
    on_hosts(*(lambda h=h: maximum(each[h], h) for h in range(2)))
    each[1].step = 17
    each[1].close()
    started = time.monotonic()
    with pytest.raises(HostFailedError, match="host 1 closed its iterator after 17 ba"):
        maximum(each[0], 1)
    assert time.monotonic() - started < 5


def test_closing_ends_a_waiting_round_at_once():
    waiting = coordinator(LocalGroup(2).reducer(0))

    def close():
        time.sleep(0.3)
        started = time.monotonic()
        waiting.close()
        return time.monotonic() - started

    error, seconds = on_hosts(lambda: maximum(waiting, 1), close)
    assert isinstance(error, ValueError)
    assert "was closed while it waited for other hosts" in str(error)
    assert seconds < 1


def test_hosts_that_differ_all_raise():
    group = LocalGroup(2)
    each = [
        coordinator(group.reducer(h), configuration={"window": 8 + h}) for h in range(2)
    ]
    for error in on_hosts(*(lambda h=h: maximum(each[h], h) for h in range(2))):
        assert isinstance(error, HostMismatchError)
        assert "window is 8 on host 0 and 9 on host 1" in str(error)


def test_another_number_of_hosts_than_configured_is_an_error_on_all():
    group = LocalGroup(2)
    each = [coordinator(group.reducer(h), expected_hosts=4) for h in range(2)]
    for error in on_hosts(*(lambda h=h: maximum(each[h], h) for h in range(2))):
        assert isinstance(error, HostMismatchError)
        assert "is for 4 hosts" in str(error)
        assert "the job has 2 processes; start as many processes" in str(error)


def test_one_name_has_one_live_coordinator_per_host():
    group = LocalGroup(2)
    reducers = [group.reducer(h) for h in range(2)]
    first = [coordinator(r) for r in reducers]
    on_hosts(*(lambda h=h: maximum(first[h], h) for h in range(2)))
    with pytest.raises(StageMisuseError, match="another iterator of it is live"):
        maximum(coordinator(reducers[0]), 1)
    # Another name is another pipeline.
    other = [coordinator(r, name="eval") for r in reducers]
    run = [lambda h=h: maximum(other[h], h, "eval") for h in range(2)]
    assert on_hosts(*run) == [[1], [1]]
    # After its end, and where it was dropped, the next may start.
    for one in first:
        one.release()
    for _ in range(2):
        run = [lambda r=r: maximum(coordinator(r), r.host_index) for r in reducers]
        assert on_hosts(*run) == [[1], [1]]


def test_an_interrupt_is_final():
    class Interrupting:
        host_index, host_count, board = 0, 2, MemoryBoard()
        reasons = ()

        def start(self, frame):
            future: Future[np.ndarray] = Future()
            future.set_exception(KeyboardInterrupt())
            return future

        def abandon(self, reason, missing):
            self.reasons = (*self.reasons, reason)

    reducer = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        maximum(coordinator(reducer), 1)
    assert reducer.reasons == ("pipeline 'train' step 0: interrupted",)
    (note,) = reducer.board.read("").values()
    assert note == "interrupted after 0 batches"


def test_notes_never_fail_and_never_hang():
    class Broken(MemoryBoard):
        def post(self, key, text):
            raise OSError("no service")

        def read(self, prefix):
            time.sleep(3)
            return {"0": "late"}

    notes = Notes(Broken(), 0)
    started = time.monotonic()
    notes.post("here/", "text")
    assert notes.read("here/") == {}
    assert notes.read("here/") == {}
    assert time.monotonic() - started < 1.5


def test_notes_are_read_by_host():
    board = MemoryBoard()
    Notes(board, 0).post("round/", "a")
    Notes(board, 3).post("round/", "b")
    Notes(board, 3).post("other/", "c")
    assert Notes(board, 1).read("round/") == {0: "a", 3: "b"}
