"""Our adapter against the real keras-rs, as far as it goes without a SparseCore.

Its layer asks the devices for SparseCores. Told that there are two on each CPU device,
it builds, preprocesses and lowers its lookup as on a TPU; only running the compiled
lookup needs the hardware, and the last test shows that it ends exactly there.
"""

import os

# Before keras is imported anywhere.
os.environ["KERAS_BACKEND"] = "jax"

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import keras
import numpy as np
import pytest
from jax_tpu_embedding.sparsecore.lib.nn import embedding, table_stacking
from keras_rs.layers import DistributedEmbedding, FeatureConfig, TableConfig
from keras_rs.src.layers.embedding.jax import (
    config_conversion,
    distributed_embedding,
    embedding_utils,
)

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.interop import (
    layout_from_feature_configs,
    layout_from_feature_specs,
    to_keras_rs,
)
from grain_sparsecore.limits import Limits
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.repartition import repartition
from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import StackedLayout

DEVICES = 8
TOPOLOGY = Topology(
    global_device_count=DEVICES, local_device_count=DEVICES, num_sc_per_device=2
)
BATCH = 32
PART = "preprocessed_inputs_per_placement"

# keras-rs 0.4.0 calls jax-tpu-embedding in a way that the latter deprecates.
ignore_its_deprecation = pytest.mark.filterwarnings(
    "ignore:.*SparseDenseMatmulInput is deprecated:DeprecationWarning"
)


@pytest.fixture
def pretend_sparsecores() -> Iterator[None]:
    with (
        mock.patch.object(DistributedEmbedding, "_has_sparsecore", return_value=True),
        mock.patch.object(
            distributed_embedding.jte_utils,
            "num_sparsecores_per_device",
            return_value=2,
        ),
    ):
        yield


def table(name: str, **kwargs: Any) -> TableConfig:
    kwargs.setdefault("vocabulary_size", 100)
    kwargs.setdefault("embedding_dim", 8)
    return TableConfig(name=name, **kwargs)


def feature(name: str, config: TableConfig, batch: int = BATCH) -> FeatureConfig:
    return FeatureConfig(
        name=name,
        table=config,
        input_shape=(batch, 3),
        output_shape=(batch, config.embedding_dim),
    )


def nested_configs() -> dict[str, Any]:
    """A nested tree whose order of paths is not that of the names."""
    adam = keras.optimizers.Adam(0.01)
    tables = [
        table("z", vocabulary_size=300, optimizer=adam, max_ids_per_partition=64),
        table("a", optimizer=keras.optimizers.Adam(0.01), max_ids_per_partition=100),
        table("m", combiner="sum", optimizer="sgd", embedding_dim=16),
        table("k", combiner="sum", optimizer=keras.optimizers.SGD(), embedding_dim=16),
        table("cpu", placement="default_device"),
    ]
    z, a, m, k, cpu = tables
    return {
        "user": {"clicks": feature("f0", z), "age": feature("f9", a)},
        "item": [feature(f"g{i}", (m, k)[i % 2]) for i in range(12)],
        "shared": feature("aa", z),
        "cpu": feature("not_ours", cpu),
    }


def on_sparsecore(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != "cpu"}


def random_inputs(tree: Any, *, ragged: bool) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)

    def rows(one: FeatureConfig) -> tuple[Any, Any]:
        counts = rng.integers(0, 5, BATCH) if ragged else np.full(BATCH, 3)
        ids = [
            rng.integers(0, one.table.vocabulary_size, n).astype(np.int32)
            for n in counts
        ]
        weights = [rng.uniform(0.5, 2, n).astype(np.float32) for n in counts]
        if not ragged:
            return np.stack(ids), np.stack(weights)
        both = np.empty(BATCH, object), np.empty(BATCH, object)
        both[0][:], both[1][:] = ids, weights
        return both

    leaves, structure = jax.tree.flatten(tree)
    ids, weights = zip(*map(rows, leaves), strict=True)
    return structure.unflatten(ids), structure.unflatten(weights)


