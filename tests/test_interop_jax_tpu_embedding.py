"""Layouts, limits and buffers against jax-tpu-embedding's own preprocessing."""

import copy
import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax_tpu_embedding.sparsecore.lib.nn import embedding, table_stacking

from grain_sparsecore.buffers import PartitionedBatch, SparseCoreInput
from grain_sparsecore.config import TopologyConfig
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.interop import (
    layout_from_feature_specs,
    to_jax_tpu_embedding,
    update_feature_specs,
)
from grain_sparsecore.limits import GrowthPolicy, Limits, StackLimits, grow_limits
from grain_sparsecore.lookup import embedding_lookup, shard_tables
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.repartition import repartition
from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import StackedLayout
from tests.spec_trees import (
    as_element,
    feature_spec,
    random_batch,
    random_specs,
    table_spec,
    topology,
    weight_options,
)


def upstream_preprocess(tree: Any, ids: Any, weights: Any, top: Topology, **kwargs):
    return embedding.preprocess_sparse_dense_matmul_input(
        ids,
        weights,
        tree,
        top.local_device_count,
        top.global_device_count,
        num_sc_per_device=top.num_sc_per_device,
        **kwargs,
    )


def assert_same_input(ours: Any, theirs: Any, top: Topology) -> None:
    """Equal in shape and dtype, and bit for bit in every slot theirs defines."""
    assert type(ours) is type(theirs)
    width = max(top.num_partitions, 8)
    np.testing.assert_array_equal(ours.num_minibatches, theirs.num_minibatches)
    assert sorted(ours.lhs_row_pointers) == sorted(theirs.lhs_row_pointers)
    for stack, pointers in theirs.lhs_row_pointers.items():
        np.testing.assert_array_equal(ours.lhs_row_pointers[stack], pointers)
        ends = pointers.reshape(top.local_sc_count, width)[:, top.num_partitions - 1]
        for field in ("lhs_embedding_ids", "lhs_sample_ids", "lhs_gains"):
            mine, other = getattr(ours, field)[stack], getattr(theirs, field)[stack]
            assert mine.shape == other.shape
            assert mine.dtype == other.dtype
            mine = mine.reshape(top.local_sc_count, -1)
            other = other.reshape(top.local_sc_count, -1)
            for core, end in enumerate(-(-ends // 8) * 8):
                assert mine[core, :end].tobytes() == other[core, :end].tobytes()


def assert_same_stats(batch: PartitionedBatch, stats: Any, layout: StackedLayout):
    for stack in layout.stacks:
        expected = [
            stats.max_ids_per_partition[stack.name].max(),
            stats.max_unique_ids_per_partition[stack.name].max(),
            stats.required_buffer_size_per_sc[stack.name].max()
            * layout.topology.num_sc_per_device,
        ]
        assert batch.stats[stack.index].tolist() == expected


def run_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices = int(2 ** rng.integers(0, 4))
    top = topology(
        devices,
        int(2 ** rng.integers(0, min(3, devices.bit_length()))),
        int(rng.choice([2, 4])),
    )
    batch_size = top.local_sc_count * int(rng.integers(1, 4))
    tree = random_specs(rng, top, batch_size * top.num_hosts)
    ids, weights = random_batch(rng, tree, batch_size)
    options = None if weights is None else weight_options(tree)
    layout = layout_from_feature_specs(tree, top, feature_options=options)
    assert layout.batch_size == batch_size
    batch = ComputeInputStats(layout).map(as_element(tree, ids, weights, layout))[
        "sparsecore"
    ]
    # The limits of the specs are where ours start, so nothing has to grow here.
    start = repartition(batch, Limits.start(layout), layout)
    embedding.prepare_feature_specs_for_training(
        tree, top.global_device_count, top.num_sc_per_device
    )
    theirs, stats = upstream_preprocess(tree, ids, weights, top)
    assert_same_input(to_jax_tpu_embedding(start), theirs, top)
    assert_same_stats(batch, stats, layout)

    # From the data alone, and written back.
    small = layout_from_feature_specs(
        tree, top, read_limits=False, feature_options=options
    )
    limits = grow_limits(
        Limits.start(small), batch.stats, layout=small, policy=GrowthPolicy()
    )
    agreed = repartition(batch, limits, small)
    update_feature_specs(tree, limits)
    for leading in (False, True):
        theirs, _ = upstream_preprocess(
            tree, ids, weights, top, has_leading_dimension=leading
        )
        ours = to_jax_tpu_embedding(agreed, has_leading_dimension=leading)
        assert_same_input(ours, theirs, top)
    if hasattr(embedding, "eval_preprocess_sparse_dense_matmul_input_shape"):
        shapes = embedding.eval_preprocess_sparse_dense_matmul_input_shape(
            tree,
            top.local_device_count,
            top.global_device_count,
            num_sc_per_device=top.num_sc_per_device,
        )
        assert jax.eval_shape(lambda x: x, to_jax_tpu_embedding(agreed)) == shapes
    # Limits that were written back are read again.
    again = layout_from_feature_specs(tree, top, feature_options=options)
    assert Limits.start(again) == limits


@pytest.mark.parametrize("block", range(4))
def test_two_hundred_random_trees_equal_its_preprocessing(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        try:
            run_tree(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_unprepared_specs_are_placed_as_preparation_does() -> None:
    shared = table_spec("shared", 40)
    tree = {
        "z": feature_spec("b", shared),
        "y": [feature_spec("a", shared), feature_spec("c", table_spec("own", 50))],
    }
    layout = layout_from_feature_specs(tree, topology(2))
    assert not shared.is_stacked()
    embedding.prepare_feature_specs_for_training(tree, 2, 2)
    prepared = layout_from_feature_specs(tree, topology(2))
    assert layout == prepared
    assert layout.stack_names == ("own", "shared")
    offsets = {f.name: f.row_offset for f in layout.features}
    assert offsets == {"a": 0, "b": 16, "c": 0}
    # A path of dict keys leads into a batch; an index of a list does not.
    assert {f.name: f.spec.ids for f in layout.features} == {
        "a": "a",
        "b": "z",
        "c": "c",
    }


def test_one_bare_spec_is_a_tree_too() -> None:
    layout = layout_from_feature_specs(feature_spec("f", table_spec("t")), topology())
    assert [(f.name, f.spec.ids) for f in layout.features] == [("f", "f")]


def test_copies_of_one_table_are_one_table() -> None:
    table = table_spec("t")
    tree = [feature_spec("a", table), feature_spec("b", copy.deepcopy(table))]
    assert len(layout_from_feature_specs(tree, topology()).stacks) == 1


def test_limits_are_read_and_the_buffer_is_the_one_upstream_would_allocate() -> None:
    table = table_spec("t", max_ids_per_partition=9, max_unique_ids_per_partition=5)
    tree = [feature_spec("f", table)]
    (stack,) = layout_from_feature_specs(tree, topology()).stacks
    assert stack.start_max_ids_per_partition == 9
    assert stack.start_max_unique_ids_per_partition == 5
    assert stack.start_buffer_size_per_device == 16 * 2 * 2
    table.suggested_coo_buffer_size_per_device = 17
    (stack,) = layout_from_feature_specs(tree, topology()).stacks
    assert stack.start_buffer_size_per_device == 32
    (stack,) = layout_from_feature_specs(tree, topology(), read_limits=False).stacks
    assert stack.start_max_ids_per_partition == 1
    assert stack.start_buffer_size_per_device == 16


def test_options_reach_the_features() -> None:
    tree = {"f": feature_spec("f", table_spec("t"))}
    options = {"f": {"ids": "clicks", "weights": "dwell", "on_invalid_id": "mod"}}
    (feature,) = layout_from_feature_specs(
        tree, topology(), feature_options=options
    ).features
    assert (feature.spec.ids, feature.spec.weights) == ("clicks", "dwell")
    assert feature.spec.on_invalid_id == "mod"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"g": {}}, r"there is no feature 'g'; known: \['f'\]"),
        ({"f": {"idz": "x"}}, r"'idz' is not one of .*ids"),
        ({"f": {"hash": 1}}, r"feature 'f': hash must be true or false"),
    ],
)
def test_wrong_options_are_named(options: dict, text: str) -> None:
    tree = {"f": feature_spec("f", table_spec("t"))}
    with pytest.raises(ConfigError, match=text):
        layout_from_feature_specs(tree, topology(), feature_options=options)


