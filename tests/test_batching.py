"""batch_ragged: every sample's values, unchanged, in one batch."""

import itertools

import grain
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from grain_sparsecore.batching import RaggedValues, batch_ragged
from grain_sparsecore.errors import InputError, InputTypeError


def check_rows(batched: object, rows: list, dtype: object) -> None:
    """A ragged feature holds exactly ``rows``."""
    assert isinstance(batched, RaggedValues)
    values, row_splits = batched
    assert values.dtype == dtype
    assert row_splits.dtype == np.int64
    assert [values[a:b].tolist() for a, b in itertools.pairwise(row_splits)] == rows


def one(values: list) -> object:
    return batch_ragged([{"f": value} for value in values])["f"]


def check_dense(batched: object, expected: list, dtype: object) -> None:
    assert isinstance(batched, np.ndarray)
    assert batched.dtype == dtype
    assert batched.tolist() == expected


def test_scalars_and_equal_shapes_are_stacked() -> None:
    batch = batch_ragged(
        [
            {"id": 3, "x": np.float32(0.5), "v": np.arange(3), "m": np.eye(2)},
            {"id": 4, "x": np.float32(1.5), "v": np.arange(3), "m": np.eye(2)},
        ]
    )
    check_dense(batch["id"], [3, 4], np.int64)
    check_dense(batch["x"], [0.5, 1.5], np.float32)
    check_dense(batch["v"], [[0, 1, 2]] * 2, np.int64)
    assert batch["m"].shape == (2, 2, 2)


def test_uneven_lengths_become_csr() -> None:
    check_rows(
        one([np.array([1, 2], np.int32), np.array([], np.int32), np.array([3])]),
        [[1, 2], [], [3]],
        np.int64,
    )


def test_lists_become_csr_also_where_lengths_are_even() -> None:
    check_rows(one([[1, 2], [3, 4]]), [[1, 2], [3, 4]], np.int64)
    check_rows(one([(1, 2), (3,)]), [[1, 2], [3]], np.int64)
    check_rows(one([[0.5], []]), [[0.5], []], np.float64)


def test_a_scalar_among_rows_is_a_row_of_one() -> None:
    check_rows(one([[1, 2], 3]), [[1, 2], [3]], np.int64)
    check_rows(
        one([np.int64(3), np.array([], np.int64)]),
        [[3], []],
        np.int64,
    )


def test_features_of_zero_length() -> None:
    batched = one([np.zeros(0, np.int32)] * 4)
    assert isinstance(batched, np.ndarray)
    assert batched.shape == (4, 0)
    assert batched.dtype == np.int32
    check_rows(one([[], []]), [[], []], np.int64)
    check_rows(one([np.zeros(0, np.uint8), []]), [[], []], np.uint8)


def test_empty_rows_have_no_say_in_the_dtype() -> None:
    # np.array([]) is float64
    check_rows(one([np.array([]), np.array([5])]), [[], [5]], np.int64)
    check_rows(one([[], np.array([5], np.uint8)]), [[], [5]], np.uint8)


def test_nested_dicts_keep_their_structure() -> None:
    batch = batch_ragged(
        [
            {"user": {"id": 1, "history": [1, 2]}, "label": 0.0},
            {"label": 1.0, "user": {"history": [], "id": 2}},
        ]
    )
    assert set(batch) == {"user", "label"}
    check_dense(batch["user"]["id"], [1, 2], np.int64)
    check_rows(batch["user"]["history"], [[1, 2], []], np.int64)


@pytest.mark.parametrize(
    ("values", "expected", "dtype"),
    [
        ([np.int8(1), np.int64(2**40)], [1, 2**40], np.int64),
        ([np.int64(2**40), np.int8(1)], [2**40, 1], np.int64),
        ([np.uint64(2**64 - 1), np.int8(1)], [2**64 - 1, 1], np.uint64),
        ([np.uint64(7), np.int8(-1)], [7, -1], np.int64),
        ([2**63, 1], [2**63, 1], np.uint64),
        ([np.float32(0.1), np.float64(0.1)], [float(np.float32(0.1)), 0.1], float),
        ([np.int64(2**53), np.float32(0.5)], [2**53, 0.5], np.float64),
        ([True, np.False_], [True, False], np.bool_),
        (["ab", "abc"], ["ab", "abc"], object),
        ([b"a\0", b""], [b"a\0", b""], object),
        ([np.str_("ab"), np.str_("abc")], ["ab", "abc"], object),
        ([np.array(["ab"]), np.array(["abc"])], [["ab"], ["abc"]], "U3"),
    ],
)
def test_no_value_changes(values: list, expected: list, dtype: object) -> None:
    check_dense(one(values), expected, dtype)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([np.array([1], np.int8), np.array([2**40, 5])], np.int64),
        ([np.array([1], object), np.array([2**40, 5], object)], np.int64),
        ([[2**63], [1, 2]], np.uint64),
        ([[1], [0.5, 2]], np.float64),
        ([["ab"], ["abc", "d\0"]], object),
        ([np.array(["ab", "c"], object), np.array([], object)], object),
    ],
)
def test_no_value_of_a_row_changes(rows: list, dtype: object) -> None:
    check_rows(one(rows), [list(row) for row in rows], dtype)


