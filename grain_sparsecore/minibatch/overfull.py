"""Buckets that alone are above a limit: where they are, and leaving out what is."""

import dataclasses

import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.dropping import DropCounts, StackArrays, count_lost
from grain_sparsecore.minibatch.buckets import BUCKETS, LEFT_OUT, Bucketed, bucketed
from grain_sparsecore.overflow import Excess, segment
from grain_sparsecore.stacking import StackedLayout


def main_contributor_of_bucket(
    batch: PartitionedBatch,
    buckets: np.ndarray,
    excess: Excess,
    layout: StackedLayout,
) -> tuple[int, float]:
    """The feature with most entries in the fullest bucket of a cell.

    Returns:
        Its index in ``layout.features``, and its share of the entries there.
    """
    stack = layout.stacks[excess.stack]
    found = bucketed(batch, buckets, stack, layout)
    counts = found.unique if excess.column else found.counts
    cell, bucket = divmod(int(counts.argmax()), BUCKETS)
    inside = found.positions[(found.cells == cell) & (found.buckets == bucket)]
    samples = segment(batch.sample_ids, batch.stats, stack, layout).ravel()[inside]
    per_feature = np.bincount(
        samples // layout.samples_per_sc_per_feature, minlength=len(stack.features)
    )
    most = int(per_feature.argmax())
    share = float(per_feature[most] / max(inside.size, 1))
    return stack.features[most].index, share


def leave_out(
    batch: PartitionedBatch,
    buckets: np.ndarray,
    ceilings: np.ndarray,
    layout: StackedLayout,
) -> tuple[np.ndarray, DropCounts]:
    """Leaves out what is too much for one bucket.

    Of every (SparseCore, partition, bucket) the first ``max_ids`` entries stay, and of
    those the first ``max_unique`` distinct embedding ids.

    Args:
        batch: The batch; it does not change.
        buckets: uint8 [E], of its slots.
        ceilings: int64 [stacks, 3], the largest limits there may be.
        layout: The stacks.

    Returns:
        The buckets, `LEFT_OUT` for entries that are; what was lost.
    """
    lost = DropCounts.zeros(len(layout.features))
    topology = layout.topology
    touched = np.zeros(
        (topology.local_sc_count, layout.samples_per_sc_per_feature), bool
    )
    buckets = buckets.copy()
    for stack in layout.stacks:
        if not (batch.stats[stack.index, :2] > ceilings[stack.index, :2]).any():
            continue
        found = bucketed(batch, buckets, stack, layout)
        gone = _too_much(found, *ceilings[stack.index, :2].tolist())
        if not gone.size:
            continue
        mine = segment(buckets, batch.stats, stack, layout)
        mine.reshape(-1)[gone] = LEFT_OUT
        stays = np.ones(mine.size, bool)
        stays[gone] = False
        arrays = StackArrays.of(batch, stack, layout)
        count_lost(lost, touched, arrays, stays.reshape(mine.shape), stack, layout)
    return buckets, dataclasses.replace(lost, examples=np.int32(touched.sum()))


def _too_much(found: Bucketed, max_ids: int, max_unique: int) -> np.ndarray:
    """Slots of the entries behind the prefix that stays, int64."""
    over = (found.counts > max_ids) | (found.unique > max_unique)
    places = found.cells.astype(np.int64) * BUCKETS + found.buckets
    inside = np.flatnonzero(over.ravel()[places])
    # Stable, so that the order of the format stays inside a bucket.
    inside = inside[np.argsort(places[inside], kind="stable")]
    counts = np.unique_counts(places[inside]).counts
    first = np.cumsum(counts) - counts
    rank = np.arange(inside.size) - np.repeat(first, counts)
    distinct = np.cumsum(found.new[inside])
    before = np.repeat(distinct[first] - 1, counts) if inside.size else distinct
    gone = (rank >= max_ids) | (distinct - before > max_unique)
    return found.positions[inside[gone]]
