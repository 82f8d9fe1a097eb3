"""Batches from workers to the main process, in memory that recurs."""

import contextlib
import dataclasses
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any
from unittest import mock

import grain
import numpy as np
import pytest

import grain_sparsecore as gsc
from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.errors import InputError
from grain_sparsecore.pipeline import (
    CoordinateLimitsIterDataset,
    repartition,
    transport,
)
from grain_sparsecore.pipeline.transport import SegmentPool, SendBatch, SentBatch
from tests.test_launch import is_alive
from tests.test_pipeline import make_batches, make_config

# The worker that tests in this process pretend to be: any other process that lives.
WORKER = os.getppid()


def make_batch(slots: int, seed: int = 0) -> PartitionedBatch:
    rng = np.random.default_rng(seed)
    return PartitionedBatch(
        embedding_ids=rng.integers(0, 99, slots, dtype=np.int32),
        sample_ids=rng.integers(0, 99, slots, dtype=np.int32),
        gains=rng.random(slots, np.float32),
        row_pointers=rng.integers(0, 99, (2, 4, 8), dtype=np.int32),
        stats=rng.integers(0, 99, (2, 3), dtype=np.int32),
        counters=rng.integers(0, 99, (3, 5), dtype=np.int32),
        num_valid_samples=np.array([8, 7], np.int32),
    )


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> SegmentPool:
    """A worker's segments; this process is worker and main process at once."""
    pool = SegmentPool()
    monkeypatch.setattr(transport, "_received", transport._Received())
    monkeypatch.setattr(transport, "_pool", lambda: pool)
    return pool


def send(pool: SegmentPool, batch: PartitionedBatch) -> bytes:
    segment = pool.take(transport.bytes_of(batch))
    assert segment is not None
    with mock.patch.object(transport, "_pid", return_value=WORKER):
        return pickle.dumps(SentBatch(batch, segment))


def test_a_batch_arrives_as_it_was(pool: SegmentPool) -> None:
    for slots in (0, 1, 1000):
        batch = make_batch(slots)
        assert pickle.loads(send(pool, batch)) == batch
    cut = dataclasses.replace(make_batch(24), raw_counts=np.arange(24, dtype=np.int32))
    arrived = pickle.loads(send(pool, cut))
    assert arrived == cut
    np.testing.assert_array_equal(arrived.raw_counts, np.arange(24))


def test_a_segment_serves_again_when_its_batch_is_gone(pool: SegmentPool) -> None:
    for seed in range(20):
        # Slightly different sizes, as batches have.
        batch = make_batch(1000 + seed, seed)
        assert pickle.loads(send(pool, batch)) == batch
    assert len(pool) == 1
    assert len(transport._received) == 1


def test_what_is_still_seen_is_never_written_again(pool: SegmentPool) -> None:
    kept, expected = [], []
    for seed in range(12):
        batch = make_batch(512, seed)
        arrived = pickle.loads(send(pool, batch))
        # Of some, only a view of a view of one array.
        kept.append(arrived if seed % 2 else arrived.gains.reshape(2, -1)[1][7:])
        expected.append(batch if seed % 2 else batch.gains.reshape(2, -1)[1][7:])
        del arrived
    assert len(pool) == 12
    assert all(np.all(a == b) for a, b in zip(kept, expected, strict=True))
    del kept
    gc.collect()
    pickle.loads(send(pool, make_batch(512)))
    assert len(pool) == 12


def test_what_is_not_received_is_not_written_again(pool: SegmentPool) -> None:
    one, two = make_batch(64, 1), make_batch(64, 2)
    sent = send(pool, one), send(pool, two)
    assert len(pool) == 2
    assert [pickle.loads(message) for message in sent] == [one, two]


def test_segments_that_became_too_small_are_let_go(pool: SegmentPool) -> None:
    names = []
    for size in (100, 1000, 10_000):
        segment = pool.take(size)
        assert segment is not None
        names.append(segment.name)
        transport._received.get(WORKER, segment.name)
        segment.state = transport._FREE
        # A smaller batch takes what there is.
        assert pool.take(50) is segment
        segment.state = transport._FREE
        assert len(pool) == 1
    # The main process lets go of them when it maps the next one.
    assert len(transport._received) == 1
    for name in names:
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)


def test_segments_of_ended_workers_are_let_go(pool: SegmentPool) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    arrived = pickle.loads(send(pool, make_batch(64)))
    ((_, name),) = transport._received._segments
    segment = transport._received._segments[WORKER, name]
    transport._received._segments = {(ended.pid, name): segment}
    transport.forget_unused_segments()
    assert len(transport._received) == 0
    assert arrived == make_batch(64)
    # Those of workers that live stay.
    pickle.loads(send(pool, make_batch(64)))
    transport.forget_unused_segments()
    assert len(transport._received) == 1


