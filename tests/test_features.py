"""Cases of the field with their stated values, and the texts of the errors."""

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sparsecore.errors import ConfigError, InputError, InputTypeError
from grain_sparsecore.features import COUNTERS, CounterTotals, read_features
from grain_sparsecore.partition import partition_batch, partition_counts
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.specs import FeatureSpec
from tests.feature_forms import Ragged, Sparse, all_forms, layout_of, read

INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1


def message_of(*args, error=InputError, **kwargs) -> str:
    with pytest.raises(error) as info:
        read(*args, **kwargs)
    text = str(info.value)
    assert "feature 'f' (table 't')" in text
    return text


def partition(value, *, batch_size=4, combiner="sum", vocabulary=64, **spec):
    layout = layout_of(
        FeatureSpec(name="f", table="t", **spec),
        batch_size=batch_size,
        combiner=combiner,
        vocabulary=vocabulary,
    )
    features, counters, num_samples = read_features({"f": value}, layout)
    batch = partition_batch(
        features, layout, counters=counters, num_samples=num_samples
    )
    return batch, layout


class TestIdsOutsideTheVocabulary:
    ROWS = ([1, 64], [3, 1000])

    def test_error_names_feature_table_sample_id_and_vocabulary(self):
        text = message_of(np.array(self.ROWS))
        assert "ids 'f': id 64 of sample 0, position 1, is at or above" in text
        assert "vocabulary_size=64; legal ids are 0 to 63" in text
        assert "(2 such ids in this batch)" in text
        assert 'on_invalid_id = "drop", "clip" or "mod"' in text

    @pytest.mark.parametrize(
        ("policy", "rows"),
        [
            ("drop", [[1], [3]]),
            ("clip", [[1, 63], [3, 63]]),
            ("mod", [[1, 0], [3, 1000 % 64]]),
        ],
    )
    def test_other_policies_mend_and_count_two(self, policy, rows):
        reading = read(np.array(self.ROWS), on_invalid_id=policy)
        assert reading.rows()[:2] == rows
        assert reading.counts["large_ids"] == 2
        assert reading.counts["negative_ids"] == 0
        assert reading.counts["ids"] == sum(map(len, rows))

    @pytest.mark.parametrize(
        ("policy", "row"), [("drop", [5]), ("clip", [0, 0, 5]), ("mod", [9, 8, 5])]
    )
    def test_negative_ids_are_counted_apart(self, policy, row):
        reading = read([[-1, -2, 5]], on_invalid_id=policy, vocabulary=10)
        assert reading.rows()[0] == row
        assert reading.counts["negative_ids"] == 2
        assert reading.counts["large_ids"] == 0

    def test_the_first_id_above_the_vocabulary_is_rejected_and_the_last_is_not(self):
        assert read([9], vocabulary=10).rows()[0] == [9]
        assert "id 10 of sample 0" in message_of([10], vocabulary=10)

    def test_ids_in_the_padding_of_the_vocabulary_are_rejected(self):
        # 100 rows are padded to 112 on two partitions.
        for value in (100, 111, 112):
            assert f"id {value} " in message_of([value], vocabulary=100)

    def test_the_padding_value_of_the_buffers_is_never_an_id(self):
        sentinel = 2**31 - 1
        assert f"id {sentinel} " in message_of([sentinel], vocabulary=sentinel)
        assert read([sentinel - 1], vocabulary=sentinel).rows()[0] == [sentinel - 1]
        with pytest.raises(ConfigError):
            layout_of(vocabulary=sentinel + 1)

    def test_the_sample_is_named_in_ragged_rows_too(self):
        text = message_of([[], [1, 2], [], [3, -7]])
        assert "id -7 of sample 3, position 1, is below 0" in text
        assert "such ids" not in text

    def test_positions_count_padding(self):
        text = message_of([[0, 0, 99]], padding_id=0)
        assert "id 99 of sample 0, position 2" in text

    @pytest.mark.parametrize(
        ("value", "dtype"),
        [
            (2**32, np.int64),  # 0 as int32
            (2**32 + 5, np.uint64),  # 5 as int32
            (INT64_MAX, np.int64),  # -1 as int32
            (-(2**63), np.int64),  # 0 as int32
            (UINT64_MAX, np.uint64),
            (2**63, np.uint64),
            (2**31, np.uint32),
            (-(2**31), np.int32),
            (-1, np.int8),
            (-128, np.int8),
            (200, np.uint8),
            (65535, np.uint16),
        ],
    )
    def test_nothing_wraps_before_it_is_checked(self, value, dtype):
        ids = np.array([[1], [value]], dtype)
        assert f"id {value} of sample 1" in message_of(ids)
        mended = read(ids, on_invalid_id="mod", vocabulary=61).rows()
        assert mended[:2] == [[1], [value % 61]]
        clipped = read(ids, on_invalid_id="clip").rows()
        assert clipped[:2] == [[1], [0 if value < 0 else 63]]

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64])
    def test_every_id_of_a_small_dtype(self, dtype):
        info = np.iinfo(dtype)
        ids = np.arange(max(info.min, -300), min(info.max, 300) + 1).astype(dtype)
        for vocabulary in (1, 100, 127, 128, 129, 255, 256, 257, 1000):
            reading = read(
                ids[:, None],
                vocabulary=vocabulary,
                on_invalid_id="drop",
                batch_size=602,
            )
            legal = [i for i in ids.tolist() if 0 <= i < vocabulary]
            assert reading.feature.ids.tolist() == legal

    def test_python_integers_of_any_size(self):
        rows = [[10**30, -(10**30)], [2**63, -1], [1, UINT64_MAX + 1]]
        assert f"id {10**30} of sample 0" in message_of(rows)
        assert read(rows, on_invalid_id="drop").rows() == [[], [], [1], []]
        assert read(rows, on_invalid_id="mod").rows()[0] == [
            10**30 % 64,
            -(10**30) % 64,
        ]

    def test_a_small_dtype_modulo_a_vocabulary_that_it_cannot_hold(self):
        ids = np.array([[-1], [-100]], np.int8)
        reading = read(ids, vocabulary=1000, on_invalid_id="mod")
        assert reading.rows()[:2] == [[999], [900]]

    def test_int64_and_uint64_rows_together_are_not_made_floats(self):
        rows = [np.array([2**53 + 1]), np.array([2**63 + 1], np.uint64)]
        assert f"id {2**53 + 1} of sample 0" in message_of(rows)
        assert read(rows, on_invalid_id="mod", vocabulary=63).rows()[:2] == [
            [(2**53 + 1) % 63],
            [(2**63 + 1) % 63],
        ]

    @given(
        st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4),
        st.integers(1, 2**31 - 1),
    )
    @settings(max_examples=50)
    def test_mod_is_that_of_python(self, row, vocabulary):
        reading = read([row], vocabulary=vocabulary, on_invalid_id="mod")
        assert reading.rows()[0] == [value % vocabulary for value in row]


