"""The bucket of every entry, and how full the buckets are."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from grain_sparsecore.buffers import PADDING_ID, PartitionedBatch
from grain_sparsecore.highway import highway_hash64
from grain_sparsecore.kernels import active_kernel
from grain_sparsecore.overflow import segment
from grain_sparsecore.stacking import ALIGNMENT, Stack, StackedLayout

# Buckets of a partition: the low 6 bits of a hash.
BUCKETS = 64

# The bucket of slots that hold no entry, or one that is left out.
LEFT_OUT = 64

# The key of the hash that jax-tpu-embedding takes; hosts may mix both.
_KEY = (0x4451E30F87DB9609, 0xCA7358A1FD2737F8, 0x4B2C991FCEE4FDEA, 0x0B2658E18326F6BA)


def slot_buckets(batch: PartitionedBatch, layout: StackedLayout) -> np.ndarray:
    """The bucket of every slot, uint8 [E]; `LEFT_OUT` where there is no entry.

    An id is hashed once for each SparseCore that has it, not once for each sample.
    """
    columns, counts = [], []
    for stack in layout.stacks:
        ids, cells, new = _slots(batch, stack, layout)
        first = np.flatnonzero(new)
        partitions = layout.topology.num_partitions
        # The bytes of an int32: of larger products the low ones, as in C.
        column = ids[first].astype(np.int64) * partitions + cells[first] % partitions
        columns.append(column.astype(np.uint32))
        # Equal ids are neighbours, so the slots up to the next one share its bucket.
        ends = np.append(first, ids.size)
        counts.append(np.diff(ends, prepend=0))
    hashed = (_hash()(np.concatenate(columns), _KEY) & np.uint64(BUCKETS - 1)).astype(
        np.uint8
    )
    result = []
    start = 0
    for column, count in zip(columns, counts, strict=True):
        of_stack = np.full(len(count), LEFT_OUT, np.uint8)
        of_stack[1:] = hashed[start : start + column.size]
        result.append(np.repeat(of_stack, count))
        start += column.size
    buckets = np.concatenate(result)
    buckets[np.equal(batch.sample_ids, PADDING_ID)] = LEFT_OUT
    return buckets


def _hash() -> Callable[[np.ndarray, Sequence[int]], np.ndarray]:
    if active_kernel().__module__.endswith(".fast"):
        from grain_sparsecore.highway_fast import highway_hash64 as fast

        return fast
    return highway_hash64


@dataclasses.dataclass(frozen=True)
class Bucketed:
    """The entries of one stack with their buckets, in the order of the format.

    A cell is a pair of a SparseCore and a partition: r * N + p.

    Attributes:
        positions: int64 [n], slots of the entries among the stack's R * length.
        cells: int32 [n], their cells.
        buckets: uint8 [n], their buckets.
        new: bool [n], whether an entry is the first of its embedding id in its cell.
        counts: int64 [R * N, 64], entries of every cell and bucket.
        unique: int64 [R * N, 64], distinct embedding ids there.
    """

    positions: np.ndarray
    cells: np.ndarray
    buckets: np.ndarray
    new: np.ndarray
    counts: np.ndarray
    unique: np.ndarray


def bucketed(
    batch: PartitionedBatch, buckets: np.ndarray, stack: Stack, layout: StackedLayout
) -> Bucketed:
    """Measures one stack of a batch.

    Args:
        batch: The batch.
        buckets: uint8 [E], as `slot_buckets` says; entries whose bucket is `LEFT_OUT`
            do not count.
        stack: The stack.
        layout: The stacks.
    """
    _, cells, new = _slots(batch, stack, layout)
    mine = segment(buckets, batch.stats, stack, layout).ravel()
    positions = np.flatnonzero(mine != LEFT_OUT)
    cells, new, mine = cells[positions], new[positions], mine[positions]
    shape = (layout.topology.local_sc_count * layout.topology.num_partitions, BUCKETS)
    places = cells.astype(np.int64) * BUCKETS + mine
    size = shape[0] * shape[1]
    return Bucketed(
        positions=positions,
        cells=cells,
        buckets=mine,
        new=new,
        counts=np.bincount(places, minlength=size).reshape(shape),
        unique=np.bincount(places[new], minlength=size).reshape(shape),
    )


def _slots(
    batch: PartitionedBatch, stack: Stack, layout: StackedLayout
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Embedding ids, cells, and where an embedding id begins, [R * length] each.

    Slots behind the last partition count to it.
    """
    partitions = layout.topology.num_partitions
    ids = segment(batch.embedding_ids, batch.stats, stack, layout)
    cores, length = ids.shape
    ends = batch.row_pointers[stack.index, :, :partitions].astype(np.int64)
    limits = (ends + (ALIGNMENT - 1)) & -ALIGNMENT
    limits[:, -1] = length
    sizes = np.diff(limits, axis=1, prepend=0)
    cells = np.repeat(np.arange(cores * partitions, dtype=np.int32), sizes.ravel())
    flat = ids.ravel()
    new = np.ones(flat.size, bool)
    np.not_equal(flat[1:], flat[:-1], out=new[1:])
    # A partition may begin with the embedding id that the one before it ends with.
    new[1:] |= cells[1:] != cells[:-1]
    new &= flat != PADDING_ID
    return flat, cells, new
