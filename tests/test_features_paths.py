import collections

import jax.numpy as jnp
import numpy as np
import pytest

from grain_sparsecore.batching import RaggedValues, batch_ragged
from grain_sparsecore.errors import InputError, InputTypeError
from grain_sparsecore.features import (
    feature_keys,
    pad_leaves,
    read_features,
    split_element,
)
from grain_sparsecore.specs import FeatureSpec
from tests.feature_forms import layout_of


def nested_layout():
    return layout_of(
        FeatureSpec(name="history", table="t", ids="user/history", weights="user/w"),
        FeatureSpec(name="item", table="t", ids="item"),
    )


def nested_batch():
    return {
        "item": np.array([1, 2, 3, 4]),
        "user": {"history": [[1], [2], [], [3, 4]], "w": [[1], [1], [], [2, 3]]},
        "label": np.arange(4),
    }


class TestKeys:
    def test_every_key_once_in_the_order_of_the_features(self):
        assert feature_keys(nested_layout()) == ("user/history", "user/w", "item")
        shared = layout_of(
            FeatureSpec(name="a", table="t", ids="x"),
            FeatureSpec(name="b", table="u", ids="x", weights="w"),
        )
        assert feature_keys(shared) == ("x", "w")

    def test_paths_lead_into_nested_dicts(self):
        (history, item), _, _ = read_features(nested_batch(), nested_layout())
        assert history.ids.tolist() == [1, 2, 3, 4]
        assert history.weights is not None
        assert history.weights.tolist() == [1, 1, 2, 3]
        assert item.ids.tolist() == [1, 2, 3, 4]

    def test_the_order_of_keys_does_not_matter(self):
        batch = nested_batch()
        turned = {
            key: dict(reversed(batch[key].items()))
            if isinstance(batch[key], dict)
            else batch[key]
            for key in reversed(batch)
        }
        one, _, _ = read_features(batch, nested_layout())
        two, _, _ = read_features(turned, nested_layout())
        for a, b in zip(one, two, strict=True):
            assert a.ids.tobytes() == b.ids.tobytes()

    def test_a_key_with_a_slash_goes_before_a_path(self):
        layout = layout_of(FeatureSpec(name="f", table="t", ids="a/b"))
        batch = {"a/b": [[1]], "a": {"b": [[2]]}}
        (feature,), _, _ = read_features(batch, layout)
        assert feature.ids.tolist() == [1]
        assert split_element(batch, layout) == {"a": {"b": [[2]]}}

    def test_paths_may_be_deep_and_have_keys_with_slashes(self):
        layout = layout_of(FeatureSpec(name="f", table="t", ids="a/b/c/d"))
        for batch in (
            {"a": {"b": {"c": {"d": [[1]]}}}},
            {"a/b": {"c/d": [[1]]}},
            {"a": {"b/c/d": [[1]]}, "a/b": {"c": 5}},
        ):
            (feature,), _, _ = read_features(batch, layout)
            assert feature.ids.tolist() == [1]

    def test_missing_and_unknown_keys_with_the_nearest_name(self):
        layout = layout_of(
            FeatureSpec(name="a", table="t"), FeatureSpec(name="bank", table="t")
        )
        with pytest.raises(InputError) as info:
            read_features({"a": [[1]], "bamk": [[1]], "z": [[1]]}, layout)
        text = str(info.value)
        assert "the batch lacks 'bank' (ids of feature 'bank', table 't')" in text
        assert "no feature reads 'bamk', 'z'" in text
        assert "did you mean 'bamk' for 'bank'?" in text

    def test_keys_that_differ_in_case_are_near(self):
        layout = layout_of(FeatureSpec(name="g", table="t"))
        with pytest.raises(InputError, match="did you mean 'G' for 'g'"):
            read_features({"G": [[1]]}, layout)

    def test_a_missing_key_names_who_reads_it(self):
        batch = nested_batch()
        del batch["user"]["w"]
        reader = r"'user/w' \(weights of feature 'history', table 't'\)"
        with pytest.raises(InputError, match=reader):
            read_features(batch, nested_layout())

    def test_missing_nested_keys(self):
        batch = nested_batch()
        batch["user"]["histroy"] = batch["user"].pop("history")
        with pytest.raises(InputError) as info:
            read_features(batch, nested_layout())
        text = str(info.value)
        assert "the batch lacks 'user/history'" in text
        assert "did you mean 'user/histroy' for 'user/history'?" in text

    def test_long_lists_of_keys_are_cut(self):
        batch = {f"column{i:03}": [[1]] for i in range(300)}
        with pytest.raises(InputError) as info:
            read_features(batch, nested_layout())
        assert "and 280 more" in str(info.value)
        assert len(str(info.value)) < 1000

    @pytest.mark.parametrize("element", [None, [1], np.zeros(3), "text", (1, 2)])
    def test_a_batch_is_a_dict(self, element):
        with pytest.raises(InputTypeError, match="a batch must be a dict of arrays"):
            read_features(element, nested_layout())