def test_what_a_worker_left_behind_is_no_error_until_it_is_used(
    pool: SegmentPool,
) -> None:
    batch = make_batch(64)
    sent = send(pool, batch)
    assert pickle.loads(sent) == batch
    # Its worker has ended, and its queue is read once more.
    transport._received._segments.clear()
    lost = pickle.loads(sent)
    assert lost == transport.LostBatch(WORKER)
    ds = grain.MapDataset.source([{"sparsecore": lost}]).to_iter_dataset()
    ds = CoordinateLimitsIterDataset(ds, layout=make_config().layout())
    with pytest.raises(InputError, match=rf"worker process {WORKER} ended, and"):
        next(iter(ds))


def test_beyond_the_most_segments_batches_travel_as_they_are(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_MOST_SEGMENTS", 2)
    monkeypatch.setattr(transport, "end_with_parent", lambda: None)
    monkeypatch.setattr(transport.multiprocessing, "parent_process", lambda: object())
    batch = make_batch(64)
    with mock.patch.object(transport, "_pid", return_value=WORKER):
        sent = [SendBatch().map({"sparsecore": batch})["sparsecore"] for _ in range(3)]
    assert [type(one) for one in sent] == [SentBatch, SentBatch, PartitionedBatch]
    assert sent[2] is batch
    assert pickle.loads(pickle.dumps(sent[0])) == batch
    assert pickle.loads(pickle.dumps(sent[1])) == batch


def test_a_worker_takes_back_what_it_finds_in_its_own_queue(pool: SegmentPool) -> None:
    def names_left() -> int:
        left = 0
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                SharedMemory(name).close()
                left += 1
        return left

    received = send(pool, make_batch(64, 1))
    kept = pickle.loads(received)
    messages = [send(pool, make_batch(64, seed)) for seed in (2, 3)]
    names = [segment.name for segment in pool._segments]
    assert len(names) == 3
    assert names_left() == 2, "the main process has removed the first"
    with mock.patch.object(transport, "_pid", return_value=WORKER):
        # Twice, as a queue that is emptied twice; and one that was received before.
        for message in (*messages, *messages, received):
            assert pickle.loads(message) == transport.LostBatch(WORKER)
    assert len(pool) == 0
    assert names_left() == 0
    assert kept == make_batch(64, 1)


def test_outside_of_workers_nothing_changes() -> None:
    element = {"sparsecore": make_batch(64), "label": np.zeros(3)}
    assert SendBatch().map(element) is element


class _MakeBatch(grain.transforms.Map):
    def map(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, element: int
    ) -> dict[str, Any]:
        return {"sparsecore": make_batch(100 + element, element), "index": element}


def batches_of_workers(count: int) -> grain.IterDataset:
    ds = grain.MapDataset.range(count).map(_MakeBatch()).to_iter_dataset()
    return ds.map(SendBatch()).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2)
    )


def test_batches_of_workers_are_kept_and_restored() -> None:
    iterator = iter(batches_of_workers(60))
    elements = [next(iterator) for _ in range(10)]
    state = iterator.get_state()
    assert len(transport._received) > 0
    # What is under way at a restart is not lost to the workers.
    for _ in range(20):
        assert next(iterator)["index"] == 10
        iterator.set_state(state)
        assert len(transport._received) <= 40
    elements += list(iterator)
    assert [element["index"] for element in elements] == list(range(60))
    for index, element in enumerate(elements):
        assert element["sparsecore"] == make_batch(100 + index, index)
    iterator.close()
    transport.forget_unused_segments()
    assert len(transport._received) == 0
    # Still there, though nothing maps the segments but the batches themselves.
    assert elements[7]["sparsecore"] == make_batch(107, 7)


def test_the_workers_of_a_pipeline_use_few_segments() -> None:
    iterator = iter(batches_of_workers(200))
    for index in range(200):
        assert next(iterator)["sparsecore"] == make_batch(100 + index, index)
        # Two batches wait in each worker's queue, and two in front of it.
        assert len(transport._received) <= 20
    iterator.close()


