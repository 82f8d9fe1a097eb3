"""Batches of samples whose features may have a different number of values each.

Grain's own batching stacks arrays of equal shapes only. Here ragged features become
CSR: all values in one array, and where each sample's values begin and end.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from grain_sparsecore.errors import InputError, InputTypeError

# float64 holds every integer up to this size, and not every larger one.
_EXACT_IN_FLOAT64 = 2**53


class RaggedValues(NamedTuple):
    """A ragged feature of a batch, in compressed sparse rows.

    Attributes:
        values: [n], the values of all samples one behind the other.
        row_splits: int64 [B + 1]; those of sample i are
            ``values[row_splits[i]:row_splits[i + 1]]``.
    """

    values: np.ndarray
    row_splits: np.ndarray


def batch_ragged(samples: Sequence[Any]) -> dict[Any, Any]:
    """Turns samples into one batch; for ``ds.batch(1024, batch_fn=batch_ragged)``.

    Scalars become [B], arrays of one shape become [B, ...]. One-dimensional arrays
    of unequal length, and all lists and tuples, become `RaggedValues`, a tuple
    ``(values, row_splits)``. A scalar among such rows, a lone id, is a row of one.
    Text becomes an object array.

    No value changes: the dtype of a feature is one that holds the values of all its
    samples exactly, whichever sample comes first. Empty rows have no say in it.

    Args:
        samples: B dicts, nested or not, with the same keys.

    Raises:
        InputError: Keys or shapes do not go together; the text names the feature and
            the sample.
        InputTypeError: Values have no common dtype that keeps them as they are.
    """
    if not samples:
        raise InputError("batch_ragged: there is no sample to batch.")
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise InputTypeError(
                f"batch_ragged: sample {i} is {type(sample).__name__}; samples must "
                "be dicts from feature keys to values."
            )
    return _batch_dicts(samples, "")


def _batch_dicts(samples: Sequence[Mapping[Any, Any]], path: str) -> dict[Any, Any]:
    first = samples[0]
    for i, sample in enumerate(samples):
        if sample.keys() != first.keys():
            raise InputError(_describe_keys(first, sample, i, path))
    return {
        key: _batch_values([s[key] for s in samples], f"{path}/{key}" if path else key)
        for key in first
    }


def _describe_keys(
    first: Mapping[Any, Any], sample: Mapping[Any, Any], index: int, path: str
) -> str:
    missing = [str(key) for key in first if key not in sample]
    unknown = [str(key) for key in sample if key not in first]
    near = difflib.get_close_matches(missing[0], unknown, n=1) if missing else []
    hint = f" Is {near[0]!r} meant to be {missing[0]!r}?" if near else ""
    return (
        f"batch_ragged: {f'in {path!r}, ' if path else ''}sample {index} has other "
        f"keys than sample 0: missing {missing}, additional {unknown}.{hint} Give all "
        "samples the same keys; an empty list stands for no ids."
    )


def _batch_values(values: Sequence[Any], path: str) -> Any:
    dicts = [isinstance(value, Mapping) for value in values]
    if all(dicts):
        return _batch_dicts(values, path)
    if any(dicts):
        odd = dicts.index(not dicts[0])
        raise InputError(
            f"batch_ragged: feature {path!r}: sample 0 holds "
            f"{type(values[0]).__name__}, but sample {odd} "
            f"{type(values[odd]).__name__}."
        )
    kinds = set(map(type, values))
    if len(kinds) == 1 and issubclass(next(iter(kinds)), np.number | np.bool_ | float):
        return np.array(values)  # scalars of one type: the common case, made fast
    rows = [_as_array(value, i, path) for i, value in enumerate(values)]
    ragged = kinds & {list, tuple} or len({row.shape for row in rows}) > 1
    if ragged and any(row.ndim > 1 for row in rows):
        odd = next((i for i, r in enumerate(rows) if r.shape != rows[0].shape), 0)
        raise InputError(
            f"batch_ragged: feature {path!r}: sample 0 has shape {rows[0].shape}, "
            f"sample {odd} {rows[odd].shape}; only one-dimensional features may be "
            "ragged, and lists must be flat."
        )
    dtype = _common_dtype(rows, path)
    if not ragged:
        return np.stack(rows, dtype=dtype, casting="unsafe")
    splits = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([row.size for row in rows], out=splits[1:])
    flat = [row.reshape(-1) for row in rows]
    return RaggedValues(np.concatenate(flat, dtype=dtype, casting="unsafe"), splits)


def _as_array(value: Any, sample: int, path: str) -> np.ndarray:
    """The value of one sample with a dtype that holds it exactly."""
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            raise InputTypeError(
                f"batch_ragged: feature {path!r}: sample {sample} has masked entries, "
                "and the values under the mask mean nothing; leave them out "
                "(array.compressed()), or fill them with the feature's padding_id."
            )
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value
    if isinstance(value, str | bytes):
        return np.array(value, object)  # not S or U: they lose NULs at the end
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(items, list | tuple):
        return _from_items(items, sample, path)
    array = np.asarray(items)
    if array.dtype == object:
        raise _no_values(value, sample, path)
    return array


def _from_items(items: Sequence[Any], sample: int, path: str) -> np.ndarray:
    """A list as an array; of text as objects."""
    if not items:
        return np.empty(0, np.int64)
    if all(isinstance(x, str | bytes) for x in items):
        array = np.empty(len(items), object)
        array[:] = items
        return array
    try:
        array = np.asarray(items)
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"batch_ragged: feature {path!r}: sample {sample} is no flat list of "
            f"values: {error}"
        ) from error
    integers = [x for x in items if isinstance(x, int | np.integer)]
    if array.dtype.kind == "f" and integers:
        # numpy makes floats of integers that fit uint64 but not int64.
        if len(integers) == len(items) and min(integers) >= 0:
            return np.array(items, np.uint64)
        _check_exact(integers, sample, path)
    if array.dtype.kind in "OSU":
        raise _no_values(items, sample, path)
    return array


def _no_values(value: Any, sample: int, path: str) -> InputTypeError:
    return InputTypeError(
        f"batch_ragged: feature {path!r}: sample {sample} holds {value!r:.80}, which "
        "is neither numbers of up to 64 bits nor text; an empty list stands for no ids."
    )


def _check_exact(integers: Sequence[Any], sample: int, path: str) -> None:
    for x in integers:
        if abs(int(x)) > _EXACT_IN_FLOAT64:
            raise InputTypeError(
                f"batch_ragged: feature {path!r}: sample {sample} holds {int(x)} among "
                "floats or integers of another sign, and no dtype holds all of them "
                "exactly. Make them one integer dtype."
            )


def _common_dtype(rows: Sequence[np.ndarray], path: str) -> np.dtype[Any]:
    """The dtype that holds the values of all rows unchanged."""
    by_dtype: dict[np.dtype[Any], int] = {}
    for i, row in enumerate(rows):
        if row.size:
            by_dtype.setdefault(row.dtype, i)
    if not by_dtype:  # all rows are empty; then any of their dtypes will do
        return rows[0].dtype
    if len(by_dtype) == 1:
        return next(iter(by_dtype))
    kinds = {dtype.kind for dtype in by_dtype}
    text = kinds & set("SUO")
    if text and (kinds - set("SUO") or {"S", "U"} <= kinds):
        (one, i), (two, j) = list(by_dtype.items())[:2]
        raise InputTypeError(
            f"batch_ragged: feature {path!r}: sample {i} has dtype {one} and sample "
            f"{j} {two}; text, bytes and numbers do not mix."
        )
    if text:
        return np.dtype(object) if "O" in kinds else np.result_type(*by_dtype)
    dtype = np.result_type(*by_dtype)
    if dtype.kind == "f" and kinds & set("iu"):
        integers = [row for row in rows if row.size and row.dtype.kind in "iu"]
        low = min(int(row.min()) for row in integers)
        high = max(int(row.max()) for row in integers)
        if "f" not in kinds:  # uint64 beside signed integers
            if low >= 0:
                return np.dtype(np.uint64)
            if high < 2**63:
                return np.dtype(np.int64)
        for i, row in enumerate(rows):
            if row.size and row.dtype.kind in "iu":
                _check_exact([int(row.min()), int(row.max())], i, path)
    return dtype
