import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from grain_sparsecore.errors import InputError, InputTypeError
from grain_sparsecore.features import read_features
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.specs import FeatureSpec
from tests.feature_forms import Ragged, Sparse, all_forms, layout_of, read


def message_of(value, weights, error=InputError, **spec) -> str:
    with pytest.raises(error) as info:
        read(value, weights, **spec)
    assert "feature 'f' (table 't'), weights 'w'" in str(info.value)
    return str(info.value)


@pytest.mark.parametrize(
    "missing",
    [np.ma.masked_equal([[1, 2]], 2), [[1, None]], pa.array([[1, None]])],
    ids=["masked", "None", "null"],
)
def test_a_missing_weight_is_filled_with_a_weight_not_with_padding(missing):
    errors = (InputError, InputTypeError)
    text = message_of([[5, 6]], missing, errors)
    assert "a weight (0 takes the id out of every sum)" in text
    assert "padding_id" not in text
    with pytest.raises(errors, match="the padding_id of the feature"):
        read(missing)


class TestShapes:
    def test_the_first_sample_of_another_length_is_named(self):
        text = message_of([[1, 2], [3], [4]], [[1, 1], [1, 1], []])
        assert "sample 1 has 1 ids but 2 weights" in text
        assert "one weight for each id" in text

    def test_lengths_are_compared_row_by_row_and_not_in_total(self):
        assert "sample 0 has 2 ids but 1 weights" in message_of(
            [[1, 2], [3]], [[1], [1, 1]]
        )

    def test_the_number_of_samples_must_be_the_same(self):
        text = message_of([[1], [2]], [[1]])
        assert "1 samples have weights, but 2 have ids" in text

    def test_dense_widths_must_be_the_same(self):
        text = message_of(np.ones((4, 2), int), np.ones((4, 3)))
        assert "sample 0 has 2 ids but 3 weights" in text
        message_of(np.ones((4, 2), int), np.ones(8))  # which belong to nothing

    def test_a_plain_array_beside_csr_or_coo_belongs_to_the_values(self):
        flat = np.array([0.5, 1.5, 2.5])
        expected = [[0.5], [], [1.5, 2.5], []]
        for value in (
            Ragged([1, 2, 3], [0, 1, 1, 3, 3]),
            (np.array([1, 2, 3]), np.array([0, 1, 1, 3, 3])),
            {"values": [1, 2, 3], "row_lengths": [1, 0, 2, 0]},
            Sparse([[0, 0], [2, 0], [2, 1]], [1, 2, 3], [4, 2]),
        ):
            for weights in (flat, flat.tolist()):
                assert read(value, weights).rows("weights") == expected
            assert "2 samples have weights" in message_of(value, flat[:2])
        # Not where rows are rows.
        assert "3 samples have weights" in message_of([[1], [], [2, 3], []], flat)

    def test_a_plain_array_follows_the_entries_of_unsorted_coo(self):
        value = Sparse([[2, 1], [0, 0], [2, 0]], [3, 1, 2], [4, 2])
        reading = read(value, np.array([30.0, 10.0, 20.0]))
        assert reading.rows() == [[1], [], [2, 3], []]
        assert reading.rows("weights") == [[10.0], [], [20.0, 30.0], []]

    def test_coo_weights_must_lie_where_the_ids_lie(self):
        ids = Sparse([[0, 0], [0, 2]], [1, 2], [2, 3])
        same = Sparse([[0, 2], [0, 0]], [2.0, 1.0], [2, 3])
        assert read(ids, same).rows("weights")[0] == [1.0, 2.0]
        other = Sparse([[0, 0], [0, 1]], [1.0, 2.0], [2, 3])
        text = message_of(ids, other)
        assert "entry 1 of the ids has index [0, 2] and of the weights [0, 1]" in text

    def test_weights_may_come_in_another_form_than_ids(self):
        rows = [[1, 2], [], [3]]
        weights = [[1.0, 2.0], [], [3.0]]
        base = read(rows, weights, others={"label": np.zeros(3)}).key()
        for value in all_forms(rows, np.int64).values():
            for given_weights in all_forms(weights, np.float32).values():
                reading = read(value, given_weights, others={"label": np.zeros(3)})
                assert reading.key() == base

    def test_weights_of_some_features_only(self):
        layout = layout_of(
            FeatureSpec(name="a", table="t", weights="w"),
            FeatureSpec(name="b", table="t"),
        )
        batch = {"a": [[1], [2, 3]], "b": [[4], [5]], "w": [[0.5], [1, 2]]}
        (a, b), _, _ = read_features(batch, layout)
        assert a.weights is not None
        assert a.weights.tolist() == [0.5, 1, 2]
        assert b.weights is None

    def test_no_weights_in_this_batch_are_ones(self):
        layout = layout_of(FeatureSpec(name="f", table="t", weights="w"))
        batch = {"f": [[1], [2, 3]]}
        (none,), _, _ = read_features({**batch, "w": None}, layout)
        assert none.weights is None
        (ones,), counters, _ = read_features({**batch, "w": [[1], [1, 1]]}, layout)
        by_none = partition_batch([none], layout, counters=counters, num_samples=2)
        by_ones = partition_batch([ones], layout, counters=counters, num_samples=2)
        np.testing.assert_array_equal(by_none.gains, by_ones.gains)
        with pytest.raises(InputError, match="'w'"):
            read_features(batch, layout)