class TestTheRest:
    def test_ids_and_weights_are_gone_and_the_input_is_as_it_was(self):
        batch = nested_batch()
        batch["user"]["age"] = np.arange(4)
        rest = split_element(batch, nested_layout())
        assert list(rest) == ["user", "label"]
        assert list(rest["user"]) == ["age"]
        assert list(batch) == ["item", "user", "label"]
        assert list(batch["user"]) == ["history", "w", "age"]

    def test_dicts_of_nothing_else_go_too_and_empty_ones_stay(self):
        batch = {**nested_batch(), "extra": {}}
        assert list(split_element(batch, nested_layout())) == ["label", "extra"]

    def test_keys_that_are_not_there_are_no_matter(self):
        assert split_element({"label": 1}, nested_layout()) == {"label": 1}


class TestPadding:
    def test_what_belongs_to_samples_grows(self):
        named = collections.namedtuple("Pair", ["one", "two"])
        rest = {
            "label": np.array([1, 2], np.int8),
            "dense": {"x": np.ones((2, 3), np.float32), "empty": np.zeros((2, 0))},
            "pair": (np.array([True, True]), [np.array(["a", "b"])]),
            "named": named(np.array([1, 2]), 5),
            "jax": jnp.ones(2),
            "objects": np.array(["a", None], object),
        }
        padded = pad_leaves(rest, 2, 4)
        assert padded["label"].tolist() == [1, 2, 0, 0]
        assert padded["label"].dtype == np.int8
        assert padded["dense"]["x"].tolist() == [[1] * 3] * 2 + [[0] * 3] * 2
        assert padded["dense"]["empty"].shape == (4, 0)
        assert padded["pair"][0].tolist() == [True, True, False, False]
        assert padded["pair"][1][0].tolist() == ["a", "b", "", ""]
        assert padded["named"].one.tolist() == [1, 2, 0, 0]
        assert padded["named"].two == 5
        assert padded["jax"].tolist() == [1, 1, 0, 0]
        assert padded["objects"].tolist() == ["a", None, "", ""]

    @pytest.mark.parametrize(
        ("values", "empty"),
        [
            ([b"a", b""], b""),
            ([None, 1.5], 0.0),
            ([[1], [2, 3]], []),
            ([None, None], None),
        ],
    )
    def test_object_columns_grow_by_what_is_empty_of_their_kind(self, values, empty):
        column = np.empty(2, object)
        column[:] = values
        padded = pad_leaves({"x": column}, 2, 4)["x"]
        assert padded.tolist() == [*values, empty, empty]
        assert type(padded[-1]) is type(empty)

    def test_object_columns_of_rows_grow_by_empty_rows(self):
        column = np.empty(2, object)
        column[:] = [np.ones((3, 5), np.float32), np.ones((1, 5), np.float32)]
        padded = pad_leaves({"x": column}, 2, 3)["x"]
        assert (padded[2].shape, padded[2].dtype) == ((0, 5), np.float32)

    @pytest.mark.parametrize("lengths", [[1, 1], [3, 0]])
    def test_ragged_columns_grow_by_empty_rows(self, lengths):
        # Where there are as many values as samples, they are no row each.
        samples = [{"x": list(range(n))} for n in lengths]
        padded = pad_leaves(batch_ragged(samples), 2, 4)["x"]
        assert isinstance(padded, RaggedValues)
        assert np.diff(padded.row_splits).tolist() == [*lengths, 0, 0]
        assert len(padded.values) == padded.row_splits[-1]
        assert padded.row_splits.dtype == np.int64

    def test_ragged_columns_of_other_rows_stay(self):
        rest = {"x": batch_ragged([{"x": [1, 2]}] * 3)["x"]}
        padded = pad_leaves(rest, 2, 4)["x"]
        assert padded.row_splits.tolist() == [0, 2, 4, 6]

    def test_what_does_not_stays(self):
        rest = {
            "step": 7,
            "name": "x",
            "scalar": np.array(3),
            "bins": np.arange(5),
            "none": None,
        }
        padded = pad_leaves(rest, 2, 4)
        assert padded.keys() == rest.keys()
        assert all(padded[key] is rest[key] for key in rest)

    def test_a_full_batch_is_as_it_was(self):
        rest = {"label": np.arange(4)}
        assert pad_leaves(rest, 4, 4)["label"] is rest["label"]
