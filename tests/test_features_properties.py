"""Random batches in random forms against the model, and broken ones."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sparsecore.errors import InputError, InputTypeError
from grain_sparsecore.features import read_features
from grain_sparsecore.specs import FeatureSpec
from tests.feature_forms import (
    PLAIN_FORMS,
    Expected,
    Ragged,
    Refused,
    Sparse,
    all_forms,
    check,
    is_unsorted_coo,
    layout_of,
    model,
    read,
)

INTEGERS = [
    np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
]

# Ids around every edge: of the vocabularies, of the dtypes, of float64.
EDGES = sorted(
    {s * 2**n + d for s in (1, -1) for n in (0, 4, 7, 8, 15, 16, 31, 32, 53, 63, 64)
     for d in (-1, 0, 1)}
)  # fmt: skip
VOCABULARIES = [1, 10, 64, 127, 128, 200, 256, 1000, 65536, 2**31 - 1]

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
WEIGHTS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, -0.0, 2.0**-75, 2.0**-74, 1e-45, 3e38]),
    FINITE,
    st.integers(-3, 3).map(float),
)
WILD_WEIGHTS = st.one_of(
    WEIGHTS, st.sampled_from([np.nan, np.inf, -np.inf, 1e39, 1e300])
)


def dtypes_of(values: list[int]) -> list[np.dtype]:
    """The integer dtypes that hold the values; object where none does."""
    low, high = min(values, default=0), max(values, default=0)
    fitting = [
        d for d in INTEGERS if np.iinfo(d).min <= low and high <= np.iinfo(d).max
    ]
    return fitting or [np.dtype(object)]


@dataclasses.dataclass
class Batch:
    """A random batch: rows, the forms they take, settings."""

    rows: list[list[int]]
    weights: list[list[float]] | None
    form: str
    weight_form: str
    dtype: np.dtype
    weight_dtype: np.dtype
    spec: dict[str, Any]
    vocabulary: int
    combiner: str
    batch_size: int

    @property
    def value(self) -> Any:
        return all_forms(self.rows, self.dtype)[self.form]

    @property
    def weight_value(self) -> Any:
        if self.weights is None:
            return None
        return all_forms(self.weights, self.weight_dtype)[self.weight_form]

    def expected(self) -> Expected:
        spec = FeatureSpec(name="f", table="t", **self.spec)
        return model(
            self.rows,
            self.weights,
            spec,
            vocabulary=self.vocabulary,
            combiner=self.combiner,
            batch_size=self.batch_size,
        )


@st.composite
def batches(draw, *, wild: bool = True) -> Batch:
    vocabulary = draw(st.sampled_from(VOCABULARIES))
    ids = st.integers(0, vocabulary - 1)
    spec: dict[str, Any] = {}
    if wild:
        edges = st.sampled_from([*EDGES, vocabulary - 1, vocabulary])
        ids = draw(st.sampled_from([ids, ids, st.one_of(ids, edges), edges]))
        spec["on_invalid_id"] = draw(st.sampled_from(["error", "drop", "clip", "mod"]))
        spec["on_invalid_weight"] = draw(st.sampled_from(["error", "zero"]))
        spec["padding_id"] = draw(st.sampled_from([None, None, 0, -1, 7, 2**64 - 1]))
        spec["allow_negative_weights"] = draw(st.booleans())
    batch_size = draw(st.sampled_from([2, 4, 6]))
    num_rows = draw(st.integers(1, batch_size))
    if draw(st.booleans()):
        width = draw(st.integers(0, 3))
        row = st.lists(ids, min_size=width, max_size=width)
    else:
        row = st.lists(ids, max_size=4)
    rows = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    flat = [value for row in rows for value in row]
    if wild and all(-(2**63) <= v < 2**64 for v in flat):
        spec["hash"] = draw(st.sampled_from([False, False, True]))
        spec["hash_seed"] = draw(st.sampled_from([0, 1, 2**64 - 1]))
    dtype = draw(st.sampled_from(dtypes_of(flat)))
    weights = None
    weight_dtype = draw(st.sampled_from([np.dtype(np.float32), np.dtype(np.float64)]))
    if draw(st.booleans()):
        numbers = draw(st.sampled_from([WEIGHTS, WILD_WEIGHTS if wild else WEIGHTS]))
        weights = [[draw(numbers) for _ in row] for row in rows]
        if weight_dtype == np.float32:
            with np.errstate(over="ignore"):
                weights = [[float(np.float32(w)) for w in row] for row in weights]
    form = draw(st.sampled_from(sorted(all_forms(rows, dtype))))
    weight_forms = set(all_forms(weights or rows, weight_dtype if weights else dtype))
    if is_unsorted_coo(form):
        weight_forms -= PLAIN_FORMS
    return Batch(
        rows,
        weights,
        form,
        draw(st.sampled_from(sorted(weight_forms))),
        dtype,
        weight_dtype,
        spec,
        vocabulary,
        draw(st.sampled_from(["sum", "mean", "sqrtn"])),
        batch_size,
    )


def read_batch(batch: Batch, value: Any, weight_value: Any):
    return read(
        value,
        weight_value,
        vocabulary=batch.vocabulary,
        combiner=batch.combiner,
        batch_size=batch.batch_size,
        # Labels: they say how many samples a short batch has.
        others={"label": np.zeros(len(batch.rows))},
        **batch.spec,
    )


@given(batches(wild=False))
@settings(max_examples=60)
def test_all_forms_of_the_same_rows_give_the_same_bytes(batch):
    weight_forms: dict[str, Any] = {"lists": None}
    if batch.weights is not None:
        weight_forms = all_forms(batch.weights, batch.weight_dtype)
    base = read_batch(batch, batch.rows, batch.weights)
    assert base.rows() == batch.expected().rows
    names = list(weight_forms)
    for i, (name, value) in enumerate(all_forms(batch.rows, batch.dtype).items()):
        weight_name = names[i % len(names)]
        if is_unsorted_coo(name) and weight_name in PLAIN_FORMS:
            weight_name = "lists"
        weights = weight_forms[weight_name]
        assert read_batch(batch, value, weights).key() == base.key(), name
    for weights in weight_forms.values():
        assert read_batch(batch, batch.rows, weights).key() == base.key()


@given(batches())
@settings(max_examples=400)
def test_any_batch_in_any_form_equals_the_model(batch):
    check_against_model(batch)


def check_against_model(batch: Batch) -> str:
    """Returns how it went, for counting."""
    refusal = None
    try:
        expected = batch.expected()
    except Refused as error:
        refusal = str(error)
    if refusal is not None:
        with pytest.raises(InputError) as info:
            read_batch(batch, batch.value, batch.weight_value)
        text = str(info.value)
        assert "feature 'f' (table 't')" in text
        assert refusal in text
        return "refused"
    reading = read_batch(batch, batch.value, batch.weight_value)
    assert reading.num_samples == len(batch.rows)
    assert reading.rows() == expected.rows
    assert reading.counts == expected.counts
    if expected.weights is not None:
        got = reading.feature.weights
        assert got is not None
        flat = [w for row in expected.weights for w in row]
        assert got.tobytes() == np.array(flat, np.float32).tobytes()
    return "equal"


def _with(array, index, value):
    array = np.array(array)
    array[index] = value
    return array


def broken_forms(rows: list[list[int]], rng: np.random.Generator) -> dict[str, Any]:
    """Inputs of which each is wrong in one way, made from rows that are right."""
    forms = all_forms(rows, np.int64)
    flat, splits = forms["csr"]
    lengths = np.diff(splits)
    indices, values, shape = forms["coo"]
    at = int(rng.integers(len(rows)))
    broken = {
        "splits start late": {"values": flat, "row_splits": splits + 1},
        "splits end late": {"values": flat, "row_splits": _with(splits, -1, 10**6)},
        "splits end early": {
            "values": np.append(flat, 0),
            "row_splits": splits,
        },
        "splits fall": {"values": flat, "row_splits": [0, len(flat) + 1, len(flat)]},
        "no splits": {"values": flat, "row_splits": []},
        "float splits": {"values": flat, "row_splits": splits.astype(float)},
        "2-D splits": {"values": flat, "row_splits": splits[None]},
        "None as splits": {"values": flat, "row_splits": None},
        "huge splits": {
            "values": flat,
            "row_splits": _with(splits.astype(np.uint64), -1, 2**64 - 1),
        },
        "one length too many": {
            "values": flat,
            "row_lengths": np.append(lengths, 1),
        },
        "negative length": {
            "values": flat,
            "row_lengths": np.append(_with(lengths, at, -1), lengths[at] + 1),
        },
        "lengths that overflow": {"values": flat, "row_lengths": [2**62] * 4},
        "capacity too small": {
            "values": flat,
            "row_splits": splits,
            "num_values": len(flat) + 1,
        },
        "capacity negative": {"values": flat, "row_splits": splits, "num_values": -1},
        "values nested": {"values": [[1], [2]], "row_splits": [0, 1, 2]},
        "values 2-D": {"values": np.ones((2, 2), int), "row_splits": [0, 1, 2]},
        "neither splits nor lengths": (flat, np.array([-5, 99])),
        "splits of floats": (flat, splits + 0.5),
        "tuple of four arrays": (flat, splits, flat, splits),
        "tuple of list and array": (flat.tolist(), splits),
        "unknown keys": {"values": flat, "splits": splits},
        "row outside": Sparse(
            np.vstack([indices, [len(rows), 0]]), np.append(values, 1), shape
        ),
        "row negative": Sparse(
            np.vstack([indices, [-1, 0]]), np.append(values, 1), shape
        ),
        "column outside": Sparse(
            np.vstack([indices, [at, 99]]), np.append(values, 1), shape
        ),
        "more values than indices": Sparse(indices, np.append(values, 1), shape),
        "float indices": Sparse(
            np.vstack([indices, [at, 0]]) + 0.0, np.append(values, 1), shape
        ),
        "rank 3": Sparse(np.zeros((1, 3), int), np.array([1]), [1, 1, 1]),
        "shape negative": Sparse(indices, values, _with(shape, 1, -1)),
        "shape of rank 0": Sparse(indices, values, []),
        "scalar": 5,
        "0-D": np.array(5),
        "3-D": np.zeros((len(rows), 1, 1), int),
        "ragged of rank 3": Ragged(Ragged(flat, splits), [0, len(rows)]),
        "floats": np.full((len(rows), 1), 1.0),
        "bools": np.full((len(rows), 1), True),
        "complex": np.full((len(rows), 1), 1j),
        "dates": np.full((len(rows), 1), "2020-01-01", "datetime64[D]"),
        "records": np.zeros((len(rows), 1), [("a", int)]),
        "strings": np.full((len(rows), 1), "1"),
        "bytes": [[b"1"] for _ in rows],
        "text": "123",
        "nothing": None,
        "a set": {1, 2},
        "a generator": (x for x in rows),
        "a function": len,
        "masked": np.ma.masked_equal(np.zeros((len(rows), 1), int), 0),
        "masked row": [np.ma.masked_equal([0], 0) for _ in rows],
        "no sample": [],
        "no sample, an array": np.zeros((0, 3), int),
        "no sample, csr": Ragged(flat[:0], [0]),
        "too many samples": [[1]] * 99,
        "too many samples, an array": np.zeros((99, 3), int),
    }
    for name, value in {
        "float": 1.0,
        "bool": True,
        "numpy bool": np.True_,
        "None": None,
        "str": "1",
        "list": [1],
        "array": np.array([1]),
        "object": object(),
        "complex": 1j,
        "too long": 2**70,
    }.items():
        wrong = [list(row) for row in rows]
        wrong[at].append(value)
        broken[f"{name} in a row"] = wrong
        array = np.empty(len(rows), object)
        array[:] = wrong
        broken[f"{name} in a row of an object array"] = array
    for name, value in {
        "a single value": 1,
        "a 2-D array": np.ones((1, 1), int),
        "text": "12",
        "a dict": {"a": 1},
        "floats": np.array([1.5]),
    }.items():
        wrong = [*map(list, rows), [1]]
        wrong[at] = value
        broken[f"{name} as a row"] = wrong
    return broken


BROKEN = sorted(broken_forms([[1], [2]], np.random.default_rng(0)))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_form_is_an_error_that_names_the_feature(name):
    for rows in ([[1], [2], [3]], [[], [4, 5]], [[1, 2], [3, 4], [5, 6], [7, 8]]):
        check_broken(name, rows, np.random.default_rng(0))


def check_broken(name: str, rows: list[list[int]], rng: np.random.Generator) -> None:
    for spec in ({}, {"on_invalid_id": "drop"}):
        value = broken_forms(rows, rng)[name]
        if spec and name.startswith("too long"):
            continue  # an id, if a strange one, which is then dropped
        with pytest.raises(InputError, match=r"feature 'f' \(table 't'\), ids 'f'"):
            read(value, batch_size=6, **spec)
        good = [[1] for _ in rows]
        layout = layout_of(
            FeatureSpec(name="f", table="t"),
            FeatureSpec(name="g", table="t"),
            batch_size=6,
        )
        with pytest.raises(InputError, match="feature 'f'"):
            read_features({"f": broken_forms(rows, rng)[name], "g": good}, layout)


SCALARS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from(EDGES),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=2),
    st.binary(max_size=2),
    st.integers(0, 9).map(np.int16),
)
ARRAYS = st.one_of(
    st.lists(st.integers(0, 9), max_size=6).map(np.array),
    st.lists(st.integers(0, 9), max_size=6).map(lambda x: np.array(x, np.uint8)),
    st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=3).map(
        lambda x: np.array(x[0] if x else [], object)
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda s: np.ones(s, np.int64)),
    st.lists(st.floats(), max_size=3).map(np.array),
)
GARBAGE = st.recursive(
    st.one_of(SCALARS, ARRAYS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.fixed_dictionaries({"values": inner, "row_splits": inner}),
        st.fixed_dictionaries({"values": inner, "row_lengths": inner}),
        st.fixed_dictionaries(
            {"indices": inner, "values": inner, "dense_shape": inner}
        ),
        st.dictionaries(st.text(max_size=2), inner, max_size=2),
    ),
    max_leaves=12,
)


@given(GARBAGE, st.one_of(st.none(), GARBAGE), st.booleans())
@settings(max_examples=400)
def test_garbage_is_read_as_legal_ids_or_is_an_error(value, weights, hashed):
    check_garbage(value, weights, hashed)


def check_garbage(value: Any, weights: Any, hashed: bool) -> str:
    spec = FeatureSpec(name="f", table="t", weights="w", hash=hashed)
    layout = layout_of(spec, batch_size=4)
    message = None
    try:
        (feature,), _, num_samples = read_features({"f": value, "w": weights}, layout)
    except (InputError, InputTypeError) as error:
        message = str(error)
    if message is not None:
        assert "feature 'f' (table 't')" in message
        return "refused"
    check(feature, 64, 4)
    assert 1 <= num_samples <= 4
    return "read"
