"""Lists and object arrays of rows: the one form that costs Python time per row."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from grain_sparsecore.features.field import Field, shown
from grain_sparsecore.features.ragged import Ragged, dense, from_lengths

_SCALARS = (int, float, str, bytes, np.generic)

_ROW = "a row is a list or a 1-D array of values."


def is_row_or_scalar(value: Any) -> bool:
    """Whether it can only be a row or a single value, and is no array."""
    return value is None or isinstance(value, (list, tuple, *_SCALARS))


def to_array(field: Field, value: Any, accepted: str) -> np.ndarray:
    """Anything that numpy can read as an array, as a plain array in native order.

    Raises:
        InputTypeError: It cannot be read, or has masked entries; ``accepted`` ends the
            message.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise field.type_error(
            "an array has masked entries, and the values under the mask mean nothing; "
            f"give array.filled(...) {field.filler}."
        )
    if value is None or isinstance(value, str | bytes):
        raise field.type_error(f"{shown(value)} is no array; {accepted}")
    try:
        # Drops subclasses such as Grain's SharedMemoryArray, which stays as the base.
        array = np.asarray(value)
    except Exception as error:  # of another library, so of any type
        raise field.type_error(
            f"a {type(value).__name__} cannot be read as an array ({error}); {accepted}"
        ) from error
    kind = array.dtype.kind
    if kind == "O" and array.ndim == 0:
        raise field.type_error(f"a {type(value).__name__} is no array; {accepted}")
    if kind == "T":
        return array.astype(object)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array


def read_rows(field: Field, rows: list[Any]) -> Ragged:
    """Reads rows, or single values of which each is a row.

    Raises:
        InputTypeError: A row is neither, rows and single values are mixed, or a value
            is of a type that cannot be ids or weights.
        InputError: A row has more than one dimension.
    """
    kinds = set(map(type, rows))
    if kinds == {np.ndarray}:
        return _from_arrays(field, rows)
    if kinds <= {list, tuple}:
        return _from_lists(field, rows)
    if all(issubclass(kind, _SCALARS) for kind in kinds):
        return dense(pack(field, rows, lambda index: f"sample {index}"))
    return _from_mixture(field, rows)


def _from_arrays(field: Field, rows: list[np.ndarray]) -> Ragged:
    dims = {row.ndim for row in rows}
    if dims == {0}:
        return read_rows(field, [row[()] for row in rows])
    if dims != {1}:
        sample = next(i for i, row in enumerate(rows) if row.ndim != 1)
        _raise_not_flat(field, sample, rows[sample].shape)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    dtypes = {row.dtype for row in rows}
    if len(dtypes) > 1:
        # np.array([]) is float64, but what an empty row might hold does not matter.
        rows = [row for row in rows if len(row)]
        dtypes = {row.dtype for row in rows}
    if not dtypes:
        return from_lengths(np.zeros(0, np.int64), lengths)
    dtype = _common_dtype(dtypes)
    if dtype is not None:
        return from_lengths(_concatenate(rows, dtype, len(dtypes) == 1), lengths)
    flat = list(itertools.chain.from_iterable(row.tolist() for row in rows))
    return from_lengths(pack(field, flat, _sample_of(lengths)), lengths)


def _concatenate(
    rows: list[np.ndarray], dtype: np.dtype, of_one_dtype: bool
) -> np.ndarray:
    if of_one_dtype and dtype.kind in "iuf" and rows[0].dtype == dtype:
        try:
            # A third of the time of np.concatenate: 20 ns a row against 70.
            return np.frombuffer(b"".join(cast(list[Any], rows)), dtype)
        except (TypeError, BufferError):
            pass  # a row is not contiguous
    return np.concatenate(rows, dtype=dtype)


def _common_dtype(dtypes: set[np.dtype]) -> np.dtype | None:
    """A dtype that holds every value of all of them, or None where numpy has none."""
    kinds = {dtype.kind for dtype in dtypes}
    if not (kinds <= {"i", "u"} or (len(kinds) == 1 and kinds <= set("fbSU"))):
        return None
    dtype = np.result_type(*dtypes)
    # int64 with uint64 gives float64, which would round ids.
    if dtype.kind not in kinds:
        return None
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _from_lists(field: Field, rows: Sequence[Sequence[Any]]) -> Ragged:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = list(itertools.chain.from_iterable(rows))
    return from_lengths(pack(field, flat, _sample_of(lengths)), lengths)