@pytest.mark.parametrize("kind", ["slash", "name"])
def test_no_two_features_read_one_column_unasked(kind: str) -> None:
    one, two = feature_spec("fa", table_spec("t")), feature_spec("fb", table_spec("u"))
    tree: Any = {"u/w": one, "u": {"w": two}}
    key = "u/w"
    if kind == "name":
        tree, key = {"fb": one, "list": [two]}, "fb"
    embedding.prepare_feature_specs_for_training(tree, 2, 2)
    with pytest.raises(
        ConfigError,
        match=rf"'f[ab]' and 'f[ab]', at .* read their ids from '{key}'",
    ) as error:
        layout_from_feature_specs(tree, topology(2))
    (name,) = re.findall(r"feature_options={'(f[ab])'", str(error.value))
    # Who says so may do it.
    options = {name: {"ids": key}}
    layout = layout_from_feature_specs(tree, topology(2), feature_options=options)
    assert {f.spec.ids for f in layout.features} == {key}


def prepared(devices: int = 2, sc: int = 2) -> dict[str, Any]:
    tree = {n: feature_spec(n, table_spec(n, 100)) for n in ("a", "b", "c")}
    table_stacking.auto_stack_tables(tree, devices, sc)
    return tree


def test_specs_prepared_for_another_topology_are_refused() -> None:
    for top in (topology(4), topology(2, sc=4), topology(1)):
        with pytest.raises(ConfigError, match=r"in the specs, but \d+ for \d devices"):
            layout_from_feature_specs(prepared(), top)


