"""The round in which hosts agree how the batches of a window are split.

It only happens in windows where a batch of some host is above a cap; the statistics of
the window say so on every host. Hosts that need no split follow those that do.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.coordination.frames import Exchange, Kind, Tag, exchange
from grain_sparsecore.dropping import DropCounts
from grain_sparsecore.minibatch import (
    SPLIT_BITS,
    Split,
    bucketed,
    leave_out,
    main_contributor_of_bucket,
    minibatch_count,
    needed_bits,
    slot_buckets,
    split_needs,
)
from grain_sparsecore.overflow import Excess, main_contributor
from grain_sparsecore.pipeline.coordinate_options import CoordinateOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSplits:
    """How the batches of one window are split.

    Attributes:
        bits: uint8 [batches, 63], equal on all hosts.
        splits: Of every batch this host has.
        drops: What each of them loses; None where nothing may be dropped.
        needs: int32 [T, 3], agreed: entries and distinct ids of the fullest bucket,
            and slots of a device, of the batches that are split.
        needs_here: int32 [batches of this host, T, 3], the same of each batch.
    """

    bits: np.ndarray
    splits: Sequence[Split]
    drops: Sequence[DropCounts | None]
    needs: np.ndarray
    needs_here: np.ndarray

    def of(self, position: int) -> Split:
        """The split of a batch of the window; also of one this host must make up."""
        if position < len(self.splits):
            return self.splits[position]
        bits = self.bits[position]
        return Split(bits=bits, buckets=np.zeros(0, np.uint8) if bits.any() else None)


def needs_split(needed: np.ndarray, ceilings: np.ndarray) -> bool:
    """Whether a batch has more entries or distinct ids than a minibatch may have."""
    return bool((needed[:, :2] > ceilings[:, :2]).any())


def needed_of_buckets(
    needed: np.ndarray, splits: WindowSplits, ceilings: np.ndarray
) -> np.ndarray:
    """What limits must hold once batches are split, int32 [T, 3].

    Args:
        needed: int32 [T, 3], agreed, of the batches as they are.
        splits: How they are split; no bucket is above a ceiling.
        ceilings: int64 [T, 3].
    """
    needed = needed.copy()
    needed[:, :2] = np.minimum(needed[:, :2], ceilings[:, :2])
    return np.maximum(needed, splits.needs)


class SplitTotals:
    """What was split so far; equal on all hosts.

    Attributes:
        batches: Batches that were handed on, by their number of minibatches.
        extra_slots: Slots per device by which the splits of a window made its batches
            larger, the most of all windows; over all stacks.
    """

    def __init__(self) -> None:
        self.batches: collections.Counter[int] = collections.Counter()
        self.extra_slots = 0

    def add_batch(self, batch: PartitionedBatch) -> None:
        """Counts a batch that is handed on."""
        split = batch.split
        self.batches[1 if split is None else minibatch_count(split.bits)] += 1

    def add_window(self, needed: np.ndarray, splits: WindowSplits) -> None:
        """Counts a window with splits; ``needed`` as for `needed_of_buckets`."""
        more = splits.needs[:, 2].astype(np.int64) - needed[:, 2]
        self.extra_slots = max(self.extra_slots, int(more.clip(0).sum()))


def agree_on_splits(
    batches: Sequence[PartitionedBatch],
    ceilings: np.ndarray,
    *,
    count: int,
    tag: Tag,
    options: CoordinateOptions,
) -> Exchange[WindowSplits]:
    """Splits the batches of a window as all hosts need it.

    Args:
        batches: Those this host has of the first ``count`` of the window.
        ceilings: int64 [stacks, 3], equal on all hosts.
        count: Batches that all hosts hand on.
        tag: Of the window.
        options: Of the pipeline.
    """
    layout = options.layout
    buckets: dict[int, np.ndarray] = {}
    mine = np.zeros((options.window, SPLIT_BITS), np.int32)
    for i, batch in enumerate(batches):
        if needs_split(batch.stats, ceilings):
            buckets[i] = slot_buckets(batch, layout)
            mine[i] = needed_bits(batch, buckets[i], ceilings, layout)
    split_tag = dataclasses.replace(tag, kind=Kind.SPLIT)
    agreed = yield from exchange(split_tag, mine.ravel())
    bits = agreed.reshape(mine.shape)[:count].astype(np.uint8)
    may_drop = options.overflow.on_full_bucket == "drop"
    splits: list[Split] = []
    drops: list[DropCounts | None] = []
    needs = np.zeros((len(batches), len(layout.stacks), 3), np.int32)
    for i, batch in enumerate(batches):
        lost = DropCounts.zeros(len(layout.features)) if may_drop else None
        if not bits[i].any():
            splits.append(Split.none())
            drops.append(lost)
            continue
        found = buckets[i] if i in buckets else slot_buckets(batch, layout)
        if may_drop:
            found, lost = leave_out(batch, found, ceilings, layout)
        for stack in layout.stacks:
            measured = bucketed(batch, found, stack, layout)
            needs[i, stack.index] = (
                measured.counts.max(),
                measured.unique.max(),
                split_needs(measured, bits[i], layout)[2],
            )
        splits.append(Split(bits=bits[i], buckets=found))
        drops.append(lost)
    needs_tag = dataclasses.replace(tag, kind=Kind.SPLIT_NEEDS)
    most = needs.max(axis=0, initial=0).ravel()
    agreed = yield from exchange(needs_tag, most)
    return WindowSplits(
        bits=bits,
        splits=splits,
        drops=drops,
        needs=agreed.reshape(needs.shape[1:]),
        needs_here=needs,
    )


def fullest(
    splits: WindowSplits,
    batches: Sequence[PartitionedBatch],
    excess: Excess,
    options: CoordinateOptions,
) -> tuple[int, int, int, float] | None:
    """Where this host needs most of what is exceeded, as `Window.worst` says."""
    if not len(splits.needs_here):
        return None
    needs = splits.needs_here[:, excess.stack, excess.column]
    position = int(needs.argmax())
    batch, buckets = batches[position], splits.splits[position].buckets
    if excess.column == 2 or buckets is None:
        found = main_contributor(batch, excess, options.layout)
    else:
        found = main_contributor_of_bucket(batch, buckets, excess, options.layout)
    return position, int(needs[position]), *found
