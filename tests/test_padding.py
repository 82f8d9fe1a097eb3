"""Empty batches have the structure, shapes and types of those that were seen."""

import collections

import jax
import ml_dtypes
import numpy as np
import pytest

from grain_sparsecore.errors import CoordinationError
from grain_sparsecore.pipeline.padding import describe_element, empty_element
from tests.coordination_helpers import batch_of, layout_of

LAYOUT = layout_of(1)


def emptied(leaf):
    """What stands for ``leaf`` in the empty batch of another host."""
    element = {"x": leaf, "sparsecore": batch_of(LAYOUT, 3)}
    empty = empty_element(describe_element(element, "sparsecore"), LAYOUT)
    assert list(empty) == ["x", "sparsecore"]
    assert empty["sparsecore"].num_valid_samples.sum() == 0
    return empty["x"]


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(np.float32),
        np.dtype(">i4"),
        np.dtype("<U7"),
        np.dtype("S2"),
        np.dtype("M8[s]"),
        np.dtype(bool),
        # Types that numpy does not have: a jitted step would refuse another.
        np.dtype(ml_dtypes.bfloat16),
        np.dtype(ml_dtypes.float8_e4m3fn),
    ],
    ids=str,
)
def test_arrays_and_numbers_keep_shape_and_type(dtype):
    for leaf in (np.ones((4, 2), dtype), np.ones(4, dtype)[0]):
        empty = emptied(leaf)
        assert type(empty) is type(leaf)
        assert empty.shape == leaf.shape
        assert np.array_equal(empty, np.zeros(leaf.shape, dtype))
        # Without an array, texts are as long as they are, and numbers native.
        if dtype.kind not in "US" or leaf.shape:
            assert empty.dtype == leaf.dtype


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (1.5, 0.0),
        (True, False),
        (2**70, 0),
        ("text", ""),
        (b"x", b""),
        (None, None),
        ({"a": {"b": 1}, "c": [1, ("y",)]}, {"a": {"b": 0}, "c": [0, ("",)]}),
        ({1: 5, "1": "x"}, {1: 0, "1": ""}),
        ({}, {}),
    ],
)
def test_plain_values_and_containers(leaf, expected):
    empty = emptied(leaf)
    assert empty == expected
    assert type(empty) is type(expected)


def test_object_arrays_keep_what_they_hold():
    texts = emptied(np.array(["a", None, "b"], object))
    assert (texts.dtype, texts.tolist()) == (object, ["", "", ""])
    rows = np.empty(2, object)
    rows[:] = [np.ones((3, 5), np.float32), np.ones((1, 5), np.float32)]
    empty = emptied(rows)
    assert [(row.shape, row.dtype) for row in empty] == [((0, 5), np.float32)] * 2
    lists = np.empty(2, object)
    lists[:] = [[1, 2], [3]]
    assert emptied(lists).tolist() == [[], []]
    assert emptied(np.array([None, None])).tolist() == [None, None]


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ({1, 2}, "element['x'] is a set, for which there is no empty value"),
        (Point(1, 2), "element['x'] is a Point"),
        ({"y": [1j]}, "element['x/y/0'] is a complex"),
        ({(1, 2): 3}, "element['x/(1, 2)'] is a key that is no text or int"),
        (np.zeros(2, [("a", "i4")]), "element['x'] is an array of [('a', '<i4')]"),
        (jax.numpy.ones(2), "element['x'] is a ArrayImpl"),
    ],
)
def test_what_has_no_empty_value_is_named(leaf, text):
    with pytest.raises(CoordinationError) as caught:
        emptied(leaf)
    assert text in str(caught.value)
    assert "use on_exhausted=" in str(caught.value)
