"""Passes over the input and output of a batch: compiled where numba is, else numpy's.

The compiled ones spare a batch the many moments at which numpy gives up the
interpreter's lock; results are the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grain_sparsecore.buffers import PADDINGS
from grain_sparsecore.kernels import is_compiled

# Numbers from which a pass takes longer than a busy training loop should wait for the
# lock, about 1 ms; numpy then gives it up.
_MOST_HELD = 1 << 21

# Slots up to which the layout, at half a nanosecond each, takes no longer than that.
_MOST_WRITTEN = 1 << 21

_PADDING_BITS = tuple(int(padding.view(np.int32)) for padding in PADDINGS)


def largest(values: np.ndarray) -> int:
    """The largest of unsigned integers of any shape; not empty."""
    if _held(values):
        return int(_compiled().largest(address(values), values.size, values.itemsize))
    return int(values.max())


def rises(values: np.ndarray) -> bool:
    """Whether int64 [n] never falls from one to the next."""
    if _held(values):
        return bool(_compiled().rises(address(values), values.size))
    return bool((values[1:] >= values[:-1]).all())


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays of int64 have one length and equal entries."""
    if one is other or one.size != other.size:
        return one is other
    if _held(one) and _held(other):
        return bool(_compiled().equal(address(one), address(other), one.size))
    return bool((one == other).all())


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Smallest and largest of float32 [n], not empty; NaN where one is NaN."""
    if _held(values):
        return _compiled().bounds(address(values), values.size)
    return values.min(), values.max()


def lay_out(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    shares: int,
    lengths: np.ndarray,
    strides: np.ndarray,
) -> None:
    """Copies blocks of shares to where shares are longer, and pads each.

    Args:
        sources: Embedding ids, sample ids and gains: blocks one after another.
        targets: Of the same types, C-contiguous, filled.
        shares: Shares of each block.
        lengths: int64 [blocks], length of the shares in the sources.
        strides: int64 [blocks], at least that; length of the shares in the targets.
    """
    if _compilable(sources):
        name = "lay_out_holding" if targets[0].size <= _MOST_WRITTEN else "lay_out"
        places = _places(sources, targets)
        getattr(_compiled(), name)(places, shares, lengths, strides)
        return
    first = start = 0
    for length, stride in zip(lengths.tolist(), strides.tolist(), strict=True):
        last, end = first + shares * length, start + shares * stride
        for source, target, padding in zip(sources, targets, PADDINGS, strict=True):
            to = target[start:end].reshape(shares, stride)
            to[:, :length] = source[first:last].reshape(shares, length)
            to[:, length:] = padding
        first, start = last, end


def pack(
    sources: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    lengths: np.ndarray,
) -> None:
    """Copies the start of each segment behind the one before, and pads each row.

    Args:
        sources: Embedding ids, sample ids and gains, [R, length]: a segment a row.
        targets: Of the same types, [L, room], C-contiguous, filled: the segments of
            one device a row.
        lengths: int64 [L, S], how much of each segment to copy.
    """
    if _compilable(sources):
        name = "pack_holding" if targets[0].size <= _MOST_WRITTEN else "pack"
        places = _places(sources, targets)
        sizes = sources[0].shape[1], targets[0].shape[1]
        getattr(_compiled(), name)(places, *sizes, lengths)
        return
    for source, target, padding in zip(sources, targets, PADDINGS, strict=True):
        segments = iter(source)
        for row, of_cores in zip(target, lengths.tolist(), strict=True):
            end = 0
            for length in of_cores:
                start, end = end, end + length
                row[start:end] = next(segments)[:length]
            row[end:] = padding


def _compilable(sources: Sequence[np.ndarray]) -> bool:
    return is_compiled() and all(
        source.flags.c_contiguous and source.flags.aligned for source in sources
    )


def _places(sources: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> np.ndarray:
    """For each array the addresses of both, and the bits of its padding."""
    addresses = zip(map(address, sources), map(address, targets), strict=True)
    return np.array(
        [(*pair, bits) for pair, bits in zip(addresses, _PADDING_BITS, strict=True)]
    )


def address(array: np.ndarray) -> int:
    """Where the memory of an array begins."""
    return array.__array_interface__["data"][0]


def _held(values: np.ndarray) -> bool:
    """Whether to take the compiled pass, which keeps the lock."""
    flags = values.flags
    return (
        values.size <= _MOST_HELD
        and flags.c_contiguous
        and flags.aligned
        and values.dtype.isnative
        and is_compiled()
    )


def _compiled() -> Any:
    from grain_sparsecore.kernels import numba_passes

    return numba_passes
