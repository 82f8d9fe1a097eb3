"""Random batches and tables, and what a dense computation makes of the raw ids."""

import jax
import jax.numpy as jnp
import numpy as np

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.features import FeatureIds
from grain_sparsecore.limits import GrowthPolicy, Limits, grow_limits
from grain_sparsecore.lookup import shard_tables, unshard_tables
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.repartition import repartition
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout
from tests import reference, strategies


def random_topology(rng: np.random.Generator) -> Topology:
    local = int(rng.choice([1, 2, 4]))
    return Topology(
        global_device_count=local * int(rng.choice([1, 1, 8])),
        local_device_count=local,
        num_sc_per_device=int(rng.choice([1, 2, 4])),
    )


def random_layout(rng: np.random.Generator, topology: Topology) -> StackedLayout:
    """Small tables: alone, stacked, shared by features."""
    combiner = strategies.COMBINERS[rng.integers(3)]
    tables = []
    features = []
    for i in range(int(rng.integers(1, 4))):
        stack = "one" if rng.random() < 0.6 else None
        tables.append(
            TableSpec(
                name=f"t{i}",
                vocabulary_size=int(rng.integers(1, 400)),
                # Tables of one stack have one padded dimension, 8.
                embedding_dim=int(rng.integers(1, 9)),
                combiner=combiner if stack else strategies.COMBINERS[rng.integers(3)],
                stack=stack,
            )
        )
        for j in range(int(rng.integers(1, 3))):
            weights = f"w{i}_{j}" if rng.random() < 0.4 else None
            features.append(
                FeatureSpec(name=f"f{i}_{j}", table=f"t{i}", weights=weights)
            )
    return make_layout(
        tables,
        features,
        topology=topology,
        batch_size=topology.local_sc_count * int(rng.integers(1, 4)),
    )


def random_batch(
    rng: np.random.Generator, layout: StackedLayout
) -> tuple[SparseCoreInput, list[FeatureIds]]:
    case = strategies.Case(layout, strategies.random_features(rng, layout))
    batch = partition_batch(
        case.features, layout, counters=case.counters, num_samples=layout.batch_size
    )
    limits = grow_limits(
        Limits.start(layout),
        batch.stats,
        layout=layout,
        policy=GrowthPolicy(kind="headroom", factor=1 + rng.random(), step=8),
    )
    return repartition(batch, limits, layout), case.features


def random_tables(
    rng: np.random.Generator, layout: StackedLayout
) -> dict[str, np.ndarray]:
    return {
        table.spec.name: rng.standard_normal(
            (table.spec.vocabulary_size, table.spec.embedding_dim), np.float32
        )
        for stack in layout.stacks
        for table in stack.tables
    }


def dense_factors(feature: FeatureIds, combiner: str, batch: int) -> np.ndarray:
    """What each id of a feature counts for, float64 [ids], by the combiner's maths."""
    rows, weights = reference.rows_of(feature, batch)
    factors = []
    for i, row in enumerate(rows):
        w = np.ones(len(row)) if weights is None else np.array(weights[i], np.float64)
        divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}
        factors.append(w / divisor[combiner] if len(row) else w)
    return np.concatenate(factors)


def dense_lookup(
    plain: dict[str, np.ndarray], features: list[FeatureIds], layout: StackedLayout
) -> dict[str, np.ndarray]:
    """Activations from the raw ids, float64."""
    result = {}
    for feature in layout.features:
        ids = features[feature.index]
        table = plain[feature.table.name].astype(np.float64)
        values = np.zeros((layout.batch_size, table.shape[1]))
        factors = dense_factors(ids, feature.table.combiner, layout.batch_size)
        np.add.at(
            values,
            samples_of(ids, layout.batch_size),
            table[ids.ids] * factors[:, None],
        )
        result[feature.name] = values
    return result


def dense_gradient(
    cotangents: dict[str, np.ndarray],
    plain: dict[str, np.ndarray],
    features: list[FeatureIds],
    layout: StackedLayout,
) -> dict[str, np.ndarray]:
    """Gradient of sum(activations * cotangents) by the plain tables, float64."""
    result = {name: np.zeros(table.shape) for name, table in plain.items()}
    for feature in layout.features:
        ids = features[feature.index]
        factors = dense_factors(ids, feature.table.combiner, layout.batch_size)
        samples = samples_of(ids, layout.batch_size)
        np.add.at(
            result[feature.table.name],
            ids.ids,
            cotangents[feature.name][samples] * factors[:, None],
        )
    return result


def samples_of(feature: FeatureIds, batch: int) -> np.ndarray:
    rows, _ = reference.rows_of(feature, batch)
    return np.repeat(np.arange(batch), [len(row) for row in rows])


def assert_all_close(actual: dict, expected: dict) -> None:
    assert set(actual) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(
            actual[name], values, rtol=1e-5, atol=1e-5, err_msg=name
        )


def check_lookup(lookup, plain, features, layout, rng) -> None:
    """Values and gradients of ``lookup(stacked tables)`` against the raw ids."""
    expected = dense_lookup(plain, features, layout)
    cotangents = {
        name: rng.standard_normal(values.shape, np.float32)
        for name, values in expected.items()
    }

    def weighted_sum(stacked):
        activations = lookup(stacked)
        total = sum(jnp.sum(activations[k] * c) for k, c in cotangents.items())
        return total, activations

    stacked = shard_tables(plain, layout)
    gradient, activations = jax.jit(jax.grad(weighted_sum, has_aux=True))(stacked)
    assert_all_close(activations, expected)
    assert_all_close(
        unshard_tables(gradient, layout),
        dense_gradient(cotangents, plain, features, layout),
    )
