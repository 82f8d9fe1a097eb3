"""From tables, features and a topology to the layout of the stacked buffers.

All of it is integer arithmetic on the declared sizes; nothing here looks at data.
The rules are those of jax-tpu-embedding's ``auto_stack_tables`` and of its feature
preparation, so that buffers made here fit tables prepared there.
"""

import dataclasses
import difflib
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from grain_sparsecore.errors import ConfigError
from grain_sparsecore.grouping import (
    DEFAULT_ACTIVATION_BYTES_LIMIT,
    group_tables,
    padded_dim,
)
from grain_sparsecore.specs import (
    ALIGNMENT,
    FeatureSpec,
    TableSpec,
    Topology,
    as_plain,
    round_up,
)

# Row pointers come in at least 8 per SparseCore, also where N is smaller.
MIN_ROW_POINTERS = 8

INT32_MAX = 2**31 - 1

_Spec = TypeVar("_Spec", TableSpec, FeatureSpec)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedTable:
    """One table and its place in a stack.

    Attributes:
        spec: The table as declared.
        padded_vocabulary_size: Rows after padding to a multiple of 8 * N.
        row_offset_in_shard: First row of the table in every partition's shard.
        shard_rotation: Partitions by which the table's shards are rotated.
    """

    spec: TableSpec
    padded_vocabulary_size: int
    row_offset_in_shard: int
    shard_rotation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedFeature:
    """One feature and its place in a stack.

    Attributes:
        spec: The feature as declared.
        table: The table it reads.
        index: Position in ``StackedLayout.features``; row of every per-feature array.
        row_offset: Sum of the global batch sizes of the features before it.
        col_offset: Offset of the table in the stack, in ids; a multiple of N.
        col_shift: Rotation of the table's shards, in partitions.
        sample_offset: Sample id, on each SparseCore, of its first sample there.
    """

    spec: FeatureSpec
    table: TableSpec
    index: int
    row_offset: int
    col_offset: int
    col_shift: int
    sample_offset: int

    @property
    def name(self) -> str:
        """Name of the feature."""
        return self.spec.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Tables that share one buffer, and the features that read them.

    Attributes:
        name: Key of the stack in every dictionary of buffers.
        index: Position in ``StackedLayout.stacks``; row of every per-stack array.
        combiner: Combiner of all its tables.
        tables: The tables, by row_offset_in_shard.
        features: The features, by row_offset.
        embedding_dim: Columns of the stacked table: the largest dimension of its
            tables, rounded up to a multiple of 8.
        vocabulary_size: Padded rows of all tables together, a multiple of 8 * N.
        samples_per_sc: Samples of all features on one SparseCore.
        start_max_ids_per_partition: Where that limit starts, and its floor.
        start_max_unique_ids_per_partition: Likewise.
        start_buffer_size_per_device: Likewise, in slots.
    """

    name: str
    index: int
    combiner: str
    tables: tuple[StackedTable, ...]
    features: tuple[StackedFeature, ...]
    embedding_dim: int
    vocabulary_size: int
    samples_per_sc: int
    start_max_ids_per_partition: int
    start_max_unique_ids_per_partition: int
    start_buffer_size_per_device: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedLayout:
    """The stacks of a model on a topology, for one batch size per host.

    Attributes:
        topology: The devices.
        batch_size: Samples per host and batch (B), the same for every feature.
        stacks: The stacks, sorted by name.
        features: Every feature once, in the order of the stacks and, inside a
            stack, of the row offsets.
    """

    topology: Topology
    batch_size: int
    stacks: tuple[Stack, ...]
    features: tuple[StackedFeature, ...]

    @functools.cached_property
    def stack_names(self) -> tuple[str, ...]:
        """Names of the stacks, sorted."""
        return tuple(stack.name for stack in self.stacks)

    @functools.cached_property
    def stack_by_name(self) -> Mapping[str, Stack]:
        """The stacks by name."""
        return {stack.name: stack for stack in self.stacks}

    @functools.cached_property
    def stack_of_feature(self) -> Mapping[str, Stack]:
        """The stack of each feature, by the feature's name."""
        return {f.name: stack for stack in self.stacks for f in stack.features}

    @property
    def samples_per_sc_per_feature(self) -> int:
        """n: samples of one feature on one SparseCore."""
        return self.batch_size // self.topology.local_sc_count

    @property
    def row_pointers_per_sc(self) -> int:
        """W: row pointers of one SparseCore, max(N, 8)."""
        return max(self.topology.num_partitions, MIN_ROW_POINTERS)

    def canonical(self) -> dict[str, Any]:
        """Everything that shapes the buffers, as a JSON-able dict.

        Two hosts whose ``canonical`` differ must not run together. Lists are in the
        order of the stacks, so the order of declaration does not matter.
        """
        topology = dict(as_plain(self.topology))
        return {
            "topology": topology,
            "batch_size": self.batch_size,
            "start_limits": {
                stack.name: [
                    stack.start_max_ids_per_partition,
                    stack.start_max_unique_ids_per_partition,
                    stack.start_buffer_size_per_device,
                ]
                for stack in self.stacks
            },
            "tables": {
                table.spec.name: {
                    **as_plain(table.spec),
                    "in_stack": stack.name,
                    "padded_vocabulary_size": table.padded_vocabulary_size,
                    "row_offset_in_shard": table.row_offset_in_shard,
                    "shard_rotation": table.shard_rotation,
                }
                for stack in self.stacks
                for table in stack.tables
            },
            "features": {
                feature.name: {
                    **as_plain(feature.spec),
                    "in_stack": stack.name,
                    "row_offset": feature.row_offset,
                    "col_offset": feature.col_offset,
                    "col_shift": feature.col_shift,
                }
                for stack in self.stacks
                for feature in stack.features
            },
        }

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for ``canonical()``."""
        text = json.dumps(self.canonical(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def theoretical_buffer_size(max_ids_per_partition: int, topology: Topology) -> int:
    """Slots per device in which any batch within ``max_ids_per_partition`` fits.

    format: every partition of every SparseCore, rounded up to 8 slots.
    """
    return (
        round_up(max_ids_per_partition, ALIGNMENT)
        * topology.num_sc_per_device
        * topology.num_partitions
    )


def max_ids_that_fit_int32(topology: Topology) -> int:
    """Largest ``max_ids_per_partition`` whose theoretical buffer fits int32."""
    per_id = topology.num_sc_per_device * topology.num_partitions
    return INT32_MAX // (per_id * ALIGNMENT) * ALIGNMENT


def check_batch_size(batch_size: int, topology: Topology) -> None:
    """Raises ConfigError unless a host's batch divides over its SparseCores."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise ConfigError(
            f"batch_size must be an integer (samples per host), not {batch_size!r}."
        )
    cores = topology.local_sc_count
    if batch_size < 1 or batch_size % cores:
        lower = batch_size // cores * cores
        nearest = f"{lower} and {lower + cores}" if lower > 0 else f"{cores}"
        raise ConfigError(
            f"batch_size={batch_size} (samples per host) does not divide over "
            f"{topology.local_device_count} local devices * "
            f"{topology.num_sc_per_device} SparseCores = {cores}; the nearest legal "
            f"sizes: {nearest}."
        )


