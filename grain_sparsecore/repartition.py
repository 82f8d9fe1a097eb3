"""From a `PartitionedBatch` and agreed limits to buffers: a copy, never a sort."""

import numpy as np

from grain_sparsecore.buffers import PartitionedBatch, SparseCoreInput
from grain_sparsecore.errors import LimitsExceededError
from grain_sparsecore.kernels.passes import lay_out
from grain_sparsecore.limits import Limits
from grain_sparsecore.minibatch import repartition_split
from grain_sparsecore.partition import segment_lengths
from grain_sparsecore.slots import empty_slots
from grain_sparsecore.stacking import StackedLayout


def repartition(
    batch: PartitionedBatch, limits: Limits, layout: StackedLayout
) -> SparseCoreInput:
    """Lays a batch out in buffers of the sizes that ``limits`` say.

    The layout inside one SparseCore does not depend on the limits, so each segment is
    copied to the start of its SparseCore's share and the rest is padded with
    INT32_MAX and NaN. Nothing of the result is memory of ``batch``, which may be shared
    with a worker process and goes back when nobody refers to it. A batch
    of a pipeline with minibatching, which has a ``split``, is laid out as
    `grain_sparsecore.minibatch.repartition_split` says.

    Args:
        batch: The batch.
        limits: Limits of every stack of ``layout``.
        layout: The stacks, equal to those the batch was made with.

    Raises:
        LimitsExceededError: The batch needs more than a limit.
    """
    if batch.split is not None:
        return repartition_split(batch, limits, layout)
    if np.any(batch.stats > limits.to_array()):
        raise LimitsExceededError(_what_exceeds(batch, limits, layout))
    topology = layout.topology
    devices = topology.local_device_count
    cores = topology.local_sc_count
    sizes = [limits[name].buffer_size_per_device for name in layout.stack_names]
    targets = empty_slots(sum(sizes) * devices)
    lengths = segment_lengths(batch.stats, layout)
    strides = np.array(sizes, np.int64) // topology.num_sc_per_device
    sources = (batch.embedding_ids, batch.sample_ids, batch.gains)
    lay_out(sources, targets, shares=cores, lengths=lengths, strides=strides)
    row_pointers: dict[str, np.ndarray] = {}
    buffers: tuple[dict[str, np.ndarray], ...] = ({}, {}, {})
    # A plain array, of which views cost less than of Grain's shared memory.
    all_pointers = np.array(batch.row_pointers)
    start = 0
    for name, size, pointers in zip(
        layout.stack_names, sizes, all_pointers, strict=True
    ):
        end = start + devices * size
        for target, by_name in zip(targets, buffers, strict=True):
            by_name[name] = target[start:end].reshape(devices, size)
        row_pointers[name] = pointers.reshape(devices, -1)
        start = end
    embedding_ids, sample_ids, gains = buffers
    return SparseCoreInput(
        row_pointers=row_pointers,
        embedding_ids=embedding_ids,
        sample_ids=sample_ids,
        gains=gains,
        num_minibatches=np.ones(devices, np.int32),
        num_valid_samples=np.array(batch.num_valid_samples),
        counters=np.array(batch.counters),
        limits=limits,
        drops=batch.drops,
    )


def _what_exceeds(
    batch: PartitionedBatch, limits: Limits, layout: StackedLayout
) -> str:
    allowed = limits.to_array()
    stack, column = (int(i) for i in np.argwhere(batch.stats > allowed)[0])
    name = layout.stacks[stack].name
    field = (
        "max_ids_per_partition",
        "max_unique_ids_per_partition",
        "buffer_size_per_device",
    )[column]
    return (
        f"stack {name!r}: the batch needs {field}={batch.stats[stack, column]}, but "
        f"the limit is {allowed[stack, column]}; agree on larger limits first "
        "(CoordinateLimitsIterDataset does) or raise the limit."
    )
