"""Failing batches: kept in the form they came in, and failing alike."""

import os
import sys
import zipfile
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from grain_sparsecore.batching import RaggedValues
from grain_sparsecore.errors import InputError
from grain_sparsecore.failing import FailingBatch
from grain_sparsecore.features import read_features, split_element
from grain_sparsecore.limits import Limits
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.specs import FeatureSpec
from tests.failing_helpers import fail, failing_layout, kept_file, loaded, saved
from tests.feature_forms import Ragged, Sparse, all_forms, layout_of
from tests.test_features_properties import GARBAGE

RAGGED_ROWS = [[5, 1], [], [7], [2, 2, 63]]
EVEN_ROWS = [[5, 1], [0, 2], [7, 7], [2, 63]]


class TestAllForms:
    @pytest.mark.parametrize("rows", [RAGGED_ROWS, EVEN_ROWS, [[1], [2], [3], [4]]])
    @pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint64, object])
    def test_every_form_reads_the_same_after_a_file(self, tmp_path, rows, dtype):
        layout = failing_layout()
        for name, form in all_forms(rows, dtype).items():
            element = {"f": form, "label": np.zeros(4, np.float32)}
            again = loaded(tmp_path, element, layout)
            (one,), counters, samples = read_features(element, layout)
            (two,), counters_again, samples_again = read_features(again, layout)
            assert one.ids.tolist() == two.ids.tolist(), name
            splits = [
                None if x.row_splits is None else x.row_splits.tolist()
                for x in (one, two)
            ]
            assert splits[0] == splits[1], name
            assert one.width == two.width
            assert counters.tolist() == counters_again.tolist()
            assert samples == samples_again
            assert (again["label"] == element["label"]).all()

    @pytest.mark.parametrize(
        "value",
        [
            [["a", "b\0"], [], ["ü"], [b"\xff\0".decode("latin1")]],
            [[b"a"], [b"\xff\0"], [], [b""]],
            [(1, 2), [3], None, np.array([4], np.uint64)],
            [np.str_("a\0"), np.bytes_(b"a\0"), np.float32(1.5), np.uint64(2**64 - 1)],
            ["\ud800", 10**40, -(2**70), True, None, 1.5, float("inf")],
            {"nested": {"a/b": (1,), 3: [2]}, ("k", 1): b""},
        ],
    )
    def test_python_values_come_back_equal_and_of_the_same_type(self, tmp_path, value):
        again = loaded(tmp_path, {"f": value})["f"]
        assert repr(again) == repr(value)

    def test_nan_stays_nan(self, tmp_path):
        assert np.isnan(loaded(tmp_path, [float("nan")])[0])

    @pytest.mark.parametrize(
        "array",
        [
            np.array([["a", "bc"]]),
            np.array([b"a\0b", b""]),
            np.array(["2020", "NaT"], "datetime64[Y]"),
            np.array([(1, 2.5)], [("a", ">i2"), ("b", "f8")]),
            np.array([np.nan, -np.inf, -0.0]),
            np.array([2**64 - 1, 0], ">u8"),
            np.asfortranarray(np.arange(6).reshape(2, 3)),
            np.zeros((0, 3), np.int8),
            np.array(5),
            np.array([1.5, np.nan], jnp.bfloat16),
            np.asfortranarray(np.ones((2, 3), jnp.bfloat16)),
            np.array([[1], [2]], jnp.int4),
        ],
    )
    def test_arrays_come_back_bit_for_bit(self, tmp_path, array):
        again = loaded(tmp_path, {"x": array})["x"]
        assert again.dtype == array.dtype
        assert again.shape == array.shape
        assert again.tobytes() == array.tobytes()
        assert again.flags.c_contiguous == array.flags.c_contiguous

    @given(
        hnp.arrays(
            st.one_of(
                hnp.integer_dtypes(endianness="?"),
                hnp.unsigned_integer_dtypes(endianness="?"),
                hnp.floating_dtypes(endianness="?"),
                hnp.boolean_dtypes(),
                hnp.byte_string_dtypes(),
                hnp.unicode_string_dtypes(endianness="?"),
            ),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        st.booleans(),
    )
    @settings(max_examples=60)
    def test_any_arrays_share_the_pools(self, tmp_path_factory, array, transposed):
        array = array.T if transposed else array
        element = [array, array[..., :1] if array.ndim else array, (array,)]
        again = loaded(tmp_path_factory.mktemp("pools"), element)
        for one, two in zip(element[:2], again[:2], strict=True):
            assert two.dtype == one.dtype
            assert two.shape == one.shape
            assert two.tobytes() == one.tobytes()
        assert again[2][0].tobytes() == array.tobytes()

    def test_strings_of_variable_width(self, tmp_path):
        array = np.array([["a", "longer than the others"]], np.dtypes.StringDType())
        again = loaded(tmp_path, array)
        assert again.dtype == array.dtype
        assert again.tolist() == array.tolist()

    def test_arrays_of_jax_become_those_of_numpy(self, tmp_path):
        again = loaded(tmp_path, {"f": jnp.arange(3)})["f"]
        assert type(again) is np.ndarray
        assert again.tolist() == [0, 1, 2]

    def test_named_tuples_keep_their_names_and_stay_tuples(self, tmp_path):
        value = RaggedValues(np.array([1, 2]), np.array([0, 0, 2]))
        again = loaded(tmp_path, {"f": value})["f"]
        assert isinstance(again, tuple)
        assert again.row_splits.tolist() == [0, 0, 2]
        assert again.values.tolist() == [1, 2]
        assert type(again)(*again)._fields == ("values", "row_splits")

    def test_all_sorts_of_things_leave_a_stand_in_of_the_same_name(self, tmp_path):
        path = saved(tmp_path, {"f": {1, 2}, "g": [sys], "h": pa.table({"a": [1]})})
        batch = FailingBatch.load(path)
        assert sorted(batch.replaced) == ["Table", "module", "set"]
        assert repr(batch.element["f"]) == "{1, 2}"
        assert type(batch.element["h"]).__module__ == "pyarrow.lib"


class _Unreadable:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("the device is gone")


def _masked():
    return np.ma.MaskedArray([[1, 2], [3, 4]], mask=[[0, 1], [0, 0]])


# Name: the batch, the settings of the feature, and a part of the error.
FAULTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dense": ({"f": np.array([[1, 64], [3, 1000]])}, {}, "id 64 of sample 0"),
    "fortran": ({"f": np.asfortranarray([[1, 2], [3, 99]])}, {}, "id 99 of sample 1"),
    "uint64": ({"f": np.array([1, 2**64 - 1], np.uint64)}, {}, f"id {2**64 - 1} of"),
    "big-endian": ({"f": np.array([1, 77], ">i4")}, {}, "id 77 of sample 1"),
    "python integers": ({"f": [[1], [10**30]]}, {}, f"id {10**30} of sample 1"),
    "lists": ({"f": [[], [1, -2]]}, {}, "id -2 of sample 1, position 1"),
    "object rows": (
        {"f": np.array([np.array([1]), np.array([1, 64])], object)},
        {},
        "id 64 of sample 1, position 1",
    ),
    "strings": ({"f": np.array(["a", "b"])}, {}, "strings (<U1), such as 'a'"),
    "object strings": ({"f": np.array(["a", "b"], object)}, {}, "str objects"),
    "bytes": ({"f": [[b"a"], [b"b", b"\xff"]]}, {}, "bytes objects, such as b'a'"),
    "strings and bytes": ({"f": ["a", 1]}, {"hash": True}, "sample 1 holds 1"),
    "float": ({"f": np.array([[1.9]], np.float32)}, {}, "float32, such as 1.9"),
    "csr": ({"f": (np.array([1, 2]), np.array([0, 3, 2]))}, {}, "falls from 3 to 2"),
    "csr dict": (
        {"f": {"values": [1], "row_lengths": [2]}},
        {},
        "row_lengths add up to 2",
    ),
    "csr in doubt": (
        {"f": (np.array([5]), np.array([0, 1]))},
        {},
        "nothing else in the batch tells which",
    ),
    "coo": (
        {"f": (np.array([[0, 0], [9, 0]]), np.array([1, 2]), (4, 2))},
        {},
        "entry 1 has index [9, 0]",
    ),
    "ragged tensor": ({"f": Ragged(np.array([1, 99]), [0, 1, 2])}, {}, "id 99 of"),
    "sparse tensor": (
        {"f": Sparse(np.array([[1, 0]]), np.array([64]), (2, 1))},
        {},
        "id 64 of sample 1",
    ),
    "arrow": ({"f": pa.array([[1], None, [64]])}, {}, "id 64 of sample 2"),
    "arrow chunks": (
        {"f": pa.chunked_array([[[1]], [[2, None]]])},
        {},
        "sample 1 has a null at position 1",
    ),
    "arrow slice": ({"f": pa.array([[99], [1], [64]])[1:]}, {}, "id 64 of sample 1"),
    "arrow dictionary": (
        {"f": pa.array(["a", "b"]).dictionary_encode()},
        {},
        "strings need hash = true",
    ),
    "arrow table": ({"f": pa.table({"f": [1]})}, {}, "a pyarrow Table is no column"),
    "jax": ({"f": jnp.array([[1, 64]])}, {}, "id 64 of sample 0"),
    "masked": ({"f": _masked()}, {}, "an array has masked entries"),
    "set": ({"f": {1, 2}}, {}, "a set is no array"),
    "a row that is a set": ({"f": [[1], {2}]}, {}, "a set is no array"),
    "unreadable": ({"f": _Unreadable()}, {}, "cannot be read as an array (the device"),
    "no dict": ([1, 2], {}, "a batch must be a dict of arrays, not list"),
    "missing key": ({"g": np.array([1])}, {}, "the batch lacks 'f'"),
    "nested": ({"user": {"ids": [[64]]}}, {"ids": "user/ids"}, "id 64 of sample 0"),
    "too many": ({"f": np.arange(7)}, {}, "7 samples, but batch_size=4"),
    "nan weight": (
        {"f": [[1, 2]], "w": [[1.0, float("nan")]]},
        {"weights": "w"},
        "weight nan of sample 0, position 1",
    ),
    "infinite weight": (
        {"f": np.array([[1], [2]]), "w": np.array([1, np.inf])},
        {"weights": "w"},
        "weight inf of sample 1",
    ),
    "bfloat16 weight": (
        {"f": np.array([[1]]), "w": np.array([[np.nan]], jnp.bfloat16)},
        {"weights": "w"},
        "weight nan of sample 0",
    ),
    "weights of another length": (
        {"f": [[1], [2, 3]], "w": [[1.0], [2.0]]},
        {"weights": "w"},
        "sample 1 has 2 ids but 1 weights",
    ),
    "negative weight": (
        {"f": [[1]], "w": [[-1]]},
        {"weights": "w", "allow_negative_weights": False},
        "is negative",
    ),
}