def ours(
    layout: StackedLayout, tree: Any, ids: Any, weights: Any = None
) -> SparseCoreInput:
    """The batch through our stages, by the names of the features."""
    names = [f"{one.name}" for one in jax.tree.leaves(tree)]
    element: dict[str, Any] = dict(zip(names, jax.tree.leaves(ids), strict=True))
    if weights is not None:
        element |= dict(
            zip((f"w_{n}" for n in names), jax.tree.leaves(weights), strict=True)
        )
    batch = ComputeInputStats(layout).map(element)["sparsecore"]
    return repartition(batch, Limits.start(layout), layout)


def by_name(tree: Any, *, weighted: bool = False) -> dict[str, dict[str, str]]:
    return {
        one.name: {"ids": one.name} | ({"weights": f"w_{one.name}"} if weighted else {})
        for one in jax.tree.leaves(tree)
    }


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal bit for bit in every slot that theirs defines."""
    assert sorted(mine) == sorted(theirs)
    for stack, other in theirs.items():
        assert isinstance(mine[stack], embedding_utils.ShardedCooMatrix)
        for field in ("shard_starts", "shard_ends"):
            one, two = getattr(mine[stack], field), getattr(other, field)
            np.testing.assert_array_equal(one, two)
            assert one.dtype == two.dtype
        ends = other.shard_ends.reshape(TOPOLOGY.local_sc_count, -1)[:, -1]
        for field in ("col_ids", "row_ids", "values"):
            one, two = getattr(mine[stack], field), getattr(other, field)
            assert (one.shape, one.dtype) == (two.shape, two.dtype)
            one, two = one.reshape(len(ends), -1), two.reshape(len(ends), -1)
            for core, end in enumerate(-(-ends // 8) * 8):
                assert one[core, :end].tobytes() == two[core, :end].tobytes()


def upstream_specs(tree: Any, stacking: Any) -> Any:
    """What the layer's build makes of configs, without the layer."""
    flat = {
        ".".join(map(str, path)): one
        for path, one in keras.tree.flatten_with_path(tree)
    }
    specs = config_conversion.keras_to_jte_feature_configs(flat)
    if stacking == "auto":
        table_stacking.auto_stack_tables(specs, DEVICES, 2)
    elif stacking is not None:
        groups = [stacking] if isinstance(stacking[0], str) else stacking
        for group in groups:
            table_stacking.stack_tables(specs, group, DEVICES, 2)
    embedding.prepare_feature_specs_for_training(specs, DEVICES, 2)
    return specs


class Named(NamedTuple):
    """Fields whose names sort otherwise than their places."""

    z: Any
    a: Any
    cpu: Any


def named_configs() -> Named:
    tree = nested_configs()
    user = Named(z=tree["shared"], a=tree["user"]["age"], cpu=tree["item"])
    return Named(z=tree["user"]["clicks"], a={"nested": user}, cpu=tree["cpu"])


@pytest.mark.parametrize("stacking", ["auto", None, ["a", "z"]])
def test_named_tuples_are_walked_as_by_the_layer(stacking: Any) -> None:
    tree = named_configs()
    layout = layout_from_feature_configs(tree, TOPOLOGY, table_stacking=stacking)
    specs = upstream_specs((tree.z, tree.a), stacking)
    theirs = layout_from_feature_specs(specs, TOPOLOGY)
    assert layout.stack_names == theirs.stack_names
    ours = {f.name: (f.row_offset, f.col_offset, f.col_shift) for f in layout.features}
    assert ours == {
        f.name: (f.row_offset, f.col_offset, f.col_shift) for f in theirs.features
    }
    assert len({row for row, _, _ in ours.values()}) > 1 or stacking is None


