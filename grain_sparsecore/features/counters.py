"""What is counted per feature and batch, and the totals of a run."""

from collections.abc import Mapping

import numpy as np

from grain_sparsecore.stacking import StackedLayout

# Columns of the counters of `read_features`, one row per feature:
# - ids: ids that are looked up, after everything below;
# - padding_ids: ids equal to ``padding_id``, left out;
# - negative_ids, large_ids: ids below 0, and at or above the vocabulary, which
#   ``on_invalid_id`` dropped, clipped or took modulo the vocabulary;
# - invalid_weights: NaN and infinite weights that became 0;
# - zero_weight_rows: samples with ids that get gain 0 because their combiner (mean and
#   sqrtn) would divide by 0, or because its divisor, or a weight over it, overflows
#   float32; or (any combiner) the sum of the gains of an id that occurs repeatedly.
COUNTERS: tuple[str, ...] = (
    "ids",
    "padding_ids",
    "negative_ids",
    "large_ids",
    "invalid_weights",
    "zero_weight_rows",
)
IDS, PADDING_IDS, NEGATIVE_IDS, LARGE_IDS, INVALID_WEIGHTS, ZERO_WEIGHT_ROWS = range(
    len(COUNTERS)
)

_WHAT = {
    NEGATIVE_IDS: "ids below 0",
    LARGE_IDS: "ids at or above the vocabulary",
    INVALID_WEIGHTS: "NaN or infinite weights, set to 0",
    ZERO_WEIGHT_ROWS: "samples whose weights add up to 0 or overflow, given gain 0",
}


class CounterTotals:
    """Adds up counters over a run and words each kind of trouble once per feature.

    Args:
        layout: The features.
    """

    def __init__(self, layout: StackedLayout) -> None:
        self._layout = layout
        # int64: a long run passes 2 ** 31 ids.
        self._totals = np.zeros((len(layout.features), len(COUNTERS)), np.int64)

    def add(self, counters: np.ndarray) -> list[str]:
        """Adds int32 [F, C] of a batch; returns a message per first occurrence."""
        new = (counters > 0) & (self._totals == 0)
        self._totals += counters
        return [
            self._message(int(f), int(c), int(counters[f, c]))
            for f, c in zip(*np.nonzero(new), strict=True)
            if c in _WHAT
        ]

    @property
    def array(self) -> np.ndarray:
        """int64 [F, C], features in the order of the layout."""
        return self._totals

    def _message(self, feature: int, column: int, count: int) -> str:
        spec = self._layout.features[feature].spec
        how = ""
        if column in (NEGATIVE_IDS, LARGE_IDS):
            how = f", on_invalid_id={spec.on_invalid_id!r}"
        return (
            f"feature {spec.name!r} (table {spec.table!r}): {count} "
            f"{_WHAT[column]}{how}; counted from here on, without further messages."
        )

    def totals(self) -> Mapping[str, Mapping[str, int]]:
        """Feature -> counter -> total, of plain ints, features sorted by name."""
        rows = {
            feature.name: dict(zip(COUNTERS, row.tolist(), strict=True))
            for feature, row in zip(self._layout.features, self._totals, strict=True)
        }
        return {name: rows[name] for name in sorted(rows)}
