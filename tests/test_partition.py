from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings

from grain_sparsecore.features import FeatureIds
from grain_sparsecore.kernels import KERNEL_VARIABLE, KERNELS
from grain_sparsecore.partition import (
    partition_batch,
    partition_counts,
    required_per_sc,
)
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout
from tests import reference
from tests.strategies import Case, cases, random_case


@pytest.fixture(params=KERNELS, autouse=True, scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs with every kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KERNEL_VARIABLE, request.param)
        yield request.param


def check_against_reference(case: Case) -> None:
    expected = reference.cells(case.features, case.layout)
    batch = partition_batch(
        case.features,
        case.layout,
        counters=case.counters,
        num_samples=case.layout.batch_size,
    )
    ids, samples, gains, pointers = reference.compact(expected, case.layout)
    for name, want, got in (
        ("stats", reference.stats(expected, case.layout), batch.stats),
        ("row_pointers", pointers, batch.row_pointers),
        ("embedding_ids", ids, batch.embedding_ids),
        ("sample_ids", samples, batch.sample_ids),
        ("gains", gains.view(np.int32), batch.gains.view(np.int32)),
    ):
        assert want.dtype == got.dtype, name
        np.testing.assert_array_equal(want, got, err_msg=name)
    for cells, (count, unique) in zip(
        expected, partition_counts(batch, case.layout), strict=True
    ):
        want_count, want_unique = reference.counts(cells)
        np.testing.assert_array_equal(want_count, count)
        np.testing.assert_array_equal(want_unique, unique)
    np.testing.assert_array_equal(
        [reference.required(cells) for cells in expected],
        required_per_sc(batch, case.layout),
    )


@pytest.mark.parametrize("seed", range(60))
def test_random_batches_equal_the_reference(seed: int) -> None:
    check_against_reference(random_case(np.random.default_rng(seed)))


@settings(max_examples=200)
@given(cases())
def test_any_batch_equals_the_reference(case: Case) -> None:
    check_against_reference(case)


def one_table(
    rows: list[list[int]],
    weights: list[list[float]] | None = None,
    *,
    combiner: str = "sum",
    sc_count: int = 2,
    vocabulary: int = 64,
) -> Case:
    layout = make_layout(
        [
            TableSpec(
                name="t",
                vocabulary_size=vocabulary,
                embedding_dim=8,
                combiner=combiner,  # pyright: ignore[reportArgumentType]
            )
        ],
        [FeatureSpec(name="f", table="t", weights="w" if weights else None)],
        topology=Topology(
            global_device_count=1, local_device_count=1, num_sc_per_device=sc_count
        ),
        batch_size=len(rows),
    )
    flat = None
    if weights is not None:
        flat = np.array([w for row in weights for w in row], np.float32)
    feature = FeatureIds(
        ids=np.array([i for row in rows for i in row], np.int32),
        row_splits=np.cumsum([0] + [len(row) for row in rows]).astype(np.int64),
        width=0,
        weights=flat,
    )
    return Case(layout, [feature])


def partition_case(case: Case, num_samples: int | None = None):
    return partition_batch(
        case.features,
        case.layout,
        counters=case.counters,
        num_samples=case.layout.batch_size if num_samples is None else num_samples,
    )


def test_worked_example_of_two_samples() -> None:
    case = one_table([[0, 0, 0, 2, 4, 1], [1, 1, 1, 3, 3, 5, 5, 7, 7, 0]])
    batch = partition_case(case)
    ((count, unique),) = partition_counts(batch, case.layout)
    assert count.max(axis=0).tolist() == [3, 4]
    assert unique.max(axis=0).tolist() == [3, 4]
    assert required_per_sc(batch, case.layout).tolist() == [[16, 16]]
    gains = batch.gains.reshape(2, 16)
    assert gains[0, :3].tolist() == [3, 1, 1]
    assert gains[1, 8:12].tolist() == [3, 2, 2, 2]
    # N = 2, so row pointers 2 to 7 repeat the aligned end.
    assert batch.row_pointers[0].tolist() == [
        [3, 9] + [16] * 6,
        [1, 12] + [16] * 6,
    ]


def test_weighted_duplicates_stay_within_their_sparsecore() -> None:
    case = one_table([[1, 1, 2], [3]], [[0.5, 0.25, 1], [1]])
    batch = partition_case(case)
    assert batch.stats.tolist() == [[1, 1, 32]]
    gains = batch.gains.reshape(2, 16)
    assert [gains[0, 0], gains[0, 8], gains[1, 0]] == [1.0, 0.75, 1.0]
    # The last id of the first sample and the first of the second stay two entries.
    batch = partition_case(one_table([[3], [3]]))
    assert batch.sample_ids.reshape(2, 8)[:, 0].tolist() == [0, 0]


