"""Carries partitioned batches from workers to the main process in memory that recurs.

Grain gives every array of an element fresh shared memory: pages that the system must
clear, map for the worker, map for the main process, and take back. For batches of
several megabytes this costs more than the sort. Here a batch takes one *segment*, which
goes back to its worker when nobody in the main process can see it any more, and serves
another batch then.

The first byte of a segment is its state. The worker writes it while it owns the
segment, the main process while it does. The main process removes a segment's name as
soon as it has mapped it, so that no segment outlives the two processes, however they
end.
"""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import grain
import jax
import numpy as np
from grain.multiprocessing import SharedMemoryArray

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.pipeline.compute import DEFAULT_KEY
from grain_sparsecore.pipeline.orphans import end_with_parent
from grain_sparsecore.slots import copied

# Arrays that grow with the ids of a batch; the others are small and travel as they are.
_FIELDS = ("embedding_ids", "sample_ids", "gains", "row_pointers", "raw_counts")

# The worker owns a free segment, and makes it sent, or retired, which is final. The
# main process makes what was sent free again.
_FREE, _SENT, _RETIRED = range(3)

# Bytes before the first array, and between arrays: a cache line.
_LINE = 64

# Batches vary; a new segment has this much room to spare, so that it fits the next.
_SPARE = 1 / 8

# Segments of a worker. A window and what is read ahead need some dozens; where more
# batches are kept, the rest go the way Grain sends arrays.
_MOST_SEGMENTS = 256


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an array lies in a segment."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def of(self, memory: np.ndarray) -> np.ndarray:
        """The array there, a view of uint8 [bytes]."""
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        flat = memory[self.offset : self.offset + size]
        return flat.view(self.dtype).reshape(self.shape)


class _Segment(SharedMemory):
    """Shared memory that does not complain when the interpreter ends before it."""

    def __del__(self) -> None:
        # Whoever still has a view of the memory at exit has no use for it after.
        with contextlib.suppress(Exception):
            super().__del__()
        # That stops before this where such a view is alive; the mapping has its own.
        descriptor = getattr(self, "_fd", -1)
        if descriptor >= 0:
            self._fd = -1
            with contextlib.suppress(OSError):
                os.close(descriptor)

    @property
    def state(self) -> int:
        """One of the states above."""
        return self._mapped[0]

    @state.setter
    def state(self, state: int) -> None:
        self._mapped[0] = state

    @property
    def memory(self) -> np.ndarray:
        """All of it: uint8 [size]."""
        return np.frombuffer(self._mapped, np.uint8)

    @property
    def _mapped(self) -> "memoryview[int]":
        # None after close(), which nobody calls before the last batch is gone.
        assert self.buf is not None
        return self.buf