PROGRAM = """
from absl import flags
import itertools, sys
flags.FLAGS.mark_as_parsed()
sys.path.insert(0, {root!r})
from tests.test_transport import batches_of_workers
if __name__ == "__main__":
    iterator = iter(batches_of_workers(50))
    kept = list(itertools.islice(iterator, 20))
    print(len(kept), flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["", "iterator.close()", "1 / 0"])
def test_a_program_ends_quietly_with_batches_in_its_hands(end: str, tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(root=os.getcwd(), end=end))
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "20\n"
    assert "BufferError" not in result.stderr
    assert "SharedMemory" not in result.stderr
    assert (result.returncode == 0) == (end != "1 / 0")


PIPELINE = """
from absl import flags
import sys
import numpy as np
flags.FLAGS.mark_as_parsed()
sys.path.insert(0, {root!r})
import grain_sparsecore as gsc
from tests.test_pipeline import make_batches, make_config
from tests.test_transport import AddDense
if __name__ == "__main__":
    config = make_config(workers=1, window=8)
    batches = make_batches(200).map(AddDense())
    iterator = iter(gsc.sparsecore_pipeline(batches, config))
    kept = [next(iterator) for _ in range(3)]
    assert all(type(batch["dense"]) is np.ndarray for batch in kept)
    assert [batch["dense"][0, -1] for batch in kept] == [7.0, 7.0, 7.0]
    print("ready", flush=True)
    {end}
"""


class AddDense(grain.transforms.Map):
    """Adds an array that Grain sends in shared memory."""

    def map(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, element: dict[str, Any]
    ) -> dict[str, Any]:
        return {**element, "dense": np.full((16, 2048), 7, np.float32)}


@pytest.mark.parametrize(
    "end", ["", "iterator.close()", "del iterator", "del iterator, kept"]
)
def test_a_program_may_leave_a_pipeline_open(end: str, tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PIPELINE.format(root=os.getcwd(), end=end))
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "ready\n", "")


def test_an_iterator_may_go_after_its_modules(monkeypatch) -> None:
    iterator = iter(gsc.sparsecore_pipeline(make_batches(64), make_config()))
    next(iterator)
    monkeypatch.setattr(repartition, "sys", None)
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


@pytest.mark.parametrize(
    "lock",
    [
        name
        for name in ("_active_limbo_lock", "_shutdown_locks_lock")
        if hasattr(threading, name)
    ],
)
def test_iterators_may_be_collected_where_threads_are_started(lock: str) -> None:
    iterator = iter(gsc.sparsecore_pipeline(make_batches(64), make_config()))
    next(iterator)
    held, closed = threading.Event(), threading.Event()

    def collect() -> None:
        held.wait()
        iterator.close()
        closed.set()

    thread = threading.Thread(target=collect)
    thread.start()
    # As a thread that is interrupted by the garbage collector has it.
    with getattr(threading, lock):
        held.set()
        assert closed.wait(30)
    thread.join()


BUSY = """
from absl import flags
import sys, time
flags.FLAGS.mark_as_parsed()
sys.path.insert(0, {root!r})
import grain_sparsecore as gsc
from tests.test_pipeline import make_batches, make_config
from tests.test_transport import Slowly
if __name__ == "__main__":
    batches = make_batches(200).map(Slowly())
    iterator = iter(gsc.sparsecore_pipeline(batches, make_config(workers=2, window=1)))
    next(iterator)
    iterator.close()
"""


class Slowly(grain.transforms.Map):
    """Keeps a worker busy for longer than `close` waits."""

    def map(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, element: dict[str, Any]
    ) -> dict[str, Any]:
        time.sleep(1.5)
        return element


def test_a_program_may_end_while_workers_are_still_closing(tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(BUSY.format(root=os.getcwd()))
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")


ORPHANS = """
from absl import flags
import multiprocessing, sys, time
flags.FLAGS.mark_as_parsed()
sys.path.insert(0, {root!r})
from tests.test_transport import batches_of_workers
if __name__ == "__main__":
    iterator = iter(batches_of_workers(10_000))
    next(iterator)
    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_a_main_process_that_is_killed(number, tmp_path) -> None:
    script = tmp_path / "program.py"
    script.write_text(ORPHANS.format(root=os.getcwd()))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 2
        process.send_signal(number)
        process.wait(timeout=60)
        deadline = time.monotonic() + 60
        while any(is_alive(pid) for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_batch_that_outlives_its_segment_leaves_no_descriptor() -> None:
    def outlive() -> int:
        segment = transport._Segment(create=True, size=4096)
        segment.unlink()
        view = segment.memory
        del segment
        gc.collect()
        assert view[0] == 0
        return len(os.listdir("/proc/self/fd"))

    first = outlive()
    assert [outlive() for _ in range(5)] == [first] * 5


def test_an_iterator_may_be_collected_while_a_batch_is_received() -> None:
    def collected() -> None:
        with transport._received._lock:
            transport.forget_unused_segments()

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_only_the_process_that_received_a_segment_gives_it_back() -> None:
    segment = transport._Segment(create=True, size=4096)
    segment.unlink()
    for owner, state in ((os.getppid(), transport._SENT), (os.getpid(), 0)):
        segment.state = transport._SENT
        transport._give_back(segment, owner)
        assert segment.state == state
