"""From the ids of a batch to its `PartitionedBatch`, and measures of the latter."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from grain_sparsecore.buffers import PADDING_ID, PartitionedBatch
from grain_sparsecore.kernels import active_kernel
from grain_sparsecore.stacking import ALIGNMENT, StackedLayout

if TYPE_CHECKING:
    from grain_sparsecore.features import FeatureIds


def partition_batch(
    features: "Sequence[FeatureIds]",
    layout: StackedLayout,
    *,
    counters: np.ndarray,
    num_samples: int,
) -> PartitionedBatch:
    """Sorts, merges, counts and aligns the ids of one batch.

    Inside a SparseCore entries are ordered by partition, embedding id and sample.
    Ids that occur more than once in a sample become one entry; its gain is their
    float32 sum in the order of the input. A sample gets gain 0 where the combiner
    would divide by 0, or where its divisor, or a weight over it, overflows float32;
    where sums of gains would, `read_features` has made its weights 0.

    Args:
        features: Ids, row splits and weights in the order of ``layout.features``,
            checked and padded to ``layout.batch_size`` samples.
        layout: The stacks.
        counters: int32 [F, C], passed on.
        num_samples: Samples that are not padding, at most ``layout.batch_size``.

    Returns:
        The batch, without limits.
    """
    devices = layout.topology.local_device_count
    per_device = layout.batch_size // devices
    first = np.arange(devices) * per_device
    return PartitionedBatch(
        *active_kernel()(features, layout),
        counters=counters,
        num_valid_samples=np.clip(num_samples - first, 0, per_device).astype(np.int32),
    )


def partition_counts(
    batch: PartitionedBatch, layout: StackedLayout
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Entries and distinct embedding ids of every (SparseCore, partition).

    Returns:
        For each stack two int32 arrays [R, N]: entries, distinct embedding ids.
    """
    partitions = layout.topology.num_partitions
    cores = layout.topology.local_sc_count
    lengths = segment_lengths(batch.stats, layout)
    result = []
    first = 0
    for ends, length in zip(batch.row_pointers, lengths.tolist(), strict=True):
        ends = ends[:, :partitions]
        starts = np.zeros_like(ends)
        starts[:, 1:] = _align(ends[:, :-1])
        ids = batch.embedding_ids[first : first + cores * length]
        first += cores * length
        result.append((ends - starts, _distinct(ids, starts, ends, length)))
    return result


def _distinct(
    ids: np.ndarray, starts: np.ndarray, ends: np.ndarray, length: int
) -> np.ndarray:
    """Distinct ids in [start, end) of each segment; equal ids are neighbours."""
    base = np.arange(len(starts), dtype=np.int64)[:, None] * length
    new = np.ones(ids.size, bool)
    np.not_equal(ids[1:], ids[:-1], out=new[1:])
    new &= ids != PADDING_ID
    # Two partitions may follow one another without a gap, and the second may begin
    # with the embedding id that the first ends with.
    new[(starts + base)[ends > starts]] = True
    before = np.zeros(ids.size + 1, np.int32)
    np.cumsum(new, out=before[1:])
    return before[ends + base] - before[starts + base]


def required_per_sc(batch: PartitionedBatch, layout: StackedLayout) -> np.ndarray:
    """Slots that each SparseCore fills, partitions aligned: int32 [T, R]."""
    last = batch.row_pointers[:, :, layout.topology.num_partitions - 1]
    return _align(last)


def segment_lengths(stats: np.ndarray, layout: StackedLayout) -> np.ndarray:
    """Slots of one segment of each stack, int64 [T].

    All segments of a stack have the length of its longest, which is what the
    statistics say: required slots per device over the SparseCores per device.
    """
    return stats[:, 2].astype(np.int64) // layout.topology.num_sc_per_device


def _align(ends: np.ndarray) -> np.ndarray:
    return (ends + (ALIGNMENT - 1)) & -ALIGNMENT
