import dataclasses
import importlib.util

import jax
import numpy as np
import pytest
from jax_tpu_embedding.sparsecore.lib.nn import embedding

from grain_sparsecore.errors import ConfigError, MissingExtraError
from grain_sparsecore.features import COUNTERS, FeatureIds
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.lookup import embedding_lookup
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.program import (
    OPTIMIZERS,
    Program,
    _feature_specs,
    buffer_shapes,
    lower,
    program_fingerprint,
)
from grain_sparsecore.repartition import repartition
from tests.rehearse_helpers import layout_of, limits_of
from tests.strategies import random_case

TWO = {"item": 1000, "user": 200}


def test_the_fingerprint_is_the_same_for_the_same_limits():
    layout = layout_of(TWO)
    fingerprint = program_fingerprint(limits_of(layout, 9, 5, 64), layout)
    assert len(fingerprint) == 64
    assert fingerprint == program_fingerprint(limits_of(layout, 9, 5, 64), layout)
    reordered = layout_of({"user": 200, "item": 1000})
    assert fingerprint == program_fingerprint(limits_of(layout, 9, 5, 64), reordered)


@pytest.mark.parametrize("stack", ["item", "user"])
@pytest.mark.parametrize(
    "field",
    [
        "max_ids_per_partition",
        "max_unique_ids_per_partition",
        "buffer_size_per_device",
    ],
)
def test_every_limit_of_every_stack_is_in_the_fingerprint(stack, field):
    layout = layout_of(TWO)
    limits = limits_of(layout, 9, 5, 64)
    plain = limits.to_plain()
    plain[stack][field] += 16
    other = Limits.from_plain(plain)
    assert program_fingerprint(limits, layout) != program_fingerprint(other, layout)


@pytest.mark.parametrize(
    "other",
    [
        {"devices": 8},
        {"samples": 128},
        {"dim": 16},
        {"optimizer": "sgd"},
        {"tables": {"item": 1000, "user": 300}},
    ],
    ids=str,
)
def test_what_else_shapes_the_program_is_in_the_fingerprint(other):
    layout, another = layout_of(TWO), layout_of(**{"tables": TWO, **other})
    limits = limits_of(layout, 9, 5, 64)
    assert program_fingerprint(limits, layout) != program_fingerprint(limits, another)


def test_hosts_are_not_in_the_fingerprint():
    alone, split = layout_of(TWO), layout_of(TWO, hosts=4)
    limits = limits_of(alone, 9, 5, 64)
    assert program_fingerprint(limits, alone) == program_fingerprint(limits, split)


@pytest.mark.parametrize("label", [*OPTIMIZERS, "adam#2"])
def test_every_optimizer_lowers(label):
    layout = layout_of(optimizer=label)
    text = lower(Program.of(layout, limits_of(layout, 9, 5, 64))).as_text()
    assert "max_unique_ids_per_partition" in text


def test_an_unknown_optimizer_is_named():
    layout = layout_of(optimizer="lion")
    with pytest.raises(ConfigError, match=r"table 'item': optimizer='lion' .*adagrad,"):
        Program.of(layout, limits_of(layout, 9, 5, 64))


def test_limits_of_other_stacks_are_refused():
    limits = limits_of(layout_of({"ad": 10}), 9, 5, 64)
    with pytest.raises(ConfigError, match=r"no limits for stack 'item'.*\['ad'\]"):
        Program.of(layout_of(), limits)


def test_without_jax_tpu_embedding_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    layout = layout_of()
    with pytest.raises(MissingExtraError, match=r"pip install .*\[sparsecore\]'"):
        program_fingerprint(limits_of(layout, 9, 5, 64), layout)


def test_a_program_survives_json():
    layout = layout_of(TWO)
    program = Program.of(layout, limits_of(layout, 9, 5, 64))
    assert Program.from_plain(program.to_plain()) == program


def some_limits(layout, stats):
    return Limits(
        {
            name: StackLimits(
                max_ids_per_partition=max(ids, 1),
                max_unique_ids_per_partition=max(unique, 1),
                buffer_size_per_device=max(size, 8 * layout.topology.num_sc_per_device),
            )
            for name, (ids, unique, size) in zip(
                layout.stack_names, stats.tolist(), strict=True
            )
        }
    )


@pytest.mark.parametrize("seed", range(20))
def test_buffers_have_the_shapes_that_both_sides_say(seed):
    case = random_case(np.random.default_rng(seed))
    layout = case.layout
    batch = partition_batch(
        case.features,
        layout,
        counters=case.counters,
        num_samples=layout.batch_size,
    )
    limits = some_limits(layout, batch.stats)
    program = Program.of(layout, limits)
    shapes = buffer_shapes(program.stacks, layout.topology)
    buffers = repartition(batch, limits, layout)

    def kinds(tree):
        return jax.tree.map(lambda array: (array.shape, np.dtype(array.dtype)), tree)

    for field in ("row_pointers", "embedding_ids", "sample_ids", "gains"):
        assert kinds(getattr(buffers, field)) == kinds(getattr(shapes, field)), field
    theirs = embedding.eval_preprocess_sparse_dense_matmul_input_shape(
        _feature_specs(program),
        layout.topology.local_device_count,
        layout.topology.global_device_count,
        num_sc_per_device=layout.topology.num_sc_per_device,
    )
    assert kinds(buffers.to_jax_tpu_embedding()) == kinds(theirs)


def batch_in(layout, limits):
    """One id a sample, in buffers of the limits, as a step takes them."""
    ids = np.arange(layout.batch_size, dtype=np.int32)
    batch = partition_batch(
        [
            FeatureIds(ids=ids, row_splits=None, width=1, weights=None)
            for _ in layout.features
        ],
        layout,
        counters=np.zeros((len(layout.features), len(COUNTERS)), np.int32),
        num_samples=layout.batch_size,
    )
    return dataclasses.replace(
        repartition(batch, limits, layout), counters=None, drops=None
    )


def test_a_compiled_step_refuses_batches_of_other_limits():
    layout = layout_of(TWO)
    limits = limits_of(layout, 16, 16, 256)
    tables = {
        stack.name: np.ones((stack.vocabulary_size, stack.embedding_dim), np.float32)
        for stack in layout.stacks
    }
    shapes = buffer_shapes(Program.of(layout, limits).stacks, layout.topology)
    traces = []

    def step(tables, inputs):
        traces.append(inputs.limits)
        return embedding_lookup(tables, inputs, layout)

    compiled = jax.jit(step).lower(tables, shapes).compile()
    activations = compiled(tables, batch_in(layout, limits))
    np.testing.assert_array_equal(activations["item_id"], np.ones((64, 8)))
    # Other sizes, and other limits in buffers of the same size.
    for other in (limits_of(layout, 16, 16, 512), limits_of(layout, 24, 16, 256)):
        with pytest.raises(TypeError, match="compiled"):
            compiled(tables, batch_in(layout, other))
    assert traces == [limits]
