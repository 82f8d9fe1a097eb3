"""Minibatching in one process: the tree, the buckets, the buffers, the pipeline."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grain_sparsecore.errors import LimitsExceededError
from grain_sparsecore.kernels import KERNEL_VARIABLE, KERNELS
from grain_sparsecore.limits import GrowthPolicy, Limits, StackLimits, grow_limits
from grain_sparsecore.metrics import entry_counts
from grain_sparsecore.minibatch import (
    LEFT_OUT,
    Split,
    bucketed,
    leave_out,
    minibatch_count,
    minibatch_of_bucket,
    needed_bits,
    slot_buckets,
    split_bits,
    split_needs,
)
from grain_sparsecore.minibatch.buckets import _KEY
from grain_sparsecore.partition import partition_counts
from grain_sparsecore.pipeline.padding import empty_batch
from grain_sparsecore.repartition import repartition
from grain_sparsecore.stacking import INT32_MAX
from tests.minibatch_helpers import (
    batch_of,
    layout_of,
)
from tests.strategies import random_case
from tests.test_highway import Scalar


def counts_of(**by_bucket: int) -> np.ndarray:
    counts = np.zeros((1, 64), np.int64)
    for name, count in by_bucket.items():
        counts[0, int(name[1:])] = count
    return counts


# The tree.


def test_what_fits_sets_no_node():
    bits = split_bits(counts_of(b0=3, b63=5), 8)
    assert bits.dtype == np.uint8
    assert bits.shape == (63,)
    assert not bits.any()
    assert minibatch_count(bits) == 1
    assert (minibatch_of_bucket(bits) == 0).all()


def test_a_pair_above_the_limit_is_cut_in_its_middle():
    bits = split_bits(counts_of(b6=3, b7=6), 8)
    # Node 3 of the pairs spans buckets 6 and 7; above it only the larger one counts.
    assert np.flatnonzero(bits).tolist() == [3]
    assert minibatch_of_bucket(bits).tolist() == [0] * 7 + [1] * 57


def test_the_larger_child_of_a_set_node_goes_on_up():
    # 6 + 3 is cut at 7; then 6 + 3 of buckets 4 to 7 and 0 to 3 is cut at 4.
    bits = split_bits(counts_of(b0=3, b6=3, b7=6), 8)
    # Level 3, nodes of 8 buckets, begins after 32 + 16 nodes.
    assert np.flatnonzero(bits).tolist() == [3, 48]
    groups = minibatch_of_bucket(bits)
    assert [groups[b] for b in (0, 3, 4, 6, 7, 63)] == [0, 0, 1, 1, 2, 2]


def test_the_root_is_the_last_bit():
    bits = split_bits(counts_of(b0=5, b63=5), 8)
    assert np.flatnonzero(bits).tolist() == [62]
    assert minibatch_of_bucket(bits).tolist() == [0] * 32 + [1] * 32


def test_nodes_of_several_trees_are_united():
    both = np.concatenate([counts_of(b0=5, b1=5), counts_of(b2=5, b3=5)])
    assert np.flatnonzero(split_bits(both, 8)).tolist() == [0, 1]
    assert not split_bits(both[:0], 8).any()


@given(
    counts=arrays(np.int64, (3, 64), elements=st.integers(0, 12)),
    limit=st.integers(1, 60),
)
def test_minibatches_fit_wherever_their_buckets_do(counts, limit):
    bits = split_bits(counts, limit)
    groups = minibatch_of_bucket(bits)
    assert groups[0] == 0
    assert groups[-1] + 1 == minibatch_count(bits) == bits.sum() + 1
    assert np.isin(np.diff(groups), (0, 1)).all()
    for tree in counts:
        sums = np.bincount(groups, tree)
        assert sums.max() <= max(limit, tree.max())
    # Nothing is cut where nothing is above the limit.
    assert bits.any() == (counts.sum(axis=1) > limit).any()


# The buckets.


@pytest.mark.parametrize("kernel", KERNELS)
def test_buckets_are_those_of_the_hash_of_the_column(kernel, monkeypatch):
    monkeypatch.setenv(KERNEL_VARIABLE, kernel)
    case = random_case(np.random.default_rng(3), max_partitions=16)
    batch, layout = batch_of(case), case.layout
    partitions = layout.topology.num_partitions
    buckets = slot_buckets(batch, layout)
    assert buckets.dtype == np.uint8
    entries = 0
    for stack in layout.stacks:
        found = bucketed(batch, buckets, stack, layout)
        counts, unique = partition_counts(batch, layout)[stack.index]
        np.testing.assert_array_equal(found.counts.sum(axis=1), counts.ravel())
        np.testing.assert_array_equal(found.unique.sum(axis=1), unique.ravel())
        start = (
            sum(
                int(batch.stats[s.index, 2]) // layout.topology.num_sc_per_device
                for s in layout.stacks[: stack.index]
            )
            * layout.topology.local_sc_count
        )
        for position, cell, bucket in zip(
            found.positions, found.cells, found.buckets, strict=True
        ):
            row = int(batch.embedding_ids[start + position])
            column = row * partitions + int(cell) % partitions
            data = np.array(column).astype("<i4").tobytes()
            assert bucket == Scalar(_KEY).hash(data) % 64
        entries += found.positions.size
    assert (buckets == LEFT_OUT).sum() == buckets.size - entries


def test_columns_beyond_int32_are_cut_to_its_bits():
    case = random_case(np.random.default_rng(3), max_partitions=16)
    batch = batch_of(case)
    big = np.where(
        batch.embedding_ids == INT32_MAX, INT32_MAX, batch.embedding_ids + 2**30
    ).astype(np.int32)
    more = slot_buckets(dataclasses.replace(batch, embedding_ids=big), case.layout)
    # N is at least 4, so that N * 2**30 leaves the low 32 bits as they are.
    assert case.layout.topology.num_partitions >= 4
    np.testing.assert_array_equal(more, slot_buckets(batch, case.layout))


def test_a_batch_without_entries_has_empty_minibatches():
    layout = layout_of()
    batch = empty_batch(layout)
    assert slot_buckets(batch, layout).size == 0
    bits = np.zeros(63, np.uint8)
    bits[62] = 1
    split = Split(bits, np.zeros(0, np.uint8))
    result = repartition(
        dataclasses.replace(batch, split=split), Limits.start(layout), layout
    )
    assert result.num_minibatches.tolist() == [2]
    assert not result.row_pointers["item"].any()
    assert np.isnan(result.gains["item"]).all()


# The buffers.


def split_case(seed: int, share: float):
    """A random batch, split so that ids per partition fall to a share."""
    case = random_case(np.random.default_rng(seed), max_partitions=16, max_ids=60)
    batch, layout = batch_of(case), case.layout
    ceilings = np.maximum((batch.stats * share).astype(np.int64), 1)
    buckets = slot_buckets(batch, layout)
    bits = needed_bits(batch, buckets, ceilings, layout)
    buckets, _ = leave_out(batch, buckets, ceilings, layout)
    needs = [
        split_needs(bucketed(batch, buckets, s, layout), bits, layout)
        for s in layout.stacks
    ]
    limits = grow_limits(
        Limits.start(layout),
        np.array(needs, np.int32),
        layout=layout,
        policy=GrowthPolicy(kind="exact"),
        minibatches=64,
    )
    return case, dataclasses.replace(batch, split=Split(bits, buckets)), limits


@pytest.mark.parametrize("field", range(3))
def test_a_split_batch_above_a_limit_is_an_error(field):
    case, batch, limits = split_case(3, 0.5)
    name = case.layout.stack_names[0]
    numbers = list(dataclasses.astuple(limits[name]))
    numbers[field] = 0
    tight = Limits(
        {
            **limits,
            name: StackLimits(
                **dict(
                    zip(
                        [f.name for f in dataclasses.fields(StackLimits)],
                        numbers,
                        strict=True,
                    )
                )
            ),
        }
    )
    needed = ["max_ids_per_partition", "max_unique_ids_per_partition", "buffer_size"]
    with pytest.raises(
        LimitsExceededError,
        match=rf"{name}.*a minibatch .* needs {needed[field]}=\d+, but the limit is 0",
    ):
        repartition(batch, tight, case.layout)


@pytest.mark.parametrize("seed", range(6))
def test_entries_of_all_minibatches_are_counted(seed):
    case, batch, limits = split_case(seed, 0.4)
    result = repartition(batch, limits, case.layout)
    counts = entry_counts(result, layout=case.layout)
    for stack in case.layout.stacks:
        found = bucketed(batch, batch.split.buckets, stack, case.layout)
        np.testing.assert_array_equal(
            counts[stack.name].ravel(), found.counts.sum(axis=1)
        )
        assert counts[stack.name].dtype == np.int32


@pytest.mark.parametrize("split", [True, False])
def test_the_buffers_share_no_memory_with_the_batch(split):
    # Shared memory of workers would be kept, and reported as leaked at exit.
    case, batch, limits = split_case(1, 0.4)
    if not split:
        whole = Split(np.zeros_like(batch.split.bits), None)
        batch = dataclasses.replace(batch, split=whole)
        limits = grow_limits(
            limits,
            batch.stats,
            layout=case.layout,
            policy=GrowthPolicy(kind="exact"),
            minibatches=64,
        )
    result = repartition(batch, limits, case.layout)
    for one in jax.tree.leaves(result):
        assert not any(np.shares_memory(one, two) for two in jax.tree.leaves(batch))


def test_sizes_may_reach_64_times_the_theoretical_one():
    layout = layout_of()
    needs = np.array([[8, 8, 2000], [1, 1, 16]], np.int32)
    for minibatches, size in ((1, 8 * 2 * 2), (64, 2000)):
        grown = grow_limits(
            Limits.start(layout),
            needs,
            layout=layout,
            policy=GrowthPolicy(kind="exact"),
            minibatches=minibatches,
            ceilings=np.array([[8, 8, INT32_MAX]] * 2),
        )
        most = max(size, Limits.start(layout)["item"].buffer_size_per_device)
        assert grown["item"].buffer_size_per_device == most


# The pipeline.
