"""What every form becomes first: values, and how they divide into rows."""

import dataclasses
from typing import Self

import numpy as np


@dataclasses.dataclass(slots=True)
class Ragged:
    """Values of any dtype, not yet checked, and their rows.

    Attributes:
        values: [n], or [num_rows, width] where all rows are of one length; any memory
            order.
        row_splits: int64 [num_rows + 1], or None where every row has ``width``.
        width: Values per row; 0 where row_splits is given.
        num_rows: Number of rows (samples).
        compressed: Whether the rows were given apart from the values (CSR or COO), so
            that a plain array of n weights can only belong to the n values.
        order: int64 [n]: value i was entry ``order[i]`` of the input; None where
            nothing was moved. Only for COO.
        indices: int64 [n, rank], row-major; None but for COO.
        other: The other way to read the same input, where it has two.
    """

    values: np.ndarray
    row_splits: np.ndarray | None
    width: int
    num_rows: int
    compressed: bool = False
    order: np.ndarray | None = None
    indices: np.ndarray | None = None
    other: "Self | None" = None

    def splits(self) -> np.ndarray:
        """int64 [num_rows + 1], whichever way the rows are kept."""
        if self.row_splits is not None:
            return self.row_splits
        return np.arange(self.num_rows + 1, dtype=np.int64) * self.width

    def locate(self, index: int) -> tuple[int, int]:
        """Row of the value at flat ``index``, and its position there."""
        if self.row_splits is None:
            return divmod(index, self.width)
        row = int(np.searchsorted(self.row_splits, index, side="right")) - 1
        return row, index - int(self.row_splits[row])


def dense(values: np.ndarray) -> Ragged:
    """Rows of one length: [num_rows, width], or [num_rows] of one value each."""
    width = values.shape[1] if values.ndim == 2 else 1
    return Ragged(values, None, width, len(values))


def from_splits(values: np.ndarray, row_splits: np.ndarray, **more: object) -> Ragged:
    """Rows of any length; ``row_splits`` are already checked."""
    return Ragged(values, row_splits, 0, len(row_splits) - 1, **more)  # type: ignore[arg-type]


def from_lengths(values: np.ndarray, lengths: np.ndarray, **more: object) -> Ragged:
    """Rows of the given lengths, which add up to ``len(values)``."""
    row_splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=row_splits[1:])
    return from_splits(values, row_splits, **more)