class TestTypesThatAreNoIds:
    @pytest.mark.parametrize(
        ("value", "named"),
        [
            (np.array([[1.9, 2], [3, 4]], np.float32), "ids are float32, such as 1.9"),
            (np.array([np.nan]), "ids are float64, such as nan"),
            (np.array([[True, False]]), "ids are bool, such as True"),
            (np.array(["a", "b"]), "ids are strings (<U1), such as 'a'"),
            (np.array([b"a"]), "ids are strings (|S1), such as b'a'"),
            (["a", "b"], "ids are str objects, such as 'a'"),
            ([[1], [2, 2.5]], "sample 1 holds 2.5 (float)"),
            ([[1], [True]], "sample 1 holds True (bool)"),
            ([np.array([1]), np.array([1.5])], "sample 1 holds 1.5 (float)"),
            ([np.array([1]), np.array([True])], "sample 1 holds True (bool)"),
            ([1.0], "sample 0 holds 1.0 (float)"),
            (np.array([1j]), "ids are complex128"),
            (np.array(["2020"], "datetime64[Y]"), "ids are datetime64[Y]"),
        ],
    )
    def test_a_type_error_names_feature_and_type(self, value, named):
        text = message_of(value, error=InputTypeError)
        assert named in text
        with pytest.raises(TypeError):
            read(value)

    def test_strings_are_pointed_to_the_hash(self):
        assert "hash = true" in message_of(["a"])

    def test_an_empty_row_may_be_of_any_dtype(self):
        assert read([np.array([]), np.array([1])]).rows()[:2] == [[], [1]]
        assert read(np.empty((4, 0))).rows() == [[], [], [], []]


