"""Embedding lookup from SparseCore buffers in pure JAX, on any backend.

The tables are stacked and sharded as the SparseCore wants them: row ``id`` of a table
lives on partition ``(id + shard_rotation) mod N``, and a stacked table is the N shards
one after another. `shard_tables` and `unshard_tables` go there and back.

The same buffers serve two ways of placing the tables:

- `embedding_lookup` sees whole tables. It runs on one device, and under ``jax.jit``
  on arrays sharded over many, with every device holding all rows.
- `sharded_embedding_lookup` leaves each device only the partitions of its own
  SparseCores, as the hardware does: memory and optimizer work are split by the number
  of devices, and only entries and activations travel.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grain_sparsecore.buffers import SparseCoreInput, check_buffers
from grain_sparsecore.entries import Entries
from grain_sparsecore.errors import InputError, InputTypeError
from grain_sparsecore.stacking import Stack, StackedLayout


def embedding_lookup(
    tables: Mapping[str, Any],
    sparsecore_input: SparseCoreInput,
    layout: StackedLayout,
) -> dict[str, jax.Array]:
    """Looks up every feature of a batch.

    Differentiable with respect to ``tables`` and jit-able; padding slots, whose gains
    are NaN, reach neither values nor gradients. The arrays may hold the devices of one
    host or, as made by `to_global_arrays`, of all hosts: D is their leading axis.

    Args:
        tables: Stacked tables by stack name, [stack.vocabulary_size,
            stack.embedding_dim], sharded by row as `shard_tables` does.
        sparsecore_input: Buffers of D devices, with or without minibatching.
        layout: The layout that the buffers were made for. Buffers do not tell the
            batch size, so that one of another batch size is not refused: it gives
            wrong activations.

    Returns:
        Activations by feature name, [D * S * n, embedding_dim of its table]: the rows
        of the batch in their order, device by device, SparseCore by SparseCore.

    Raises:
        InputError: A table is missing or has another shape than the layout says, or
            the row pointers are those of another topology.
        InputTypeError: ``sparsecore_input`` is none, but the whole batch for one.
    """
    check_buffers(sparsecore_input, function="embedding_lookup")
    _check_present(tables, layout, function="embedding_lookup")
    activations = {}
    for stack in layout.stacks:
        table = tables[stack.name]
        _check_table(table, stack, stack.vocabulary_size)
        entries = Entries.read(sparsecore_input, stack, layout)
        shards = jnp.asarray(table).reshape(
            layout.topology.num_partitions, -1, stack.embedding_dim
        )
        activations[stack.name] = _combine(shards, entries, stack)
    return _by_feature(activations, layout)


def sharded_embedding_lookup(
    tables: Mapping[str, jax.Array],
    sparsecore_input: SparseCoreInput,
    layout: StackedLayout,
    *,
    mesh: Mesh,
    axis: str,
) -> dict[str, jax.Array]:
    """`embedding_lookup` with tables, buffers and results sharded over a mesh axis.

    Device d of the axis holds partitions [d * S, (d + 1) * S) of every table and the
    buffers of batch rows [d * S * n, (d + 1) * S * n). It gathers all devices' entries,
    adds up the rows it holds, and the sums of all devices are scattered back to the
    owners of the samples. The gradient of a table stays on the device that holds it.

    Args:
        tables: As for `embedding_lookup`, axis 0 sharded over ``axis``.
        sparsecore_input: Global arrays [G, ...], axis 0 sharded over ``axis``.
        layout: As for `embedding_lookup`.
        mesh: The devices; those of one host next to one another, in the order of the
            hosts.
        axis: Name of a mesh axis of ``layout.topology.global_device_count`` devices.

    Returns:
        Activations by feature name, [G * S * n, embedding_dim of its table], axis 0
        sharded over ``axis``.

    Raises:
        InputError: The mesh axis has another size than the layout says; otherwise as
            `embedding_lookup`.
        InputTypeError: Likewise.
    """
    check_buffers(sparsecore_input, function="sharded_embedding_lookup")
    devices = layout.topology.global_device_count
    if mesh.shape.get(axis) != devices:
        raise InputError(
            f"sharded_embedding_lookup: mesh axis {axis!r} has {mesh.shape.get(axis)} "
            f"devices, but the layout is for {devices}; use the mesh of the job that "
            "the layout was made for."
        )
    _check_present(tables, layout, function="sharded_embedding_lookup")
    sharded = PartitionSpec(axis)
    lookup = jax.shard_map(
        functools.partial(_lookup_on_one_device, layout=layout, axis=axis),
        mesh=mesh,
        in_specs=(sharded, sharded),
        out_specs=sharded,
    )
    return lookup(
        {name: tables[name] for name in layout.stack_names},
        without_counts(sparsecore_input),
    )


def _lookup_on_one_device(
    tables: dict[str, jax.Array],
    sparsecore_input: SparseCoreInput,
    *,
    layout: StackedLayout,
    axis: str,
) -> dict[str, jax.Array]:
    topology = layout.topology
    here = topology.num_sc_per_device
    gathered = jax.tree.map(
        lambda x: jax.lax.all_gather(x, axis, tiled=True), sparsecore_input
    )
    activations = {}
    for stack in layout.stacks:
        table = tables[stack.name]
        rows = stack.vocabulary_size // topology.global_device_count
        _check_table(table, stack, rows, hosts=topology.num_hosts, axis=axis)
        entries = Entries.read(gathered, stack, layout).on_partitions(
            jax.lax.axis_index(axis) * here, here
        )
        shards = table.reshape(here, -1, table.shape[-1])
        partial = _combine(shards, entries, stack)
        activations[stack.name] = jax.lax.psum_scatter(
            partial, axis, scatter_dimension=0, tiled=True
        )
    return _by_feature(activations, layout)


def _combine(shards: jax.Array, entries: Entries, stack: Stack) -> jax.Array:
    """Weighted sums of table rows.

    Args:
        shards: [partitions, rows, dim].
        entries: [D, groups, slots].
        stack: The stack.

    Returns:
        [D, S, samples of the stack on one SparseCore, dim].
    """
    valid = entries.valid
    # Out of range, so that the gather fills in zeros, its gradient and the sum below
    # drop the slot, and no real row is touched. Partition and row stay two indices:
    # their product may not fit int32.
    nowhere = shards.shape[0]
    rows = shards.at[
        jnp.where(valid, entries.partitions, nowhere),
        jnp.where(valid, entries.embedding_ids, 0),
    ].get(mode="fill", fill_value=0)
    gains = jnp.where(valid, entries.gains, 0)
    samples = jnp.where(valid, entries.sample_ids, entries.samples_per_group)
    add = functools.partial(jax.ops.segment_sum, num_segments=entries.samples_per_group)
    sums = jax.vmap(jax.vmap(add))(rows * gains[..., None], samples)
    return sums.reshape(sums.shape[0], -1, stack.samples_per_sc, sums.shape[-1])


def _by_feature(
    activations: Mapping[str, jax.Array], layout: StackedLayout
) -> dict[str, jax.Array]:
    """Cuts [D, S, samples, dim] of each stack into [D * S * n, dim] of each feature."""
    n = layout.samples_per_sc_per_feature
    result = {}
    for feature in layout.features:
        whole = activations[layout.stack_of_feature[feature.name].name]
        # sample_offset is a multiple of n below samples_per_sc: nothing wraps around.
        mine = whole[
            :,
            :,
            feature.sample_offset : feature.sample_offset + n,
            : feature.table.embedding_dim,
        ]
        result[feature.name] = mine.reshape(-1, feature.table.embedding_dim)
    return result


def _check_present(
    tables: Mapping[str, Any], layout: StackedLayout, *, function: str
) -> None:
    for name in layout.stack_names:
        if name not in tables:
            raise InputError(
                f"{function}: there is no table of stack {name!r}; got "
                f"{sorted(tables)}. Tables go by the name of their stack, as "
                "shard_tables returns them."
            )


def _check_table(
    table: Any, stack: Stack, rows: int, *, hosts: int = 1, axis: str = ""
) -> None:
    expected = (rows, stack.embedding_dim)
    if hosts > 1 and tuple(table.shape) == (rows * hosts, stack.embedding_dim):
        raise InputError(
            f"stack {stack.name!r}: a device has {rows * hosts} rows of the table, not "
            f"{rows}: {hosts} times too many, as if each of the {hosts} hosts had put "
            "its whole table behind the others'. to_global_arrays is for batches; "
            "tables, which every host has whole, go by jax.device_put(table, "
            f"NamedSharding(mesh, PartitionSpec({axis!r})))."
        )
    if tuple(table.shape) != expected:
        raise InputError(
            f"stack {stack.name!r}: the table has shape {tuple(table.shape)}, not "
            f"{expected} (padded rows, padded dimension); make it with shard_tables."
        )


def shard_tables(plain: Mapping[str, Any], layout: StackedLayout) -> dict[str, Any]:
    """Stacks and shards plain tables.

    Row ``id`` of a table goes to row ``p * (stack.vocabulary_size // N) +
    row_offset_in_shard + id // N`` of its stack, ``p = (id + shard_rotation) mod N``;
    rows and columns of padding are 0.

    Args:
        plain: Tables by name, [vocabulary_size, embedding_dim]; numpy or JAX arrays.
        layout: The stacks.

    Returns:
        By stack name, [stack.vocabulary_size, stack.embedding_dim], of the same kind
        of array.

    Raises:
        InputError: A table is missing or has another shape than its spec says.
    """
    partitions = layout.topology.num_partitions
    stacked = {}
    for stack in layout.stacks:
        shards = []
        for table in stack.tables:
            spec = table.spec
            if spec.name not in plain:
                raise InputError(
                    f"table {spec.name!r} is missing; got {sorted(plain)}."
                )
            rows = plain[spec.name]
            expected = (spec.vocabulary_size, spec.embedding_dim)
            if tuple(rows.shape) != expected:
                raise InputError(
                    f"table {spec.name!r} has shape {tuple(rows.shape)}, not "
                    f"{expected} (vocabulary_size, embedding_dim)."
                )
            xp = np if isinstance(rows, np.ndarray) else jnp
            padded = xp.pad(
                rows,
                (
                    (0, table.padded_vocabulary_size - spec.vocabulary_size),
                    (0, stack.embedding_dim - spec.embedding_dim),
                ),
            )
            by_partition = padded.reshape(-1, partitions, stack.embedding_dim)
            shard = xp.swapaxes(by_partition, 0, 1)
            shards.append(xp.roll(shard, table.shard_rotation, axis=0))
        xp = np if all(isinstance(s, np.ndarray) for s in shards) else jnp
        stacked[stack.name] = xp.concatenate(shards, axis=1).reshape(
            -1, stack.embedding_dim
        )
    return stacked


def unshard_tables(stacked: Mapping[str, Any], layout: StackedLayout) -> dict[str, Any]:
    """The inverse of `shard_tables`.

    Args:
        stacked: By stack name, [stack.vocabulary_size, stack.embedding_dim].
        layout: The stacks.

    Returns:
        By table name, [vocabulary_size, embedding_dim].

    Raises:
        InputError: A stacked table has another shape than the layout says.
    """
    partitions = layout.topology.num_partitions
    plain = {}
    for stack in layout.stacks:
        whole = stacked[stack.name]
        _check_table(whole, stack, stack.vocabulary_size)
        xp = np if isinstance(whole, np.ndarray) else jnp
        shards = whole.reshape(partitions, -1, stack.embedding_dim)
        for table in stack.tables:
            first = table.row_offset_in_shard
            rows = table.padded_vocabulary_size // partitions
            mine = xp.roll(
                shards[:, first : first + rows], -table.shard_rotation, axis=0
            )
            by_id = xp.swapaxes(mine, 0, 1).reshape(-1, stack.embedding_dim)
            plain[table.spec.name] = by_id[
                : table.spec.vocabulary_size, : table.spec.embedding_dim
            ]
    return plain


def without_counts(sparsecore_input: SparseCoreInput) -> SparseCoreInput:
    """The buffers without what was counted on the way, which no device needs."""
    return dataclasses.replace(sparsecore_input, counters=None, drops=None)


def to_global_arrays(batch: Any, mesh: Mesh, axis: str) -> Any:
    """Puts each host's batch on its devices, as one global batch.

    Every leaf becomes a ``jax.Array`` whose axis 0 is sharded over ``axis``: [B, ...]
    of each host becomes [hosts * B, ...], in the order of the hosts, and the [L, ...]
    of a `SparseCoreInput` [G, ...]. Its limits stay; ``counters`` and ``drops``,
    which count per host, become None. Nothing is sent between hosts.

    Args:
        batch: A pytree of arrays of numbers, such as what the pipeline yields.
        mesh: The devices; along ``axis``, those of one host next to one another, in
            the order of the hosts. Over its other axes a batch is repeated.
        axis: Name of the mesh axis.

    Raises:
        InputTypeError: A leaf is no array of numbers, for example of strings.
        InputError: A leaf does not divide over the devices of this host.
    """
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    local = _local_shards(sharding)

    def check(path: Any, leaf: Any) -> np.ndarray:
        values = np.asarray(leaf)
        where = f"leaf {jax.tree_util.keystr(path)} of the batch"
        if not _is_number(values.dtype):
            raise InputTypeError(
                f"{where} is an array of {values.dtype}, which cannot go to a device; "
                "leave it out."
            )
        if values.ndim == 0 or values.shape[0] % local:
            raise InputError(
                f"{where} has shape {values.shape}; axis 0 must divide by {local}, "
                f"the devices of this host along mesh axis {axis!r}."
            )
        return values

    batch = jax.tree.map(
        lambda x: without_counts(x) if isinstance(x, SparseCoreInput) else x,
        batch,
        is_leaf=lambda x: isinstance(x, SparseCoreInput),
    )
    batch = jax.tree_util.tree_map_with_path(check, batch)
    if sharding.is_fully_addressable:
        # All leaves in one call: half the work.
        return jax.device_put(batch, sharding)
    return jax.tree.map(
        lambda values: jax.make_array_from_process_local_data(sharding, values), batch
    )


def _local_shards(sharding: NamedSharding) -> int:
    """Into how many parts this host's share of axis 0 is cut."""
    indices = sharding.addressable_devices_indices_map((sharding.mesh.size,))
    return len({index[0].start for index in indices.values() if index is not None})


def _is_number(dtype: np.dtype) -> bool:
    # numpy knows nothing of bfloat16 and its kind.
    return dtype.kind in "biufc" or (
        dtype.kind == "V" and jnp.issubdtype(dtype, jnp.number)
    )