@pytest.mark.parametrize(
    ("values", "error", "expected"),
    [
        (
            [np.uint64(2**64 - 1), np.int8(-1)],
            InputTypeError,
            "feature 'f': sample 0 holds 18446744073709551615 among floats or integers "
            "of another sign",
        ),
        (
            [np.int64(2**53 + 1), np.float64(0.5)],
            InputTypeError,
            "sample 0 holds 9007199254740993 among floats",
        ),
        (
            [[0.5], [2**53 + 1, 0.5]],
            InputTypeError,
            "sample 1 holds 9007199254740993 among floats",
        ),
        ([[-1, 2**63]], InputTypeError, "sample 0 holds 9223372036854775808"),
        ([[2**64]], InputTypeError, "sample 0 holds [18446744073709551616]"),
        ([1, None], InputTypeError, "sample 1 holds None, which is neither numbers"),
        ([[1], [1, None]], InputTypeError, "sample 1 holds [1, None]"),
        (["a", 1], InputTypeError, "sample 0 has dtype object and sample 1 int64"),
        (
            [np.array(["a"]), np.array([1])],
            InputTypeError,
            "sample 0 has dtype <U1 and sample 1 int64; text, bytes and numbers",
        ),
        (
            [np.zeros((2, 2)), np.zeros((2, 3))],
            InputError,
            "sample 0 has shape (2, 2), sample 1 (2, 3); only one-dimensional",
        ),
        (
            [[[1, 2], [3, 4]]],
            InputError,
            "sample 0 has shape (2, 2), sample 0 (2, 2); only one-dimensional features "
            "may be ragged, and lists must be flat",
        ),
        ([[1, [2]]], InputError, "sample 0 is no flat list of values"),
        ([{"a": 1}, 3], InputError, "sample 0 holds dict, but sample 1 int"),
        (
            [np.ma.array([1, 2]), np.ma.array([3, 77], mask=[0, 1])],
            InputTypeError,
            "sample 1 has masked entries, and the values under the mask mean nothing",
        ),
        ([np.array(1), np.ma.masked], InputTypeError, "sample 1 has masked entries"),
    ],
)
def test_an_error_names_feature_and_sample(
    values: list, error: type[Exception], expected: str
) -> None:
    with pytest.raises(error) as caught:
        one(values)
    assert "feature 'f'" in str(caught.value)
    assert expected in str(caught.value)


def test_arrays_without_a_masked_entry_are_plain_ones() -> None:
    batched = one([np.ma.array([3, 4]), np.ma.array([5])])
    check_rows(batched, [[3, 4], [5]], np.int64)
    stacked = one([np.ma.array([3, 4]), np.ma.array([5, 6])])
    assert type(stacked) is np.ndarray


def test_other_keys_are_named_with_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        batch_ragged([{"a": {"history": 1, "b": 2}}, {"a": {"histery": 1, "b": 2}}])
    assert str(caught.value) == (
        "batch_ragged: in 'a', sample 1 has other keys than sample 0: missing "
        "['history'], additional ['histery']. Is 'histery' meant to be 'history'? Give "
        "all samples the same keys; an empty list stands for no ids."
    )


def test_samples_must_be_dicts() -> None:
    with pytest.raises(InputTypeError, match="sample 1 is tuple; samples must be dict"):
        batch_ragged([{"a": 1}, (1, 2)])
    with pytest.raises(InputError, match="there is no sample"):
        batch_ragged([])


def test_it_is_a_batch_fn_of_grain() -> None:
    samples = [{"f": np.arange(i % 3), "id": np.int32(i)} for i in range(10)]
    ds = grain.MapDataset.source(samples).batch(4, batch_fn=batch_ragged)
    batches = list(ds)
    assert len(batches) == 3
    check_rows(batches[2]["f"], [[0, 1], []], np.int64)
    check_dense(batches[2]["id"], [8, 9], np.int32)
    again = (
        grain.MapDataset.source(samples)
        .to_iter_dataset()
        .batch(4, batch_fn=batch_ragged)
    )
    for one, two in zip(again, batches, strict=True):
        check_rows(one["f"], [list(range(i % 3)) for i in two["id"]], np.int64)


ROW = st.one_of(
    st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4),
    st.integers(0, 8).flatmap(
        lambda k: st.sampled_from("bBhHiIlLqQ").map(
            lambda code: np.arange(k).astype(code)
        )
    ),
)


@hypothesis.given(st.lists(ROW, min_size=1, max_size=6))
def test_integers_come_back_exactly_or_are_refused(rows: list) -> None:
    plain = [[int(x) for x in row] for row in rows]
    flat = [x for row in plain for x in row]
    fits = not flat or min(flat) >= 0 or max(flat) < 2**63
    if not fits:
        with pytest.raises(InputTypeError, match="feature 'f'"):
            one(rows)
        return
    batched = one(rows)
    if isinstance(batched, RaggedValues):
        check_rows(batched, plain, batched.values.dtype)
        assert batched.values.dtype.kind in "iu"
    else:
        check_dense(batched, plain, batched.dtype)  # type: ignore[attr-defined]
        assert batched.dtype.kind in "iu"  # type: ignore[attr-defined]
