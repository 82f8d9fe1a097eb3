"""Buffers of batches that may be split: a regrouping of entries, never a sort of ids.

The order is SparseCore, minibatch, partition, bucket, embedding id, sample id. Each
(SparseCore, minibatch, partition) starts at a multiple of 8, right behind the one
before it, and row pointers count from the start of the device's buffer.
"""

import math

import numpy as np

from grain_sparsecore.buffers import PADDINGS, PartitionedBatch, SparseCoreInput
from grain_sparsecore.errors import LimitsExceededError
from grain_sparsecore.kernels.passes import pack
from grain_sparsecore.limits import STAT_FIELDS, Limits, StackLimits
from grain_sparsecore.minibatch.buckets import BUCKETS, Bucketed, bucketed
from grain_sparsecore.minibatch.splits import (
    Split,
    minibatch_count,
    minibatch_of_bucket,
)
from grain_sparsecore.overflow import segment
from grain_sparsecore.slots import empty_slots, scratch
from grain_sparsecore.stacking import ALIGNMENT, Stack, StackedLayout

# The embedding ids, sample ids and gains of one stack, [L, size] each.
Slots = tuple[np.ndarray, ...]


def repartition_split(
    batch: PartitionedBatch, limits: Limits, layout: StackedLayout
) -> SparseCoreInput:
    """Lays a batch with a `Split` out in buffers of the sizes that ``limits`` say.

    Row pointers have a place for 64 minibatches, [L, S * 64 * W]. Those of the S * K
    minibatches come first; the rest point behind the last one, which makes them empty.

    Args:
        batch: The batch; its ``split`` says which minibatches it has.
        limits: Limits of every stack of ``layout``, for each minibatch.
        layout: The stacks, equal to those the batch was made with.

    Raises:
        LimitsExceededError: A minibatch, or all of a device, needs more than a limit.
    """
    split: Split = batch.split
    devices = layout.topology.local_device_count
    # One piece of memory for all stacks: asking for it takes a while.
    sizes = [limits[name].buffer_size_per_device for name in layout.stack_names]
    all_slots = empty_slots(devices * sum(sizes))
    shape = (
        len(layout.stacks),
        devices,
        layout.topology.num_sc_per_device * BUCKETS,
        layout.row_pointers_per_sc,
    )
    all_pointers = scratch(math.prod(shape), np.int32).reshape(shape)
    end = 0
    row_pointers: dict[str, np.ndarray] = {}
    buffers: tuple[dict[str, np.ndarray], ...] = ({}, {}, {})
    for stack, size, pointers in zip(layout.stacks, sizes, all_pointers, strict=True):
        agreed = limits[stack.name]
        if split.buckets is None:
            entries = _Whole(batch, stack, layout)
        else:
            entries = _Regrouped(batch, split, stack, layout)
        _check(entries.needs, agreed, stack)
        start, end = end, end + devices * size
        slots = tuple(x[start:end].reshape(devices, size) for x in all_slots)
        entries.fill(slots, pointers)
        row_pointers[stack.name] = pointers.reshape(devices, -1)
        for by_name, array in zip(buffers, slots, strict=True):
            by_name[stack.name] = array
    embedding_ids, sample_ids, gains = buffers
    return SparseCoreInput(
        row_pointers=row_pointers,
        embedding_ids=embedding_ids,
        sample_ids=sample_ids,
        gains=gains,
        num_minibatches=np.full(devices, minibatch_count(split.bits), np.int32),
        num_valid_samples=np.array(batch.num_valid_samples),
        counters=np.array(batch.counters),
        limits=limits,
        drops=batch.drops,
    )


def _check(needs: tuple[int, int, int], limits: StackLimits, stack: Stack) -> None:
    allowed = (
        limits.max_ids_per_partition,
        limits.max_unique_ids_per_partition,
        limits.buffer_size_per_device,
    )
    for field, need, limit in zip(STAT_FIELDS, needs, allowed, strict=True):
        if need > limit:
            raise LimitsExceededError(
                f"stack {stack.name!r}: a minibatch of the batch needs {field}={need}, "
                f"but the limit is {limit}; agree on the split and on larger limits "
                "first (CoordinateLimitsIterDataset does)."
            )


def split_needs(
    found: Bucketed, bits: np.ndarray, layout: StackedLayout
) -> tuple[int, int, int]:
    """What a stack of a split batch needs, in the order of STAT_FIELDS.

    Entries and distinct ids are those of the fullest (SparseCore, minibatch,
    partition), slots those of the fullest device.
    """
    counts = _per_minibatch(found.counts, bits, layout)
    unique = _per_minibatch(found.unique, bits, layout)
    by_device = _align(counts).reshape(layout.topology.local_device_count, -1)
    return int(counts.max()), int(unique.max()), int(by_device.sum(axis=1).max())