class TestRows:
    def test_empty_rows_stay_where_they_are(self):
        rows = [[], [1], [], [2, 3]]
        for value in all_forms(rows, np.int64).values():
            assert read(value, others={"label": np.zeros(4)}).rows() == rows
        batch, layout = partition(rows)
        assert batch.stats.tolist() == [[1, 1, 16 * 2]]
        counts = partition_counts(batch, layout)[0][0]
        assert counts.tolist() == [[0, 1], [1, 1]]
        # SparseCore 0: id 1 of its sample 1; SparseCore 1: 2 and 3 of its sample 1.
        real = batch.gains == 1
        assert batch.sample_ids[real].tolist() == [1, 1, 1]
        assert batch.embedding_ids[real].tolist() == [0, 1, 1]

    @pytest.mark.parametrize("at", [0, 3])
    def test_the_first_and_the_last_row_may_be_empty(self, at):
        rows = [[5], [6], [7], [8]]
        rows[at] = []
        for value in all_forms(rows, np.int32).values():
            assert read(value, others={"label": np.zeros(4)}).rows() == rows

    def test_unsorted_coo_is_sorted_and_never_shifted(self):
        indices = np.array([[3, 1], [0, 0], [3, 0]])
        reading = read(Sparse(indices, np.array([30, 10, 20]), (4, 2)))
        assert reading.rows() == [[10], [], [], [20, 30]]

    @pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
    def test_all_rows_empty_is_a_batch_of_nothing(self, combiner):
        full, _ = partition([[1], [2], [3], [4]], combiner=combiner)
        for value in all_forms([[], [], [], []], np.int64).values():
            reading = read(
                value, others={"label": np.zeros(4)}, batch_size=4, combiner=combiner
            )
            assert reading.counts == dict.fromkeys(COUNTERS, 0)
            assert reading.feature.ids.tolist() == []
        batch, _ = partition(np.zeros((4, 0), np.int32), combiner=combiner)
        assert batch.stats.tolist() == [[0, 0, 0]]
        assert batch.row_pointers.shape == full.row_pointers.shape
        assert not batch.row_pointers.any()
        assert batch.embedding_ids.size == 0

    def test_one_dimension_is_one_id_a_sample(self):
        expected = read(np.array([[1], [2], [3], [4]])).key()
        assert read(np.array([1, 2, 3, 4])).key() == expected
        objects = np.array([1, 2, 3, 4], object)
        assert read(objects).key() == expected

    def test_uneven_arrays_and_tuples_are_rows(self):
        rows = [[1, 2], [3], [], []]
        assert read([np.array([1, 2]), np.array([3])]).rows() == rows
        assert read([(1, 2), (3,)]).rows() == rows
        assert read([[], [1]]).rows() == [[], [1], [], []]

    def test_a_batch_without_samples_is_an_error(self):
        values = [[], np.zeros((0, 3), int), np.zeros(0, int), Ragged([], [0])]
        for value in [*values, {"values": [], "row_lengths": []}]:
            text = message_of(value)
            assert "the batch has no sample (batch size 0)" in text
            assert "batch_size=4" in text

    def test_rows_and_single_values_do_not_mix(self):
        text = message_of([[1, 2], 3], error=InputTypeError)
        assert "sample 1 is a single value, 3, but sample 0 is a row" in text

    def test_deeper_nesting_is_named(self):
        assert "sample 1 holds [2] (list)" in message_of([[1], [[2]]])
        text = message_of([np.array([1]), np.array([[2]])])
        assert "sample 1 is an array of shape (1, 1)" in text
        assert "3 dimensions" in message_of(np.zeros((4, 1, 1), int))

    @pytest.mark.parametrize("one", [3, np.int64(3), np.array(3), jnp.array(3)])
    def test_a_single_value_hints_at_batching(self, one):
        text = message_of(one)
        assert "3 is a single value, as in an element that is not batched" in text
        assert "ds.batch(4, batch_fn=grain_sparsecore.batch_ragged)" in text

    def test_what_is_missing_must_be_left_out(self):
        assert "sample 1 holds None" in message_of([[1], [2, None]])

    @pytest.mark.parametrize("order", [1, -1])
    def test_dtypes_of_rows_may_differ(self, order):
        rows = [
            np.array([1], np.int8),
            np.array([2**40, 5]),
            np.array([300], np.uint16),
        ]
        reading = read(rows[::order], vocabulary=1000, on_invalid_id="drop")
        assert reading.rows()[:3] == [[1], [5], [300]][::order]
        assert reading.counts["large_ids"] == 1


class TestTheNumberOfSamples:
    def test_a_short_batch_is_filled_up_with_empty_samples(self):
        reading = read(np.array([[1, 2], [3, 4]]))
        assert reading.num_samples == 2
        assert reading.rows() == [[1, 2], [3, 4], [], []]

    def test_more_samples_than_the_batch_is_an_error_with_the_three_numbers(self):
        text = message_of(np.arange(7), batch_size=4)
        assert "7 samples, but batch_size=4 per host" in text
        assert "1 local devices * 2 SparseCores = 2" in text
        assert "nearest legal: 6 and 8" in text
        assert "nearest legal: 8." in message_of(np.arange(8), batch_size=4)

    def test_features_must_have_the_same_samples(self):
        layout = layout_of(
            FeatureSpec(name="a", table="t"), FeatureSpec(name="b", table="u")
        )
        batch = {"a": np.array([[1], [2], [3], [4]]), "b": [[1], [2]]}
        with pytest.raises(InputError) as info:
            read_features(batch, layout)
        text = str(info.value)
        assert "feature 'b' (table 'u'), ids 'b': 2 samples" in text
        assert "feature 'a' has 4, and batch_size is 4" in text


