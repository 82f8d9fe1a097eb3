import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sparsecore.errors import InputError, InputTypeError
from grain_sparsecore.hashing import hash_ids
from tests.feature_forms import model_hash, read, splitmix64

WIDEST = 2**32


def hashed(values, vocabulary_size=WIDEST, seed=0):
    return hash_ids(values, vocabulary_size=vocabulary_size, seed=seed).tolist()


def test_the_model_is_splitmix64():
    # The values that the literature prints for the state 1234567.
    outputs = splitmix64(1234567)
    assert [next(outputs) for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_an_integer_is_an_output_of_splitmix64():
    outputs = splitmix64(next(splitmix64(0)))
    assert hashed(np.arange(5)) == [next(outputs) >> 32 for _ in range(5)]


def test_the_mapping_never_changes():
    # Tables are trained with it. These numbers are from the first release.
    assert hashed(np.array([0, 1, -1, 2**40])) == [
        2802244911,
        3011683077,
        1210155558,
        614113193,
    ]
    assert hashed(["", "a", "item:1234567"]) == [2802244911, 2609069145, 1852270227]
    assert hashed([0, 1], vocabulary_size=1000, seed=7) == [721, 649]


@given(
    st.lists(st.integers(-(2**63), 2**64 - 1), max_size=8),
    st.integers(1, WIDEST),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=100)
def test_integers_equal_the_model(values, vocabulary, seed):
    expected = [model_hash(value, vocabulary, seed) for value in values]
    assert hashed(values, vocabulary, seed) == expected
    assert hashed(np.array(values, object), vocabulary, seed) == expected


@given(
    st.lists(
        st.one_of(st.text(st.characters(), max_size=20), st.binary(max_size=20)),
        max_size=8,
    ),
    st.integers(1, WIDEST),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=200)
def test_strings_equal_the_model(values, vocabulary, seed):
    expected = [model_hash(value, vocabulary, seed) for value in values]
    assert hashed(values, vocabulary, seed) == expected


# numpy cuts zero characters off, and StringDType refuses lone surrogates.
TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9
)


@given(st.lists(TEXT, max_size=8))
@settings(max_examples=100)
def test_all_kinds_of_strings_are_the_same(values):
    expected = hashed(values)
    encoded = [value.encode() for value in values]
    assert hashed(encoded) == expected
    assert hashed(np.array(values, "U9")) == expected
    assert hashed(np.array(encoded, "S40")) == expected
    assert hashed(np.array(values, np.dtypes.StringDType())) == expected
    assert hashed(np.array(values, ">U9")) == expected
    assert hashed(np.array(values, "U9")[::-1]) == expected[::-1]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.uint64])
def test_all_integer_dtypes_are_the_same(dtype):
    values = np.array([0, 1, 100], dtype)
    assert hashed(values) == hashed([0, 1, 100])
    assert hashed(values.astype(values.dtype.newbyteorder(">"))) == hashed(values)


def test_negative_integers_are_sign_extended():
    expected = hashed(np.array([2**64 - 1], np.uint64))
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        assert hashed(np.array([-1], dtype)) == expected


def test_the_shape_stays():
    values = np.arange(12).reshape(3, 4)
    result = hash_ids(values, vocabulary_size=10)
    assert result.shape == (3, 4)
    assert result.dtype == np.int64
    assert hash_ids(values.T, vocabulary_size=10).tolist() == result.T.tolist()
    assert hash_ids(np.zeros((0, 3), int), vocabulary_size=10).shape == (0, 3)
    assert hash_ids(np.array(["ab", "c"])[None], vocabulary_size=9).shape == (1, 2)
    assert hash_ids([], vocabulary_size=10).shape == (0,)


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 1000, 2**31 - 1, WIDEST])
def test_results_lie_in_the_vocabulary_and_spread_evenly(vocabulary):
    count = 100_000
    for values in (np.arange(count), np.arange(count) * 2**40, -np.arange(count)):
        result = hash_ids(values, vocabulary_size=vocabulary)
        assert result.min() >= 0
        assert result.max() < vocabulary
        buckets = np.bincount(result * 8 // max(vocabulary, 8), minlength=8)
        if vocabulary >= 1000:
            # 12,500 each; six standard deviations of 105.
            assert abs(buckets - count / 8).max() < 630


def test_seeds_give_unrelated_mappings():
    values = np.arange(10_000)
    one = hash_ids(values, vocabulary_size=100, seed=0)
    for seed in (1, 2, 2**64 - 1):
        same = np.count_nonzero(one == hash_ids(values, vocabulary_size=100, seed=seed))
        assert abs(same - 100) < 60


def test_lone_surrogates_are_hashed():
    assert hashed(["\ud800", "a\udfff"]) == [
        model_hash("\ud800", WIDEST),
        model_hash("a\udfff", WIDEST),
    ]
    assert hashed(np.array(["\ud800"])) == hashed(["\ud800"])


def test_long_and_short_strings_together():
    values = ["", "x" * 1000, "y", "x" * 1000, "12345678", "123456789"]
    assert hashed(values) == [model_hash(value, WIDEST) for value in values]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (np.array([1.5]), "float64"),
        (np.array([True]), "bool"),
        ([1.5], "float"),
        ([True], "bool"),
        ([1, True], "bool"),
        ([1, "a"], "int, str"),
        ([None], "NoneType"),
        ([[1]], "list"),
        ([[1], [2]], "list"),
        (["a", b"b", 1], "bytes, int, str"),
    ],
)
def test_other_types_are_refused(values, named):
    with pytest.raises(InputTypeError, match=named):
        hash_ids(values, vocabulary_size=10)


def test_many_values_are_hashed_like_few():
    values = np.arange(50_000)
    assert hashed(values)[-1] == model_hash(49_999, WIDEST)
    strings = values.astype("U5")
    assert hashed(strings)[-1] == model_hash("49999", WIDEST)
    for kind in (np.int64, "U5", object):
        whole = hashed(values.astype(kind))
        assert whole[20_000:] == hashed(values[20_000:].astype(kind))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_more_than_64_bits_are_refused(value):
    with pytest.raises(InputError, match=str(value)):
        hash_ids([0, value], vocabulary_size=10)
    with pytest.raises(InputError, match=rf"feature 'f'.*{value}"):
        read([[0, value]], hash=True)


@pytest.mark.parametrize("seed", [0, 5])
def test_features_are_hashed_at_full_width(seed):
    rows = [[2**64 - 1, -1], [2**63, 5], [], [0]]
    reading = read(rows, hash=True, hash_seed=seed, vocabulary=1000)
    expected = [[model_hash(value, 1000, seed) for value in row] for row in rows]
    assert reading.rows() == expected
    assert reading.counts["large_ids"] == 0


@pytest.mark.parametrize(
    "value",
    [
        [["a", "bcd"], ["é"]],
        [[b"a", b"bcd"], ["é".encode()]],
        [np.array(["a", "bcd"]), np.array(["é"])],
        np.array([["a", "bcd"], ["é", "a"]])[:1].repeat(2, 0),
        {"values": np.array(["a", "bcd"]), "row_splits": [0, 1, 2]},
    ],
)
def test_strings_of_a_feature_are_hashed(value):
    reading = read(value, hash=True, vocabulary=1000)
    assert reading.rows()[0][0] == model_hash("a", 1000)
