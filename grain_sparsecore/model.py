"""The small ranking model of the training job: embeddings, a network, Adagrad.

Everything that is initialised depends on the seed, the name of a table and the shapes
alone, so a job starts from the same parameters on any number of hosts and devices.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grain_sparsecore.lookup import shard_tables, sharded_embedding_lookup
from grain_sparsecore.stacking import StackedLayout

# Adagrad starts its sums of squares here, as TensorFlow's does, so that the first
# step is not a full learning rate for every weight.
_INITIAL_ACCUMULATOR = 0.1

State = dict[str, Any]


def init_state(
    layout: StackedLayout,
    *,
    dense_size: int,
    hidden: Sequence[int],
    seed: int,
    mesh: Mesh,
    axis: str,
) -> State:
    """Parameters and Adagrad's sums of squares, placed on the devices of a mesh.

    Args:
        layout: The stacks.
        dense_size: Number of dense values per sample.
        hidden: Sizes of the hidden layers.
        seed: Seed of the parameters.
        mesh: The devices.
        axis: Mesh axis that tables are sharded over; the network is on every device.

    Returns:
        ``{"params": p, "accumulators": a}``, both ``{"tables": {stack: array},
        "network": [{"w": [in, out], "b": [out]}, ...]}``.
    """
    tables = shard_tables(
        {
            table.spec.name: init_table(
                table.spec.name,
                table.spec.vocabulary_size,
                table.spec.embedding_dim,
                seed=seed,
            )
            for stack in layout.stacks
            for table in stack.tables
        },
        layout,
    )
    inputs = dense_size + sum(f.table.embedding_dim for f in layout.features)
    params = {"tables": tables, "network": init_network(inputs, hidden, seed=seed)}
    accumulators = jax.tree.map(
        lambda x: np.full(x.shape, _INITIAL_ACCUMULATOR, x.dtype), params
    )
    shardings = state_shardings(mesh, axis)

    def place(tree: Any, sharding: NamedSharding) -> Any:
        # Every host makes the whole array and keeps its devices' part of it.
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i]),
            tree,
        )

    return {
        kind: {part: place(values[part], shardings[kind][part]) for part in values}
        for kind, values in (("params", params), ("accumulators", accumulators))
    }


def state_shardings(mesh: Mesh, axis: str) -> dict[str, dict[str, NamedSharding]]:
    """Where the parts of the state are: tables by row, the network everywhere."""
    one = {
        "tables": NamedSharding(mesh, PartitionSpec(axis)),
        "network": NamedSharding(mesh, PartitionSpec()),
    }
    return {"params": one, "accumulators": one}


def init_table(name: str, rows: int, dim: int, *, seed: int) -> np.ndarray:
    """Normal values of variance 1 / dim, float32 [rows, dim]."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal((rows, dim), np.float32)
    return values * np.float32(dim**-0.5)


def init_network(
    inputs: int, hidden: Sequence[int], *, seed: int
) -> list[dict[str, np.ndarray]]:
    """Fully connected layers down to one logit, weights as by He et al. (2015)."""
    rng = np.random.default_rng(seed)
    layers = []
    for outputs in (*hidden, 1):
        w = rng.standard_normal((inputs, outputs), np.float32)
        layers.append(
            {
                "w": w * np.float32((2 / max(inputs, 1)) ** 0.5),
                "b": np.zeros(outputs, np.float32),
            }
        )
        inputs = outputs
    return layers


def predict(network: Sequence[Mapping[str, jax.Array]], inputs: jax.Array) -> jax.Array:
    """Logits [batch] for inputs [batch, inputs]."""
    x = inputs
    for i, layer in enumerate(network):
        x = x @ layer["w"] + layer["b"]
        if i < len(network) - 1:
            x = jax.nn.relu(x)
    return x[:, 0]


def mean_loss(
    logits: jax.Array, labels: jax.Array, num_valid_samples: jax.Array
) -> jax.Array:
    """Binary cross-entropy, averaged over the real samples of all devices.

    Args:
        logits: [batch].
        labels: [batch], from 0 to 1.
        num_valid_samples: int32 [devices]; the first so many of the batch / devices
            samples of each device are real.
    """
    devices = num_valid_samples.shape[0]
    position = jnp.arange(logits.shape[0] // devices)
    valid = (position < num_valid_samples[:, None]).reshape(-1)
    losses = jax.nn.softplus(logits) - logits * labels
    return jnp.sum(jnp.where(valid, losses, 0)) / jnp.maximum(jnp.sum(valid), 1)


def make_train_step(
    layout: StackedLayout,
    *,
    learning_rate: float,
    mesh: Mesh,
    axis: str,
    on_trace: Callable[[], None],
) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """The jitted step ``(state, batch) -> (state, loss)``; it takes over ``state``.

    A batch is ``{"sparsecore": SparseCoreInput, "dense": [B, n], "label": [B]}`` of
    global arrays. The step is compiled anew whenever the limits in it change.

    Args:
        layout: The stacks.
        learning_rate: Of Adagrad, for all parameters.
        mesh: The devices.
        axis: Mesh axis that batch and tables are sharded over.
        on_trace: Called at each compilation.
    """

    def loss_of(params: Any, batch: Any) -> jax.Array:
        activations = sharded_embedding_lookup(
            params["tables"], batch["sparsecore"], layout, mesh=mesh, axis=axis
        )
        # By name: the order of the stacks depends on the number of devices.
        columns = [activations[name] for name in sorted(activations)]
        inputs = jnp.concatenate([*columns, batch["dense"]], axis=1)
        return mean_loss(
            predict(params["network"], inputs),
            batch["label"],
            batch["sparsecore"].num_valid_samples,
        )

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        on_trace()
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        accumulators = jax.tree.map(
            lambda a, g: a + g * g, state["accumulators"], gradients
        )
        params = jax.tree.map(
            lambda p, a, g: p - learning_rate * g * jax.lax.rsqrt(a),
            state["params"],
            accumulators,
            gradients,
        )
        return {"params": params, "accumulators": accumulators}, loss

    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(
            state_shardings(mesh, axis),
            NamedSharding(mesh, PartitionSpec()),
        ),
    )