class SegmentPool:
    """The segments of a worker. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []

    def __len__(self) -> int:
        return len(self._segments)

    def take(self, size: int) -> _Segment | None:
        """A segment of ``size`` bytes or more; None where too many are in use."""
        with self._lock:
            free = [s for s in self._segments if s.state == _FREE]
            segment = min(
                (s for s in free if s.size >= size), key=lambda s: s.size, default=None
            )
            if segment is None:
                # Batches have grown; these will not serve again.
                for small in free:
                    small.state = _RETIRED
                    self._segments.remove(small)
                if len(self._segments) >= _MOST_SEGMENTS:
                    return None
                segment = _Segment(create=True, size=size + int(size * _SPARE))
                self._segments.append(segment)
            segment.state = _SENT
            return segment

    def take_back(self, name: str) -> None:
        """Lets go of a segment that was sent and will not be received."""
        with self._lock:
            for segment in [s for s in self._segments if s.name == name]:
                self._segments.remove(segment)
                segment.state = _RETIRED
                # Its name is gone if it was received for an earlier batch.
                with contextlib.suppress(FileNotFoundError):
                    segment.unlink()


class SentBatch:
    """A batch whose large arrays are in a segment.

    No pytree, so that Grain sends it as it is. What arrives where it is unpickled is
    the `PartitionedBatch`, over the same memory.

    Args:
        batch: What to send.
        segment: Of at least `bytes_of` the batch.
    """

    def __init__(self, batch: PartitionedBatch, segment: _Segment) -> None:
        places, _ = _lay_out(batch)
        memory = segment.memory
        for name, place in places.items():
            np.copyto(place.of(memory), getattr(batch, name))
        rest = dataclasses.replace(batch, **dict.fromkeys(_FIELDS))
        self._received = (segment.name, _pid(), places, rest)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, self._received


def bytes_of(batch: PartitionedBatch) -> int:
    """Size of the segment that a batch needs."""
    return _lay_out(batch)[1]


def _lay_out(batch: PartitionedBatch) -> tuple[dict[str, _Place], int]:
    places: dict[str, _Place] = {}
    end = _LINE
    for name in _FIELDS:
        array = getattr(batch, name)
        if array is not None:
            places[name] = _Place(end, array.shape, array.dtype)
            end += -(-array.nbytes // _LINE) * _LINE
    return places, end


class _Received:
    """The segments that the main process has mapped, by worker and name.

    They stay mapped for as long as their worker may use them again: their names are
    gone. Safe to use from several threads.
    """

    def __init__(self) -> None:
        # Iterators close when they are collected, which may be inside of any method.
        self._lock = threading.RLock()
        self._segments: dict[tuple[int, str], _Segment] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, worker: int, name: str) -> _Segment:
        """The segment, mapped now if it is new."""
        with self._lock:
            segment = self._segments.get((worker, name))
            if segment is None:
                self._forget_unused()
                segment = self._segments[worker, name] = _Segment(name)
                segment.unlink()
            return segment

    def forget_unused(self) -> None:
        """Unmaps what no worker will use again, once nobody sees it any more."""
        with self._lock:
            self._forget_unused()

    def _forget_unused(self) -> None:
        alive = {worker: _is_alive(worker) for worker, _ in self._segments}
        self._segments = {
            (worker, name): segment
            for (worker, name), segment in self._segments.items()
            if alive[worker] and segment.state != _RETIRED
        }


_received = _Received()


def forget_unused_segments() -> None:
    """Gives memory of workers that have ended back, unless a batch is still over it."""
    _received.forget_unused()


@dataclasses.dataclass(frozen=True)
class LostBatch:
    """Stands for a batch whose segment is gone with its worker.

    What is left in the queue of a worker that was ended is read as well, to be thrown
    away. An exception there would only be noise.

    Attributes:
        worker: Process id.
    """

    worker: int


def _receive(
    name: str, worker: int, places: dict[str, _Place], rest: PartitionedBatch
) -> PartitionedBatch | LostBatch:
    if worker == _pid():
        # Grain empties the queue of a worker that ends in the worker itself.
        _pool().take_back(name)
        return LostBatch(worker)
    try:
        segment = _received.get(worker, name)
    except FileNotFoundError:
        return LostBatch(worker)
    # Every array over the segment refers to this one, or to a view of it, so it lives
    # as long as any of them, and not longer.
    lease = segment.memory
    weakref.finalize(lease, _give_back, segment, os.getpid()).atexit = False
    arrays = {field: place.of(lease) for field, place in places.items()}
    return dataclasses.replace(rest, **arrays)


def _give_back(segment: _Segment, owner: int) -> None:
    # A forked child sees the memory too, and does not own it.
    if os.getpid() == owner:
        segment.state = _FREE


def _pid() -> int:
    """This process; in tests, one process stands for two."""
    return os.getpid()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def own_arrays(element: dict[str, Any], key: str) -> dict[str, Any]:
    """An element whose arrays in Grain's shared memory are copied into plain ones.

    Whoever keeps a batch may keep it until the interpreter ends, which Grain's arrays
    complain of; and their memory is another for every batch.

    Args:
        element: As it came.
        key: Key of the `PartitionedBatch`, which stays as it is.
    """
    rest = {k: v for k, v in element.items() if k != key}
    if not any(isinstance(leaf, SharedMemoryArray) for leaf in jax.tree.leaves(rest)):
        return element

    def own(leaf: Any) -> Any:
        return copied(leaf) if isinstance(leaf, SharedMemoryArray) else leaf

    return {**element, **jax.tree.map(own, rest)}


@functools.cache
def _pool() -> SegmentPool:
    return SegmentPool()


@dataclasses.dataclass(frozen=True)
class SendBatch(grain.transforms.Map):
    """The last stage in a worker: puts the `PartitionedBatch` into a segment.

    Elsewhere it changes nothing.

    Attributes:
        key: Key of the batch.
    """

    key: str = DEFAULT_KEY

    def map(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, element: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Maps an element; see `SentBatch`."""
        batch = element[self.key]
        if multiprocessing.parent_process() is None:
            return element
        end_with_parent()
        segment = _pool().take(bytes_of(batch))
        if segment is None:
            return element
        return {**element, self.key: SentBatch(batch, segment)}
