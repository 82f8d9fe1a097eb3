"""Which tables form which stack: by name, or the way ``auto_stack_tables`` does it."""

import hashlib
from collections.abc import Mapping, Sequence

from grain_sparsecore.errors import ConfigError
from grain_sparsecore.specs import (
    ALIGNMENT,
    AUTO_STACK,
    FeatureSpec,
    TableSpec,
    Topology,
    round_up,
)

# Auto-stacking stops filling a stack where the activations of one SparseCore pass
# this many bytes; the default of jax-tpu-embedding 0.1.0.
DEFAULT_ACTIVATION_BYTES_LIMIT = 2048 * 1024

# Longer stack names are cut and get a hash, as in jax-tpu-embedding.
_MAX_STACK_NAME = 50
_STACK_NAME_HASH = 12


def group_tables(
    tables: Mapping[str, TableSpec],
    ordered: Sequence[FeatureSpec],
    topology: Topology,
    batch_size: int,
    activation_bytes_limit: int,
) -> dict[str, list[TableSpec]]:
    """Which tables form which stack; tables in the order their features come in."""
    in_order = [tables[name] for name in dict.fromkeys(f.table for f in ordered)]
    groups: dict[str, list[TableSpec]] = {}

    def add(name: str, members: list[TableSpec]) -> None:
        if name in groups:
            raise ConfigError(
                f"two stacks are named {name!r}: tables "
                f"{sorted(t.name for t in groups[name])} and "
                f"{sorted(t.name for t in members)}. A table without a stack gives "
                "its own name to its stack; rename one of them."
            )
        _check_stackable(name, members)
        groups[name] = members

    explicit: dict[str, list[TableSpec]] = {}
    automatic: dict[tuple[int, str, str], list[TableSpec]] = {}
    for table in in_order:
        if table.stack is None:
            add(table.name, [table])
        elif table.stack == AUTO_STACK:
            key = (padded_dim(table), table.optimizer, table.combiner)
            automatic.setdefault(key, []).append(table)
        else:
            explicit.setdefault(table.stack, []).append(table)
    for name, members in explicit.items():
        add(name, members)
    global_batch = batch_size * topology.num_hosts
    samples: dict[str, int] = {}
    for feature in ordered:
        per_sc = global_batch // topology.num_partitions
        samples[feature.table] = samples.get(feature.table, 0) + per_sc
    for members in automatic.values():
        for part in _first_fit(members, samples, activation_bytes_limit):
            add(auto_stack_name([t.name for t in part]), part)
    return groups


def _first_fit(
    tables: Sequence[TableSpec], samples: Mapping[str, int], limit: int
) -> list[list[TableSpec]]:
    """Puts each table into the first stack whose activations stay within ``limit``."""
    bins: list[list[TableSpec]] = []
    filled: list[int] = []
    for table in tables:
        size = padded_dim(table) * samples[table.name] * 4
        for i, used in enumerate(filled):
            if used + size <= limit:
                bins[i].append(table)
                filled[i] += size
                break
        else:
            bins.append([table])
            filled.append(size)
    return bins


def _check_stackable(name: str, tables: Sequence[TableSpec]) -> None:
    first = tables[0]
    for table in tables[1:]:
        for field, one, two in (
            ("embedding_dim rounded up to 8", padded_dim(first), padded_dim(table)),
            ("combiner", first.combiner, table.combiner),
            ("optimizer", first.optimizer, table.optimizer),
        ):
            if one != two:
                raise ConfigError(
                    f"stack {name!r}: tables {first.name!r} and {table.name!r} "
                    f"differ in {field} ({one!r} and {two!r}); tables of one stack "
                    "must agree. Give them different stacks."
                )


def padded_dim(table: TableSpec) -> int:
    """Columns of the table in a stack: its dimension rounded up to 8."""
    return round_up(table.embedding_dim, ALIGNMENT)


def auto_stack_name(table_names: Sequence[str]) -> str:
    """The name jax-tpu-embedding gives to a stack of these tables, in this order."""
    name = "_".join(table_names)
    if len(name) <= _MAX_STACK_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_STACK_NAME_HASH]
    return f"{name[:_MAX_STACK_NAME]}...{digest}"
