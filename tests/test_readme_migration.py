"""Runs the marked code blocks of the README's page for people who come from elsewhere.

Each block is real code over the names below. Only the lookups of jax-tpu-embedding and
keras-rs are not run but evaluated for their shapes, since they need a SparseCore.
"""

import os

# Before keras is imported anywhere.
os.environ["KERAS_BACKEND"] = "jax"

import re
from pathlib import Path
from typing import Any
from unittest import mock

import grain
import jax
import keras_rs
import numpy as np
import pytest
import tensorflow as tf
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec
from keras_rs.src.layers.embedding.jax import distributed_embedding

import grain_sparsecore as gsc
from grain_sparsecore import interop, lookup, pipeline

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"<!-- migration: ([\w. -]+) -->\n```python\n(.*?)^```", re.M | re.S)

BATCH = 32
FEATURES = {"item": 300, "user": 100}


def blocks() -> dict[str, str]:
    return dict(BLOCK.findall(README.read_text()))


def batch(index: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(index)
    ids = {
        name: rng.integers(0, size, (BATCH, 3)).astype(np.int32)
        for name, size in FEATURES.items()
    }
    return ids | {"label": np.ones(BATCH, np.float32)}


def names() -> dict[str, Any]:
    """What every block may use without an import."""
    return {
        "batches": grain.MapDataset.range(6).map(batch),
        "state": 0,
    }


def run(name: str, values: dict[str, Any]) -> dict[str, Any]:
    exec(compile(blocks()[name], f"README, {name}", "exec"), values)
    return values


def feature_specs() -> dict[str, embedding_spec.FeatureSpec]:
    optimizer = embedding_spec.SGDOptimizerSpec(learning_rate=0.1)
    specs = {}
    for name, size in FEATURES.items():
        table = embedding_spec.TableSpec(
            name=f"{name}s",
            vocabulary_size=size,
            embedding_dim=8,
            initializer=jax.nn.initializers.zeros,
            optimizer=optimizer,
            combiner="sum",
        )
        specs[name] = embedding_spec.FeatureSpec(
            name=name, table_spec=table, input_shape=(BATCH, 3), output_shape=(BATCH, 8)
        )
    embedding.auto_stack_tables(specs, jax.device_count(), 2)
    return specs


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def variables(specs: Any) -> dict[str, embedding.EmbeddingVariables]:
    return {
        name: embedding.EmbeddingVariables(
            jax.ShapeDtypeStruct(
                (spec.stack_vocab_size, spec.stack_embedding_dim), np.float32
            ),
            (),
        )
        for name, spec in embedding.get_stacked_table_specs(specs).items()
    }


def check_lookup(function: Any, inputs: Any, specs: Any) -> None:
    sharded = jax.shard_map(
        function,
        mesh=mesh(),
        in_specs=(P("x"), P("x")),
        out_specs=P("x"),
        check_vma=False,
    )
    activations = jax.eval_shape(sharded, inputs, variables(specs))
    assert {k: a.shape for k, a in activations.items()} == dict.fromkeys(
        FEATURES, (BATCH, 8)
    )


def test_the_page_has_all_blocks() -> None:
    assert sorted(blocks()) == [
        "flax",
        "jax-tpu-embedding after",
        "jax-tpu-embedding before",
        "keras-rs after",
        "keras-rs before",
        "tf.data",
    ]


def test_jax_tpu_embedding_before() -> None:
    specs = feature_specs()

    def train_step(state: int, inputs: Any, label: np.ndarray) -> int:
        check_lookup(
            lambda x, v: embedding.tpu_sparse_dense_matmul(
                x, v, specs, global_device_count=8, num_sc_per_device=2
            ),
            inputs,
            specs,
        )
        return state + 1

    values = names() | {
        "jax": jax,
        "np": np,
        "embedding": embedding,
        "multihost_utils": multihost_utils,
        "feature_specs": specs,
        "train_step": train_step,
    }
    assert run("jax-tpu-embedding before", values)["state"] == 6


def test_jax_tpu_embedding_after() -> None:
    specs = feature_specs()

    def train_step(state: int, batch: Any, lookup_function: Any) -> int:
        arrays = lookup.to_global_arrays(batch, mesh(), "x")
        check_lookup(lookup_function, arrays, specs)
        return state + 1

    values = names() | {
        "jax": jax,
        "embedding": embedding,
        "feature_specs": specs,
        "train_step": train_step,
    }
    run("jax-tpu-embedding after", values)
    assert values["state"] == 6
    (stacked,) = embedding.get_stacked_table_specs(specs).values()
    (limits,) = values["batch"]["sparsecore"].limits.values()
    assert stacked.max_ids_per_partition == limits.max_ids_per_partition
    assert stacked.suggested_coo_buffer_size_per_device == limits.buffer_size_per_device


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.filterwarnings(
    "ignore:.*SparseDenseMatmulInput is deprecated:DeprecationWarning"
)
def test_keras_rs(side: str) -> None:
    configs = {
        name: keras_rs.layers.FeatureConfig(
            name,
            keras_rs.layers.TableConfig(
                f"{name}s", size, 8, optimizer="sgd", placement="sparsecore"
            ),
            (BATCH, 3),
            (BATCH, 8),
        )
        for name, size in FEATURES.items()
    }
    shapes = []

    def model(layer: Any, inputs: Any) -> None:
        outputs = jax.eval_shape(layer, inputs)
        shapes.append({name: x.shape for name, x in outputs.items()})

    values = names() | {
        "keras_rs": keras_rs,
        "feature_configs": configs,
        "model": model,
    }
    with (
        mock.patch.object(
            keras_rs.layers.DistributedEmbedding, "_has_sparsecore", return_value=True
        ),
        mock.patch.object(
            distributed_embedding.jte_utils,
            "num_sparsecores_per_device",
            return_value=2,
        ),
    ):
        run(f"keras-rs {side}", values)
    assert shapes == [dict.fromkeys(FEATURES, (BATCH, 8))] * 6


def staged() -> tuple[Any, Any]:
    topology = gsc.Topology.from_jax(num_sc_per_device=2)
    layout = interop.layout_from_feature_specs(feature_specs(), topology)
    ds = grain.MapDataset.range(6).map(batch).map(pipeline.ComputeInputStats(layout))
    ds = ds.to_iter_dataset()
    ds = ds.pipe(pipeline.CoordinateLimitsIterDataset, layout=layout)
    return layout, ds.pipe(pipeline.RepartitionIterDataset, layout=layout)


def test_flax() -> None:
    layout, ds = staged()
    tables = {
        f"{name}s": np.arange(size * 8, dtype=np.float32).reshape(size, 8)
        for name, size in FEATURES.items()
    }
    values = names() | {"layout": layout, "ds": ds, "plain_tables": tables}
    run("flax", values)
    for name in FEATURES:
        expected = tables[f"{name}s"][batch(5)[name]].sum(1)
        np.testing.assert_allclose(values["activations"][name], expected, rtol=1e-6)


def test_tf_data() -> None:
    layout, ds = staged()
    expected = [element["sparsecore"] for element in ds]
    seen = []

    def train_step(state: Any, element: Any) -> None:
        seen.append(element["sparsecore"])

    values = names() | {
        "layout": layout,
        "train_step": train_step,
        "tf_dataset": tf.data.Dataset.from_tensor_slices(
            {key: np.concatenate([batch(i)[key] for i in range(6)]) for key in batch(0)}
        ).batch(BATCH),
    }
    run("tf.data", values)
    for one, two in zip(seen, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, two)
