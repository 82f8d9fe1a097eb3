"""The same model in Flax NNX: the tables are parameters of a module."""

import functools
import itertools
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.lookup import (
    shard_tables,
    sharded_embedding_lookup,
    to_global_arrays,
)
from tests.examples import shared


class Ranker(nnx.Module):
    """Embeddings by SparseCore buffers, and one linear layer."""

    def __init__(self, layout: Any, mesh: jax.sharding.Mesh) -> None:
        values = shared.starting_values(layout)
        by_row = NamedSharding(mesh, PartitionSpec(shared.AXIS))
        everywhere = NamedSharding(mesh, PartitionSpec())
        tables = shard_tables(values["tables"], layout)
        self.tables = nnx.Dict(
            {
                name: nnx.Param(jax.device_put(table, by_row))
                for name, table in tables.items()
            }
        )
        self.w = nnx.Param(jax.device_put(values["w"], everywhere))
        self.layout, self.mesh = layout, mesh

    def __call__(self, buffers: SparseCoreInput, dense: jax.Array) -> jax.Array:
        """Logits [batch]."""
        tables = {name: param[...] for name, param in self.tables.items()}
        activations = sharded_embedding_lookup(
            tables, buffers, self.layout, mesh=self.mesh, axis=shared.AXIS
        )
        return shared.logits(self.w[...], activations, dense)


def train(steps: int) -> list[float]:
    """Trains, and returns the loss of every step."""
    mesh, layout = shared.make_mesh(), shared.layout_of_job()
    model = Ranker(layout, mesh)
    optimizer = nnx.Optimizer(model, optax.sgd(shared.LEARNING_RATE), wrt=nnx.Param)

    def loss_fn(model: Ranker, batch: dict[str, Any]) -> jax.Array:
        logits = model(batch["sparsecore"], batch["dense"])
        return shared.loss_of(logits, batch["label"])

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train_step(model: Ranker, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, gradients)
        return loss

    losses = []
    for batch in itertools.islice(shared.batches(layout), steps):
        batch = to_global_arrays(batch, mesh, shared.AXIS)
        losses.append(float(train_step(model, optimizer, batch)))
    return losses


if __name__ == "__main__":
    print(train(100)[::10])
