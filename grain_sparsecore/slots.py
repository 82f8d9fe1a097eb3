"""Memory for the slots of a batch: embedding ids, sample ids and gains.

Fresh pages cost more than what is written to them, about 1 ns a slot, so a block of
memory goes back to a pool when the last array over it is gone, and the next batch of
that size takes it. Whoever keeps a batch, or a view of any part of it, keeps the
block: it is never written again while anybody can see it.
"""

import threading
import weakref
from collections import deque

import numpy as np

# Blocks that wait for use; more than a window and its successor need no place.
_MOST_FREE = 64

# A block is taken for a batch that fills at least this part of it.
_LEAST_FILL = 1 / 4

# Batches vary; a new block has this much room to spare, so that it fits the next.
_SPARE = 1 / 8


class BlockPool:
    """Blocks of int32 memory that come back by themselves.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Appending and popping are atomic, and arrays may die at any time, also
        # while this thread holds the lock: giving back takes no lock.
        self._free: deque[np.ndarray] = deque(maxlen=_MOST_FREE)

    def take(self, count: int) -> np.ndarray:
        """int32 [count], uninitialised, seen by nobody else."""
        block = self._pop_fitting(count)
        if block is None:
            block = np.empty(count + int(count * _SPARE), np.int32)
        # Every view of an array refers to the array that owns the memory, or to the
        # last one before an object that is no array: this one. So it lives as long
        # as any view of it, and not longer.
        lease = np.frombuffer(block.data, np.int32)
        weakref.finalize(lease, self._free.append, block).atexit = False
        return lease[:count]

    def release(self) -> None:
        """Gives blocks that wait for use back to the system."""
        self._free.clear()

    def _pop_fitting(self, count: int) -> np.ndarray | None:
        with self._lock:
            for _ in range(len(self._free)):
                block = self._free.popleft()
                if count <= block.size and count >= block.size * _LEAST_FILL:
                    return block
                self._free.append(block)
        return None


_pool = BlockPool()


def release_memory() -> None:
    """Gives memory that waits for the next batch back to the system."""
    _pool.release()


def scratch(count: int, dtype: type[np.generic]) -> np.ndarray:
    """An uninitialised array of a type of 4 or 8 bytes, [count]."""
    words = np.dtype(dtype).itemsize // 4
    return _pool.take(count * words).view(dtype)


def copied(array: np.ndarray) -> np.ndarray:
    """A copy of an array without objects, C-contiguous and of the plain array type."""
    words = -(-array.nbytes // 4)
    copy = _pool.take(words).view(np.uint8)[: array.nbytes]
    copy = copy.view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def empty_slots(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Uninitialised embedding ids int32, sample ids int32, gains float32, [count]."""
    block = _pool.take(3 * count).reshape(3, count)
    return block[0], block[1], block[2].view(np.float32)
