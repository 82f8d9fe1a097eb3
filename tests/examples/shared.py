"""What the training loops share: tables, data, starting values and the loss."""

from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import grain_sparsecore as gsc
from grain_sparsecore.batching import batch_ragged
from grain_sparsecore.pipeline import (
    ComputeInputStats,
    CoordinateLimitsIterDataset,
    RepartitionIterDataset,
)
from grain_sparsecore.stacking import StackedLayout, make_layout

AXIS = "data"
LEARNING_RATE = 0.5
BATCH = 64  # samples of all hosts together
DENSE = 4
WINDOW = 4


def make_mesh() -> Mesh:
    """All devices of the job in a row."""
    return Mesh(np.array(jax.devices()), (AXIS,))


def layout_of_job() -> StackedLayout:
    """Two tables, stacked, read by three features; on the devices of this job."""
    table = {"embedding_dim": 8, "combiner": "mean", "stack": "auto"}
    return make_layout(
        [
            gsc.TableSpec(name="item", vocabulary_size=500, **table),
            gsc.TableSpec(name="user", vocabulary_size=300, **table),
        ],
        [
            gsc.FeatureSpec(name="item", table="item"),
            gsc.FeatureSpec(name="history", table="item", weights="dwell"),
            gsc.FeatureSpec(name="user", table="user"),
        ],
        topology=gsc.Topology.from_jax(num_sc_per_device=2),
        batch_size=BATCH // jax.process_count(),
    )


class Records:
    """Generated samples: lists of ids and weights, dense values, a label to learn."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: Any) -> dict[str, Any]:
        rng = np.random.default_rng(int(index))
        item = rng.integers(0, 500)
        clicks = rng.integers(0, 500, rng.integers(0, 6))
        return {
            "item": np.int64(item),
            "history": clicks,
            "dwell": rng.uniform(0.5, 2, len(clicks)).astype(np.float32),
            "user": rng.integers(0, 300),
            "dense": rng.standard_normal(DENSE).astype(np.float32),
            "label": np.float32(item % 2),
        }


def batches(layout: StackedLayout) -> grain.IterDataset[dict[str, Any]]:
    """This host's batches; ``batch["sparsecore"]`` is a `SparseCoreInput`."""
    ds = grain.MapDataset.source(Records()).shuffle(seed=1)
    ds = ds[jax.process_index() :: jax.process_count()]
    ds = ds.batch(layout.batch_size, drop_remainder=True, batch_fn=batch_ragged)
    return (
        ds.map(ComputeInputStats(layout))
        .to_iter_dataset()
        .pipe(CoordinateLimitsIterDataset, layout=layout, window=WINDOW)
        .pipe(RepartitionIterDataset, layout=layout)
    )


def starting_values(layout: StackedLayout) -> dict[str, Any]:
    """Plain tables [vocabulary, dim], and the weights of one linear layer."""
    rng = np.random.default_rng(0)
    tables = {
        table.spec.name: rng.normal(
            0, 0.3, (table.spec.vocabulary_size, table.spec.embedding_dim)
        ).astype(np.float32)
        for stack in layout.stacks
        for table in sorted(stack.tables, key=lambda t: t.spec.name)
    }
    columns = DENSE + sum(f.table.embedding_dim for f in layout.features)
    return {"tables": tables, "w": rng.normal(0, 0.2, columns).astype(np.float32)}


def logits(
    w: jax.Array, activations: dict[str, jax.Array], dense: jax.Array
) -> jax.Array:
    """One linear layer over all activations and the dense values, [batch]."""
    inputs = [activations[name] for name in sorted(activations)]
    return jnp.concatenate([dense, *inputs], axis=1) @ w


def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Binary cross-entropy, averaged over the batch."""
    return jnp.mean(jax.nn.softplus(logits) - logits * labels)
