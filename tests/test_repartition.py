import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from grain_sparsecore.buffers import PartitionedBatch, SparseCoreInput
from grain_sparsecore.errors import LimitsExceededError
from grain_sparsecore.limits import GrowthPolicy, Limits, StackLimits, grow_limits
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.repartition import repartition
from tests import reference
from tests.strategies import Case, cases, random_case, random_features


def partition_case(case: Case) -> PartitionedBatch:
    return partition_batch(
        case.features,
        case.layout,
        counters=case.counters,
        num_samples=case.layout.batch_size,
    )


def fitting_limits(case: Case, batch: PartitionedBatch, kind: str) -> Limits:
    return grow_limits(
        Limits.start(case.layout),
        batch.stats,
        layout=case.layout,
        policy=GrowthPolicy(kind=kind),  # pyright: ignore[reportArgumentType]
    )


def check_against_reference(
    case: Case, limits: Limits, result: SparseCoreInput
) -> None:
    for stack, cells in zip(
        case.layout.stacks, reference.cells(case.features, case.layout), strict=True
    ):
        pointers, ids, samples, gains = reference.buffers(
            cells, limits[stack.name].buffer_size_per_device, case.layout
        )
        for want, got in (
            (pointers, result.row_pointers[stack.name]),
            (ids, result.embedding_ids[stack.name]),
            (samples, result.sample_ids[stack.name]),
            (gains.view(np.int32), result.gains[stack.name].view(np.int32)),
        ):
            np.testing.assert_array_equal(want, got)
    assert result.limits == limits
    assert result.num_minibatches.tolist() == [1] * len(result.num_valid_samples)


@pytest.mark.parametrize("kind", ["exact", "headroom", "geometric"])
@pytest.mark.parametrize("seed", range(15))
def test_random_batches_equal_the_reference(seed: int, kind: str) -> None:
    case = random_case(np.random.default_rng(seed))
    batch = partition_case(case)
    limits = fitting_limits(case, batch, kind)
    check_against_reference(case, limits, repartition(batch, limits, case.layout))


@settings(max_examples=60)
@given(cases())
def test_any_batch_equals_the_reference(case: Case) -> None:
    batch = partition_case(case)
    limits = fitting_limits(case, batch, "exact")
    check_against_reference(case, limits, repartition(batch, limits, case.layout))


@pytest.mark.parametrize(
    ("column", "field"),
    [
        (0, "max_ids_per_partition"),
        (1, "max_unique_ids_per_partition"),
        (2, "buffer_size_per_device"),
    ],
)
def test_exceeded_limits_name_stack_and_numbers(column: int, field: str) -> None:
    case = random_case(np.random.default_rng(5))
    batch = partition_case(case)
    limits = dict(fitting_limits(case, batch, "exact"))
    stack = case.layout.stacks[-1]
    needed = int(batch.stats[-1, column])
    small: StackLimits = dataclasses.replace(limits[stack.name], **{field: needed - 1})
    limits[stack.name] = small
    with pytest.raises(LimitsExceededError) as error:
        repartition(batch, Limits(limits), case.layout)
    text = str(error.value)
    assert f"stack {stack.name!r}" in text
    assert f"needs {field}={needed}, but the limit is {needed - 1}" in text


def test_result_is_a_pytree_with_static_limits() -> None:
    case = random_case(np.random.default_rng(1))
    batch = partition_case(case)
    limits = fitting_limits(case, batch, "geometric")
    result = repartition(batch, limits, case.layout)
    leaves, structure = jax.tree.flatten(result)
    assert len(leaves) == 4 * len(case.layout.stacks) + 3
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
    again = jax.tree.structure(repartition(batch, limits, case.layout))
    assert structure == again


def test_batch_is_left_as_it_was() -> None:
    case = random_case(np.random.default_rng(2))
    batch = partition_case(case)
    before = [leaf.copy() for leaf in jax.tree.leaves(batch)]
    result = repartition(batch, fitting_limits(case, batch, "headroom"), case.layout)
    for buffers in (result.embedding_ids, result.sample_ids, result.gains):
        for buffer in buffers.values():
            buffer[...] = 0
    for was, now in zip(before, jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(was, now)


def test_kept_batches_are_never_overwritten() -> None:
    # Memory is recycled between batches, so keep some, in whole or in part.
    rng = np.random.default_rng(11)
    layout_case = random_case(rng)
    kept = []
    for i in range(12):
        case = Case(layout_case.layout, random_features(rng, layout_case.layout))
        batch = partition_case(case)
        result = repartition(batch, fitting_limits(case, batch, "exact"), case.layout)
        if i % 3 == 0:
            arrays = jax.tree.leaves((batch, result))
        elif i % 3 == 1:
            arrays = [gains[:, ::2] for gains in result.gains.values()]
        else:
            arrays = []
        kept.append([(array, array.tobytes()) for array in arrays])
    for array, content in (pair for pairs in kept for pair in pairs):
        assert array.tobytes() == content


def test_the_result_shares_no_memory_with_the_batch() -> None:
    # Shared memory of workers would be kept, and reported as leaked at exit.
    case = random_case(np.random.default_rng(0))
    batch = partition_case(case)
    result = repartition(batch, fitting_limits(case, batch, "exact"), case.layout)
    for one in jax.tree.leaves(result):
        assert not any(np.shares_memory(one, two) for two in jax.tree.leaves(batch))
