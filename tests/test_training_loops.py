"""The training loops of ``tests/examples``: all reach the same loss, which falls."""

import importlib

import grain
import jax
import numpy as np
import pytest

from grain_sparsecore.testing import TestHost, run_hosts
from tests.examples import flax_linen, flax_nnx, plain_jax, shared, steps_per_call

STEPS = 24


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """The losses of a dense computation from the raw ids, in float64."""
    layout = shared.layout_of_job()
    values = shared.starting_values(layout)
    tables = {k: v.astype(np.float64) for k, v in values["tables"].items()}
    w = values["w"].astype(np.float64)
    records = shared.Records()
    ds = grain.MapDataset.source(records).shuffle(seed=1)
    names = sorted(f.name for f in layout.features)
    table_of = {f.name: f.table.name for f in layout.features}
    losses = []
    for step in range(STEPS):
        samples = [ds[step * shared.BATCH + i] for i in range(shared.BATCH)]
        inputs = np.zeros((shared.BATCH, len(w)))
        gains = []
        for i, sample in enumerate(samples):
            inputs[i, : shared.DENSE] = sample["dense"]
            for j, name in enumerate(names):
                ids = np.atleast_1d(sample[name])
                gain = sample["dwell"] if name == "history" else np.ones(len(ids))
                gain = gain / gain.sum() if len(ids) else gain
                at = shared.DENSE + 8 * j
                inputs[i, at : at + 8] = gain @ tables[table_of[name]][ids]
                gains.append((i, name, at, ids, gain))
        labels = np.array([s["label"] for s in samples])
        z = inputs @ w
        losses.append(np.mean(np.logaddexp(0, z) - z * labels))
        dz = (1 / (1 + np.exp(-z)) - labels) / shared.BATCH
        updates = {name: np.zeros_like(table) for name, table in tables.items()}
        for i, name, at, ids, gain in gains:
            np.add.at(
                updates[table_of[name]],
                ids,
                gain[:, None] * (dz[i] * w[at : at + 8])[None],
            )
        w = w - shared.LEARNING_RATE * (dz @ inputs)
        for name, update in updates.items():
            tables[name] -= shared.LEARNING_RATE * update
    return np.array(losses)


@pytest.mark.parametrize(
    "example",
    [plain_jax, steps_per_call, flax_nnx, flax_linen],
    ids=lambda m: m.__name__,
)
def test_every_loop_trains_as_the_dense_computation_does(
    example, expected: np.ndarray
) -> None:
    losses = example.train(STEPS)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


def test_the_loops_run_on_all_devices() -> None:
    assert jax.device_count() == 8
    assert shared.layout_of_job().topology.num_partitions == 16


def losses_of_host(host: TestHost, *, example: str) -> list[float]:
    return importlib.import_module(f"tests.examples.{example}").train(STEPS)


@pytest.mark.parametrize("example", ["plain_jax", "flax_nnx", "flax_linen"])
def test_two_hosts_train_as_one_does(example: str, expected: np.ndarray) -> None:
    results = run_hosts(
        losses_of_host,
        hosts=2,
        devices_per_host=4,
        arguments={"example": example},
        timeout_seconds=240,
    )
    for result in results:
        np.testing.assert_allclose(result.value, expected, rtol=2e-5)