def test_a_part_of_a_prepared_tree_is_refused() -> None:
    tree = prepared()
    for name in ("a", "b", "c"):
        rest = {key: spec for key, spec in tree.items() if key != name}
        with pytest.raises(ConfigError, match=r"\(stack 'a_b_c'\).*whole tree"):
            layout_from_feature_specs(rest, topology(2))


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({}, "there is no feature in it"),
        ({"f": 3}, r"\['f'\] is a int without name, table_spec, output_shape"),
        (
            [feature_spec("f", table_spec("t")), feature_spec("f", table_spec("u"))],
            "two features are named 'f', at '0' and '1'",
        ),
        (
            [
                feature_spec("f", table_spec("t", 10)),
                feature_spec("g", table_spec("t", 20)),
            ],
            "two tables are named 't': vocabulary_size 10 and 20",
        ),
        (
            [
                feature_spec("f", table_spec("t"), 16),
                feature_spec("g", table_spec("u"), 8),
            ],
            r"feature 'g': output_shape=\(8, 8\) means 8 samples .*'f' means 16",
        ),
        (
            [feature_spec("f", table_spec("t"), 14)],
            r"batch_size=14 .*nearest legal sizes: 12 and 16",
        ),
        (
            [feature_spec("f", table_spec("t", combiner="max"))],
            "table 't': combiner='max' is not one of sum, mean, sqrtn",
        ),
        (
            [
                feature_spec(
                    "f",
                    table_spec(
                        "t",
                        max_ids_per_partition=8,
                        suggested_coo_buffer_size_per_device=1000,
                    ),
                )
            ],
            "stack 't': suggested_coo_buffer_size_per_device=1000 is above 64",
        ),
        (
            [feature_spec("f", table_spec("t", max_ids_per_partition=2**30))],
            "stack 't': max_ids_per_partition=1073741824 .*does not fit int32",
        ),
    ],
)
def test_wrong_trees_are_named(tree: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        layout_from_feature_specs(tree, topology(2))


def test_the_batch_size_can_be_given_where_the_specs_leave_it_open() -> None:
    spec = feature_spec("f", table_spec("t"))
    spec.output_shape = [None, 8]
    assert layout_from_feature_specs(spec, topology(2), batch_size=8).batch_size == 8
    with pytest.raises(ConfigError, match="no output_shape names the batch size"):
        layout_from_feature_specs(spec, topology(2))
    with pytest.raises(ConfigError, match=r"means 16 samples.*batch_size=8 on 1 hosts"):
        layout_from_feature_specs(
            feature_spec("f", table_spec("t")), topology(2), batch_size=8
        )


LIMITS = StackLimits(
    max_ids_per_partition=8, max_unique_ids_per_partition=4, buffer_size_per_device=32
)


def test_limits_are_written_back_for_every_stack_or_for_none() -> None:
    tree = prepared()
    before = embedding.get_stacked_table_specs(tree)
    with pytest.raises(ConfigError, match="feature 'a': there are no limits for stack"):
        update_feature_specs(tree, Limits({"other": LIMITS}))
    assert embedding.get_stacked_table_specs(tree) == before
    update_feature_specs(tree, Limits({"a_b_c": LIMITS, "other": LIMITS}))
    (after,) = embedding.get_stacked_table_specs(tree).values()
    assert after == dataclasses.replace(
        before["a_b_c"],
        max_ids_per_partition=8,
        max_unique_ids_per_partition=4,
        suggested_coo_buffer_size_per_device=32,
    )
    with pytest.raises(ConfigError, match="table 't' is not prepared"):
        update_feature_specs(
            [feature_spec("f", table_spec("t"))], Limits({"t": LIMITS})
        )


def example(devices: int) -> tuple[Any, StackedLayout, SparseCoreInput]:
    tree = prepared(devices)
    top = topology(devices)
    layout = layout_from_feature_specs(tree, top)
    rng = np.random.default_rng(0)
    element = {n: rng.integers(0, 100, (16, 3)) for n in "abc"}
    batch = ComputeInputStats(layout).map(element)["sparsecore"]
    return tree, layout, repartition(batch, Limits.start(layout), layout)


@pytest.mark.parametrize("leading", [False, True])
def test_nothing_is_copied(leading: bool) -> None:
    _, _, batch = example(2)
    theirs = to_jax_tpu_embedding(batch, has_leading_dimension=leading)
    for ours, field in (
        (batch.row_pointers, theirs.lhs_row_pointers),
        (batch.embedding_ids, theirs.lhs_embedding_ids),
        (batch.sample_ids, theirs.lhs_sample_ids),
        (batch.gains, theirs.lhs_gains),
    ):
        assert np.shares_memory(ours["a_b_c"], field["a_b_c"])
        assert field["a_b_c"].ndim == 1 + leading
    assert theirs.num_minibatches.shape == ((2, 1) if leading else (2,))
    assert batch.to_jax_tpu_embedding(has_leading_dimension=leading) is not theirs


def test_what_was_handed_over_outlives_the_batch() -> None:
    # The memory of batches is used again, but not while anybody can see it.
    _, layout, batch = example(2)
    theirs = to_jax_tpu_embedding(batch)
    before = copy.deepcopy(theirs)
    del batch
    for seed in range(8):
        ids = np.random.default_rng(seed).integers(0, 100, (16, 3))
        other = ComputeInputStats(layout).map(dict.fromkeys("abc", ids))["sparsecore"]
        repartition(other, Limits.start(layout), layout)
    jax.tree.map(np.testing.assert_array_equal, theirs, before)


@pytest.mark.parametrize("devices", [1, 4])
def test_its_lookup_accepts_our_buffers(devices: int) -> None:
    # The lookup itself needs a SparseCore; its abstract evaluation checks every
    # shape and dtype against the specs.
    tree, layout, batch = example(devices)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    variables = {
        stack.name: embedding.EmbeddingVariables(
            table=jax.ShapeDtypeStruct(
                (stack.vocabulary_size, stack.embedding_dim), np.float32
            ),
            slot=(),
        )
        for stack in layout.stacks
    }
    lookup = jax.shard_map(
        functools.partial(
            embedding.tpu_sparse_dense_matmul,
            feature_specs=tree,
            global_device_count=devices,
            num_sc_per_device=2,
        ),
        mesh=mesh,
        in_specs=(P("x"), P("x")),
        out_specs=P("x"),
        check_vma=False,
    )

    def step(batch: SparseCoreInput, variables: Any) -> Any:
        return lookup(to_jax_tpu_embedding(batch), variables)

    activations = jax.eval_shape(step, batch, variables)
    assert {name: a.shape for name, a in activations.items()} == dict.fromkeys(
        "abc", (16, 8)
    )


def test_tables_of_unequal_width_stacked_by_hand_are_looked_up() -> None:
    # Upstream allows it and pads the narrow table; so the specs may say so.
    specs = {"a": table_spec("a", 50, 8), "b": table_spec("b", 70, 20)}
    tree = {name: feature_spec(name, table) for name, table in specs.items()}
    table_stacking.stack_tables(tree, ["b", "a"], 2, 2, stack_name="s")
    layout = layout_from_feature_specs(tree, topology(2))
    rng = np.random.default_rng(0)
    ids = {"a": rng.integers(0, 50, (16, 2)), "b": rng.integers(0, 70, (16, 2))}
    batch = repartition(
        ComputeInputStats(layout).map(ids)["sparsecore"], Limits.start(layout), layout
    )
    plain = {
        name: rng.normal(size=(table.vocabulary_size, table.embedding_dim)).astype("f4")
        for name, table in specs.items()
    }
    stacked = shard_tables(plain, layout)
    theirs = table_stacking.stack_and_shard_tables(specs, plain, 4, pad_value=0)
    np.testing.assert_array_equal(stacked["s"], theirs["s"].reshape(-1, 24))
    activations = embedding_lookup(stacked, batch, layout)
    for name, table in plain.items():
        expected = table[ids[name]].sum(1)
        np.testing.assert_allclose(activations[name], expected, rtol=1e-5, atol=1e-6)


def test_a_topology_section_is_told_how_to_become_a_topology() -> None:
    specs: Any = {"f": feature_spec("f", table_spec("t"))}
    section: Any = TopologyConfig(num_sc_per_device=2)
    with pytest.raises(ConfigError, match=r"not a TopologyConfig; .* resolve\(\)"):
        layout_from_feature_specs(specs, section, batch_size=8)
