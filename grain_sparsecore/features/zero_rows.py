"""Samples whose weights make no gains: their gains are 0, and they are counted."""

import numpy as np

from grain_sparsecore.kernels.gains import weighted_gains, zeroed_rows
from grain_sparsecore.kernels.passes import bounds

# The largest number whose square is 0 in float32: 2 ** -150 lies half way between 0
# and the smallest float32, and rounds to the even one, 0.
_LARGEST_WITHOUT_SQUARE = np.float32(2.0**-75)

# Up to here, 2 ** 31 squares add up to less than 2 ** 112: nothing overflows float32.
_LARGEST_WITHOUT_OVERFLOW = 2.0**40

# Up to here, however many gains of one id add up to 2 ** 121 at the most: from there
# on, one more is less than half a unit in the last place.
_LARGEST_SUMMABLE = 2.0**96


def settle_zero_rows(
    ids: np.ndarray, weights: np.ndarray, row_splits: np.ndarray, combiner: str
) -> tuple[np.ndarray, int]:
    """Finds the samples with ids that get gain 0.

    mean divides by the float32 running sum of the weights, sqrtn by the root of the
    float32 running sum of their squares. Neither that may be 0 or overflow, nor a
    weight over it, nor the float32 running sum of the gains of an id that occurs more
    than once in the sample. Most batches are settled by their smallest and largest
    weight.

    Args:
        ids: int32 [n].
        weights: float32 [n], finite.
        row_splits: int64 [B + 1].
        combiner: ``"sum"``, ``"mean"`` or ``"sqrtn"``.

    Returns:
        The weights, 0 in samples where only sums of gains overflow: who divides by
        the sum of the weights does not see that; and the number of samples.
    """
    if weights.size == 0:
        return weights, 0
    smallest, largest = bounds(weights)
    most = max(-smallest, largest)
    if combiner == "sum":
        if most <= _LARGEST_SUMMABLE:
            return weights, 0
        start, end = _filled(row_splits)
        large = np.maximum.reduceat(np.abs(weights), start) > _LARGEST_SUMMABLE
        start, lengths, places = _ids_of(start[large], end[large])
        rows = _overflowing_rows(ids[places], weights[places], lengths)
        return _without(weights, start[rows], lengths[rows]), int(rows.sum())
    small = most <= _LARGEST_WITHOUT_OVERFLOW
    if small and smallest > _LARGEST_WITHOUT_SQUARE:
        return weights, 0  # sums of positive numbers, and of squares that do not vanish
    start, end = _filled(row_splits)
    if small and combiner == "sqrtn":
        # Where one square is above 0 the sum is; else it stays 0 at every step. No
        # weight is much larger than the root of a sum with its own square.
        most = np.maximum.reduceat(np.abs(weights), start)
        return weights, int(np.count_nonzero(most <= _LARGEST_WITHOUT_SQUARE))
    if small and smallest >= 0:
        most = np.maximum.reduceat(weights, start)
        return weights, int(np.count_nonzero(most == 0))
    if small:
        # Only sums near 0, compared with what was added, can be 0, or make a quotient
        # or sums of quotients overflow.
        wide = weights.astype(np.float64)
        total = np.abs(np.add.reduceat(wide, start))
        scale = np.add.reduceat(np.abs(wide), start)
        doubtful = total <= scale * (end - start) * 2.0**-23
        start, end = start[doubtful], end[doubtful]
    start, lengths, places = _ids_of(start, end)
    doubtful_weights = weights[places]
    zero = zeroed_rows(doubtful_weights, lengths, combiner)
    gains = weighted_gains(doubtful_weights, lengths, combiner)
    if np.abs(gains).max(initial=0) > _LARGEST_SUMMABLE:
        rows = _overflowing_rows(ids[places], gains, lengths)
        weights = _without(weights, start[rows], lengths[rows])
        zero |= rows
    return weights, int(np.count_nonzero(zero))


def _filled(row_splits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where samples begin and end that have ids."""
    start, end = row_splits[:-1], row_splits[1:]
    filled = end > start
    return start[filled], end[filled]


def _ids_of(
    start: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where samples begin, their lengths, and the places of all of their ids."""
    lengths = end - start
    first = np.cumsum(lengths) - lengths
    return start, lengths, np.repeat(start - first, lengths) + np.arange(lengths.sum())


def _overflowing_rows(
    ids: np.ndarray, gains: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Rows in which the gains of equal ids overflow where they are added up.

    In float32, from left to right; once infinite, a sum of finite numbers stays so.
    """
    rows = np.repeat(np.arange(lengths.size), lengths)
    entry_keys = rows << 32 | ids
    entry_keys, entries = np.unique(entry_keys, return_inverse=True)
    sums = np.zeros(entry_keys.size, np.float32)
    with np.errstate(over="ignore"):
        np.add.at(sums, entries, gains)
    result = np.zeros(lengths.size, bool)
    result[entry_keys[~np.isfinite(sums)] >> 32] = True
    return result


def _without(weights: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The weights with 0 in some samples; a copy, since the input may be the user's."""
    if not start.size:
        return weights
    _, _, places = _ids_of(start, start + lengths)
    weights = weights.copy()
    weights[places] = 0
    return weights
