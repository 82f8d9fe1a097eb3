"""Compiled passes over input and output that do no sorting.

numpy gives up the interpreter's lock in every call on more than 500 numbers. Beside a
thread that computes in Python, each time costs up to 5 ms, whatever the call itself
takes. The checks here keep the lock, for microseconds; the layout keeps it or gives it
up once.

Arrays come as addresses, so that each function is compiled for one signature only.
"""

# numba's decorators and intrinsics have no types that pyright could follow.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import functools

import numba
import numpy as np

from grain_sparsecore.kernels.numba_tools import compiled, part, pointer

_holding = functools.partial(compiled, nogil=False)


@_holding
def largest(address, count, size):
    """The largest of ``count`` unsigned integers of ``size`` bytes, as uint64."""
    place = pointer(address)
    if size == 4:
        # One loop for each type, for vector instructions.
        words = numba.carray(place, count, np.uint32)
        most = np.uint32(0)
        for i in range(count):
            most = max(most, words[i])
        return np.uint64(most)
    if size == 8:
        longs = numba.carray(place, count, np.uint64)
        most_long = np.uint64(0)
        for i in range(count):
            most_long = max(most_long, longs[i])
        return most_long
    if size == 2:
        shorts = numba.carray(place, count, np.uint16)
        most_short = np.uint16(0)
        for i in range(count):
            most_short = max(most_short, shorts[i])
        return np.uint64(most_short)
    octets = numba.carray(place, count, np.uint8)
    most_octet = np.uint8(0)
    for i in range(count):
        most_octet = max(most_octet, octets[i])
    return np.uint64(most_octet)


@_holding
def rises(address, count):
    """Whether ``count`` int64 never fall from one to the next."""
    splits = numba.carray(pointer(address), count, np.int64)
    falls = np.int64(0)
    for i in range(count - 1):
        falls |= np.int64(splits[i + 1] < splits[i])
    return falls == 0


@_holding
def equal(one_address, other_address, count):
    """Whether two arrays of int64 are equal."""
    one = numba.carray(pointer(one_address), count, np.int64)
    other = numba.carray(pointer(other_address), count, np.int64)
    different = np.int64(0)
    for i in range(count):
        different |= one[i] ^ other[i]
    return different == 0


@_holding
def bounds(address, count):
    """The smallest and largest of float32 [count]; both are NaN where one is NaN."""
    # As integers in the order of the floats, since vector instructions may only
    # reorder comparisons of integers: a negative float falls as its bits rise. NaN is
    # then beyond infinity.
    bits = numba.carray(pointer(address), count, np.int32)
    low, high = np.int32(2**31 - 1), np.int32(-(2**31))
    for i in range(count):
        ordered = bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(2**31 - 1))
        low = min(low, ordered)
        high = max(high, ordered)
    result = np.empty(2, np.int32)
    result[0] = low ^ ((low >> np.int32(31)) & np.int32(2**31 - 1))
    result[1] = high ^ ((high >> np.int32(31)) & np.int32(2**31 - 1))
    floats = result.view(np.float32)
    if np.isnan(floats[0]) or np.isnan(floats[1]):
        return np.float32(np.nan), np.float32(np.nan)
    return floats[0], floats[1]


@part
def _lay_out(places, shares, lengths, strides):
    source_size, target_size = shares * lengths.sum(), shares * strides.sum()
    for row in range(len(places)):
        source = numba.carray(pointer(places[row, 0]), source_size, np.int32)
        target = numba.carray(pointer(places[row, 1]), target_size, np.int32)
        pad = np.int32(places[row, 2])
        # Unsigned indices are not checked for being negative.
        start = to = np.uintp(0)
        for block in range(lengths.size):
            length, stride = np.uintp(lengths[block]), np.uintp(strides[block])
            for _ in range(shares):
                for i in range(length):
                    target[to + i] = source[start + i]
                for i in range(length, stride):
                    target[to + i] = pad
                start += length
                to += stride


@compiled
def lay_out(places, shares, lengths, strides):
    """Copies the shares of each block of 4-byte words, and pads each to its stride.

    Args:
        places: int64 [arrays, 3], for each: address of the source, blocks one after
            another, each of ``shares`` times its length; address of the target, the
            same with its stride in the place of its length; bits of the padding.
        shares: Shares of a block.
        lengths: int64 [blocks], words of a share in the source.
        strides: int64 [blocks], words of a share in the target.
    """
    _lay_out(places, shares, lengths, strides)


@_holding
def lay_out_holding(places, shares, lengths, strides):
    """As `lay_out`, keeping the interpreter's lock."""
    _lay_out(places, shares, lengths, strides)


@part
def _pack(places, length, room, lengths):
    devices, cores = lengths.shape
    size = devices * cores * length
    for row in range(len(places)):
        source = numba.carray(pointer(places[row, 0]), size, np.int32)
        target = numba.carray(pointer(places[row, 1]), devices * room, np.int32)
        pad = np.int32(places[row, 2])
        start = np.uintp(0)
        for device in range(devices):
            to, end = np.uintp(device * room), np.uintp((device + 1) * room)
            for core in range(cores):
                count = np.uintp(lengths[device, core])
                for i in range(count):
                    target[to + i] = source[start + i]
                to += count
                start += np.uintp(length)
            for i in range(to, end):
                target[i] = pad


@compiled
def pack(places, length, room, lengths):
    """Copies the start of each segment of 4-byte words behind the one before.

    Args:
        places: int64 [arrays, 3], for each: address of the source, R segments of
            ``length``; address of the target, L rows of ``room``, each for the
            segments of one device; bits of the padding, which fills the rest.
        length: Words of a segment in the source.
        room: Words of a row.
        lengths: int64 [L, S], words of each segment to copy.
    """
    _pack(places, length, room, lengths)


@_holding
def pack_holding(places, length, room, lengths):
    """As `pack`, keeping the interpreter's lock."""
    _pack(places, length, room, lengths)
