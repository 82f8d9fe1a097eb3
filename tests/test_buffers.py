import dataclasses

import jax
import numpy as np
import pytest

from grain_sparsecore.buffers import PartitionedBatch, SparseCoreInput
from grain_sparsecore.limits import Limits, StackLimits

LIMITS = Limits(
    {
        "t": StackLimits(
            max_ids_per_partition=1,
            max_unique_ids_per_partition=1,
            buffer_size_per_device=8,
        )
    }
)


def make_batch(**change):
    fields = {
        "embedding_ids": np.arange(8, dtype=np.int32),
        "sample_ids": np.arange(8, dtype=np.int32),
        "gains": np.full(8, np.nan, np.float32),
        "row_pointers": np.zeros((1, 1, 8), np.int32),
        "stats": np.ones((1, 3), np.int32),
        "counters": np.zeros((1, 2), np.int32),
        "num_valid_samples": np.ones(1, np.int32),
    }
    return PartitionedBatch(**{**fields, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"embedding_ids": np.zeros(8, np.int32)},
        {"embedding_ids": np.arange(8, dtype=np.int64)},
        {"embedding_ids": np.arange(8, dtype=np.int32).reshape(2, 4)},
        {"gains": np.zeros(8, np.float32)},
        {"limits": LIMITS},
    ],
)
def test_batches_are_equal_bit_by_bit(change):
    assert make_batch() == make_batch()
    assert make_batch() != make_batch(**change)
    assert make_batch() != "a batch"


def test_limits_are_metadata_and_arrays_are_leaves():
    buffers = {"t": np.zeros((1, 8), np.int32)}
    batch = SparseCoreInput(
        row_pointers=buffers,
        embedding_ids=buffers,
        sample_ids=buffers,
        gains=buffers,
        num_minibatches=np.ones(1, np.int32),
        num_valid_samples=np.ones(1, np.int32),
        counters=np.zeros((1, 2), np.int32),
        limits=LIMITS,
    )
    leaves, tree = jax.tree.flatten(batch)
    assert len(leaves) == 7
    assert jax.tree.unflatten(tree, leaves) == batch
    other = dataclasses.replace(batch, limits=Limits({}))
    assert jax.tree.structure(other) != tree


def test_a_batch_shows_what_it_is_made_for_and_not_its_numbers():
    assert repr(make_batch()) == "PartitionedBatch(no limits yet)"
    assert repr(make_batch(limits=LIMITS)) == (
        "PartitionedBatch(Limits(t: ids 1, unique 1, buffer 8))"
    )
