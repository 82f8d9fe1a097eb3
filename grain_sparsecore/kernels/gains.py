"""The float32 factor of every id, bit for bit as the format has it.

The order of float32 operations matters here: sums run left to right in the order of
the input, one rounding each, as a C loop would do them. numpy's ``sum`` and
``add.reduceat`` do not; ``add.accumulate`` and ``add.at`` do.
"""

import numpy as np

_FLOAT32_MAX = float(np.finfo(np.float32).max)

# Rows still running below which a step over all of them costs more than a loop over
# each of them.
_FEW_ROWS = 16


def constant_gain(combiner: str, count: int) -> np.float32:
    """Gain of each of ``count`` ids without weights."""
    return row_gains(np.array([count]), combiner)[0]


def row_gains(lengths: np.ndarray | int, combiner: str) -> np.ndarray:
    """Gain of the ids of each row without weights; 0 for rows without ids.

    Args:
        lengths: Ids of each row, duplicates counted: integers [rows], or one.
        combiner: ``"sum"``, ``"mean"`` or ``"sqrtn"``.

    Returns:
        float32 [rows], or [] for one length.
    """
    counts = np.asarray(lengths).astype(np.float32)
    if combiner == "sum":
        return np.ones_like(counts)
    divisors = np.sqrt(counts) if combiner == "sqrtn" else counts
    return np.divide(
        np.float32(1), divisors, out=np.zeros_like(counts), where=counts > 0
    )


def weighted_gains(
    weights: np.ndarray, lengths: np.ndarray | int, combiner: str
) -> np.ndarray:
    """Gain of every id with weights: the weight over the row's divisor.

    Args:
        weights: float32 [ids].
        lengths: Ids of each row, int64 [rows], or one number for all rows.
        combiner: As in `row_gains`.

    Returns:
        float32 [ids], finite; 0 in the rows of `zeroed_rows`.
    """
    if combiner == "sum" or not weights.size:
        return weights
    lengths = row_lengths(weights, lengths)
    divisors, zero = row_divisors(weights, lengths, combiner)
    gains = np.repeat(divisors, lengths)
    divide(weights, gains, lengths, divisors, zero)
    return gains


def zeroed_rows(weights: np.ndarray, lengths: np.ndarray, combiner: str) -> np.ndarray:
    """Which rows get gain 0 because their weights cannot be divided.

    Their divisor is 0 or overflows float32, or a weight over it does. Rows without ids
    are no such rows.

    Args:
        weights: float32 [ids], finite.
        lengths: int64 [rows].
        combiner: ``"mean"`` or ``"sqrtn"``.

    Returns:
        bool [rows].
    """
    divisors, zero = row_divisors(weights, lengths, combiner)
    divide(weights, np.repeat(divisors, lengths), lengths, divisors, zero)
    return zero & (lengths > 0)


def row_lengths(weights: np.ndarray, lengths: np.ndarray | int) -> np.ndarray:
    """Lengths of rows as an array, where they may be one number for all."""
    if isinstance(lengths, int):
        return np.full(weights.size // lengths, lengths, np.int64)
    return lengths


def row_divisors(
    weights: np.ndarray, lengths: np.ndarray, combiner: str
) -> tuple[np.ndarray, np.ndarray]:
    """What the weights of each row are divided by: float32 [rows].

    Args:
        weights: float32 [ids].
        lengths: int64 [rows].
        combiner: ``"mean"`` or ``"sqrtn"``.

    Returns:
        The divisors, 1 where there is none; and bool [rows], where that is.
    """
    # What overflows is found afterwards.
    with np.errstate(over="ignore"):
        if combiner == "mean":
            divisors = np.zeros(lengths.size, np.float32)
            np.add.at(divisors, np.repeat(np.arange(lengths.size), lengths), weights)
        else:
            divisors = np.sqrt(_sums_of_squares(weights, lengths))
    zero = (divisors == 0) | ~np.isfinite(divisors)
    divisors[zero] = 1
    return divisors, zero


def divide(
    weights: np.ndarray,
    gains: np.ndarray,
    lengths: np.ndarray,
    divisors: np.ndarray,
    zero: np.ndarray,
) -> None:
    """Divides in place; all gains of a row are 0 where one cannot be had.

    Args:
        weights: float32 [ids].
        gains: float32 [ids], holds the divisor of each id; replaced by the gains.
        lengths: int64 [rows].
        divisors: float32 [rows], as `row_divisors` has them.
        zero: bool [rows], the rows that have none; rows are added.
    """
    largest = max(float(weights.max(initial=0)), -float(weights.min(initial=0)))
    smallest = float(np.abs(divisors).min(initial=1))
    if largest / smallest < _FLOAT32_MAX:
        np.divide(weights, gains, out=gains)
    else:
        with np.errstate(over="ignore"):
            np.divide(weights, gains, out=gains)
        rows = np.repeat(np.arange(lengths.size), lengths)
        zero[rows[~np.isfinite(gains)]] = True
    if zero.any():
        gains[np.repeat(zero, lengths)] = 0


def _sums_of_squares(weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Running sum of squares of each row, rounded to float32 at every step."""
    order = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[order]
    starts = (np.cumsum(lengths) - lengths)[order]
    squares = weights.astype(np.float64) ** 2
    sums = np.zeros(lengths.size, np.float32)
    # Step j adds the j-th weight of every row that has one; rows are sorted by
    # length, so those are a prefix.
    longest = int(sorted_lengths[0]) if sorted_lengths.size else 0
    running = np.searchsorted(-sorted_lengths, -np.arange(longest), "left")
    step = 0
    for rows in running.tolist():
        if rows < _FEW_ROWS:
            break
        sums[:rows] += squares[starts[:rows] + step]
        step += 1
    for row in range(int(running[step]) if step < longest else 0):
        total = sums[row]
        start = int(starts[row])
        for square in squares[start + step : start + int(sorted_lengths[row])]:
            total = np.float32(total + square)
        sums[row] = total
    result = np.empty_like(sums)
    result[order] = sums
    return result


def repeated_sums(gain: float, most: int) -> np.ndarray:
    """float32 [most + 1]: entry c is ``gain`` added up c times, left to right."""
    sums = np.zeros(most + 1, np.float32)
    np.add.accumulate(np.full(most, gain, np.float32), out=sums[1:])
    return sums