class TestPaddingIds:
    def test_padding_is_in_no_row_mean_or_statistic(self):
        value = np.array([[5, 0, 0], [0, 0, 0]])
        reading = read(value, padding_id=0, combiner="mean")
        assert reading.rows() == [[5], [], [], []]
        assert reading.counts == {
            **dict.fromkeys(COUNTERS, 0),
            "ids": 1,
            "padding_ids": 5,
        }
        batch, _ = partition(value, padding_id=0, combiner="mean")
        assert batch.stats.tolist() == [[1, 1, 8 * 2]]
        assert batch.gains[batch.sample_ids == 0].tolist() == [1.0]

    @pytest.mark.parametrize(
        ("padding_id", "dtype"),
        [(-1, np.int8), (-1, np.int64), (2**64 - 1, np.uint64), (63, np.int32)],
    )
    def test_padding_may_lie_anywhere(self, padding_id, dtype):
        value = np.array([[5, padding_id], [padding_id, 6]], dtype)
        assert read(value, padding_id=padding_id).rows()[:2] == [[5], [6]]

    @pytest.mark.parametrize("padding_id", [-1, 300, 2**64 - 1])
    def test_padding_beyond_the_dtype_equals_nothing(self, padding_id):
        reading = read(np.array([[5]], np.uint8), padding_id=padding_id)
        assert reading.rows()[0] == [5]
        assert reading.counts["padding_ids"] == 0

    def test_padding_goes_before_hashing_and_policy(self):
        for spec in ({"hash": True}, {"on_invalid_id": "clip"}):
            reading = read([[-1, -1], [3]], padding_id=-1, vocabulary=64, **spec)
            assert [len(row) for row in reading.rows()] == [0, 1, 0, 0]
            assert reading.counts["padding_ids"] == 2

    def test_strings_cannot_be_padding(self):
        text = message_of([["a"]], padding_id=0, hash=True, error=InputTypeError)
        assert "padding_id=0 is an integer" in text


class TestCounters:
    def test_totals_and_one_message_per_feature_and_kind(self):
        layout = layout_of(
            FeatureSpec(name="b", table="t", on_invalid_id="clip"),
            FeatureSpec(name="a", table="u", on_invalid_id="drop", padding_id=7),
        )
        totals = CounterTotals(layout)
        messages = []
        for _ in range(3):
            batch = {"b": [[99, 98, -1], [1]], "a": [[7, 1], [2]]}
            _, counters, _ = read_features(batch, layout)
            messages += totals.add(counters)
        assert messages == [
            "feature 'b' (table 't'): 1 ids below 0, on_invalid_id='clip'; counted "
            "from here on, without further messages.",
            "feature 'b' (table 't'): 2 ids at or above the vocabulary, "
            "on_invalid_id='clip'; counted from here on, without further messages.",
        ]
        zero = dict.fromkeys(COUNTERS, 0)
        assert totals.totals() == {
            "a": {**zero, "ids": 6, "padding_ids": 3},
            "b": {**zero, "ids": 12, "negative_ids": 3, "large_ids": 6},
        }
        assert list(totals.totals()) == ["a", "b"]

    def test_totals_pass_int32(self):
        totals = CounterTotals(layout_of())
        counters = np.full((1, len(COUNTERS)), 2**31 - 1, np.int32)
        totals.add(counters)
        totals.add(counters)
        assert totals.totals()["f"]["ids"] == 2**32 - 2


class TestMemory:
    def test_int32_is_not_copied(self):
        ids = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.int32)
        assert np.shares_memory(read(ids).feature.ids, ids)

    def test_the_input_is_never_changed(self):
        ids = np.array([[-1, 2], [99, 4]], np.int32)
        weights = np.array([[np.nan, 1], [2, 3]], np.float32)
        for policy in ("drop", "clip", "mod"):
            copies = ids.copy(), weights.copy()
            read(
                copies[0],
                copies[1],
                on_invalid_id=policy,
                on_invalid_weight="zero",
            )
            np.testing.assert_array_equal(copies[0], ids)
            np.testing.assert_array_equal(copies[1], weights)


def test_from_a_worker_process():
    ids = np.arange(40_000).reshape(4, -1)
    source = [{"f": np.zeros((4, 0), np.int32), "g": ids} for _ in range(3)]
    ds = grain.MapDataset.source(source).to_iter_dataset()
    ds = ds.map(ComputeInputStats(layout_of())).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=1)
    )
    elements = list(ds)
    assert len(elements) == 3
    for element in elements:
        # A feature without any id is an array of size 0 on its way.
        assert np.asarray(element["sparsecore"].stats).tolist() == [[0, 0, 0]]
        # What passed through untouched lies in shared memory now.
        assert type(element["g"]) is not np.ndarray
        reading = read(element["g"], vocabulary=40_000)
        assert reading.feature.ids.tolist() == list(range(40_000))