def make_layout(
    tables: Iterable[TableSpec],
    features: Iterable[FeatureSpec],
    *,
    topology: Topology,
    batch_size: int,
    rotation: int | None = None,
    activation_bytes_limit: int = DEFAULT_ACTIVATION_BYTES_LIMIT,
) -> StackedLayout:
    """Stacks tables and features and computes every offset.

    Args:
        tables: The tables, in any order. Each must be read by a feature.
        features: The features, in any order.
        topology: The devices.
        batch_size: Samples per host and batch.
        rotation: Partitions by which each further table of a stack is rotated, so
            that the low ids of all tables do not meet in one partition. Defaults to
            the number of SparseCores per device.
        activation_bytes_limit: Bytes of activations per SparseCore at which
            ``stack="auto"`` starts another stack.

    Raises:
        ConfigError: Names collide or are unknown, the tables of a stack do not fit
            together, or a size does not divide or overflows int32.
    """
    check_batch_size(batch_size, topology)
    table_by_name = _unique_by_name(tables, "table")
    feature_by_name = _unique_by_name(features, "feature")
    _check_references(table_by_name, feature_by_name)

    # In the order of the features' names, as a prepared jax-tpu-embedding tree has
    # it: the order of declaration must not matter.
    ordered = [feature_by_name[name] for name in sorted(feature_by_name)]
    groups = group_tables(
        table_by_name, ordered, topology, batch_size, activation_bytes_limit
    )
    shift = topology.num_sc_per_device if rotation is None else rotation
    stacks: list[Stack] = []
    first = 0
    for index, name in enumerate(sorted(groups)):
        stacks.append(
            make_stack(
                name, index, first, groups[name], ordered, topology, batch_size, shift
            )
        )
        first += len(stacks[-1].features)
    return StackedLayout(
        topology=topology,
        batch_size=batch_size,
        stacks=tuple(stacks),
        features=tuple(f for stack in stacks for f in stack.features),
    )


def _unique_by_name(specs: Iterable[_Spec], kind: str) -> dict[str, _Spec]:
    by_name: dict[str, _Spec] = {}
    for spec in specs:
        other = by_name.get(spec.name)
        if other is not None:
            raise ConfigError(
                f"two {kind}s are named {spec.name!r}: {_differences(other, spec)}. "
                f"Give every {kind} a name of its own."
            )
        by_name[spec.name] = spec
    if not by_name:
        raise ConfigError(f"there is no {kind}; declare at least one.")
    return by_name