@pytest.mark.parametrize(
    "stacking", ["auto", None, ["a", "z"], [["z", "a"], ["k", "m"]], [["m"]]]
)
def test_layout_from_configs_is_that_of_the_layer(stacking: Any) -> None:
    tree = nested_configs()
    layout = layout_from_feature_configs(tree, TOPOLOGY, table_stacking=stacking)
    specs = upstream_specs(on_sparsecore(tree), stacking)
    theirs = layout_from_feature_specs(specs, TOPOLOGY)
    assert layout.stack_names == theirs.stack_names
    for one, two in zip(layout.stacks, theirs.stacks, strict=True):
        assert one.vocabulary_size == two.vocabulary_size
        assert [
            (t.spec.name, t.row_offset_in_shard, t.shard_rotation) for t in one.tables
        ] == [
            (t.spec.name, t.row_offset_in_shard, t.shard_rotation) for t in two.tables
        ]
        assert [
            (f.name, f.row_offset, f.col_offset, f.col_shift) for f in one.features
        ] == [(f.name, f.row_offset, f.col_offset, f.col_shift) for f in two.features]
    paths = {f.name: f.spec.ids for f in layout.features}
    assert (paths["f0"], paths["g3"]) == ("user/clicks", "g3")
    assert "not_ours" not in paths


_DECAY = keras.optimizers.schedules.CosineDecay(0.1, 100)


@pytest.mark.parametrize(
    ("one", "two", "together"),
    [
        # What SparseCore does not have keeps no tables apart.
        (keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.1, weight_decay=0.5), 1),
        (keras.optimizers.Adam(0.1), keras.optimizers.AdamW(0.1), 1),
        (keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1, clipvalue=3.0), 1),
        (keras.optimizers.Ftrl(0.1), keras.optimizers.Ftrl(0.1, name="other"), 1),
        ("adagrad", keras.optimizers.Adagrad(), 1),
        # What it has does.
        (keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2), 0),
        (keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1), 0),
        (keras.optimizers.Adam(0.1), keras.optimizers.Adam(0.1, beta_2=0.9), 0),
        (keras.optimizers.Ftrl(0.1), keras.optimizers.Ftrl(0.1, beta=0.9), 0),
        # A schedule equals itself alone.
        (keras.optimizers.SGD(_DECAY), keras.optimizers.SGD(_DECAY), 1),
        (
            keras.optimizers.SGD(_DECAY),
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100)),
            0,
        ),
    ],
)
def test_optimizers_are_equal_where_the_layer_finds_them_so(one, two, together):
    tree = {
        "f": feature("f", table("t", optimizer=one)),
        "g": feature("g", table("u", optimizer=two)),
    }
    layout = layout_from_feature_configs(tree, TOPOLOGY)
    theirs = layout_from_feature_specs(upstream_specs(tree, "auto"), TOPOLOGY)
    assert len(layout.stacks) == 2 - together
    assert layout.stack_names == theirs.stack_names


def test_limits_of_a_stack_are_the_largest_of_its_tables_as_in_the_layer() -> None:
    layout = layout_from_feature_configs(nested_configs(), TOPOLOGY)
    stack = layout.stack_of_feature["f0"]
    assert {t.spec.name for t in stack.tables} == {"a", "z"}
    assert stack.start_max_ids_per_partition == 100
    assert stack.start_buffer_size_per_device == 104 * 2 * 16
    small = layout_from_feature_configs(nested_configs(), TOPOLOGY, read_limits=False)
    assert small.stack_of_feature["f0"].start_max_ids_per_partition == 2


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_buffers_equal_stack_and_shard_samples(ragged: bool, weighted: bool) -> None:
    tree = on_sparsecore(nested_configs())
    ids, weights = random_inputs(tree, ragged=ragged)
    weights = weights if weighted else None
    flat = upstream_specs(tree, "auto")
    order = {one.name: path for path, one in flat.items()}
    names = [one.name for one in jax.tree.leaves(tree)]

    def keyed(values: Any) -> Any:
        if values is None:
            return None
        leaves = jax.tree.leaves(values)
        return {order[n]: leaf for n, leaf in zip(names, leaves, strict=True)}

    samples = embedding_utils.create_feature_samples(flat, keyed(ids), keyed(weights))
    theirs, _ = embedding_utils.stack_and_shard_samples(
        flat, samples, DEVICES, DEVICES, 2
    )
    layout = layout_from_feature_specs(
        flat, TOPOLOGY, feature_options=by_name(tree, weighted=weighted)
    )
    mine = to_keras_rs(ours(layout, tree, ids, weights))
    assert list(mine) == ["inputs"]
    assert_same(mine["inputs"], theirs)