def _sample_of(lengths: np.ndarray) -> Callable[[int], str]:
    def where(index: int) -> str:
        return f"sample {np.searchsorted(np.cumsum(lengths), index, side='right')}"

    return where


def _from_mixture(field: Field, rows: list[Any]) -> Ragged:
    """Rows of several types: lists, arrays of other libraries, None."""
    lists: list[Any] = []
    scalar_at = row_at = None
    for sample, row in enumerate(rows):
        if row is None:
            lists.append([])
        elif isinstance(row, list | tuple):
            row_at = sample
            lists.append(row)
        elif isinstance(row, _SCALARS):
            scalar_at = sample
            lists.append([row])
        else:
            array = to_array(field, row, f"this is sample {sample}, and {_ROW}")
            if array.ndim == 0:
                scalar_at = sample
            elif array.ndim == 1:
                row_at = sample
            else:
                _raise_not_flat(field, sample, array.shape)
            lists.append(array.reshape(-1))
    if scalar_at is not None and row_at is not None:
        raise field.type_error(
            f"sample {scalar_at} is a single value, {shown(rows[scalar_at])}, but "
            f"sample {row_at} is a row; write single values as rows of one."
        )
    if all(isinstance(row, np.ndarray) or len(row) == 0 for row in lists):
        return _from_arrays(field, [np.asarray(row) for row in lists])
    return _from_lists(
        field, [row.tolist() if isinstance(row, np.ndarray) else row for row in lists]
    )


def _raise_not_flat(field: Field, sample: int, shape: tuple[int, ...]) -> NoReturn:
    raise field.error(f"sample {sample} is an array of shape {shape}; {_ROW}")


def pack(field: Field, flat: list[Any], where: Callable[[int], str]) -> np.ndarray:
    """A list of single values as an array of exactly the same values.

    Integers that no integer dtype holds together, and strings, come as objects.

    Args:
        field: For messages; ids may not be floats or bools, weights not strings.
        flat: The values.
        where: Names the place of a value from its index.
    """
    kinds = set(map(type, flat))
    if not kinds:
        return np.zeros(0, np.int64)
    families = {_family(kind) for kind in kinds}
    allowed = {"integer", "string"}
    if field.kind == "weights":
        allowed = {"integer", "float", "bool"}
    if not families <= allowed:
        wrong = next(i for i, v in enumerate(flat) if _family(type(v)) not in allowed)
        raise field.type_error(_wrong_type_text(field, flat[wrong], where(wrong)))
    if families == {"string"}:
        return np.fromiter(flat, object, len(flat))
    if "string" in families:
        first = _family(type(flat[0]))
        other = next(i for i, v in enumerate(flat) if _family(type(v)) != first)
        raise field.type_error(
            f"{where(0)} holds {shown(flat[0])}, but {where(other)} holds "
            f"{shown(flat[other])}; ids are all integers or all strings."
        )
    array = np.array(flat)
    if field.kind == "weights":
        if array.dtype.kind not in "iufb":
            array = np.fromiter(map(_to_float, flat), np.float64, len(flat))
        return array
    if families == {"integer"} and array.dtype.kind not in "iu":
        # Beyond 64 bits, or numpy's float64 for negative values and values >= 2 ** 63.
        return np.fromiter(map(int, flat), object, len(flat))
    return array


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _family(kind: type) -> str:
    if issubclass(kind, bool | np.bool_):
        return "bool"
    if issubclass(kind, int | np.integer):
        return "integer"
    if issubclass(kind, float | np.floating):
        return "float"
    if issubclass(kind, str | bytes):
        return "string"
    return "other"


def _wrong_type_text(field: Field, value: Any, place: str) -> str:
    text = f"{place} holds {shown(value)} ({type(value).__name__}); "
    if isinstance(value, list | tuple | np.ndarray):
        return f"{text}rows cannot be nested deeper."
    if value is None:
        return f"{text}leave out what is missing, or put here {field.filler}."
    if field.kind == "weights":
        return f"{text}weights must be floats or integers."
    return (
        f"{text}ids must be integers (or, with hash = true, strings). Convert them "
        "where they are made, so that no id is rounded."
    )
