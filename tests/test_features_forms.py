"""CSR, COO, tuples, pyarrow and other libraries: what is told apart, and how."""

import collections

import numpy as np
import pyarrow as pa
import pytest

from grain_sparsecore.errors import InputError, InputTypeError
from grain_sparsecore.features import read_features
from grain_sparsecore.specs import FeatureSpec, Topology
from tests.feature_forms import Ragged, Sparse, layout_of, read


def message_of(value, **kwargs) -> str:
    with pytest.raises(InputError) as info:
        read(value, **kwargs)
    assert "feature 'f' (table 't'), ids 'f'" in str(info.value)
    return str(info.value)


class TestRowSplitsAndLengths:
    @pytest.mark.parametrize(
        ("splits", "text"),
        [
            ([], "row_splits is empty"),
            ([0, 3, 2], "row_splits falls from 3 to 2 at sample 1"),
            ([0, 1, 2], "row_splits ends at 2, but there are 3 values"),
            ([0, 1, 4], "row_splits ends at 4, but there are 3 values"),
            ([1, 2, 3], "row_splits starts at 1, not at 0"),
            ([-1, 2, 3], "row_splits starts at -1"),
            ([0, 1.5, 3], "row_splits must be integers, not float64"),
            ([[0, 3]], "row_splits has shape (1, 2)"),
            ([0, 3, 2**64 - 1], "does not fit int64"),
        ],
    )
    def test_bad_splits_are_refused_and_never_mended(self, splits, text):
        array = np.array(splits, np.uint64) if 2**64 - 1 in splits else splits
        for value in (
            Ragged(np.array([1, 2, 3]), array),
            {"values": [1, 2, 3], "row_splits": array},
        ):
            assert text in message_of(value)

    @pytest.mark.parametrize(
        ("lengths", "text"),
        [
            ([2, 2], "row_lengths add up to 4, but there are 3 values"),
            ([4, -1], "row_lengths is -1 at sample 1"),
            ([2**62] * 4, f"row_lengths add up to {2**64}"),
            ([1] * 8, "row_lengths add up to 8"),
        ],
    )
    def test_bad_lengths_are_refused(self, lengths, text):
        assert text in message_of({"values": [1, 2, 3], "row_lengths": lengths})

    def test_eight_lengths_for_two_features_of_five_samples(self):
        layout = layout_of(
            FeatureSpec(name="a", table="t"),
            FeatureSpec(name="b", table="t"),
            batch_size=6,
        )
        five = {"values": [1] * 5, "row_lengths": [1] * 5}
        eight = {"values": [1] * 8, "row_lengths": [1] * 8}
        with pytest.raises(InputError, match=r"'b'.*8 samples, but feature 'a' has 5"):
            read_features({"a": five, "b": eight}, layout)
        with pytest.raises(InputError, match="8 samples, but batch_size=6"):
            read_features({"a": eight, "b": eight}, layout)

    def test_capacity_behind_the_values_must_be_declared(self):
        value = {"values": np.array([1, 2, 3, -9, -9]), "row_splits": [0, 1, 3]}
        assert "give num_values where the rest is capacity" in message_of(value)
        assert read({**value, "num_values": 3}).rows()[:2] == [[1], [2, 3]]
        assert "num_values=6 is not from 0 to 5" in message_of(
            {**value, "num_values": 6}
        )
        lengths = {"values": np.array([1, 2, 3, -9]), "row_lengths": [1, 2]}
        assert read({**lengths, "num_values": 3}).rows()[:2] == [[1], [2, 3]]

    def test_values_are_flat(self):
        text = message_of({"values": np.ones((2, 2), int), "row_splits": [0, 2]})
        assert "values of shape (2, 2) must have one dimension" in text
        assert "value 0 holds [1]" in message_of(
            {"values": [[1]], "row_splits": [0, 1]}
        )

    def test_other_dicts_say_how_to_name_a_nested_feature(self):
        text = message_of({"history": [1], "country": [2]})
        assert "'country', 'history'" in text
        assert "'f/...'" in text