def test_nothing_but_shard_starts_is_copied() -> None:
    tree = {"f": feature("f", table("t"))}
    layout = layout_from_feature_configs(tree, TOPOLOGY)
    batch = ours(layout, tree, {"f": np.ones((BATCH, 3), np.int32)})
    matrix = to_keras_rs(batch)["inputs"]["t"]
    for one, two in (
        (matrix.shard_ends, batch.row_pointers),
        (matrix.col_ids, batch.embedding_ids),
        (matrix.row_ids, batch.sample_ids),
        (matrix.values, batch.gains),
    ):
        assert np.shares_memory(one, two["t"])


@ignore_its_deprecation
def test_the_layer_takes_ours_in_place_of_its_own(pretend_sparsecores: None) -> None:
    tree = on_sparsecore(nested_configs())
    ids, _ = random_inputs(tree, ragged=False)
    layer = DistributedEmbedding(tree)
    theirs = layer.preprocess(ids, training=True)
    layout = layout_from_feature_specs(
        layer._config.feature_specs, TOPOLOGY, feature_options=by_name(tree)
    )
    mine = to_keras_rs(ours(layout, tree, ids), for_layer=True)
    keras.tree.assert_same_structure(mine, theirs)
    part = "preprocessed_inputs_per_placement"
    assert_same(
        mine[part]["sparsecore"]["inputs"], theirs[part]["sparsecore"]["inputs"]
    )
    shapes = jax.eval_shape(layer, mine)
    assert jax.tree.map(lambda x: x.shape, shapes) == {
        "user": {"clicks": (BATCH, 8), "age": (BATCH, 8)},
        "item": [(BATCH, 16)] * 12,
        "shared": (BATCH, 8),
    }


@ignore_its_deprecation
def test_without_sparsecores_the_layer_ends_at_the_custom_call(
    pretend_sparsecores: None,
) -> None:
    tree = {"f": feature("f", table("t", placement="sparsecore"))}
    layout = layout_from_feature_configs(tree, TOPOLOGY)
    batch = to_keras_rs(
        ours(layout, tree, {"f": np.ones((BATCH, 3), np.int32)}), for_layer=True
    )
    layer = DistributedEmbedding(tree)
    # Without this its first call would take the preprocessed input for raw ids.
    layer.build({"f": (BATCH, 3)})
    with pytest.raises(Exception, match="custom call to SparseDenseMatmulOp for Host"):
        layer(batch)


def test_without_sparsecores_the_layer_refuses_to_be_built() -> None:
    with pytest.raises(ValueError, match="sparsecore placement"):
        DistributedEmbedding({"f": feature("f", table("t", placement="sparsecore"))})


@pytest.mark.parametrize(
    ("tree", "stacking", "text"),
    [
        (
            [feature("f", table("t", placement="default_device"))],
            "auto",
            "nothing is left for SparseCore",
        ),
        (
            [feature("f", table("t", placement="tpu"))],
            "auto",
            "table 't': placement='tpu' is not one of auto, sparsecore, default_device",
        ),
        (
            [feature("f", table("t"))],
            "automatic",
            "table_stacking='automatic': the only text is 'auto'",
        ),
        (
            [feature("f", table("t"))],
            ["u"],
            r"no table 'u' on SparseCore; known: \['t'",
        ),
        (
            [feature("f", table("t")), feature("g", table("u"))],
            [["t", "u"], ["t"]],
            "table 't' is in two stacks",
        ),
        (
            [feature("f", table("t")), feature("g", table("u", combiner="sum"))],
            [["t", "u"]],
            "stack 't_u': tables 't' and 'u' differ in combiner",
        ),
    ],
)
def test_wrong_configs_are_named(tree: Any, stacking: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        layout_from_feature_configs(tree, TOPOLOGY, table_stacking=stacking)
