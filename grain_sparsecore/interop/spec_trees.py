"""Reading trees of foreign feature declarations, by their attributes alone."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from grain_sparsecore.errors import ConfigError
from grain_sparsecore.specs import (
    ALIGNMENT,
    FeatureSpec,
    TableSpec,
    Topology,
    round_up,
)
from grain_sparsecore.stacking import (
    INT32_MAX,
    Stack,
    StackedLayout,
    check_batch_size,
    max_ids_that_fit_int32,
    theoretical_buffer_size,
)

# What the caller may add to a feature that the foreign declaration does not know:
# where its ids are, and the policies of FeatureSpec.
FeatureOptions = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One feature of a foreign tree.

    Attributes:
        path: Keys from the root, as text: ``("user", "history")``.
        key: Key of its ids in a batch that has the shape of the tree.
        spec: The foreign object.
    """

    path: tuple[str, ...]
    key: str
    spec: Any


def flatten_tree(tree: Any, *, required: Sequence[str]) -> list[Leaf]:
    """The features of a tree of dicts, lists and tuples, in JAX's order.

    Args:
        tree: Dicts, lists and tuples of features, or a single one.
        required: Attributes every feature must have.

    Raises:
        ConfigError: There is no feature, a leaf is none, or two have one name.
    """
    leaves = []
    for keys, spec in jax.tree_util.tree_flatten_with_path(tree)[0]:
        missing = [name for name in required if not hasattr(spec, name)]
        if missing:
            raise ConfigError(
                f"feature tree: {jax.tree_util.keystr(keys)} is a "
                f"{type(spec).__name__} without {', '.join(missing)}; every leaf "
                "must be a feature specification."
            )
        leaves.append(Leaf(_path(keys), _batch_key(keys, spec.name), spec))
    if not leaves:
        raise ConfigError("feature tree: there is no feature in it.")
    seen: dict[str, Leaf] = {}
    for leaf in leaves:
        other = seen.setdefault(leaf.spec.name, leaf)
        if other is not leaf:
            raise ConfigError(
                f"two features are named {leaf.spec.name!r}, at "
                f"{'/'.join(other.path)!r} and {'/'.join(leaf.path)!r}; names must "
                "be unique."
            )
    return leaves


def _path(keys: Sequence[Any]) -> tuple[str, ...]:
    return tuple(
        str(next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a)))
        for k in keys
    )


def _batch_key(keys: Sequence[Any], name: str) -> str:
    # A batch is made of dicts, so only a path of dict keys can lead into it.
    parts = [k.key for k in keys if isinstance(k, jax.tree_util.DictKey)]
    if len(parts) != len(keys) or not all(isinstance(p, str) for p in parts):
        return name
    return "/".join(parts) or name


def host_batch_size(
    leaves: Sequence[Leaf], topology: Topology, batch_size: int | None
) -> int:
    """Samples per host, from the shapes of the features' activations.

    ``output_shape`` is [global samples, ..., columns]; where its first number is
    None, ``batch_size`` must be given.

    Raises:
        ConfigError: ``topology`` is no `Topology`, features disagree with each other or
            with ``batch_size``, or the batch does not divide over the hosts and their
            SparseCores.
    """
    if not isinstance(topology, Topology):
        raise ConfigError(
            f"topology: must be a Topology, not a {type(topology).__name__}; use "
            "Topology(...) or Topology.from_jax(...), or of a TopologyConfig what its "
            "resolve() returns."
        )
    if batch_size is not None:
        check_batch_size(batch_size, topology)
    expected = None if batch_size is None else batch_size * topology.num_hosts
    origin = f"batch_size={batch_size} on {topology.num_hosts} hosts"
    for leaf in leaves:
        shape = list(leaf.spec.output_shape)[:-1]
        if not shape or any(n is None for n in shape):
            continue
        samples = int(math.prod(shape))
        if expected is None:
            expected, origin = samples, f"feature {leaf.spec.name!r}"
        elif samples != expected:
            raise ConfigError(
                f"feature {leaf.spec.name!r}: output_shape="
                f"{tuple(leaf.spec.output_shape)} means {samples} samples in the "
                f"global batch, but {origin} means {expected}; every feature must "
                "have the same batch."
            )
    if expected is None:
        raise ConfigError(
            "feature tree: no output_shape names the batch size; pass batch_size "
            "(samples per host)."
        )
    size, rest = divmod(expected, topology.num_hosts)
    if rest:
        raise ConfigError(
            f"{origin}: {expected} samples in the global batch do not divide over "
            f"{topology.num_hosts} hosts."
        )
    check_batch_size(size, topology)
    return size


def optimizer_labels(
    tables: Mapping[str, Any], *, key: Callable[[Any], Any], kind: Callable[[Any], str]
) -> dict[str, str]:
    """A text for each table's optimizer; equal optimizers get equal texts.

    The texts follow the sorted names of the tables, so that all hosts find the same.

    Args:
        tables: Foreign tables by name.
        key: What makes two optimizers equal.
        kind: The text for an optimizer; further ones of the kind get a number.
    """
    known: list[tuple[Any, str]] = []
    labels = {}
    for name in sorted(tables):
        optimizer = tables[name].optimizer
        mine = key(optimizer)
        label = next((text for other, text in known if other == mine), None)
        if label is None:
            label = kind(optimizer)
            if any(text == label for _, text in known):
                label = f"{label}#{len(known)}"
            known.append((mine, label))
        labels[name] = label
    return labels


