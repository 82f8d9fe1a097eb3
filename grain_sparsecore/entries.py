"""What each slot of the buffers means, read from the row pointers inside a JAX program.

Only row pointers decide: what unused slots hold does not matter.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.errors import InputError
from grain_sparsecore.minibatch import BUCKETS
from grain_sparsecore.stacking import ALIGNMENT, INT32_MAX, Stack, StackedLayout


@dataclasses.dataclass(frozen=True)
class Entries:
    """The slots of one stack, all arrays [D, groups, slots of a group].

    Without minibatching a group is a SparseCore, which has its own part of the buffer.
    With minibatching SparseCores share it, and a group is a device.

    Attributes:
        partitions: Partition of the slot.
        embedding_ids: Row on the partition.
        sample_ids: Sample in the group.
        gains: Factor of the row.
        valid: Whether the slot holds an entry; nothing else counts where it does not.
        samples_per_group: Samples of all features in a group.
    """

    partitions: jax.Array
    embedding_ids: jax.Array
    sample_ids: jax.Array
    gains: jax.Array
    valid: jax.Array
    samples_per_group: int

    @classmethod
    def read(
        cls, buffers: SparseCoreInput, stack: Stack, layout: StackedLayout
    ) -> "Entries":
        """Reads the buffers of D devices.

        Raises:
            InputError: The row pointers have another shape than the layout says.
        """
        cores = layout.topology.num_sc_per_device
        width = layout.row_pointers_per_sc
        pointers = jnp.asarray(buffers.row_pointers[stack.name])
        if pointers.ndim == 2 and pointers.shape[1] == cores * width:
            return cls._read_whole(pointers, buffers, stack, layout)
        if pointers.ndim == 2 and pointers.shape[1] == cores * BUCKETS * width:
            return cls._read_minibatches(pointers, buffers, stack, layout)
        raise InputError(
            f"stack {stack.name!r}: row_pointers have shape {pointers.shape}, not "
            f"[devices, {cores * width}] ({cores} SparseCores * {width} pointers), or "
            f"{BUCKETS} times that with minibatching; the buffers were made for "
            "another topology."
        )

    @classmethod
    def _read_whole(
        cls,
        pointers: jax.Array,
        buffers: SparseCoreInput,
        stack: Stack,
        layout: StackedLayout,
    ) -> "Entries":
        cores = layout.topology.num_sc_per_device
        partitions = layout.topology.num_partitions

        def per_sc(values: Any) -> jax.Array:
            values = jnp.asarray(values)
            return values.reshape(values.shape[0], cores, -1)

        embedding_ids = per_sc(buffers.embedding_ids[stack.name])
        ends = per_sc(pointers)[..., :partitions]
        slots = jnp.arange(embedding_ids.shape[-1], dtype=jnp.int32)
        # A slot belongs to the first partition whose aligned end lies behind it, and
        # holds an entry if it also lies before that partition's end.
        partition_of = jax.vmap(
            jax.vmap(lambda e: jnp.searchsorted(e, slots, side="right"))
        )(_aligned(ends)).astype(jnp.int32)
        end_of = jnp.take_along_axis(
            ends, jnp.minimum(partition_of, partitions - 1), axis=-1
        )
        return cls(
            partitions=partition_of,
            embedding_ids=embedding_ids,
            sample_ids=per_sc(buffers.sample_ids[stack.name]),
            gains=per_sc(buffers.gains[stack.name]),
            valid=(partition_of < partitions) & (slots < end_of),
            samples_per_group=stack.samples_per_sc,
        )

    @classmethod
    def _read_minibatches(
        cls,
        pointers: jax.Array,
        buffers: SparseCoreInput,
        stack: Stack,
        layout: StackedLayout,
    ) -> "Entries":
        cores, width = layout.topology.num_sc_per_device, layout.row_pointers_per_sc
        minibatches = jnp.asarray(buffers.num_minibatches).reshape(-1, 1)
        used = cores * minibatches * width
        index = jnp.arange(pointers.shape[1], dtype=jnp.int32)
        aligned = jnp.where(index < used, _aligned(pointers), INT32_MAX)
        embedding_ids = jnp.asarray(buffers.embedding_ids[stack.name])
        slots = jnp.arange(embedding_ids.shape[-1], dtype=jnp.int32)
        # As above, but over the (SparseCore, minibatch, partition) of a device. Row
        # pointers behind the partitions repeat the last aligned end: never the first.
        segment = jax.vmap(lambda e: jnp.searchsorted(e, slots, side="right"))(aligned)
        segment = segment.astype(jnp.int32)
        end_of = jnp.take_along_axis(
            pointers, jnp.minimum(segment, pointers.shape[1] - 1), axis=-1
        )
        core = segment // (width * minibatches)
        samples = jnp.asarray(buffers.sample_ids[stack.name])

        def grouped(values: Any) -> jax.Array:
            return jnp.asarray(values)[:, None]

        return cls(
            partitions=grouped(segment % width),
            embedding_ids=grouped(embedding_ids),
            sample_ids=grouped(core * stack.samples_per_sc + samples),
            gains=grouped(buffers.gains[stack.name]),
            valid=grouped((segment < used) & (slots < end_of)),
            samples_per_group=cores * stack.samples_per_sc,
        )

    def on_partitions(self, first: Any, count: int) -> "Entries":
        """Only the entries of ``count`` partitions, renumbered from 0."""
        partitions = self.partitions - first
        here = (partitions >= 0) & (partitions < count)
        return dataclasses.replace(self, partitions=partitions, valid=self.valid & here)


def _aligned(ends: jax.Array) -> jax.Array:
    return (ends + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