class TestTuples:
    """(values, x): nobody may take row_lengths for row_splits or the reverse."""

    def test_splits_have_one_entry_more_than_the_batch(self):
        value = (np.array([1, 2, 3]), np.array([0, 0, 0, 0, 3]))
        assert read(value).rows() == [[], [], [], [1, 2, 3]]
        # As lengths they would be a valid fifth sample, which no batch has.
        falling = (np.array([1, 2, 3, 4, 5]), np.array([0, 3, 2, 0, 0]))
        assert "row_splits falls" in message_of(falling)

    def test_as_many_as_samples_are_lengths_where_they_add_up(self):
        value = (np.array([1, 2, 3]), np.array([0, 2, 0, 1]))
        assert read(value).rows() == [[], [1, 2], [], [3]]

    def test_splits_of_a_short_batch(self):
        reading = read((np.array([1, 2, 3]), np.array([0, 1, 1, 3])))
        assert reading.num_samples == 3
        assert reading.rows() == [[1], [], [2, 3], []]

    @pytest.mark.parametrize(
        ("samples", "rows"),
        [(4, [[], [], [], [1, 2]]), (3, [[], [], [1, 2], []])],
    )
    def test_what_is_valid_as_both_is_settled_by_the_rest_of_the_batch(
        self, samples, rows
    ):
        value = (np.array([1, 2]), np.array([0, 0, 0, 2]))
        for others in (
            {"label": np.zeros(samples)},
            {"dense": {"age": np.zeros((samples, 3))}, "weight": np.float32(3)},
        ):
            reading = read(value, others=others)
            assert reading.rows() == rows
            assert reading.num_samples == samples
        layout = layout_of(
            FeatureSpec(name="f", table="t"), FeatureSpec(name="g", table="t")
        )
        # Another feature counts before other arrays do.
        batch = {"f": value, "g": [[1]] * samples, "label": np.zeros(7 - samples)}
        features, _, num_samples = read_features(batch, layout)
        assert num_samples == samples
        assert features[0].row_splits is not None
        assert np.diff(features[0].row_splits).tolist() == [len(r) for r in rows]

    def test_what_nothing_settles_is_an_error(self):
        value = (np.array([1, 2]), np.array([0, 0, 0, 2]))
        text = message_of(value)
        assert "row_lengths of 4 samples or row_splits of 3" in text
        assert "give a dict" in text
        message_of(value, others={"a": np.zeros(4), "b": np.zeros(3)})
        message_of(value, others={"a": np.zeros(9)})

    def test_weights_are_settled_by_their_ids(self):
        # Both are valid as lengths and as splits.
        weights = (np.array([0.5, 2.0]), np.array([0, 0, 0, 2]))
        reading = read([[], [], [], [1, 2]], weights)
        assert reading.rows("weights") == [[], [], [], [0.5, 2.0]]
        reading = read([[], [], [1, 2]], weights)
        assert reading.rows("weights") == [[], [], [0.5, 2.0], []]

    def test_a_short_batch_of_one_sample(self):
        value = (np.array([5, 6]), np.array([0, 2]))
        reading = read(value, others={"label": np.zeros(1)}, batch_size=2)
        assert reading.rows() == [[5, 6], []]

    @pytest.mark.parametrize("rows", [[0], [0, 0]])
    def test_one_sample_a_batch(self, rows):
        layout = layout_of(
            batch_size=1,
            topology=Topology(
                global_device_count=1, local_device_count=1, num_sc_per_device=1
            ),
        )
        batch = {"f": (np.array([], int), np.array(rows))}
        (feature,), _, num_samples = read_features(batch, layout)
        assert num_samples == 1
        assert feature.ids.size == 0

    def test_neither_splits_nor_lengths_says_why(self):
        text = message_of((np.array([5, 7]), np.array([0, 1, 9])))
        assert "as row_splits, row_splits ends at 9" in text
        assert "As row_lengths, row_lengths add up to 10" in text
        assert "use a list" in text

    def test_rows_that_are_arrays_go_in_a_list(self):
        rows = (np.array([1]), np.array([2]), np.array([3]), np.array([4]))
        assert "put rows that are arrays into a list" in message_of(rows)
        assert read(list(rows)).rows() == [[1], [2], [3], [4]]
        assert "put rows into a list" in message_of(([1, 2], np.array([0, 2])))

    def test_other_arrays_than_those_of_numpy_are_arrays_too(self):
        value = (pa.array([1, 2, 3]), pa.array([0, 1, 1, 2, 3]))
        assert read(value).rows() == [[1], [], [2], [3]]

    def test_a_named_tuple_with_the_fields_of_a_sparse_tensor(self):
        kind = collections.namedtuple("Value", ["indices", "values", "dense_shape"])
        value = kind(np.array([[1, 0]]), np.array([7]), np.array([4, 1]))
        assert read(value).rows() == [[], [7], [], []]


class TestCoo:
    def test_one_dimension_has_at_most_one_id_a_sample(self):
        value = Sparse(np.array([[2], [0]]), np.array([7, 8]), [3])
        assert read(value).rows() == [[8], [], [7], []]

    def test_equal_indices_keep_their_order(self):
        value = Sparse(np.array([[1, 0], [1, 0], [0, 0]]), np.array([7, 8, 9]), [2, 1])
        assert read(value).rows()[:2] == [[9], [7, 8]]

    @pytest.mark.parametrize(
        ("indices", "shape", "text"),
        [
            ([[4, 0]], [4, 2], "entry 0 has index [4, 0], outside dense_shape [4, 2]"),
            ([[0, 2]], [4, 2], "entry 0 has index [0, 2], outside dense_shape [4, 2]"),
            ([[-1, 0]], [4, 2], "entry 0 has index [-1, 0]"),
            ([[0, 0], [1, 0]], [4, 2], "1 values with indices of shape (2, 2)"),
            ([[0, 0]], [4], "1 values with indices of shape (1, 2)"),
            ([[0, 0, 0]], [4, 1, 1], "1 values with indices of shape (1, 3)"),
            ([[0.0, 0.0]], [4, 2], "indices must be integers, not float64"),
            ([[0, 0]], [4, -2], "dense_shape [4, -2] has a negative size"),
            ([[0, 0]], [4.0, 2.0], "dense_shape must be integers"),
            # Told before as many row_splits are made.
            ([[0, 0]], [10**14, 2], "has 100000000000000 samples, but batch_size=4"),
        ],
    )
    def test_bad_indices_are_named(self, indices, shape, text):
        value = Sparse(np.array(indices), np.array([1]), np.array(shape))
        assert text in message_of(value)

    def test_a_batch_without_any_id(self):
        for indices in (np.zeros((0, 2), int), np.zeros(0), []):
            reading = read(Sparse(indices, [], [3, 0]))
            assert reading.rows() == [[], [], [], []]
            assert reading.num_samples == 3