def unique_tables(
    leaves: Sequence[Leaf], table_of: Callable[[Any], Any], fields: Sequence[str]
) -> dict[str, Any]:
    """The foreign tables by name, in the order in which features read them.

    Raises:
        ConfigError: Two tables have one name and differ.
    """
    tables: dict[str, Any] = {}
    for leaf in leaves:
        table = table_of(leaf.spec)
        other = tables.setdefault(table.name, table)
        if other is table:
            continue
        for field in fields:
            one, two = getattr(other, field), getattr(table, field)
            if one != two:
                raise ConfigError(
                    f"two tables are named {table.name!r}: {field} {one!r} and "
                    f"{two!r} (feature {leaf.spec.name!r}); give every table a name "
                    "of its own."
                )
    return tables


def feature_spec(leaf: Leaf, table: str, options: FeatureOptions) -> FeatureSpec:
    """Our declaration of one foreign feature."""
    extra = dict(options.get(leaf.spec.name, {}))
    known = {field.name for field in dataclasses.fields(FeatureSpec)} - {
        "name",
        "table",
    }
    unknown = sorted(set(extra) - known)
    if unknown:
        raise ConfigError(
            f"feature_options[{leaf.spec.name!r}]: {unknown[0]!r} is not one of "
            f"{', '.join(sorted(known))}."
        )
    extra.setdefault("ids", leaf.key)
    return FeatureSpec(name=leaf.spec.name, table=table, **extra)


def check_options(leaves: Sequence[Leaf], options: FeatureOptions) -> None:
    """Checks options against features, and that no two read one column unasked.

    Raises:
        ConfigError: Options name a feature that does not exist, or two features have
            ids under one key, and nobody said so.
    """
    names = sorted(leaf.spec.name for leaf in leaves)
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise ConfigError(
            f"feature_options: there is no feature {unknown[0]!r}; known: {names}."
        )
    derived: dict[str, Leaf] = {}
    for leaf in leaves:
        if "ids" in options.get(leaf.spec.name, {}):
            continue
        other = derived.setdefault(leaf.key, leaf)
        if other is not leaf:
            raise ConfigError(
                f"features {other.spec.name!r} and {leaf.spec.name!r}, at "
                f"{other.path!r} and {leaf.path!r} of the tree, would both read their "
                f"ids from {leaf.key!r} of the batch; say where they are with "
                f"feature_options={{{leaf.spec.name!r}: {{'ids': ...}}}}."
            )


def table_spec(table: Any, *, optimizer: str, stack: str | None) -> TableSpec:
    """Our declaration of one foreign table, without its limits."""
    return TableSpec(
        name=table.name,
        vocabulary_size=int(table.vocabulary_size),
        embedding_dim=int(table.embedding_dim),
        combiner=table.combiner,
        optimizer=optimizer,
        stack=stack,
    )


def with_start_limits(
    stack: Stack,
    *,
    max_ids: int,
    max_unique_ids: int,
    suggested: int | None,
    topology: Topology,
) -> Stack:
    """The stack with foreign limits as where it starts.

    The buffer is the one jax-tpu-embedding allocates for them: ``suggested`` slots per
    device, rounded up to 8 per SparseCore, or without it whatever could be filled.

    Raises:
        ConfigError: The buffer overflows int32, or is larger than can be filled.
    """
    max_ids = max(1, int(max_ids))
    theoretical = theoretical_buffer_size(max_ids, topology)
    if theoretical > INT32_MAX:
        raise ConfigError(
            f"stack {stack.name!r}: max_ids_per_partition={max_ids} needs a buffer of "
            f"up to {theoretical} slots per device, which does not fit int32; the "
            f"largest value that fits is {max_ids_that_fit_int32(topology)}."
        )
    size = theoretical
    if suggested is not None:
        unit = ALIGNMENT * topology.num_sc_per_device
        size = round_up(max(1, int(suggested)), unit)
    if size > theoretical:
        raise ConfigError(
            f"stack {stack.name!r}: suggested_coo_buffer_size_per_device={suggested} "
            f"is above {theoretical}, the most that max_ids_per_partition={max_ids} "
            "can fill; lower it or raise max_ids_per_partition."
        )
    return dataclasses.replace(
        stack,
        start_max_ids_per_partition=max_ids,
        start_max_unique_ids_per_partition=max(1, int(max_unique_ids)),
        start_buffer_size_per_device=size,
    )


def as_layout(
    stacks: Sequence[Stack], *, topology: Topology, batch_size: int
) -> StackedLayout:
    """A layout of stacks that are sorted and numbered already."""
    return StackedLayout(
        topology=topology,
        batch_size=batch_size,
        stacks=tuple(stacks),
        features=tuple(f for stack in stacks for f in stack.features),
    )
