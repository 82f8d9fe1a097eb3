"""Layouts from the configs of keras-rs, and buffers in the form its layer takes.

Configs are read by their attributes. keras-rs itself is imported only to build its
``ShardedCooMatrix``, keras only to look up an optimizer given by name.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.errors import ConfigError, InputError, MissingExtraError
from grain_sparsecore.grouping import (
    DEFAULT_ACTIVATION_BYTES_LIMIT,
    auto_stack_name,
    group_tables,
)
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
from grain_sparsecore.specs import ALIGNMENT, AUTO_STACK, Topology
from grain_sparsecore.stacking import StackedLayout, make_stack

_TABLE_FIELDS = (
    "vocabulary_size",
    "embedding_dim",
    "combiner",
    "max_ids_per_partition",
    "max_unique_ids_per_partition",
)
# Beside the learning rate, what the layer keeps of each optimizer and its subclasses.
_OPTIMIZER_OPTIONS = {
    "SGD": (),
    "Adagrad": ("initial_accumulator_value",),
    "Adam": ("beta_1", "beta_2", "epsilon"),
    "Ftrl": (
        "learning_rate_power",
        "l1_regularization_strength",
        "l2_regularization_strength",
        "beta",
        "initial_accumulator_value",
    ),
}
_PLACEMENTS = ("auto", "sparsecore", "default_device")


def layout_from_feature_configs(
    feature_configs: Any,
    topology: Topology,
    *,
    table_stacking: str | Sequence[str] | Sequence[Sequence[str]] | None = "auto",
    batch_size: int | None = None,
    read_limits: bool = True,
    feature_options: FeatureOptions | None = None,
) -> StackedLayout:
    """The layout that ``keras_rs.layers.DistributedEmbedding`` gives its SparseCores.

    Args:
        feature_configs: The ``FeatureConfig`` objects as the layer takes them: dicts,
            lists and tuples. Those whose table has ``placement="default_device"`` are
            left out; ``"auto"`` counts as on SparseCore.
        topology: The devices the layer will run on.
        table_stacking: As for the layer: ``"auto"``, names of tables, lists of names,
            or None for no stacking.
        batch_size: Samples per host. Needed only where ``output_shape`` leaves the
            global batch open.
        read_limits: Start from the limits of the ``TableConfig`` objects, for a stack
            the largest of them, as the layer does. ``False`` starts from the smallest
            buffers and lets the data decide.
        feature_options: By feature name, fields of our `FeatureSpec` that configs
            cannot express, as for ``layout_from_feature_specs``.

    Raises:
        ConfigError: Names collide or are unknown, tables cannot be stacked, nothing is
            placed on SparseCore, or a size does not fit.
    """
    leaves = [
        leaf
        for leaf in flatten_tree(
            _as_keras_walks(feature_configs),
            required=("name", "table", "output_shape"),
        )
        if _on_sparsecore(leaf)
    ]
    if not leaves:
        raise ConfigError(
            "feature tree: every table has placement='default_device', so nothing is "
            "left for SparseCore."
        )
    # The layer flattens its tree to a dict by dotted path, which JAX then sorts.
    leaves.sort(key=lambda leaf: ".".join(leaf.path))
    options = feature_options or {}
    check_options(leaves, options)
    size = host_batch_size(leaves, topology, batch_size)
    configs = unique_tables(leaves, lambda spec: spec.table, _TABLE_FIELDS)
    labels = optimizer_labels(
        configs, key=_optimizer_key, kind=lambda one: _optimizer(one).name
    )
    stack_of, order = _read_stacking(table_stacking, configs)
    tables = {
        name: table_spec(config, optimizer=labels[name], stack=stack_of[name])
        for name, config in configs.items()
    }
    features = [feature_spec(leaf, leaf.spec.table.name, options) for leaf in leaves]
    groups = group_tables(
        tables, features, topology, size, DEFAULT_ACTIVATION_BYTES_LIMIT
    )
    stacks = []
    first = 0
    for index, name in enumerate(sorted(groups)):
        members = groups[name]
        if name in order:
            members.sort(key=lambda table, name=name: order[name].index(table.name))
        ordered = features
        if members[0].stack is None:
            # Left to the layer's preparation, which orders by name.
            ordered = sorted(features, key=lambda feature: feature.name)
        stack = make_stack(
            name,
            index,
            first,
            members,
            ordered,
            topology,
            size,
            topology.num_sc_per_device,
        )
        if read_limits:
            mine = [configs[table.name] for table in members]
            stack = with_start_limits(
                stack,
                max_ids=max(t.max_ids_per_partition for t in mine),
                max_unique_ids=max(t.max_unique_ids_per_partition for t in mine),
                suggested=None,
                topology=topology,
            )
        stacks.append(stack)
        first += len(stack.features)
    return as_layout(stacks, topology=topology, batch_size=size)


def _as_keras_walks(tree: Any) -> Any:
    """Named tuples as plain ones: Keras counts their fields, where JAX has names."""
    if isinstance(tree, Mapping):
        return {key: _as_keras_walks(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        values = map(_as_keras_walks, tree)
        return tuple(values) if isinstance(tree, tuple) else list(values)
    return tree


def _on_sparsecore(leaf: Leaf) -> bool:
    placement = leaf.spec.table.placement
    if placement not in _PLACEMENTS:
        raise ConfigError(
            f"table {leaf.spec.table.name!r}: placement={placement!r} is not one of "
            f"{', '.join(_PLACEMENTS)}."
        )
    return placement != "default_device"


def _optimizer(optimizer: Any) -> Any:
    if not isinstance(optimizer, str):
        return optimizer
    try:
        import keras
    except ImportError as error:
        raise MissingExtraError(
            f"optimizer {optimizer!r} is given by name, which needs keras: "
            "pip install 'grain_sparsecore[keras-rs]'."
        ) from error
    return keras.optimizers.get(optimizer)


def _optimizer_key(optimizer: Any) -> Any:
    """What the layer compares: of an optimizer, it keeps what SparseCore can do."""
    optimizer = _optimizer(optimizer)
    with warnings.catch_warnings():
        # It reads the learning rate in a way that NumPy 2 warns about.
        warnings.simplefilter("ignore", DeprecationWarning)
        options = optimizer.get_config()
    for base in type(optimizer).__mro__:
        if base.__name__ in _OPTIMIZER_OPTIONS:
            kept = [options[name] for name in _OPTIMIZER_OPTIONS[base.__name__]]
            # Schedules are equal where they are one object.
            rate = getattr(optimizer, "_learning_rate", None)
            rate = rate if callable(rate) else options["learning_rate"]
            return base.__name__, rate, *kept
    # The layer refuses others.
    options.pop("name", None)
    kind = type(optimizer).__name__
    return kind + json.dumps(options, sort_keys=True, default=str)


def _read_stacking(
    table_stacking: Any, configs: Mapping[str, Any]
) -> tuple[dict[str, str | None], dict[str, list[str]]]:
    """Stack of each table (None: its own), and the tables of the stacks by hand."""
    if table_stacking is None or table_stacking == AUTO_STACK:
        return dict.fromkeys(configs, table_stacking), {}
    if isinstance(table_stacking, str):
        raise ConfigError(
            f"table_stacking={table_stacking!r}: the only text is 'auto'; otherwise "
            "give lists of table names, or None."
        )
    groups = [list(group) for group in table_stacking if not isinstance(group, str)]
    names = [name for name in table_stacking if isinstance(name, str)]
    if names:
        groups.append(names)
    stack_of: dict[str, str | None] = dict.fromkeys(configs)
    order = {}
    for group in groups:
        stack = auto_stack_name(group)
        order[stack] = group
        for name in group:
            if name not in configs:
                raise ConfigError(
                    f"table_stacking: there is no table {name!r} on SparseCore; "
                    f"known: {sorted(configs)}."
                )
            if stack_of[name] is not None:
                raise ConfigError(f"table_stacking: table {name!r} is in two stacks.")
            stack_of[name] = stack
    return stack_of, order


def to_keras_rs(
    sparsecore_input: SparseCoreInput, *, for_layer: bool = False
) -> dict[str, Any]:
    """The preprocessed input of keras-rs over the same memory.

    The ids and gains are viewed, never copied; ``shard_starts`` is computed.

    Args:
        sparsecore_input: NumPy buffers of this host, before they go to its devices.
        for_layer: Wrap the result for ``DistributedEmbedding.__call__`` in place of
            what the layer's ``preprocess`` returns.

    Returns:
        ``{"inputs": {stack: ShardedCooMatrix}}`` with shard_starts int64
        [L * S * W], shard_ends int32 [L * S * W], col_ids (embedding ids) and row_ids
        (sample ids) int32 [L * size], values (gains) float32 [L * size]. With
        ``for_layer``, that under
        ``["preprocessed_inputs_per_placement"]["sparsecore"]``.

    Raises:
        InputError: The batch is split into minibatches.
        MissingExtraError: keras-rs or jax-tpu-embedding is not installed.
    """
    minibatches = int(np.max(sparsecore_input.num_minibatches))
    if minibatches > 1:
        raise InputError(
            f"to_keras_rs: the batch is split into {minibatches} minibatches, and "
            "keras-rs has none; set limits.on_overflow to 'error' or 'drop'."
        )
    try:
        from keras_rs.src.layers.embedding.jax.embedding_utils import ShardedCooMatrix
    except ImportError as error:
        raise MissingExtraError(
            "to_keras_rs needs keras-rs and jax-tpu-embedding (Linux on x86-64): "
            "pip install 'grain_sparsecore[keras-rs]'."
        ) from error
    matrices = {}
    for name, pointers in sparsecore_input.row_pointers.items():
        ends = np.asarray(pointers).reshape(-1)
        # int64 and the 0 in front are keras-rs's own; it counts on over the ends of
        # all SparseCores as if they were one.
        starts = np.zeros(len(ends), np.int64)
        starts[1:] = -(-ends[:-1] // ALIGNMENT) * ALIGNMENT
        matrices[name] = ShardedCooMatrix(
            shard_starts=starts,
            shard_ends=ends,
            col_ids=sparsecore_input.embedding_ids[name].reshape(-1),
            row_ids=sparsecore_input.sample_ids[name].reshape(-1),
            values=sparsecore_input.gains[name].reshape(-1),
        )
    inputs = {"inputs": matrices}
    if for_layer:
        return {"preprocessed_inputs_per_placement": {"sparsecore": inputs}}
    return inputs
