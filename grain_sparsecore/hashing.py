"""A documented 64-bit hash of integers, bytes and strings onto a vocabulary.

The mapping is part of what a trained table means, so it never changes. All arithmetic
is modulo 2 ** 64. ``mix`` is the output function of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", 2014):

    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z = (z ^ z >> 27) * 0x94D049BB133111EB
    mix(z) = z ^ z >> 31

With G = 0x9E3779B97F4A7C15 and key = mix(seed + G):

- an integer x, sign-extended to 64 bits, has hash mix(key + (x + 1) * G), which is
  output x of a SplitMix64 generator that starts at ``key``;
- bytes have h = mix(key + (length + 1) * G), then h = mix((h ^ w) + G) for each
  little-endian 8-byte word w, the last one filled up with zero bytes;
- a string has the hash of its UTF-8 bytes, lone surrogates being encoded like other
  characters.

A hash h falls on id floor(h * vocabulary_size / 2 ** 64).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grain_sparsecore.errors import InputError, InputTypeError

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_WORD = 8

# Values hashed at a time: the temporaries of a block stay in the cache, which is four
# times as fast as whole arrays of 400,000.
_BLOCK = 16384

# Strings are laid out as a table of one width, unless that is so many times as large
# as they are together: one long string must not cost memory for all.
_MOST_PADDING = 4


def hash_ids(
    values: np.ndarray | Sequence[Any], *, vocabulary_size: int, seed: int = 0
) -> np.ndarray:
    """Maps integers, bytes or strings onto ``0 .. vocabulary_size - 1``.

    Args:
        values: An integer array of any dtype and shape; or an array (dtype S, U or
            object) or a sequence of all bytes, all str, or a mixture of the two.
            Python integers must lie in [-2**63, 2**64). numpy cuts trailing zero
            bytes off values of dtype S and U, so they hash without them.
        vocabulary_size: From 1 to 2**32.
        seed: From 0 to 2**64 - 1; another seed gives an unrelated mapping.

    Returns:
        int64 ids of the shape of ``values``.

    Raises:
        InputTypeError: Values of another type, such as floats or bools.
        InputError: An integer beyond 64 bits.
    """
    if isinstance(values, np.ndarray):
        array = values
    else:
        # Not np.array(values): it would make two strings of [1, "a"] and two integers
        # of [1, True].
        array = np.fromiter(values, object, len(values))
    flat = array.ravel()
    key = _mix_int((seed + _GAMMA) & _MASK)
    result = np.empty(flat.size, np.int64)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        result[start : start + _BLOCK] = _onto(_hash(block, key), vocabulary_size)
    return result.reshape(array.shape)


def _hash(flat: np.ndarray, key: int) -> np.ndarray:
    kind = flat.dtype.kind
    if kind in "iu":
        return _hash_integers(_as_words(flat), key)
    if kind in "SU":
        return _hash_fixed(flat, key)
    if kind in "OT":
        return _hash_objects(flat.tolist(), key)
    raise InputTypeError(
        f"cannot hash values of dtype {flat.dtype}; ids to hash are integers, bytes or "
        "strings."
    )


def _mix_int(z: int) -> int:
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31


def _mix(z: np.ndarray) -> np.ndarray:
    """In place, on an array of our own."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _as_words(flat: np.ndarray) -> np.ndarray:
    if flat.dtype.kind == "i":
        return flat.astype(np.int64, copy=False).view(np.uint64)
    return flat.astype(np.uint64, copy=False)


def _hash_integers(words: np.ndarray, key: int) -> np.ndarray:
    z = words * np.uint64(_GAMMA)
    z += np.uint64((key + _GAMMA) & _MASK)
    return _mix(z)


def _onto(hashed: np.ndarray, vocabulary_size: int) -> np.ndarray:
    """floor(hashed * vocabulary_size / 2 ** 64), without 128-bit arithmetic."""
    size = np.uint64(vocabulary_size)
    low = hashed & np.uint64(0xFFFFFFFF)
    low *= size
    low >>= np.uint64(32)
    high = hashed >> np.uint64(32)
    high *= size
    high += low
    high >>= np.uint64(32)
    return high.view(np.int64)


