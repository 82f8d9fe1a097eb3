"""One feature of one batch for the tests: every form of the same rows, and a model.

The model is plain Python over rows of Python integers and floats. It shares nothing
with the package but the names of the counters.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow as pa

from grain_sparsecore.features import COUNTERS, FeatureIds, read_features
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout

TOPOLOGY = Topology(global_device_count=1, local_device_count=1, num_sc_per_device=2)


def layout_of(
    *features: FeatureSpec,
    vocabulary=64,
    combiner="sum",
    batch_size=4,
    topology=TOPOLOGY,
) -> StackedLayout:
    features = features or (FeatureSpec(name="f", table="t"),)
    tables = [
        TableSpec(
            name=name, vocabulary_size=vocabulary, embedding_dim=8, combiner=combiner
        )
        for name in sorted({feature.table for feature in features})
    ]
    return make_layout(tables, features, topology=topology, batch_size=batch_size)


@dataclasses.dataclass
class Reading:
    """What `read_features` said of the only feature of a batch."""

    feature: FeatureIds
    counts: dict[str, int]
    num_samples: int
    batch_size: int

    @property
    def splits(self) -> list[int]:
        if self.feature.row_splits is None:
            return [i * self.feature.width for i in range(self.batch_size + 1)]
        return self.feature.row_splits.tolist()

    def rows(self, what: str = "ids") -> list[list[Any]]:
        values = getattr(self.feature, what).tolist()
        splits = self.splits
        return [values[splits[i] : splits[i + 1]] for i in range(self.batch_size)]

    def key(self) -> tuple[Any, ...]:
        """Everything, byte for byte."""
        feature = self.feature
        splits = feature.row_splits
        return (
            feature.ids.tobytes(),
            None if splits is None else splits.tobytes(),
            feature.width,
            None if feature.weights is None else feature.weights.tobytes(),
            self.counts,
            self.num_samples,
        )


def read(
    value: Any,
    weights: Any = None,
    *,
    vocabulary=64,
    combiner="sum",
    batch_size=4,
    others: dict[str, Any] | None = None,
    **spec: Any,
) -> Reading:
    """Reads a batch of the one feature "f" of table "t"."""
    if weights is not None:
        spec["weights"] = "w"
    layout = layout_of(
        FeatureSpec(name="f", table="t", **spec),
        vocabulary=vocabulary,
        combiner=combiner,
        batch_size=batch_size,
    )
    element = {"f": value, "w": weights, **(others or {})}
    (feature,), counters, num_samples = read_features(element, layout)
    check(feature, vocabulary, batch_size)
    assert counters.dtype == np.int32
    counts = dict(zip(COUNTERS, counters[0].tolist(), strict=True))
    return Reading(feature, counts, num_samples, batch_size)


def check(feature: FeatureIds, vocabulary: int, batch_size: int) -> None:
    """What holds of any `FeatureIds`, whatever the input was."""
    ids, splits, weights = feature.ids, feature.row_splits, feature.weights
    assert type(ids) is np.ndarray
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert ids.flags.c_contiguous
    assert ids.flags.aligned
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < vocabulary)
    if splits is None:
        assert ids.size == batch_size * feature.width
    else:
        assert feature.width == 0
        assert splits.dtype == np.int64
        assert splits.shape == (batch_size + 1,)
        assert splits[0] == 0
        assert splits[-1] == ids.size
        assert (np.diff(splits) >= 0).all()
        assert len(set(np.diff(splits).tolist())) > 1  # else it had a width
    if weights is not None:
        assert weights.dtype == np.float32
        assert weights.shape == ids.shape
        assert weights.flags.c_contiguous
        assert np.isfinite(weights).all()


@dataclasses.dataclass
class Ragged:
    """Looks like a tf.RaggedTensor."""

    values: Any
    row_splits: Any


@dataclasses.dataclass
class Sparse:
    """Looks like a tf.SparseTensor."""

    indices: Any
    values: Any
    dense_shape: Any


def _csr(rows, dtype):
    splits = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=splits[1:])
    flat = np.empty(int(splits[-1]), dtype)
    flat[:] = [x for row in rows for x in row]
    return flat, splits


def _coo(rows, dtype):
    places = [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
    width = max(map(len, rows), default=0)
    indices = np.array(places, np.int64).reshape(-1, 2)
    return indices, _csr(rows, dtype)[0], np.array([len(rows), width])


def _objects(rows):
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def _gappy(array):
    """The same values with a stride along every axis, the last one backwards."""
    wide = np.zeros([2 * n for n in array.shape], array.dtype)
    every_second = tuple(slice(None, None, 2) for _ in array.shape)
    wide[every_second] = array[..., ::-1]
    return wide[every_second][..., ::-1]


def _unaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    result = raw.view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def _read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def all_forms(rows: list[list[Any]], dtype: Any) -> dict[str, Any]:
    """Every form of the rows, by name; values that fit ``dtype``.

    dtype object stands for Python numbers that no dtype holds together.
    """
    dtype = np.dtype(dtype)
    flat, splits = _csr(rows, dtype)
    lengths = np.diff(splits)
    arrays = [np.array(row, dtype) for row in rows]
    indices, values, shape = _coo(rows, dtype)
    order = np.random.default_rng(len(flat)).permutation(len(flat))
    shuffled = (indices[order], values[order], shape)
    plain = [[x.item() if isinstance(x, np.generic) else x for x in r] for r in rows]
    forms: dict[str, Any] = {
        "lists": plain,
        "tuples": tuple(tuple(row) for row in plain),
        "lists and tuples": [tuple(r) if i % 2 else r for i, r in enumerate(plain)],
        "arrays in a list": arrays,
        "arrays, some empty ones float": [
            a if a.size else np.array([]) for a in arrays
        ],
        "arrays and lists": [r if i % 2 else arrays[i] for i, r in enumerate(plain)],
        "None for empty rows": [row or None for row in plain],
        "object array of arrays": _objects(arrays),
        "object array of lists": _objects(plain),
        "csr": (flat, splits),
        "csr int32": (flat, splits.astype(np.int32)),
        "csr uint64": (flat, splits.astype(np.uint64)),
        "csr of lists": {"values": flat.tolist(), "row_splits": splits.tolist()},
        "csr strided": (_gappy(flat), _gappy(splits)),
        "csr read-only": (_read_only(flat), _read_only(splits)),
        "csr dict": {"row_splits": splits, "values": flat},
        "csr lengths": (flat, lengths),
        "csr lengths uint8": (flat, lengths.astype(np.uint8)),
        "csr lengths dict": {"values": flat, "row_lengths": lengths},
        "csr with capacity": {
            "values": np.concatenate([flat, flat[:1], flat[:1]]),
            "row_splits": splits,
            "num_values": np.int32(len(flat)),
        },
        "ragged tensor": Ragged(flat, splits),
        "coo": (indices, values, shape),
        "coo shuffled": shuffled,
        "coo fortran": (np.asfortranarray(shuffled[0]), shuffled[1], list(shape)),
        "coo dict": dict(
            zip(("indices", "values", "dense_shape"), shuffled, strict=True)
        ),
        "sparse tensor": Sparse(*shuffled),
    }
    if dtype.kind != "O":
        forms["arrays, strided"] = [_gappy(a) for a in arrays]
        forms["csr big-endian"] = (flat.astype(dtype.newbyteorder(">")), splits)
        forms["csr unaligned"] = (_unaligned(flat), _unaligned(splits))
        forms |= _arrow_forms(plain, pa.from_numpy_dtype(dtype))
    widths = {len(row) for row in rows}
    if len(widths) == 1:
        forms |= _dense_forms(rows, dtype, widths.pop())
    return forms


def _arrow_forms(plain, kind):
    lists = pa.array(plain, pa.list_(kind))
    half = len(plain) // 2
    longer = pa.array([[0, 0], *plain, [0]], pa.list_(kind))
    nulls = [row or None for row in plain]
    forms = {
        "arrow lists": lists,
        "arrow large lists": pa.array(plain, pa.large_list(kind)),
        "arrow list view": pa.array(plain, pa.list_view(kind)),
        "arrow slice": longer[1:-1],
        "arrow nulls": pa.array(nulls, pa.list_(kind)),
        "arrow column": pa.table({"f": lists})["f"],
        "arrow chunks": pa.chunked_array([lists[:half], lists[half:]]),
    }
    widths = {len(row) for row in plain}
    if len(widths) == 1 and widths != {0}:
        forms["arrow fixed"] = pa.array(plain, pa.list_(kind, widths.pop()))
    if all(len(row) == 1 for row in plain):
        forms["arrow flat"] = pa.array([row[0] for row in plain], kind)
    if all(len(row) <= 1 for row in plain):
        forms["arrow flat nulls"] = pa.array(
            [row[0] if row else None for row in plain], kind
        )
    return forms


def _dense_forms(rows, dtype, width):
    array = np.empty((len(rows), width), dtype)
    array[...] = np.array(rows, dtype).reshape(array.shape)
    forms = {
        "C": array,
        "F": np.asfortranarray(array),
        "strided": _gappy(array),
        "read-only": _read_only(array),
        "object 2-D": array.astype(object),
    }
    if dtype.kind != "O":
        forms["big-endian"] = array.astype(dtype.newbyteorder(">"))
        forms["unaligned"] = _unaligned(array)
        forms["structured field"] = _field_of_records(array)
    if dtype in (np.int32, np.float32):
        forms["jax"] = jnp.asarray(array)
        forms["jax rows"] = [jnp.asarray(row) for row in array]
    if width == 1:
        forms["1-D"] = array[:, 0]
        forms["1-D list"] = array[:, 0].tolist()
        forms["1-D tuple"] = tuple(array[:, 0].tolist())
        forms["1-D object"] = array[:, 0].astype(object)
        forms["list of numpy scalars"] = list(array[:, 0])
        forms["list of 0-D arrays"] = [np.array(x, dtype) for x in array[:, 0]]
    return forms


def _field_of_records(array):
    records = np.zeros(array.shape, [("pad", np.uint8), ("id", array.dtype)])
    records["id"] = array
    return records["id"]


# Forms of one value a sample that weights beside COO ids are not given in: there such
# an array has one weight for each entry, in the order of the entries.
PLAIN_FORMS = {
    "1-D",
    "1-D list",
    "1-D tuple",
    "1-D object",
    "list of numpy scalars",
    "list of 0-D arrays",
    "arrow flat",
}


def is_unsorted_coo(form: str) -> bool:
    return form.startswith("coo ") or form == "sparse tensor"


class Refused(Exception):
    """The model does not allow the batch; its argument is part of the message."""


@dataclasses.dataclass
class Expected:
    rows: list[list[int]]
    weights: list[list[np.float32]] | None
    counts: dict[str, int]


def model(
    rows: list[list[int]],
    weights: list[list[float]] | None,
    spec: FeatureSpec,
    *,
    vocabulary: int,
    combiner: str,
    batch_size: int,
) -> Expected:
    """What must come out, sample by sample and id by id."""
    counts = dict.fromkeys(COUNTERS, 0)
    ids: list[list[int]] = []
    kept: list[list[int]] = []
    for sample, row in enumerate(rows):
        ids.append([])
        kept.append([])
        for position, value in enumerate(row):
            mended = _model_id(value, spec, vocabulary, counts)
            if mended is None:
                continue
            if mended < 0:
                raise Refused(f"id {value} of sample {sample}, position {position},")
            ids[-1].append(mended)
            kept[-1].append(position)
    counts["ids"] = sum(map(len, ids))
    ids += [[] for _ in range(batch_size - len(rows))]
    if weights is None:
        return Expected(ids, None, counts)
    gains = []
    for sample, (row, positions) in enumerate(zip(weights, kept, strict=True)):
        gains.append([])
        for position in positions:
            where = f"of sample {sample}, position {position}"
            gains[-1].append(_model_weight(row[position], spec, counts, where))
    negative = [w for row in gains for w in row if w < 0]
    if negative and not spec.allow_negative_weights:
        raise Refused("is negative")
    for row_ids, row in zip(ids, gains, strict=False):
        zero, cleared = _model_is_zero(row_ids, row, combiner)
        counts["zero_weight_rows"] += zero
        if cleared:
            row[:] = [np.float32(0)] * len(row)
    gains += [[] for _ in range(batch_size - len(weights))]
    return Expected(ids, gains, counts)


def _model_id(value, spec, vocabulary, counts):
    """The id, None where it is left out, -1 where it is refused."""
    if spec.padding_id is not None and value == spec.padding_id:
        counts["padding_ids"] += 1
        return None
    if spec.hash:
        return model_hash(value, vocabulary, spec.hash_seed)
    if 0 <= value < vocabulary:
        return value
    if spec.on_invalid_id == "error":
        return -1
    counts["negative_ids" if value < 0 else "large_ids"] += 1
    if spec.on_invalid_id == "drop":
        return None
    if spec.on_invalid_id == "clip":
        return 0 if value < 0 else vocabulary - 1
    return value % vocabulary


def _model_weight(value, spec, counts, where):
    with np.errstate(over="ignore"):
        weight = np.float32(value)
    if np.isfinite(weight):
        return weight
    if spec.on_invalid_weight == "error":
        raise Refused(where)
    counts["invalid_weights"] += 1
    return np.float32(0)


def _model_is_zero(ids, weights, combiner):
    """Whether gain 0 comes of weights that cannot be divided or gains that overflow.

    And whether only the latter, which the weights then say.
    """
    if not weights:
        return False, False
    total = np.float32(0)
    sums = dict.fromkeys(ids, np.float32(0))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for weight in weights:
            if combiner == "mean":
                total = np.float32(total + weight)
            else:
                total = np.float32(np.float64(total) + np.float64(weight) ** 2)
        divisor = {"sum": np.float32(1), "mean": total, "sqrtn": np.sqrt(total)}
        gains = [np.float32(weight / divisor[combiner]) for weight in weights]
        for id_, gain in zip(ids, gains, strict=True):
            sums[id_] = np.float32(sums[id_] + gain)
    if not np.isfinite([divisor[combiner], *gains]).all() or divisor[combiner] == 0:
        return True, False
    overflows = not np.isfinite(list(sums.values())).all()
    return overflows, overflows


_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(state: int):
    """The outputs of the SplitMix64 generator that starts at ``state``."""
    while True:
        state = (state + _GAMMA) & _MASK
        yield _mix(state)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def model_hash(value: int | str | bytes, vocabulary: int, seed: int = 0) -> int:
    """The documented hash, one value at a time."""
    key = next(splitmix64(seed))
    if isinstance(value, int):
        hashed = _mix((key + (value + 1) * _GAMMA) & _MASK)
    else:
        data = value
        if isinstance(value, str):
            data = value.encode(errors="surrogatepass")
        hashed = _mix((key + (len(data) + 1) * _GAMMA) & _MASK)
        for i in range(0, len(data), 8):
            word = int.from_bytes(data[i : i + 8], "little")
            hashed = _mix(((hashed ^ word) + _GAMMA) & _MASK)
    return hashed * vocabulary >> 64
