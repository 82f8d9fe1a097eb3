"""HighwayHash64 of 4-byte inputs, for whole arrays at once.

The hash is Google's (J. Alakuijala, B. Cox, J. Wassenberg, "Fast keyed hash/
pseudo-random function using SIMD multiply and permute", 2016). Only inputs of exactly
4 bytes are needed here, so there is one block, the remainder block, and no loop over
the input.
"""

from collections.abc import Sequence

import numpy as np

# Hex digits of pi: the initial multipliers of the algorithm.
_INIT0 = (
    0xDBE6D5D5FE4CCE2F,
    0xA4093822299F31D0,
    0x13198A2E03707344,
    0x243F6A8885A308D3,
)
_INIT1 = (
    0x3BD39E10CB0EF593,
    0xC0ACF169B5F18A8C,
    0xBE5466CF34E90C6C,
    0x452821E638D01377,
)

_INPUT_BYTES = 4
FINAL_ROUNDS = 4

# Values hashed at a time: the state, 128 bytes a value, stays in the cache.
_CHUNK = 4096

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def highway_hash64(values: np.ndarray, key: Sequence[int]) -> np.ndarray:
    """Hashes the 4 little-endian bytes of every value.

    Args:
        values: int32 or uint32 [n].
        key: Four words of 64 bits.

    Returns:
        uint64 [n].
    """
    values = np.ascontiguousarray(values).view(np.uint32)
    result = np.empty(values.shape, np.uint64)
    initial = initial_state(key)
    for first in range(0, values.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        result[part] = _hash_chunk(values[part], initial)
    return result


def initial_state(key: Sequence[int]) -> tuple[np.ndarray, ...]:
    """The state v0, v1, mul0, mul1, each uint64 [4], once the length is mixed in."""
    words = np.array(key, np.uint64)
    mul0, mul1 = np.array(_INIT0, np.uint64), np.array(_INIT1, np.uint64)
    v0 = mul0 ^ words
    v1 = mul1 ^ _swapped(words)
    # The length of the remainder goes into both halves of each word, and both halves
    # of v1 are rotated left by it.
    v0 = v0 + np.uint64((_INPUT_BYTES << 32) + _INPUT_BYTES)
    halves = v1.view(np.uint32)
    halves[:] = halves << np.uint32(_INPUT_BYTES) | halves >> np.uint32(
        32 - _INPUT_BYTES
    )
    return v0, v1, mul0, mul1


def _hash_chunk(values: np.ndarray, initial: tuple[np.ndarray, ...]) -> np.ndarray:
    n = values.size
    state = [np.repeat(words[:, None], n, axis=1) for words in initial]
    block = np.zeros((4, n), np.uint64)
    block[0] = values
    _update(state, block)
    for _ in range(FINAL_ROUNDS):
        _update(state, _swapped(state[0][[2, 3, 0, 1]]))
    return sum(words[0] for words in state)  # pyright: ignore[reportReturnType]


def _swapped(words: np.ndarray) -> np.ndarray:
    """Each word with its halves of 32 bits exchanged."""
    return words << _HALF | words >> _HALF


def _update(state: list[np.ndarray], block: np.ndarray) -> None:
    v0, v1, mul0, mul1 = state
    v1 += mul0
    v1 += block
    mul0 ^= (v1 & _LOW) * (v0 >> _HALF)
    v0 += mul1
    mul1 ^= (v0 & _LOW) * (v1 >> _HALF)
    _mix(v1, v0)
    _mix(v0, v1)


def _mix(source: np.ndarray, target: np.ndarray) -> None:
    """Adds the bytes of each pair of words, in another order, to a pair of words."""
    low, high = source[::2], source[1::2]
    target[::2] += (
        (_bits(low, 3) | _bits(high, 4)) >> np.uint64(24)
        | (_bits(low, 5) | _bits(high, 6)) >> np.uint64(16)
        | _bits(low, 2)
        | _bits(low, 1) << np.uint64(32)
        | _bits(high, 7) >> np.uint64(8)
        | low << np.uint64(56)
    )
    target[1::2] += (
        (_bits(high, 3) | _bits(low, 4)) >> np.uint64(24)
        | _bits(high, 2)
        | _bits(high, 5) >> np.uint64(16)
        | _bits(high, 1) << np.uint64(24)
        | _bits(low, 6) >> np.uint64(8)
        | _bits(high, 0) << np.uint64(48)
        | _bits(low, 7)
    )


def _bits(words: np.ndarray, byte: int) -> np.ndarray:
    """One byte of each word, where it is."""
    return words & np.uint64(0xFF << 8 * byte)