def _per_minibatch(
    counts: np.ndarray, bits: np.ndarray, layout: StackedLayout
) -> np.ndarray:
    """From [R * N, 64] to [R, K, N]."""
    starts = np.flatnonzero(np.diff(minibatch_of_bucket(bits), prepend=np.uint8(255)))
    merged = np.add.reduceat(counts, starts, axis=1)
    shape = (layout.topology.local_sc_count, layout.topology.num_partitions, -1)
    return merged.reshape(shape).transpose(0, 2, 1)


class _Regrouped:
    """One stack of a batch of several minibatches."""

    def __init__(
        self, batch: PartitionedBatch, split: Split, stack: Stack, layout: StackedLayout
    ) -> None:
        self._found = bucketed(batch, split.buckets, stack, layout)
        self._sources = _segments(batch, stack, layout)
        self._bits = split.bits
        self._layout = layout
        self.needs = split_needs(self._found, split.bits, layout)

    def fill(self, slots: Slots, pointers: np.ndarray) -> None:
        """Fills the buffers, and row pointers int32 [L, S * 64, W]."""
        counts = _per_minibatch(self._found.counts, self._bits, self._layout)
        devices, size = slots[0].shape
        sizes = _align(counts)
        by_device = sizes.reshape(devices, -1)
        starts = np.cumsum(by_device, axis=1) - by_device
        order = self._order()
        flat = counts.ravel()
        before = np.cumsum(flat) - flat
        first = (starts + np.arange(devices)[:, None] * size).ravel()
        targets = np.repeat(first - before, flat) + np.arange(order.size)
        for target, source, padding in zip(slots, self._sources, PADDINGS, strict=True):
            target[:] = padding
            target.reshape(-1)[targets] = source.ravel()[order]
        starts = starts.reshape(counts.shape)
        last = starts[:, :, -1:] + sizes[:, :, -1:]
        _fill_pointers(pointers, starts + counts, last)

    def _order(self) -> np.ndarray:
        """The slots of the entries in their new order, int64 [n]."""
        found = self._found
        partitions = self._layout.topology.num_partitions
        core, partition = np.divmod(found.cells.astype(np.int64), partitions)
        minibatch = minibatch_of_bucket(self._bits)[found.buckets]
        group = core * minibatch_count(self._bits) + minibatch
        group = (group * partitions + partition) * BUCKETS + found.buckets
        # The position in the low bits keeps the order inside a group, and numpy sorts
        # plain numbers several times faster than it sorts stably.
        width = int(found.positions.size).bit_length()
        keys = group << width
        keys |= np.arange(keys.size)
        keys.sort()
        keys &= (1 << width) - 1
        return found.positions[keys]


class _Whole:
    """One stack of a batch of one minibatch: segments are copied as they are."""

    def __init__(
        self, batch: PartitionedBatch, stack: Stack, layout: StackedLayout
    ) -> None:
        devices = layout.topology.local_device_count
        ends = batch.row_pointers[stack.index, :, : layout.topology.num_partitions]
        self._ends = ends.astype(np.int64)
        self._lengths = _align(self._ends[:, -1]).reshape(devices, -1)
        self._sources = _segments(batch, stack, layout)
        self._layout = layout
        ids, unique, _ = batch.stats[stack.index].tolist()
        self.needs = (ids, unique, int(self._lengths.sum(axis=1).max()))

    def fill(self, slots: Slots, pointers: np.ndarray) -> None:
        """Fills the buffers, and row pointers int32 [L, S * 64, W]."""
        lengths = self._lengths
        starts = np.cumsum(lengths, axis=1) - lengths
        pack(self._sources, slots, lengths)
        starts, last = starts.reshape(-1, 1), (starts + lengths).reshape(-1, 1)
        _fill_pointers(pointers, (self._ends + starts)[:, None], last[:, None])


def _fill_pointers(pointers: np.ndarray, ends: np.ndarray, last: np.ndarray) -> None:
    """Fills row pointers from the ends [R, K, N] and aligned ends [R, K, 1]."""
    devices = len(pointers)
    partitions = ends.shape[2]
    used = ends.shape[0] * ends.shape[1] // devices
    shape = (devices, used, -1)
    pointers[:, :used, :partitions] = ends.reshape(shape)
    pointers[:, :used, partitions:] = last.reshape(shape)
    pointers[:, used:] = last.reshape(shape)[:, -1:]


def _segments(
    batch: PartitionedBatch, stack: Stack, layout: StackedLayout
) -> tuple[np.ndarray, ...]:
    arrays = batch.embedding_ids, batch.sample_ids, batch.gains
    return tuple(segment(array, batch.stats, stack, layout) for array in arrays)


def _align(counts: np.ndarray) -> np.ndarray:
    return (counts + (ALIGNMENT - 1)) & -ALIGNMENT