class TestReplay:
    @pytest.mark.parametrize("name", FAULTS)
    def test_the_same_error_comes_out_of_the_file(self, tmp_path, name):
        element, spec, part = FAULTS[name]
        layout = failing_layout(**spec)
        plain = fail(element, ComputeInputStats(layout))
        error = fail(element, ComputeInputStats(layout, dump_failing=tmp_path))
        assert part in str(error)
        assert (type(error), str(error)) == (type(plain), str(plain))
        batch = FailingBatch.load(kept_file(error))
        assert batch.layout == layout
        again = fail(batch.element, ComputeInputStats(batch.layout))
        assert (type(again), str(again)) == (type(error), str(error))
        assert batch.error_text == str(error)
        assert batch.error_type.rpartition(".")[2] == type(error).__name__

    @given(GARBAGE, st.one_of(st.none(), GARBAGE), st.booleans())
    @settings(max_examples=150)
    def test_garbage_fails_alike_or_not_at_all(
        self, tmp_path_factory, value, weights, hashed
    ):
        folder = tmp_path_factory.mktemp("garbage")
        spec = FeatureSpec(name="f", table="t", weights="w", hash=hashed)
        layout = layout_of(spec)
        path = saved(folder, {"f": value, "w": weights}, layout)
        results = []
        for element in ({"f": value, "w": weights}, FailingBatch.load(path).element):
            try:
                batch = ComputeInputStats(layout).map(element)["sparsecore"]
            except InputError as error:
                results.append((type(error), str(error)))
            else:
                results.append((batch.embedding_ids.tobytes(), batch.gains.tobytes()))
        assert results[0] == results[1]

    @pytest.mark.parametrize("name", FAULTS)
    def test_the_rest_of_the_batch_is_kept(self, tmp_path, name):
        element, spec, _ = FAULTS[name]
        if not isinstance(element, dict):
            return
        layout = failing_layout(**spec)
        # As many labels as fit no feature, so that they settle nothing.
        rest = {"label": np.array([0, 1, 1], np.float32), "city": "Paris"}
        error = fail(
            {**element, **rest}, ComputeInputStats(layout, dump_failing=tmp_path)
        )
        batch = FailingBatch.load(kept_file(error))
        kept = split_element(batch.element, layout)
        assert kept["label"].tobytes() == rest["label"].tobytes()
        assert kept["city"] == "Paris"

    def test_errors_that_are_not_ours_are_kept_too(self, tmp_path, monkeypatch):
        def broken(*args, **kwargs):
            raise IndexError("a defect")

        monkeypatch.setattr("grain_sparsecore.pipeline.compute.partition_batch", broken)
        error = fail(
            {"f": np.arange(4)},
            ComputeInputStats(failing_layout(), dump_failing=tmp_path),
        )
        assert type(error) is IndexError
        batch = FailingBatch.load(kept_file(error))
        assert (batch.error_type, batch.error_text) == (
            "builtins.IndexError",
            "a defect",
        )

    def test_the_stage_is_kept(self, tmp_path):
        layout = failing_layout()
        limits = Limits.start(layout)
        stage = ComputeInputStats(
            layout, key="buffers", cut_above=limits, dump_failing=str(tmp_path)
        )
        batch = FailingBatch.load(kept_file(fail({"f": [[64]]}, stage)))
        assert (batch.key, batch.cut_above) == ("buffers", limits)
        assert batch.origin["pid"] == os.getpid()
        assert batch.origin["numpy"] == np.__version__

    def test_a_good_batch_leaves_nothing(self, tmp_path):
        folder = tmp_path / "none"
        stage = ComputeInputStats(failing_layout(), dump_failing=folder)
        assert "sparsecore" in stage.map({"f": np.arange(4)})
        assert not folder.exists()

    def test_a_large_batch_of_rows_is_few_members(self, tmp_path):
        layout = layout_of(batch_size=20_000)
        rows = [np.array([i % 64]) for i in range(20_000)]
        rows[-1] = np.array([64])
        error = fail({"f": rows}, ComputeInputStats(layout, dump_failing=tmp_path))
        path = kept_file(error)
        with zipfile.ZipFile(path) as archive:
            assert archive.namelist() == ["batch.npy", "pool_0.npy", "origin.npy"]
        again = fail(FailingBatch.load(path).element, ComputeInputStats(layout))
        assert "id 64 of sample 19999" in str(again)
