"""A training step in plain JAX: explicit shardings, donated state.

``jax.jit`` recompiles by itself when the agreed limits change, on all hosts in the same
step, because they are static metadata of ``batch["sparsecore"]``.
"""

import functools
import itertools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from grain_sparsecore.lookup import (
    shard_tables,
    sharded_embedding_lookup,
    to_global_arrays,
)
from tests.examples import shared


def train(steps: int) -> list[float]:
    """Trains, and returns the loss of every step."""
    mesh, layout = shared.make_mesh(), shared.layout_of_job()
    by_row = NamedSharding(mesh, PartitionSpec(shared.AXIS))
    everywhere = NamedSharding(mesh, PartitionSpec())
    placement = {"tables": by_row, "w": everywhere}

    def loss_fn(state: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
        activations = sharded_embedding_lookup(
            state["tables"], batch["sparsecore"], layout, mesh=mesh, axis=shared.AXIS
        )
        logits = shared.logits(state["w"], activations, batch["dense"])
        return shared.loss_of(logits, batch["label"])

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        in_shardings=(placement, by_row),
        out_shardings=(placement, everywhere),
    )
    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(state, batch)
        return jax.tree.map(
            lambda x, g: x - shared.LEARNING_RATE * g, state, gradients
        ), loss

    start = shared.starting_values(layout)
    start["tables"] = shard_tables(start["tables"], layout)
    state = {key: jax.device_put(start[key], placement[key]) for key in placement}
    losses = []
    for batch in itertools.islice(shared.batches(layout), steps):
        batch = to_global_arrays(batch, mesh, shared.AXIS)
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    print(train(100)[::10])
