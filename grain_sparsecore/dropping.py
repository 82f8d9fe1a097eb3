"""Cutting a batch down to what its limits may become, and counting what is lost.

In each (SparseCore, partition) the entries that stay are a run of neighbours in the
order of the format, so a cut batch is an ordinary `PartitionedBatch` with statistics
of its own. No later stage knows that it was cut.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from grain_sparsecore.buffers import PADDING_GAIN, PADDING_ID, PartitionedBatch
from grain_sparsecore.kernels import active_kernel
from grain_sparsecore.overflow import segment
from grain_sparsecore.partition import partition_counts
from grain_sparsecore.stacking import ALIGNMENT, Stack, StackedLayout

if TYPE_CHECKING:
    from grain_sparsecore.features import FeatureIds

# Columns of ``DropCounts.per_feature``.
DROP_FIELDS = ("dropped_ids", "dropped_entries", "dropped_examples")

# 2**32 divided by the golden ratio. Its multiples modulo 2**32 are spread evenly
# however many of them are taken, so that no place is left out for long.
_GOLDEN = 0x9E3779B1


@dataclasses.dataclass(frozen=True)
class DropCounts:
    """What one batch of one host lost; zeros where it lost nothing.

    Attributes:
        per_feature: int32 [F, 3]: ids of the input, duplicates included; entries,
            which are distinct (sample, id) pairs; samples that lost at least one.
        lost_weight: float32 [F], sum of the absolute gains of the lost entries, in
            units of the combiner: for ``mean`` 1.0 is one whole sample.
        examples: int32 scalar, samples that lost an entry of any feature.
    """

    per_feature: Any
    lost_weight: Any
    examples: Any

    @classmethod
    def zeros(cls, num_features: int) -> "DropCounts":
        """Nothing lost."""
        return cls(
            per_feature=np.zeros((num_features, len(DROP_FIELDS)), np.int32),
            lost_weight=np.zeros(num_features, np.float32),
            examples=np.int32(0),
        )


jax.tree_util.register_dataclass(
    DropCounts,
    data_fields=["per_feature", "lost_weight", "examples"],
    meta_fields=[],
)


def count_raw_ids(
    features: "Sequence[FeatureIds]", layout: StackedLayout
) -> np.ndarray:
    """How many ids of the input each entry of the batch stands for, int32 [E].

    With weight 1 everywhere and summed, the gain of an entry is that number: exact
    up to 2**24 equal ids in one sample. It costs a second sort, so it is for batches
    that will be cut.
    """
    plain = [dataclasses.replace(feature, weights=None) for feature in features]
    gains = active_kernel()(plain, _summed(layout)).gains
    return np.nan_to_num(gains, nan=0).astype(np.int32)


@functools.lru_cache(maxsize=8)
def _summed(layout: StackedLayout) -> StackedLayout:
    stacks = tuple(dataclasses.replace(s, combiner="sum") for s in layout.stacks)
    return dataclasses.replace(layout, stacks=stacks)


def cut_batch(
    batch: PartitionedBatch,
    ceilings: np.ndarray,
    *,
    layout: StackedLayout,
    order: Literal["prefix", "balanced"] = "prefix",
    step: int = 0,
) -> tuple[PartitionedBatch, DropCounts]:
    """The batch without the entries that do not fit ``ceilings``.

    Per partition, at most ``max_ids`` entries and ``max_unique`` distinct embedding ids
    stay: the first in the order of the format (``"prefix"``), or the first from a point
    that depends on ``step`` (``"balanced"``), going round at the end. Where the
    partitions of a SparseCore then still need more slots than there may be, the fullest
    are cut to one height, a multiple of 8.

    Args:
        batch: The batch. Its ``raw_counts``, where present, say how many ids of the
            input each entry stands for; else each stands for one.
        ceilings: int64 [stacks, 3], the largest limits there may be.
        layout: The stacks.
        order: See above.
        step: Number of the batch, for ``"balanced"``.

    Returns:
        The batch itself where it fits, or a new one; what was lost.
    """
    lost = DropCounts.zeros(len(layout.features))
    if not (batch.stats > ceilings).any():
        return batch, lost
    counts = partition_counts(batch, layout)
    touched = np.zeros(
        (layout.topology.local_sc_count, layout.samples_per_sc_per_feature), bool
    )
    parts = []
    stats = batch.stats.copy()
    row_pointers = batch.row_pointers.copy()
    for stack in layout.stacks:
        arrays = StackArrays.of(batch, stack, layout)
        if (batch.stats[stack.index] > ceilings[stack.index]).any():
            starts, keep = _what_stays(
                arrays, *counts[stack.index], ceilings[stack.index], layout, order, step
            )
            mask = arrays.mask(starts, keep)
            count_lost(lost, touched, arrays, mask, stack, layout)
            arrays = arrays.only(mask, keep, layout)
            row_pointers[stack.index] = arrays.row_pointers
        parts.append(arrays)
        stats[stack.index, 2] = (
            arrays.embedding_ids.shape[1] * layout.topology.num_sc_per_device
        )
    lost = dataclasses.replace(lost, examples=np.int32(touched.sum()))
    cut = dataclasses.replace(
        batch,
        embedding_ids=_join(p.embedding_ids for p in parts),
        sample_ids=_join(p.sample_ids for p in parts),
        gains=_join(p.gains for p in parts),
        row_pointers=row_pointers,
        stats=stats,
        raw_counts=None,
    )
    for stack, (ids, unique) in zip(
        layout.stacks, partition_counts(cut, layout), strict=True
    ):
        stats[stack.index, :2] = ids.max(), unique.max()
    return cut, lost


@dataclasses.dataclass(frozen=True)
class StackArrays:
    """The entries of one stack, [R, length]; row pointers [R, W]."""

    embedding_ids: np.ndarray
    sample_ids: np.ndarray
    gains: np.ndarray
    row_pointers: np.ndarray
    raw_counts: np.ndarray | None

    @classmethod
    def of(
        cls, batch: PartitionedBatch, stack: Stack, layout: StackedLayout
    ) -> "StackArrays":
        """The part of a batch that belongs to ``stack``."""

        def part(array: np.ndarray) -> np.ndarray:
            return segment(array, batch.stats, stack, layout)

        return cls(
            embedding_ids=part(batch.embedding_ids),
            sample_ids=part(batch.sample_ids),
            gains=part(batch.gains),
            row_pointers=batch.row_pointers[stack.index],
            raw_counts=None if batch.raw_counts is None else part(batch.raw_counts),
        )

    def mask(self, starts: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Which slots stay, bool [R, length]; starts and keep are [R, N]."""
        partitions = starts.shape[1]
        ends = self.row_pointers[:, :partitions].astype(np.int64)
        first = _aligned_starts(ends)
        count = ends - first
        # Partition of each slot: it changes at every aligned start.
        slots = np.arange(self.embedding_ids.shape[1])
        rows = np.arange(len(ends))[:, None]
        partition = np.array(
            [np.searchsorted(row, slots, side="right") - 1 for row in first]
        )
        index = slots - first[rows, partition]
        turned = (index - starts[rows, partition]) % np.maximum(
            count[rows, partition], 1
        )
        return (index < count[rows, partition]) & (turned < keep[rows, partition])

    def only(
        self, mask: np.ndarray, keep: np.ndarray, layout: StackedLayout
    ) -> "StackArrays":
        """The slots of ``mask``, laid out anew."""
        partitions = keep.shape[1]
        sizes = _align(keep)
        first = np.cumsum(sizes, axis=1) - sizes
        length = int((first[:, -1] + sizes[:, -1]).max())
        cores, _ = np.nonzero(mask)
        counts = keep.ravel()
        # Rank of each kept entry in its partition, in order of the partitions.
        before = np.cumsum(counts) - counts
        ranks = np.arange(counts.sum()) - np.repeat(before, counts)
        columns = ranks + np.repeat(first.ravel(), counts)

        def moved(array: np.ndarray, padding: Any) -> np.ndarray:
            result = np.full((len(keep), length), padding, array.dtype)
            result[cores, columns] = array[mask]
            return result

        row_pointers = np.empty_like(self.row_pointers)
        row_pointers[:, :partitions] = first + keep
        row_pointers[:, partitions:] = (first[:, -1:] + sizes[:, -1:]).astype(np.int32)
        return StackArrays(
            embedding_ids=moved(self.embedding_ids, PADDING_ID),
            sample_ids=moved(self.sample_ids, PADDING_ID),
            gains=moved(self.gains, PADDING_GAIN),
            row_pointers=row_pointers,
            raw_counts=None,
        )


