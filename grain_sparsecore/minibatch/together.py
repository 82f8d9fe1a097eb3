"""One step of all hosts at once, for those who predict it: no exchange is needed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.minibatch.buckets import bucketed, slot_buckets
from grain_sparsecore.minibatch.layout import split_needs
from grain_sparsecore.minibatch.overfull import leave_out
from grain_sparsecore.minibatch.splits import Split, needed_bits
from grain_sparsecore.stacking import StackedLayout


class StepSplit(NamedTuple):
    """How the batches of a step are split.

    Attributes:
        splits: Of the batch of each host.
        needs: int32 [T, 3], the most that a batch then needs of limits.
        lost: Entries that no split can hold, of all hosts.
    """

    splits: list[Split]
    needs: np.ndarray
    lost: int


def split_together(
    batches: Sequence[PartitionedBatch], ceilings: np.ndarray, layout: StackedLayout
) -> StepSplit:
    """Splits the batches of one step as their hosts would agree to.

    Args:
        batches: Of each host.
        ceilings: int64 [stacks, 3]; the last column is not looked at.
        layout: The stacks.
    """
    needs = np.max([batch.stats for batch in batches], axis=0)
    if (needs[:, :2] <= ceilings[:, :2]).all():
        return StepSplit([Split.none()] * len(batches), needs, 0)
    buckets = [slot_buckets(batch, layout) for batch in batches]
    bits = np.max(
        [
            needed_bits(batch, found, ceilings, layout)
            for batch, found in zip(batches, buckets, strict=True)
        ],
        axis=0,
    )
    needs = needs.copy()
    needs[:, :2] = np.minimum(needs[:, :2], ceilings[:, :2])
    lost = 0
    splits = []
    for batch, found in zip(batches, buckets, strict=True):
        found, drops = leave_out(batch, found, ceilings, layout)
        lost += int(drops.per_feature[:, 1].sum())
        for stack in layout.stacks:
            measured = bucketed(batch, found, stack, layout)
            slots = split_needs(measured, bits, layout)[2]
            needs[stack.index, 2] = max(needs[stack.index, 2], slots)
        splits.append(Split(bits=bits, buckets=found))
    return StepSplit(splits, needs, lost)
