"""HighwayHash64 of 4-byte inputs, compiled; the same as `grain_sparsecore.highway`.

About ten times as fast. Needs numba.
"""

# numba's decorators have no types that pyright could follow.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import threading
from collections.abc import Sequence

import numba
import numpy as np

from grain_sparsecore.highway import FINAL_ROUNDS, initial_state

# numba makes a signed number of an unsigned and a plain one.
_U = np.uint64

_part = numba.njit(inline="always")

# numba compiles, and writes its cache, at the first call.
_first_call = threading.Lock()


def highway_hash64(values: np.ndarray, key: Sequence[int]) -> np.ndarray:
    """See `grain_sparsecore.highway.highway_hash64`."""
    values = np.ascontiguousarray(values).view(np.uint32)
    result = np.empty(values.shape, np.uint64)
    state = np.concatenate(initial_state(key))
    with _first_call:
        _hash_all(values[:0], state, result[:0])
    _hash_all(values, state, result)
    return result


@_part
def _mix(high, low, target_high, target_low):
    """A pair of words with the bytes of another added, in another order."""
    target_low += (
        ((low & _U(0xFF000000)) | (high & _U(0xFF00000000))) >> _U(24)
        | ((low & _U(0xFF0000000000)) | (high & _U(0xFF000000000000))) >> _U(16)
        | (low & _U(0xFF0000))
        | (low & _U(0xFF00)) << _U(32)
        | (high & _U(0xFF00000000000000)) >> _U(8)
        | low << _U(56)
    )
    target_high += (
        ((high & _U(0xFF000000)) | (low & _U(0xFF00000000))) >> _U(24)
        | (high & _U(0xFF0000))
        | (high & _U(0xFF0000000000)) >> _U(16)
        | (high & _U(0xFF00)) << _U(24)
        | (low & _U(0xFF000000000000)) >> _U(8)
        | (high & _U(0xFF)) << _U(48)
        | (low & _U(0xFF00000000000000))
    )
    return target_high, target_low


@_part
def _lane(word, v0, v1, mul0, mul1):
    v1 += mul0 + word
    mul0 ^= (v1 & _U(0xFFFFFFFF)) * (v0 >> _U(32))
    v0 += mul1
    mul1 ^= (v0 & _U(0xFFFFFFFF)) * (v1 >> _U(32))
    return v0, v1, mul0, mul1


def _compile(function):
    # Where no cache can be written, each process compiles anew.
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


@_part
def _swapped(word):
    return word << _U(32) | word >> _U(32)


@_compile
def _hash_all(values, state, result):
    for i in range(values.size):
        a0, a1, a2, a3 = state[0], state[1], state[2], state[3]
        b0, b1, b2, b3 = state[4], state[5], state[6], state[7]
        c0, c1, c2, c3 = state[8], state[9], state[10], state[11]
        d0, d1, d2, d3 = state[12], state[13], state[14], state[15]
        w0, w1, w2, w3 = _U(values[i]), _U(0), _U(0), _U(0)
        for _ in range(1 + FINAL_ROUNDS):
            a0, b0, c0, d0 = _lane(w0, a0, b0, c0, d0)
            a1, b1, c1, d1 = _lane(w1, a1, b1, c1, d1)
            a2, b2, c2, d2 = _lane(w2, a2, b2, c2, d2)
            a3, b3, c3, d3 = _lane(w3, a3, b3, c3, d3)
            a1, a0 = _mix(b1, b0, a1, a0)
            a3, a2 = _mix(b3, b2, a3, a2)
            b1, b0 = _mix(a1, a0, b1, b0)
            b3, b2 = _mix(a3, a2, b3, b2)
            w0, w1 = _swapped(a2), _swapped(a3)
            w2, w3 = _swapped(a0), _swapped(a1)
        result[i] = a0 + b0 + c0 + d0