def test_empty_batch_has_no_slots() -> None:
    batch = partition_case(one_table([[], [], [], []]), num_samples=0)
    assert batch.stats.tolist() == [[0, 0, 0]]
    assert batch.embedding_ids.shape == (0,)
    assert batch.row_pointers.shape == (1, 2, 8)
    assert not batch.row_pointers.any()
    assert batch.num_valid_samples.tolist() == [0]


@pytest.mark.parametrize(
    ("combiner", "weights"),
    [("mean", [1.0, -1.0]), ("mean", [0.0, 0.0]), ("sqrtn", [0.0, 0.0])],
)
def test_weights_that_cancel_out_give_gain_zero(
    combiner: str, weights: list[float]
) -> None:
    case = one_table([[1, 3], [5]], [weights, [2.0]], combiner=combiner)
    batch = partition_case(case)
    gains = batch.gains.reshape(2, 8)
    assert gains[0, :2].tolist() == [0, 0]
    assert gains[1, 0] == 1
    check_against_reference(case)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_long_and_short_rows_sum_in_input_order(combiner: str) -> None:
    # One row far longer than the others takes the scalar path of the row sums, the
    # others the vectorised one; float32 sums of these depend on their order.
    rng = np.random.default_rng(7)
    lengths = [300] + [int(n) for n in rng.integers(0, 9, 127)]
    case = one_table(
        [rng.integers(0, 40, n).tolist() for n in lengths],
        [(rng.random(n) * 10.0 ** rng.integers(-6, 6, n)).tolist() for n in lengths],
        combiner=combiner,
        sc_count=4,
    )
    check_against_reference(case)


def test_valid_samples_are_counted_per_device() -> None:
    layout = make_layout(
        [TableSpec(name="t", vocabulary_size=8, embedding_dim=8)],
        [FeatureSpec(name="f", table="t")],
        topology=Topology(
            global_device_count=4, local_device_count=4, num_sc_per_device=2
        ),
        batch_size=16,
    )
    feature = FeatureIds(
        ids=np.zeros(6, np.int32),
        row_splits=np.minimum(np.arange(17), 6),
        width=0,
        weights=None,
    )
    batch = partition_case(Case(layout, [feature]), num_samples=6)
    assert batch.num_valid_samples.tolist() == [4, 2, 0, 0]
    assert batch.num_valid_samples.dtype == np.int32


def test_results_do_not_depend_on_the_order_of_declaration() -> None:
    rng = np.random.default_rng(3)
    case = random_case(rng)
    tables = [t.spec for s in case.layout.stacks for t in s.tables]
    features = [f.spec for f in case.layout.features]
    layout = make_layout(
        tables[::-1],
        features[::-1],
        topology=case.layout.topology,
        batch_size=case.layout.batch_size,
    )
    one = partition_case(case)
    two = partition_case(Case(layout, case.features))
    for field in ("embedding_ids", "sample_ids", "gains", "row_pointers", "stats"):
        np.testing.assert_array_equal(getattr(one, field), getattr(two, field))


def test_largest_ids_of_the_largest_vocabulary_keep_all_bits() -> None:
    case = one_table(
        [[2**31 - 2, 0], [2**31 - 3], [2**30], [2**31 - 2]],
        sc_count=4,
        vocabulary=2**31 - 1,
    )
    check_against_reference(case)


def test_sparsecores_of_equal_length_may_hold_features_unequally() -> None:
    layout = make_layout(
        [TableSpec(name="t", vocabulary_size=64, embedding_dim=8)],
        [FeatureSpec(name=name, table="t") for name in "abc"],
        topology=Topology(
            global_device_count=1, local_device_count=1, num_sc_per_device=2
        ),
        batch_size=2,
    )

    def ragged(ids: list[int], lengths: list[int]) -> FeatureIds:
        return FeatureIds(
            ids=np.array(ids, np.int32),
            row_splits=np.cumsum([0] + lengths),
            width=0,
            weights=None,
        )

    # Three ids on each SparseCore, but none and two of them before those of b.
    features = [
        ragged([5, 9], [0, 2]),
        FeatureIds(
            ids=np.array([3, 2], np.int32), row_splits=None, width=1, weights=None
        ),
        ragged([6, 1], [2, 0]),
    ]
    check_against_reference(Case(layout, features))
