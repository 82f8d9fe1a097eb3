"""CSR and COO: values, with their rows given apart from them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from grain_sparsecore.features.field import Field
from grain_sparsecore.features.ragged import Ragged, from_lengths, from_splits
from grain_sparsecore.features.rows import pack, to_array
from grain_sparsecore.kernels.passes import rises

_CSR_KEYS = ({"values", "row_splits"}, {"values", "row_lengths"})
_COO_KEYS = {"indices", "values", "dense_shape"}


def read_mapping(field: Field, value: Mapping[str, Any]) -> Ragged:
    """Reads CSR or COO from a dict with the names of its parts.

    ``num_values`` may be added to CSR: only that many of ``values`` are meant, and the
    rest is capacity.
    """
    keys = set(value)
    if keys == _COO_KEYS:
        return read_coo(field, value["indices"], value["values"], value["dense_shape"])
    if keys - {"num_values"} in _CSR_KEYS:
        values = _values(field, value["values"])
        if "num_values" in keys:
            values = values[: _num_values(field, value["num_values"], len(values))]
        return read_csr(
            field,
            values,
            row_splits=value.get("row_splits"),
            row_lengths=value.get("row_lengths"),
        )
    raise field.error(
        f"a dict with the keys {sorted(map(str, keys))} is no accepted form; it must "
        "have values and row_splits, values and row_lengths, or indices, values and "
        f"dense_shape. For an entry of a nested dict write {field.key + '/...'!r}."
    )


def _num_values(field: Field, value: Any, capacity: int) -> int:
    number = int(_integers(field, "num_values", [value])[0])
    if not 0 <= number <= capacity:
        raise field.error(
            f"num_values={number} is not from 0 to {capacity}, the length of values."
        )
    return number


def read_csr(
    field: Field, values: Any, *, row_splits: Any = None, row_lengths: Any = None
) -> Ragged:
    """Reads CSR where it is known which of the two is given.

    Raises:
        InputError: They do not fit the values; nothing is mended.
    """
    flat = _values(field, values)
    if row_splits is not None:
        splits = _integers(field, "row_splits", row_splits)
        problem = _splits_problem(splits, len(flat))
        if problem:
            raise field.error(problem)
        return from_splits(flat, splits, compressed=True)
    lengths = _integers(field, "row_lengths", row_lengths)
    problem = _lengths_problem(lengths, len(flat))
    if problem:
        raise field.error(problem)
    return from_lengths(flat, lengths, compressed=True)


def read_csr_pair(field: Field, values: Any, rows: Any) -> Ragged:
    """Reads ``(values, row_splits)`` or ``(values, row_lengths)``.

    See `grain_sparsecore.features` for the rule. Where both readings are valid the one
    of row_lengths is returned, with the other as ``Ragged.other``.
    """
    flat = _values(field, values)
    entries = _integers(field, "row_splits or row_lengths", rows)
    no_splits = _splits_problem(entries, len(flat))
    if len(entries) > field.batch_size:
        # As lengths they would be more rows than a batch may have.
        if no_splits:
            raise field.error(no_splits)
        return from_splits(flat, entries, compressed=True)
    no_lengths = _lengths_problem(entries, len(flat))
    if no_splits and no_lengths:
        raise field.error(
            f"the second array is neither row_splits nor row_lengths: as row_splits, "
            f"{no_splits} As row_lengths, {no_lengths} For two rows, use a list."
        )
    if no_lengths:
        return from_splits(flat, entries, compressed=True)
    result = from_lengths(flat, entries, compressed=True)
    # One entry is no row_splits where a batch has one sample: it would have none.
    if not no_splits and not len(entries) == field.batch_size == 1:
        result.other = from_splits(flat, entries, compressed=True)
    return result


def read_coo(field: Field, indices: Any, values: Any, dense_shape: Any) -> Ragged:
    """Reads COO, sorted or not, of rank 1 (one value a row at most) or 2.

    Raises:
        InputError: Shapes disagree, or an index lies outside ``dense_shape``.
    """
    flat = _values(field, values)
    shape = _integers(field, "dense_shape", dense_shape)
    places = to_array(field, indices, "give indices as an integer array.")
    if places.size == 0:
        places = np.zeros((0, max(len(shape), 1)), np.int64)
    if places.dtype.kind not in "iu":
        raise field.type_error(f"indices must be integers, not {places.dtype}.")
    if places.ndim == 1 and len(shape) == 1:
        places = places[:, None]
    if len(shape) not in (1, 2) or places.shape != (len(flat), len(shape)):
        raise field.error(
            f"{len(flat)} values with indices of shape {places.shape} and dense_shape "
            f"{shape.tolist()}; they must be [n], [n, 2] and [2]."
        )
    if (shape < 0).any():
        raise field.error(f"dense_shape {shape.tolist()} has a negative size.")
    if shape[0] > field.batch_size:
        # Before anything is made that has as many entries as a shape may claim.
        raise field.error(
            f"dense_shape {shape.tolist()} has {shape[0]} samples, but "
            f"batch_size={field.batch_size} per host. Give the shape of one batch, "
            "or set batch_size."
        )
    # Column by column: reductions over an axis of two cost ten times as much.
    columns = [places[:, i] for i in range(len(shape))]
    for column, size in zip(columns, shape.tolist(), strict=True):
        if column.size and not (column.min() >= 0 and column.max() < size):
            at = int(np.flatnonzero((column < 0) | (column >= size))[0])
            raise field.error(
                f"entry {at} has index {places[at].tolist()}, outside dense_shape "
                f"{shape.tolist()}."
            )
    places = places.astype(np.int64, copy=False)
    order = _row_major_order(columns)
    if order is not None:
        places, flat = places.take(order, axis=0), flat.take(order)
    lengths = np.bincount(places[:, 0], minlength=int(shape[0]))
    return from_lengths(flat, lengths, compressed=True, order=order, indices=places)


def _row_major_order(columns: list[np.ndarray]) -> np.ndarray | None:
    """int64 [n] that sorts the entries, equal ones in their order; None if sorted."""
    row, column = columns[0], columns[-1]
    sorted_so_far = row[1:] > row[:-1]
    sorted_so_far |= (row[1:] == row[:-1]) & (column[1:] >= column[:-1])
    if sorted_so_far.all():
        return None
    return np.lexsort((column, row))


def _values(field: Field, values: Any) -> np.ndarray:
    if not isinstance(values, list | tuple):
        values = to_array(field, values, "give values as a flat array.")
        if values.ndim != 1:
            raise field.error(
                f"values of shape {values.shape} must have one dimension; ids nest no "
                "deeper than one list for each sample."
            )
        if values.dtype.kind != "O":
            return values
        values = values.tolist()
    return pack(field, list(values), lambda index: f"value {index}")


def _integers(field: Field, name: str, values: Any) -> np.ndarray:
    """int64 [n], from an array or a sequence of integers."""
    array = to_array(field, values, f"give {name} as a flat integer array.")
    if array.ndim != 1:
        raise field.error(f"{name} has shape {array.shape}; it must be flat.")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise field.type_error(f"{name} must be integers, not {array.dtype}.")
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise field.error(f"{name} holds {array.max()}, which does not fit int64.")
    return np.ascontiguousarray(array, np.int64)


def _splits_problem(splits: np.ndarray, size: int) -> str | None:
    if len(splits) == 0:
        return "row_splits is empty; even a batch without rows has the entry 0."
    if splits[0] != 0:
        return f"row_splits starts at {splits[0]}, not at 0."
    if not rises(splits):
        row = int(np.flatnonzero(splits[1:] < splits[:-1])[0])
        return (
            f"row_splits falls from {splits[row]} to {splits[row + 1]} at sample {row}."
        )
    if splits[-1] != size:
        return (
            f"row_splits ends at {splits[-1]}, but there are {size} values; cut values "
            "to the end, or give num_values where the rest is capacity."
        )
    return None


def _lengths_problem(lengths: np.ndarray, size: int) -> str | None:
    negative = np.flatnonzero(lengths < 0)
    if negative.size:
        row = int(negative[0])
        return f"row_lengths is {lengths[row]} at sample {row}."
    # As Python integers where one length alone passes the values: no overflow.
    total = int(lengths.sum()) if not (lengths > size).any() else sum(lengths.tolist())
    if total != size:
        return f"row_lengths add up to {total}, but there are {size} values."
    return None