def _what_stays(
    arrays: StackArrays,
    count: np.ndarray,
    distinct: np.ndarray,
    ceilings: np.ndarray,
    layout: StackedLayout,
    order: str,
    step: int,
) -> tuple[np.ndarray, np.ndarray]:
    """First entry that stays, and how many, of every (SparseCore, partition)."""
    max_ids, max_unique, size = (int(c) for c in ceilings)
    slots = size // layout.topology.num_sc_per_device
    fraction = step * _GOLDEN % 2**32 if order == "balanced" else 0
    starts = count.astype(np.int64) * fraction >> 32
    keep = np.minimum(count, max_ids).astype(np.int64)
    ends = arrays.row_pointers[:, : count.shape[1]]
    for core, partition in np.argwhere(distinct > max_unique).tolist():
        end, entries = int(ends[core, partition]), int(count[core, partition])
        ids = arrays.embedding_ids[core, end - entries : end]
        turned = np.roll(ids, -int(starts[core, partition]))
        # Where the ids change; the change after max_unique of them ends the run.
        changes = np.flatnonzero(turned[1:] != turned[:-1]) + 1
        within = int(changes[max_unique - 1])
        keep[core, partition] = min(keep[core, partition], within)
    for row in keep:
        if _align(row).sum() > slots:
            row[:] = np.minimum(row, _heights(row, slots))
    starts[keep == count] = 0
    return starts, keep