class TestArrow:
    def test_a_null_row_is_empty_also_where_values_lie_under_it(self):
        lists = pa.ListArray.from_arrays(
            pa.array([0, 2, 3, 4], pa.int32()),
            pa.array([1, 2, 9, 3]),
            mask=pa.array([False, True, False]),
        )
        assert read(lists).rows() == [[1, 2], [], [3], []]

    def test_a_null_in_a_row_is_named(self):
        text = message_of(pa.array([[1], [2, None]]))
        assert "sample 1 has a null at position 1" in text

    def test_a_column_with_missing_values(self):
        column = pa.table({"f": pa.array([1, None, 3])})["f"]
        assert read(column).rows() == [[1], [], [3], []]
        assert read(pa.array([None, None])).rows() == [[], [], [], []]

    def test_an_empty_column_is_a_batch_of_no_sample(self):
        assert "no sample" in message_of(pa.chunked_array([], pa.list_(pa.int64())))

    def test_dictionaries_are_decoded(self):
        column = pa.array([7, 8, 7]).dictionary_encode()
        assert read(column).rows()[:3] == [[7], [8], [7]]
        lists = pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), column)
        assert read(lists).rows()[:2] == [[7], [8, 7]]

    @pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()])
    def test_strings_are_hashed(self, kind):
        column = pa.array([["a", "bc"], []], pa.list_(kind))
        expected = read([["a", "bc"], []], hash=True).key()
        assert read(column, hash=True).key() == expected

    @pytest.mark.parametrize(
        "value",
        [
            pa.array([[1.5]]),
            pa.array([[True]]),
            pa.array([["a"]]),
            pa.array([{"a": 1}]),
            pa.array([[[1]]]),
            pa.array([1], pa.timestamp("s")),
            pa.table({"f": [1]}),
            pa.scalar(5),
        ],
        ids=str,
    )
    def test_other_types_are_no_ids(self, value):
        with pytest.raises(InputTypeError, match="feature 'f'"):
            read(value)

    def test_lists_are_read_without_a_copy_where_they_are_int32(self):
        lists = pa.array([[1, 2], [3], [], [4]], pa.list_(pa.int32()))
        ids = read(lists).feature.ids
        assert np.shares_memory(ids, lists.values.to_numpy())


class TestOtherLibraries:
    def test_anything_with_array_is_read(self):
        class Foreign:
            shape = (2, 1)

            def __array__(self, dtype=None, copy=None):
                return np.array([[1], [2]])

        assert read(Foreign()).rows()[:2] == [[1], [2]]

    def test_what_fails_in_another_library_is_an_error_of_the_feature(self):
        class Failing:
            def __array__(self, dtype=None, copy=None):
                raise RuntimeError("on the accelerator")

        text = message_of(Failing())
        assert "a Failing cannot be read as an array (on the accelerator)" in text

    def test_masked_arrays_are_refused_where_something_is_masked(self):
        masked = np.ma.array([[1], [2]], mask=[[0], [1]])
        assert "array.filled(...) the padding_id of the feature" in message_of(masked)
        assert read(np.ma.array([[1], [2]])).rows()[:2] == [[1], [2]]

    @pytest.mark.parametrize("policy", ["error", "drop", "clip", "mod"])
    def test_integers_of_no_common_dtype_are_read_as_they_are(self, policy):
        one, two = np.int64(1), np.uint64(5)
        for rows in (
            [[one], [two], [], [3]],
            [[1, two], [one], [], [3]],
            [np.array([one, two], object), [3], [], [4]],
            [np.array([1]), np.array([5], np.uint64), [], [3]],
        ):
            expected = [[int(v) for v in row] for row in rows]
            reading = read(rows, on_invalid_id=policy)
            assert reading.rows() == expected
            assert reading.counts["ids"] == sum(map(len, expected))
        reading = read([[-1, two], [one], [], [3]], padding_id=-1, on_invalid_id=policy)
        assert reading.rows() == [[5], [1], [], [3]]
        assert reading.counts["padding_ids"] == 1

    def test_a_subclass_stays_alive_through_its_view(self):
        class Subclass(np.ndarray):
            pass

        array = np.arange(4, dtype=np.int32).view(Subclass)
        ids = read(array).feature.ids
        assert type(ids) is np.ndarray
        assert np.shares_memory(ids, array)