def _hash_objects(values: list[Any], key: int) -> np.ndarray:
    kinds = set(map(type, values))
    if all(issubclass(k, int | np.integer) and k is not bool for k in kinds):
        words = [int(v) for v in values]
        if min(words) < -(2**63) or max(words) > _MASK:
            wide = next(v for v in words if not -(2**63) <= v <= _MASK)
            raise InputError(f"cannot hash {wide}: it does not fit 64 bits.")
        bits = np.fromiter((v & _MASK for v in words), np.uint64, len(words))
        return _hash_integers(bits, key)
    if not all(issubclass(k, str | bytes) for k in kinds):
        names = ", ".join(sorted(k.__name__ for k in kinds))
        raise InputTypeError(
            f"cannot hash values of type {names}; ids to hash are all integers, or all "
            "bytes or strings."
        )
    encoded = [
        v.encode(errors="surrogatepass") if isinstance(v, str) else v for v in values
    ]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    longest = int(lengths.max())
    if longest * len(encoded) <= _MOST_PADDING * int(lengths.sum()):
        # numpy fills each up with zero bytes, which is what their words need.
        return _hash_table(_as_table(np.array(encoded, f"S{longest}")), lengths, key)
    return _hash_ragged(np.frombuffer(b"".join(encoded), np.uint8), lengths, key)


def _hash_fixed(flat: np.ndarray, key: int) -> np.ndarray:
    # numpy's own lengths: up to the last byte that is not zero.
    lengths = np.strings.str_len(flat)
    flat = np.ascontiguousarray(flat, flat.dtype.newbyteorder("="))
    if flat.dtype.kind == "S":
        return _hash_table(_as_table(flat), lengths, key)
    codes = flat.view(np.uint32).reshape(len(flat), -1)
    if codes.max(initial=0) >= 128:
        return _hash_objects(flat.tolist(), key)
    return _hash_table(codes.astype(np.uint8), lengths, key)  # ASCII is its own UTF-8


def _as_table(flat: np.ndarray) -> np.ndarray:
    """uint8 [n, itemsize] of an array of dtype S."""
    return flat.view(np.uint8).reshape(len(flat), -1)


def _hash_table(table: np.ndarray, lengths: np.ndarray, key: int) -> np.ndarray:
    """Hashes rows of bytes that are filled up with zeros to one width."""
    rows, width = table.shape
    words = -(-width // _WORD)
    padded = np.zeros((rows, words * _WORD), np.uint8)
    padded[:, :width] = table
    return _hash_words(padded.reshape(-1), np.arange(rows) * words, lengths, key)


def _hash_ragged(data: np.ndarray, lengths: np.ndarray, key: int) -> np.ndarray:
    """Hashes rows of bytes that lie one behind the other in ``data``."""
    words = -(-lengths // _WORD)
    first_word = np.cumsum(words) - words
    # Each row starts at a word of its own, so that the words can be read as uint64.
    padded = np.zeros(int(words.sum()) * _WORD, np.uint8)
    first_byte = np.cumsum(lengths) - lengths
    shift = np.repeat(first_word * _WORD - first_byte, lengths)
    padded[np.arange(len(data)) + shift] = data
    return _hash_words(padded, first_word, lengths, key)


def _hash_words(
    padded: np.ndarray, first_word: np.ndarray, lengths: np.ndarray, key: int
) -> np.ndarray:
    """Hashes rows of ``lengths`` bytes that start at words of ``padded``."""
    words = padded.view("<u8").astype(np.uint64, copy=False)
    hashed = _hash_integers(lengths.astype(np.uint64), key)
    active = np.flatnonzero(lengths > 0)
    step = 0
    while active.size:
        part = hashed.take(active)
        part ^= words.take(first_word.take(active) + step)
        part += np.uint64(_GAMMA)
        hashed[active] = _mix(part)
        step += 1
        active = active[lengths.take(active) > step * _WORD]
    return hashed