class TestValues:
    @pytest.mark.parametrize(
        "dtype",
        ["int8", "uint8", "int64", "uint64", "float16", "float32", "float64", "bool"],
    )
    def test_numbers_of_every_dtype(self, dtype):
        weights = np.array([[0], [1], [1], [0]], dtype)
        for value in (weights, weights.tolist(), list(weights)):
            assert read([1, 2, 3, 4], value).rows("weights") == [[0], [1], [1], [0]]

    def test_bfloat16(self):
        weights = np.array([0.5, 1, 2, -3], ml_dtypes.bfloat16)
        reading = read([1, 2, 3, 4], weights)
        assert reading.feature.weights is not None
        assert reading.feature.weights.tolist() == [0.5, 1, 2, -3]

    @pytest.mark.parametrize(
        "weights",
        [
            np.array(["1"] * 4),
            ["1"] * 4,
            [[None]] * 4,
            np.ones(4, complex),
            np.zeros(4, "timedelta64[s]"),
            [1j] * 4,
            object(),
        ],
        ids=str,
    )
    def test_other_types_are_refused(self, weights):
        message_of([1, 2, 3, 4], weights, error=InputTypeError)

    @pytest.mark.parametrize(
        "weights",
        [
            [[2**70], [2**63], [-1], [5]],
            [[np.uint64(5)], [np.int64(-1)], [1], [2.5]],
            [
                np.array([2**63], np.uint64),
                np.array([-1]),
                np.array([1]),
                np.array([2]),
            ],
            [np.int64(1), np.uint64(5), np.int64(-1), np.uint64(2**63)],
            [[2**70], [0.5], [True], [np.uint64(2**63)]],
        ],
        ids=str,
    )
    def test_integers_of_no_common_dtype(self, weights):
        expected = [[float(np.float32(float(np.ravel(w)[0])))] for w in weights]
        assert read([[1], [2], [3], [4]], weights).rows("weights") == expected

    def test_an_integer_above_all_floats_is_infinite(self):
        text = message_of([[1]], [[-(10**400)]])
        assert "weight -inf of sample 0, position 0, is not finite" in text

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_weight_that_is_not_finite_is_named(self, bad):
        text = message_of([[1, 2]], [[bad, 1]])
        assert f"weight {bad} of sample 0, position 0, is not finite" in text
        assert 'on_invalid_weight = "zero"' in text
        text = message_of([[], [1, 2], [3]], [[], [1, bad], [bad]])
        assert "of sample 1, position 1 (the first of 2 such weights)" in text

    def test_it_may_become_zero_and_is_counted(self):
        reading = read(
            [[1, 2], [3]], [[np.nan, 1], [-np.inf]], on_invalid_weight="zero"
        )
        assert reading.rows("weights")[:2] == [[0.0, 1.0], [0.0]]
        assert reading.counts["invalid_weights"] == 2

    def test_too_large_for_float32_is_infinite(self):
        text = message_of([[1]], np.array([[1e300]]))
        assert "weight 1e+300 of sample 0" in text
        assert "finite in float32" in text
        reading = read([[1]], np.array([[1e300]]), on_invalid_weight="zero")
        assert reading.rows("weights")[0] == [0.0]

    def test_negative_weights_are_allowed_unless_they_are_not(self):
        assert read([[1]], [[-2.5]]).rows("weights")[0] == [-2.5]
        text = message_of([[1], [2]], [[1], [-2.5]], allow_negative_weights=False)
        assert "weight -2.5 of sample 1, position 0, is negative" in text
        assert read([[1]], [[-0.0]], allow_negative_weights=False).counts["ids"] == 1

    @pytest.mark.parametrize("bad", [np.nan, -np.inf])
    def test_weights_set_to_zero_do_not_hide_negative_ones_nor_are_any(self, bad):
        spec = {"allow_negative_weights": False, "on_invalid_weight": "zero"}
        assert read([[1, 2]], [[bad, 1]], **spec).rows("weights")[0] == [0.0, 1.0]
        text = message_of([[1, 2]], [[bad, -1]], **spec)
        assert "weight -1.0 of sample 0, position 1, is negative" in text

    def test_weights_of_ids_that_are_left_out_are_not_looked_at(self):
        ids = [[0, 5], [99, 6]]
        weights = [[np.nan, 1.0], [-np.inf, 2.0]]
        reading = read(ids, weights, padding_id=0, on_invalid_id="drop")
        assert reading.rows() == [[5], [6], [], []]
        assert reading.rows("weights") == [[1.0], [2.0], [], []]
        assert reading.counts["invalid_weights"] == 0
        # But positions in messages are those of the input.
        text = message_of(
            ids, [[1, 1], [1, np.nan]], padding_id=0, on_invalid_id="clip"
        )
        assert "sample 1, position 1" in text

    def test_float32_is_not_copied(self):
        weights = np.ones((4, 2), np.float32)
        got = read(np.ones((4, 2), np.int32), weights).feature.weights
        assert got is not None
        assert np.shares_memory(got, weights)
