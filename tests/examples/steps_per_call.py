"""Several training steps in one call: ``jax.lax.scan`` over the batches of a window.

All batches of a window have the same limits, so their buffers have equal shapes and
equal metadata and can be stacked.
"""

import functools
import itertools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grain_sparsecore.lookup import (
    shard_tables,
    sharded_embedding_lookup,
    to_global_arrays,
)
from tests.examples import shared


def train(steps: int) -> list[float]:
    """Trains ``steps`` // window calls, and returns the loss of every step."""
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

    def one_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_fn)(state, batch)
        return jax.tree.map(
            lambda x, g: x - shared.LEARNING_RATE * g, state, gradients
        ), loss

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(placement, everywhere))
    def train_window(state: Any, window: Any) -> tuple[Any, jax.Array]:
        return jax.lax.scan(one_step, state, window)

    start = shared.starting_values(layout)
    start["tables"] = shard_tables(start["tables"], layout)
    state = {key: jax.device_put(start[key], placement[key]) for key in placement}
    losses: list[float] = []
    iterator = iter(shared.batches(layout))
    for _ in range(steps // shared.WINDOW):
        window = [
            to_global_arrays(batch, mesh, shared.AXIS)
            for batch in itertools.islice(iterator, shared.WINDOW)
        ]
        stacked = jax.tree.map(lambda *arrays: jax.numpy.stack(arrays), *window)
        state, several = train_window(state, stacked)
        losses += np.asarray(several).tolist()
    return losses


if __name__ == "__main__":
    print(train(100)[::10])
