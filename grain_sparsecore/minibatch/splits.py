"""Which buckets make a minibatch: a binary tree whose set nodes are boundaries.

Where the two children of a node together are above a limit, the node is set, and the
larger child goes on up; otherwise their sum does. Bits are OR-ed over everything, so
every host draws the same boundaries, and a minibatch fits wherever its buckets do.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.minibatch.buckets import BUCKETS, bucketed
from grain_sparsecore.stacking import StackedLayout

# Nodes of the tree, level by level: 32 pairs of buckets, then 16, 8, 4, 2 and 1.
SPLIT_BITS = BUCKETS - 1


@dataclasses.dataclass(frozen=True)
class Split:
    """How one batch is split, in a pipeline where batches may be.

    Attributes:
        bits: uint8 [63], the agreed nodes; all 0 for a batch that is not split.
        buckets: uint8 [E], the bucket of every slot; None for a batch that is not
            split.
    """

    bits: Any
    buckets: Any = None

    @classmethod
    def none(cls) -> "Split":
        """One minibatch."""
        return cls(bits=np.zeros(SPLIT_BITS, np.uint8))


jax.tree_util.register_dataclass(Split, data_fields=["bits", "buckets"], meta_fields=[])


def split_bits(counts: np.ndarray, limit: int) -> np.ndarray:
    """The nodes that ``limit`` sets.

    Args:
        counts: int64 [n, 64], entries, or distinct ids, of every bucket.
        limit: What a minibatch may have of them.

    Returns:
        uint8 [63], 1 where any of the n trees has the node set.
    """
    bits = []
    level = counts
    while level.shape[1] > 1:
        left, right = level[:, ::2], level[:, 1::2]
        total = left + right
        over = total > limit
        bits.append(over.any(axis=0))
        level = np.where(over, np.maximum(left, right), total)
    return np.concatenate(bits).astype(np.uint8)


def needed_bits(
    batch: PartitionedBatch,
    buckets: np.ndarray,
    ceilings: np.ndarray,
    layout: StackedLayout,
) -> np.ndarray:
    """The nodes that one host's batch sets, uint8 [63].

    Args:
        batch: The batch.
        buckets: uint8 [E], of its slots.
        ceilings: [stacks, 2 or more], largest ids and distinct ids per partition.
        layout: The stacks.
    """
    bits = np.zeros(SPLIT_BITS, np.uint8)
    for stack in layout.stacks:
        most = ceilings[stack.index]
        if not (batch.stats[stack.index, :2] > most[:2]).any():
            continue
        found = bucketed(batch, buckets, stack, layout)
        for counts, limit in zip((found.counts, found.unique), most, strict=False):
            # No node of any other tree can be set.
            above = counts[counts.sum(axis=1) > limit]
            bits |= split_bits(above, int(limit))
    return bits


def minibatch_count(bits: np.ndarray) -> int:
    """K, from 1 to 64."""
    return int(np.sum(bits)) + 1


def minibatch_of_bucket(bits: np.ndarray) -> np.ndarray:
    """The minibatch of every bucket, uint8 [64], from 0 to K - 1 in order."""
    begins = np.zeros(BUCKETS, np.uint8)
    first, size = 0, 2
    while size <= BUCKETS:
        nodes = BUCKETS // size
        # A node over [i, i + size) draws its boundary in the middle.
        begins[size // 2 :: size] = bits[first : first + nodes]
        first += nodes
        size *= 2
    return np.cumsum(begins, dtype=np.uint8)
