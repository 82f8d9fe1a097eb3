"""The same model in Flax Linen, with its ``TrainState``."""

import functools
import itertools
from typing import Any

import jax
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.lookup import (
    shard_tables,
    sharded_embedding_lookup,
    to_global_arrays,
)
from grain_sparsecore.stacking import StackedLayout
from tests.examples import shared


class Ranker(nn.Module):
    """Embeddings by SparseCore buffers, and one linear layer."""

    layout: StackedLayout
    mesh: Mesh

    @nn.compact
    def __call__(self, buffers: SparseCoreInput, dense: jax.Array) -> jax.Array:
        """Logits [batch]."""
        values = shared.starting_values(self.layout)
        tables = {
            name: self.param(f"table_{name}", lambda _, table=table: table)
            for name, table in shard_tables(values["tables"], self.layout).items()
        }
        w = self.param("w", lambda _: values["w"])
        activations = sharded_embedding_lookup(
            tables, buffers, self.layout, mesh=self.mesh, axis=shared.AXIS
        )
        return shared.logits(w, activations, dense)


def train(steps: int) -> list[float]:
    """Trains, and returns the loss of every step."""
    mesh, layout = shared.make_mesh(), shared.layout_of_job()
    by_row = NamedSharding(mesh, PartitionSpec(shared.AXIS))
    everywhere = NamedSharding(mesh, PartitionSpec())
    model = Ranker(layout, mesh)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn(
                {"params": params}, batch["sparsecore"], batch["dense"]
            )
            return shared.loss_of(logits, batch["label"])

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=gradients), loss

    state = None
    losses = []
    for batch in itertools.islice(shared.batches(layout), steps):
        batch = to_global_arrays(batch, mesh, shared.AXIS)
        if state is None:
            variables = model.init(
                jax.random.key(0), batch["sparsecore"], batch["dense"]
            )
            params = {
                name: jax.device_put(value, everywhere if name == "w" else by_row)
                for name, value in variables["params"].items()
            }
            state = TrainState.create(
                apply_fn=model.apply, params=params, tx=optax.sgd(shared.LEARNING_RATE)
            )
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    print(train(100)[::10])