def _differences(one: TableSpec | FeatureSpec, two: TableSpec | FeatureSpec) -> str:
    first, second = as_plain(one), as_plain(two)
    parts = [
        f"{key} {first[key]!r} and {second[key]!r}"
        for key in first
        if first[key] != second[key]
    ]
    return "; ".join(parts) or "with equal fields"


def _check_references(
    tables: Mapping[str, TableSpec], features: Mapping[str, FeatureSpec]
) -> None:
    for feature in features.values():
        if feature.table not in tables:
            near = difflib.get_close_matches(feature.table, tables, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {sorted(tables)}."
            raise ConfigError(
                f"feature {feature.name!r}: there is no table {feature.table!r}; {hint}"
            )
    unread = sorted(set(tables) - {f.table for f in features.values()})
    if unread:
        raise ConfigError(
            f"table {unread[0]!r} is read by no feature; add a feature for it or "
            "remove the table."
        )


def make_stack(
    name: str,
    index: int,
    first_feature: int,
    members: Sequence[TableSpec],
    ordered: Sequence[FeatureSpec],
    topology: Topology,
    batch_size: int,
    rotation: int,
) -> Stack:
    """One stack from its tables, in order, and all features, in order.

    Args:
        name: Name of the stack.
        index: Its position among the stacks.
        first_feature: Features in the stacks before it.
        members: Its tables in the order in which they lie in the stack.
        ordered: All features; those that read a member take their places in the
            order in which they come.
        topology: The devices.
        batch_size: Samples per host and batch.
        rotation: Partitions by which each further table is rotated.

    Raises:
        ConfigError: The rows or the buffer overflow int32.
    """
    partitions = topology.num_partitions
    stacked: dict[str, StackedTable] = {}
    row = 0
    for position, table in enumerate(members):
        padded = round_up(table.vocabulary_size, ALIGNMENT * partitions)
        stacked[table.name] = StackedTable(
            spec=table,
            padded_vocabulary_size=padded,
            row_offset_in_shard=row,
            shard_rotation=position * rotation % partitions,
        )
        row += padded // partitions
    if row > INT32_MAX:
        raise ConfigError(
            f"stack {name!r}: {row} rows per partition do not fit int32; split the "
            "stack or use more partitions."
        )
    mine = [f for f in ordered if f.table in stacked]
    # bs of the format: what one SparseCore sees of all features of the stack.
    samples_per_sc = len(mine) * batch_size // topology.local_sc_count
    global_batch = batch_size * topology.num_hosts
    features = tuple(
        StackedFeature(
            spec=spec,
            table=stacked[spec.table].spec,
            index=first_feature + i,
            row_offset=i * global_batch,
            col_offset=stacked[spec.table].row_offset_in_shard * partitions,
            col_shift=stacked[spec.table].shard_rotation,
            sample_offset=i * global_batch // partitions % samples_per_sc,
        )
        for i, spec in enumerate(mine)
    )
    max_ids = sum(t.max_ids_per_partition for t in members)
    max_unique = sum(t.max_unique_ids_per_partition for t in members)
    return Stack(
        name=name,
        index=index,
        combiner=members[0].combiner,
        tables=tuple(stacked.values()),
        features=features,
        embedding_dim=max(padded_dim(t) for t in members),
        vocabulary_size=row * partitions,
        samples_per_sc=samples_per_sc,
        start_max_ids_per_partition=max_ids,
        start_max_unique_ids_per_partition=max_unique,
        start_buffer_size_per_device=_start_buffer(name, members, max_ids, topology),
    )


def _start_buffer(
    name: str, members: Sequence[TableSpec], max_ids: int, topology: Topology
) -> int:
    theoretical = theoretical_buffer_size(max_ids, topology)
    if theoretical > INT32_MAX:
        raise ConfigError(
            f"stack {name!r}: max_ids_per_partition={max_ids} needs a buffer of up to "
            f"{theoretical} slots per device (rounded up to 8, times "
            f"{topology.num_sc_per_device} SparseCores, times "
            f"{topology.num_partitions} partitions), which does not fit int32; the "
            f"largest value that fits is {max_ids_that_fit_int32(topology)}."
        )
    unit = ALIGNMENT * topology.num_sc_per_device
    suggested = [t.suggested_coo_buffer_size_per_device for t in members]
    size = round_up(max(sum(s or 0 for s in suggested), 1), unit)
    if size > theoretical:
        raise ConfigError(
            f"stack {name!r} (tables {[t.name for t in members]}): "
            f"suggested_coo_buffer_size_per_device={size} is above {theoretical}, "
            f"the most that max_ids_per_partition={max_ids} can fill; lower it or "
            "raise max_ids_per_partition."
        )
    return size
