"""In which order the records of a source are read, epoch after epoch.

Positions count through all epochs: position p is in epoch ``p // size``. Every order
visits each record once per epoch.
"""

import dataclasses
from typing import Protocol

import numpy as np

from grain_sparsecore.sources.scramble import GOLDEN, mix, permute


class Order(Protocol):
    """An order of records."""

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The records at some positions, both int64 [n]."""
        ...


@dataclasses.dataclass(frozen=True)
class InOrder:
    """The order of the source.

    Attributes:
        size: Number of records.
    """

    size: int

    def at(self, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        return positions % self.size


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """All records in random order, another in each epoch.

    Attributes:
        size: Number of records.
        seed: Another seed gives other orders.
    """

    size: int
    seed: int

    def at(self, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        epochs, places = np.divmod(positions, self.size)
        return permute(places, self.size, _keys(self.seed, epochs))


class ShuffledGroups:
    """Groups of records in random order, and the records inside runs of groups.

    Whoever reads in this order needs only the groups of one run at a time.

    Args:
        group_starts: int64 [groups + 1], the first record of each group, and the end.
        groups_in_run: Groups whose records are mixed, 1 or more.
        seed: Another seed gives other orders.
    """

    def __init__(
        self, group_starts: np.ndarray, *, groups_in_run: int, seed: int
    ) -> None:
        self._starts = group_starts
        self._groups_in_run = groups_in_run
        self._seed = seed
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def at(self, positions: np.ndarray) -> np.ndarray:
        """See `Order`."""
        epochs, places = np.divmod(positions, self._starts[-1])
        records = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            records[inside] = self._at(epoch, places[inside])
        return records

    def _at(self, epoch: int, places: np.ndarray) -> np.ndarray:
        order, starts = self._epoch(epoch)
        runs = (np.searchsorted(starts, places, "right") - 1) // self._groups_in_run
        mixed = np.empty_like(places)
        for run in np.unique(runs).tolist():
            first = run * self._groups_in_run
            last = min(first + self._groups_in_run, len(order))
            start, end = int(starts[first]), int(starts[last])
            inside = runs == run
            key = _keys(self._seed, np.array([epoch * len(order) + first]))
            mixed[inside] = start + permute(places[inside] - start, end - start, key)
        group = np.searchsorted(starts, mixed, "right") - 1
        return self._starts[order[group]] + mixed - starts[group]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The groups in the order of an epoch, and where each starts there."""
        epochs = self._epochs
        if epoch not in epochs:
            key = _keys(self._seed, np.array([epoch]))
            groups = len(self._starts) - 1
            order = permute(np.arange(groups), groups, mix(key))
            sizes = np.diff(self._starts)[order]
            starts = np.concatenate([[0], np.cumsum(sizes)])
            # Two epochs meet where one ends. A new dict, since threads share it.
            before = {e: value for e, value in epochs.items() if e == epoch - 1}
            self._epochs = epochs = {**before, epoch: (order, starts)}
        return epochs[epoch]


def _keys(seed: int, numbers: np.ndarray) -> np.ndarray:
    """uint64 keys of permutations."""
    base = mix(np.array([seed], np.uint64) + GOLDEN)
    return mix(base + numbers.astype(np.uint64) * GOLDEN)