def _heights(counts: np.ndarray, slots: int) -> np.ndarray:
    """Height, a multiple of 8, to cut each partition to so that all fit ``slots``.

    One height for all, as large as possible; what is then left of the slots goes to
    the first of the partitions that were cut, 8 each.
    """
    sizes = _align(counts)
    low, high = 0, int(sizes.max()) // ALIGNMENT
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(sizes, middle * ALIGNMENT).sum() <= slots:
            low = middle
        else:
            high = middle - 1
    heights = np.full(counts.shape, low * ALIGNMENT, np.int64)
    left = (slots - int(np.minimum(sizes, heights).sum())) // ALIGNMENT
    heights[np.flatnonzero(sizes > heights)[:left]] += ALIGNMENT
    return heights


def count_lost(
    lost: DropCounts,
    touched: np.ndarray,
    arrays: StackArrays,
    mask: np.ndarray,
    stack: Stack,
    layout: StackedLayout,
) -> None:
    """Adds what ``mask`` leaves out to ``lost`` and ``touched`` [R, n]."""
    cores, columns = np.nonzero(~mask & (arrays.sample_ids != PADDING_ID))
    samples = arrays.sample_ids[cores, columns]
    per_core = layout.samples_per_sc_per_feature
    position, sample = np.divmod(samples, per_core)
    indices = np.array([f.index for f in stack.features])[position]
    raw = (
        np.ones(len(cores), np.int64)
        if arrays.raw_counts is None
        else arrays.raw_counts[cores, columns]
    )
    features = len(layout.features)
    lost.per_feature[:, 0] += np.bincount(indices, raw, features).astype(np.int32)
    lost.per_feature[:, 1] += np.bincount(indices, minlength=features).astype(np.int32)
    weights = np.abs(arrays.gains[cores, columns])
    lost.lost_weight[:] += np.bincount(indices, weights, features).astype(np.float32)
    touched[cores, sample] = True
    whole = np.unique(np.stack([indices, cores, sample]), axis=1)[0]
    lost.per_feature[:, 2] += np.bincount(whole, minlength=features).astype(np.int32)


def _align(counts: np.ndarray) -> np.ndarray:
    return (counts + (ALIGNMENT - 1)) & -ALIGNMENT


def _aligned_starts(ends: np.ndarray) -> np.ndarray:
    starts = np.zeros_like(ends)
    starts[:, 1:] = _align(ends[:, :-1])
    return starts


def _join(parts: Any) -> np.ndarray:
    return np.concatenate([p.ravel() for p in parts])
