"""Trees of jax-tpu-embedding's specs, and batches for them."""

from typing import Any

import jax
import numpy as np
from jax_tpu_embedding.sparsecore.lib.nn import (
    embedding,
    embedding_spec,
    table_stacking,
)

from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import StackedLayout

OPTIMIZERS = (
    embedding_spec.SGDOptimizerSpec(learning_rate=0.1),
    embedding_spec.AdagradOptimizerSpec(learning_rate=0.1),
    embedding_spec.AdagradOptimizerSpec(learning_rate=0.2),
)


def table_spec(name: str, vocabulary: int = 100, dim: int = 8, **kwargs: Any) -> Any:
    kwargs.setdefault("optimizer", OPTIMIZERS[0])
    kwargs.setdefault("combiner", "sum")
    return embedding_spec.TableSpec(
        name=name,
        vocabulary_size=vocabulary,
        embedding_dim=dim,
        initializer=jax.nn.initializers.zeros,
        **kwargs,
    )


def feature_spec(name: str, table: Any, global_batch: int = 16) -> Any:
    return embedding_spec.FeatureSpec(
        name=name,
        table_spec=table,
        input_shape=[global_batch, 4],
        output_shape=[global_batch, table.embedding_dim],
    )


def topology(devices: int = 1, local: int | None = None, sc: int = 2) -> Topology:
    return Topology(
        global_device_count=devices,
        local_device_count=local or devices,
        num_sc_per_device=sc,
    )


def nest(rng: np.random.Generator, features: list[Any], root: bool = True) -> Any:
    """The features in a random tree of dicts, lists and tuples."""
    # A bare array of weights at the root trips upstream's truth test of it.
    if len(features) == 1 and not root:
        return features[0]
    parts = [features]
    if len(features) > 2 and rng.random() < 0.7:
        cut = int(rng.integers(1, len(features)))
        parts = [features[:cut], features[cut:]]
    if len(parts) == 1:
        kind = rng.integers(0, 3)
        if kind == 0:
            return list(features)
        if kind == 1:
            return tuple(features)
        return {f.name: f for f in rng.permutation(np.array(features, object))}
    inner = [nest(rng, part, root=False) for part in parts]
    return inner if rng.random() < 0.3 else dict(zip(("y", "b"), inner, strict=True))


def random_specs(rng: np.random.Generator, top: Topology, global_batch: int) -> Any:
    """A tree prepared in one of the ways that jax-tpu-embedding offers."""
    alike = rng.random() < 0.7
    kinds = [
        (
            int(rng.choice([5, 8, 16])),
            OPTIMIZERS[rng.integers(0, 3)],
            str(rng.choice(["sum", "mean", "sqrtn"])),
        )
        for _ in range(5)
    ]
    tables = []
    for i in rng.permutation(int(rng.integers(1, 6))):
        dim, optimizer, combiner = kinds[0 if alike else i]
        tables.append(
            table_spec(
                f"t{i}",
                int(rng.integers(1, 900)),
                dim,
                optimizer=optimizer,
                combiner=combiner,
                max_ids_per_partition=int(rng.integers(128, 400)),
                max_unique_ids_per_partition=int(rng.integers(128, 400)),
            )
        )
    reads = tables + [tables[rng.integers(0, len(tables))] for _ in range(2)]
    reads = reads[: int(rng.integers(len(tables), len(reads) + 1))]
    names = rng.permutation(len(reads))
    tree = nest(
        rng,
        [feature_spec(f"f{names[i]}", t, global_batch) for i, t in enumerate(reads)],
    )
    devices, cores = top.global_device_count, top.num_sc_per_device
    way = rng.integers(0, 4)
    rotation = None if rng.random() < 0.5 else int(rng.integers(0, 6))
    if way == 0:
        table_stacking.auto_stack_tables(tree, devices, cores, rotation=rotation)
    elif way == 1:
        same: dict[Any, list[str]] = {}
        for table in tables:
            key = (-(-table.embedding_dim // 8), table.combiner, table.optimizer)
            same.setdefault(key, []).append(table.name)
        group = max(same.values(), key=len)
        table_stacking.stack_tables(tree, group, devices, cores, rotation=rotation)
    if way < 3:
        embedding.prepare_feature_specs_for_training(tree, devices, cores)
    return tree


def random_batch(rng: np.random.Generator, tree: Any, batch_size: int) -> Any:
    """Ids and weights in the shape of the tree; weights None without weights."""
    leaves, structure = jax.tree.flatten(tree)
    dense = rng.random() < 0.4
    ids, weights = [], []
    for spec in leaves:
        vocabulary = spec.table_spec.vocabulary_size
        counts = rng.integers(0, 6, batch_size)
        if dense:
            counts[:] = 3
        rows = [rng.integers(0, vocabulary, n).astype(np.int32) for n in counts]
        w = [rng.uniform(0.25, 2, n).astype(np.float32) for n in counts]
        if dense:
            ids.append(np.stack(rows))
            weights.append(np.stack(w))
        else:
            ids.append(as_objects(rows))
            weights.append(as_objects(w))
    weighted = rng.random() < 0.5
    return (
        structure.unflatten(ids),
        structure.unflatten(weights) if weighted else None,
    )


def as_objects(rows: list[np.ndarray]) -> np.ndarray:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def as_element(tree: Any, ids: Any, weights: Any, layout: StackedLayout) -> dict:
    """A batch as a pipeline has it: each array under the key its feature names."""
    element: dict[str, Any] = {}
    names = [spec.name for spec in jax.tree.leaves(tree)]
    by_name = dict(zip(names, jax.tree.leaves(ids), strict=True))
    weights_by_name = dict(zip(names, jax.tree.leaves(weights), strict=False))
    for feature in layout.features:
        put(element, feature.spec.ids, by_name[feature.name])
        if feature.spec.weights is not None:
            put(element, feature.spec.weights, weights_by_name[feature.name])
    return element


def put(element: dict, path: str, value: Any) -> None:
    *outer, last = path.split("/")
    for key in outer:
        element = element.setdefault(key, {})
    element[last] = value


def weight_options(tree: Any) -> dict[str, dict[str, str]]:
    return {
        spec.name: {"weights": f"weights/{spec.name}"} for spec in jax.tree.leaves(tree)
    }
