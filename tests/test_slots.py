import gc
import pickle
import threading

import jax
import numpy as np
import pytest

from grain_sparsecore.slots import BlockPool


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_released_memory_is_taken_again() -> None:
    pool = BlockPool()
    first = pool.take(1000)
    where = address(first)
    del first
    assert address(pool.take(900)) == where


@pytest.mark.parametrize(
    "keep",
    [
        lambda a: a,
        lambda a: a[3:5],
        lambda a: a[:900].reshape(3, 300)[1].view(np.float32),
        lambda a: memoryview(a),
        lambda a: pickle.PickleBuffer(a),
        lambda a: a.T[::-1][5:],
        lambda a: np.asarray(a)[None],
        lambda a: jax.device_put(a),
    ],
    ids=[
        "array",
        "slice",
        "view",
        "memoryview",
        "pickle buffer",
        "strides",
        "axis",
        "jax array",
    ],
)
def test_memory_that_is_seen_is_not_taken(keep) -> None:
    pool = BlockPool()
    first = pool.take(1000)
    first[:] = 7
    where = address(first)
    kept = keep(first)
    expected = np.asarray(kept).tobytes()
    del first
    gc.collect()
    others = [pool.take(1000) for _ in range(3)]
    for other in others:
        other[:] = 9
    assert np.asarray(kept).tobytes() == expected
    # A jax array may be a copy, and then the memory is free.
    if not isinstance(kept, jax.Array):
        assert where not in [address(other) for other in others]
        del kept
        assert address(pool.take(1000)) == where


def test_blocks_far_too_large_or_too_small_are_left() -> None:
    pool = BlockPool()
    large, small = pool.take(100_000), pool.take(100)
    places = {address(large), address(small)}
    del large, small
    assert address(pool.take(1000)) not in places
    assert pool.take(0).shape == (0,)


def test_threads_never_share_memory() -> None:
    pool = BlockPool()
    clashes = []

    def work(number: int) -> None:
        for _ in range(300):
            mine = pool.take(500)
            mine[:] = number
            again = pool.take(500)
            again[:] = -number
            if (mine != number).any():
                clashes.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []


def test_released_blocks_go_back_to_the_system() -> None:
    pool = BlockPool()
    first, second = pool.take(1000), pool.take(1000)
    del first
    pool.release()
    assert not pool._free
    # What is in use is not touched, and comes back as always.
    second[:] = 1
    where = address(second)
    del second
    assert address(pool.take(1000)) == where
