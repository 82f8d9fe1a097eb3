"""What happened to the ids of a whole run: counted per host, added over all hosts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.dropping import DROP_FIELDS
from grain_sparsecore.features import COUNTERS, CounterTotals
from grain_sparsecore.stacking import StackedLayout

# Per feature: the columns of ``DropCounts.per_feature`` and of its lost weight.
_DROPS = (*DROP_FIELDS, "lost_weight")


class Tally:
    """Adds up the counters and drops of the batches of one host.

    Tallies of several hosts are added as vectors: ``Tally.of(layout, a + b)``.

    Args:
        layout: The stacks.
    """

    def __init__(self, layout: StackedLayout) -> None:
        self._layout = layout
        self._counters = CounterTotals(layout)
        self._drops = np.zeros((len(layout.features), len(_DROPS)))
        self._samples = 0
        self._touched = 0

    def add(self, batch: SparseCoreInput) -> list[str]:
        """Adds a batch; returns a message for each trouble that is seen first."""
        self._samples += int(np.sum(batch.num_valid_samples))
        if batch.drops is not None:
            self._drops[:, :-1] += np.asarray(batch.drops.per_feature)
            self._drops[:, -1] += np.asarray(batch.drops.lost_weight)
            self._touched += int(batch.drops.examples)
        return self._counters.add(np.asarray(batch.counters))

    def to_vector(self) -> np.ndarray:
        """float64, of one length for a layout; exact up to 2**53."""
        sizes = np.array([self._samples, self._touched])
        parts = (self._counters.array, self._drops, sizes)
        return np.concatenate([part.ravel().astype(np.float64) for part in parts])

    @classmethod
    def of(cls, layout: StackedLayout, vector: np.ndarray) -> "Tally":
        """The inverse of `to_vector`."""
        tally = cls(layout)
        features = len(layout.features)
        first = features * len(COUNTERS)
        counters = vector[:first].reshape(features, -1)
        tally._counters.add(counters.astype(np.int64))
        tally._drops = vector[first:-2].reshape(features, -1)
        tally._samples, tally._touched = (int(x) for x in vector[-2:])
        return tally

    @property
    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """Feature -> counter -> total, see `grain_sparsecore.features.COUNTERS`."""
        return self._counters.totals()

    @property
    def given_ids(self) -> dict[str, int]:
        """Feature -> ids that came in: looked up, padding, and dropped as invalid."""
        invalid = self._dropped_as_invalid()
        return {
            name: counts["ids"] + counts["padding_ids"] + invalid.get(name, 0)
            for name, counts in self.counters.items()
        }

    @property
    def dropped_ids(self) -> int:
        """Ids that were given and not looked up: invalid ones, and those cut."""
        cut = int(self._drops[:, DROP_FIELDS.index("dropped_ids")].sum())
        return cut + sum(self._dropped_as_invalid().values())

    def _dropped_as_invalid(self) -> dict[str, int]:
        # Those that are clipped or taken modulo the vocabulary are looked up.
        totals = self.counters
        return {
            feature.name: totals[feature.name]["negative_ids"]
            + totals[feature.name]["large_ids"]
            for feature in self._layout.features
            if feature.spec.on_invalid_id == "drop"
        }

    @property
    def drops(self) -> dict[str, dict[str, Any]]:
        """What was cut at limits, by stack: ids, entries, weight, and by feature.

        A sample that lost entries of several features of a stack counts as an example
        in each of them, so a stack has no such number.
        """
        rows = {
            feature.name: _named(row)
            for feature, row in zip(self._layout.features, self._drops, strict=True)
        }
        found = {}
        for stack in self._layout.stacks:
            mine = {feature.name: rows[feature.name] for feature in stack.features}
            found[stack.name] = {
                name: sum(row[name] for row in mine.values())
                for name in _DROPS
                if name != "dropped_examples"
            }
            found[stack.name]["features"] = mine
        return found

    @property
    def dropped_example_share(self) -> float:
        """Share of the samples that lost an entry at a limit, from 0 to 1."""
        return self._touched / self._samples if self._samples else 0.0


def _named(row: np.ndarray) -> dict[str, float]:
    values = zip(_DROPS, row.tolist(), strict=True)
    return {n: v if n == "lost_weight" else int(v) for n, v in values}
