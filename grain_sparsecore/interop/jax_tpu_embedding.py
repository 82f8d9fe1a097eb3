"""Layouts from the specs of jax-tpu-embedding, and buffers back to it.

The specs are read and written by their attributes; the package itself is imported
only to build its ``PreprocessedInput``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.errors import ConfigError, MissingExtraError
from grain_sparsecore.interop.spec_trees import (
    FeatureOptions,
    Leaf,
    as_layout,
    check_options,
    feature_spec,
    flatten_tree,
    host_batch_size,
    optimizer_labels,
    table_spec,
    unique_tables,
    with_start_limits,
)
from grain_sparsecore.limits import Limits
from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import Stack, StackedLayout, make_stack

_TABLE_FIELDS = (
    "vocabulary_size",
    "embedding_dim",
    "combiner",
    "optimizer",
    "max_ids_per_partition",
    "max_unique_ids_per_partition",
)


def layout_from_feature_specs(
    feature_specs: Any,
    topology: Topology,
    *,
    batch_size: int | None = None,
    read_limits: bool = True,
    feature_options: FeatureOptions | None = None,
) -> StackedLayout:
    """The layout of a tree of jax-tpu-embedding ``FeatureSpec`` objects.

    Stacks, offsets and rotations are those in the specs, whether ``stack_tables``,
    ``auto_stack_tables`` or ``prepare_feature_specs_for_training`` put them there. A
    table that none of them has touched is placed as the last one would.

    Args:
        feature_specs: Dicts, lists and tuples of ``FeatureSpec``, nested as you like.
        topology: The devices; those for which the specs were prepared.
        batch_size: Samples per host. Needed only where ``output_shape`` leaves the
            global batch open.
        read_limits: Start from the limits in the specs: ids and unique ids per
            partition, and the buffer that jax-tpu-embedding would allocate for them.
            ``False`` starts from the smallest buffers and lets the data decide.
        feature_options: By feature name, fields of our `FeatureSpec` that the tree
            cannot express: ``{"item": {"ids": "clicks", "weights": "dwell"}}``. By
            default the ids are at the feature's place in the tree
            (``"user/history"``), or under its name where lists lead to it.

    Raises:
        ConfigError: Names collide, the specs were prepared for another topology, a
            part of a stack is missing, or a size does not fit.
    """
    leaves = flatten_tree(
        feature_specs, required=("name", "table_spec", "output_shape")
    )
    options = feature_options or {}
    check_options(leaves, options)
    size = host_batch_size(leaves, topology, batch_size)
    tables = unique_tables(leaves, lambda spec: spec.table_spec, _TABLE_FIELDS)
    stack_of = {name: _stack_name(table) for name, table in tables.items()}
    labels = optimizer_labels(
        tables, key=lambda one: one, kind=lambda one: one.short_name()
    )
    ours = {
        name: table_spec(table, optimizer=labels[name], stack=stack_of[name])
        for name, table in tables.items()
    }
    groups: dict[str, list[str]] = {}
    for name, stack in stack_of.items():
        groups.setdefault(stack, []).append(name)

    stacks: list[Stack] = []
    first = 0
    for index, stack_name in enumerate(sorted(groups)):
        members = sorted(groups[stack_name], key=lambda name: _row_offset(tables[name]))
        mine = sorted(
            (leaf for leaf in leaves if leaf.spec.table_spec.name in members),
            key=_feature_order,
        )
        stack = make_stack(
            stack_name,
            index,
            first,
            [ours[name] for name in members],
            [feature_spec(leaf, leaf.spec.table_spec.name, options) for leaf in mine],
            topology,
            size,
            _rotation([tables[name] for name in members]),
        )
        if _is_prepared(tables[members[0]]):
            _check_prepared(stack, [tables[name] for name in members], mine, topology)
        if read_limits:
            # One record for the whole stack; a table of its own, where unprepared.
            table = tables[members[0]]
            source = table.stacked_table_spec if _is_prepared(table) else table
            stack = with_start_limits(
                stack,
                max_ids=source.max_ids_per_partition,
                max_unique_ids=source.max_unique_ids_per_partition,
                suggested=source.suggested_coo_buffer_size_per_device,
                topology=topology,
            )
        stacks.append(stack)
        first += len(stack.features)
    return as_layout(stacks, topology=topology, batch_size=size)


def _is_prepared(table: Any) -> bool:
    return bool(table.is_stacked())


def _stack_name(table: Any) -> str:
    return table.stacked_table_spec.stack_name if _is_prepared(table) else table.name


def _row_offset(table: Any) -> int:
    return int(table.setting_in_stack.row_offset_in_shard)


def _feature_order(leaf: Leaf) -> tuple[int, str]:
    # Unprepared features take the order that preparation gives them: their names'.
    prepared = _is_prepared(leaf.spec.table_spec)
    offset = int(leaf.spec.id_transformation.row_offset) if prepared else 0
    return offset, leaf.spec.name


def _rotation(members: Sequence[Any]) -> int:
    """Partitions between one table and the next; the second table tells."""
    if len(members) < 2:
        return 0
    return int(members[1].setting_in_stack.shard_rotation)


def _check_prepared(
    stack: Stack, tables: Sequence[Any], leaves: Sequence[Leaf], topology: Topology
) -> None:
    """Raises unless the specs say what our arithmetic says for this topology."""

    def check(owner: str, field: str, theirs: Any, ours: Any) -> None:
        if theirs != ours:
            raise ConfigError(
                f"{owner} (stack {stack.name!r}): {field}={theirs} in the specs, but "
                f"{ours} for {topology.global_device_count} devices with "
                f"{topology.num_sc_per_device} SparseCores each and "
                f"{stack.samples_per_sc} samples per SparseCore. Prepare the specs "
                "for this topology, and pass the whole tree that was prepared."
            )

    for placed, table in zip(stack.tables, tables, strict=True):
        owner, setting = f"table {table.name!r}", table.setting_in_stack
        check(
            owner,
            "padded_vocab_size",
            setting.padded_vocab_size,
            placed.padded_vocabulary_size,
        )
        check(
            owner,
            "row_offset_in_shard",
            setting.row_offset_in_shard,
            placed.row_offset_in_shard,
        )
        check(owner, "shard_rotation", setting.shard_rotation, placed.shard_rotation)
    for placed, leaf in zip(stack.features, leaves, strict=True):
        owner, theirs = f"feature {leaf.spec.name!r}", leaf.spec.id_transformation
        for field in ("row_offset", "col_offset", "col_shift"):
            check(owner, field, getattr(theirs, field), getattr(placed, field))
    whole = tables[0].stacked_table_spec
    owner = f"stack {stack.name!r}"
    check(owner, "stack_vocab_size", whole.stack_vocab_size, stack.vocabulary_size)
    check(owner, "combiner", whole.combiner, stack.combiner)
    samples = stack.samples_per_sc * topology.num_partitions
    check(owner, "total_sample_count", whole.total_sample_count, samples)


def update_feature_specs(feature_specs: Any, limits: Limits) -> None:
    """Writes agreed limits into prepared specs of jax-tpu-embedding, in place.

    After it, ``preprocess_sparse_dense_matmul_input`` and the lookup of
    jax-tpu-embedding work with buffers of exactly the sizes of ours. Both are compiled
    for the limits in the specs: call this where `SparseCoreInput.limits` changes, and
    let the step be traced again.

    Args:
        feature_specs: The tree of ``FeatureSpec`` objects.
        limits: Limits by stack name; every stack of the tree must be in it.

    Raises:
        ConfigError: The specs are not prepared, or a stack has no limits.
    """
    leaves = flatten_tree(feature_specs, required=("name", "table_spec"))
    updated = []
    for leaf in leaves:
        table = leaf.spec.table_spec
        if not _is_prepared(table):
            raise ConfigError(
                f"feature {leaf.spec.name!r}: table {table.name!r} is not prepared; "
                "call prepare_feature_specs_for_training first."
            )
        stacked = table.stacked_table_spec
        if stacked.stack_name not in limits:
            raise ConfigError(
                f"feature {leaf.spec.name!r}: there are no limits for stack "
                f"{stacked.stack_name!r}; known: {sorted(limits)}."
            )
        agreed = limits[stacked.stack_name]
        new = dataclasses.replace(
            stacked,
            max_ids_per_partition=agreed.max_ids_per_partition,
            max_unique_ids_per_partition=agreed.max_unique_ids_per_partition,
            suggested_coo_buffer_size_per_device=agreed.buffer_size_per_device,
        )
        updated.append((table, new))
    # All or nothing: a tree that is half updated would be compiled like that.
    for table, new in updated:
        table.stacked_table_spec = new


def to_jax_tpu_embedding(
    sparsecore_input: SparseCoreInput, *, has_leading_dimension: bool = False
) -> Any:
    """The ``PreprocessedInput`` of jax-tpu-embedding over the same memory.

    NumPy arrays are viewed, never copied. Inside ``jax.jit`` and for global arrays it
    is a reshape that merges the device axis.

    Args:
        sparsecore_input: Buffers of one host, or global arrays made of them.
        has_leading_dimension: Keep the device axis, for ``jax.pmap``; without it, the
            arrays are flat, for ``jax.jit`` and ``jax.shard_map``.

    Returns:
        ``PreprocessedInput``: per stack row_pointers [L * S * W] (64 times as many
        with minibatching, for ``enable_minibatching=True``), the other three
        [L * size], num_minibatches [L]; with the device axis [L, S * W], [L, size]
        and [L, 1].

    Raises:
        MissingExtraError: jax-tpu-embedding is not installed.
    """
    try:
        from jax_tpu_embedding.sparsecore.lib.nn import embedding
    except ImportError as error:
        raise MissingExtraError(
            "to_jax_tpu_embedding needs jax-tpu-embedding (Linux on x86-64): "
            "pip install 'grain_sparsecore[sparsecore]'."
        ) from error

    def arrays(by_stack: Mapping[str, Any]) -> dict[str, Any]:
        if has_leading_dimension:
            return dict(by_stack)
        return {name: array.reshape(-1) for name, array in by_stack.items()}

    num_minibatches = sparsecore_input.num_minibatches
    if has_leading_dimension:
        num_minibatches = num_minibatches.reshape(-1, 1)
    return embedding.PreprocessedInput(
        embedding.SparseDenseMatmulInput(
            lhs_row_pointers=arrays(sparsecore_input.row_pointers),
            lhs_embedding_ids=arrays(sparsecore_input.embedding_ids),
            lhs_sample_ids=arrays(sparsecore_input.sample_ids),
            lhs_gains=arrays(sparsecore_input.gains),
        ),
        num_minibatches,
    )
