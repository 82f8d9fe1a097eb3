"""Tells the accepted forms apart and reads each into a `Ragged`."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from grain_sparsecore.features import arrow, compressed
from grain_sparsecore.features.field import Field, shown
from grain_sparsecore.features.ragged import Ragged, dense
from grain_sparsecore.features.rows import is_row_or_scalar, read_rows, to_array

_logger = logging.getLogger(__name__)

# Keys of which this process has warned.
_warned_of: set[str] = set()

_ACCEPTED = (
    "give a [B, k] or [B] array, a list of rows, a dict of values and row_splits or "
    "row_lengths, or a dict of indices, values and dense_shape."
)


def read_form(field: Field, value: Any) -> Ragged:
    """Reads ids or weights in any accepted form; see `grain_sparsecore.features`.

    Raises:
        InputTypeError: It is no accepted form, or rows hold what cannot be values.
        InputError: The rows contradict the values.
    """
    if isinstance(value, np.ndarray):
        return _read_array(field, value)
    if isinstance(value, list):
        ragged = read_rows(field, value)
        _warn_of_positions(field, value, ragged)
        return ragged
    if isinstance(value, Mapping):
        return compressed.read_mapping(field, value)
    if arrow.is_arrow(value):
        return arrow.read_arrow(field, value)
    # Before tuples: TensorFlow's SparseTensorValue is a named tuple.
    if _has(value, "indices", "values", "dense_shape"):
        return compressed.read_coo(
            field, value.indices, value.values, value.dense_shape
        )
    if _has(value, "values", "row_splits"):
        return compressed.read_csr(field, value.values, row_splits=value.row_splits)
    if isinstance(value, tuple):
        return _read_tuple(field, value)
    return _read_array(field, value)


def _warn_of_positions(field: Field, value: list[Any], ragged: Ragged) -> None:
    """Warns, once a key, of rows that may be columns.

    Grain's own batching makes of samples with lists one array for each position of the
    lists. As many as samples look like the rows of a batch.
    """
    size = field.batch_size
    if (
        size > 1
        and len(value) == size
        and ragged.values.size == size * size
        and isinstance(value[0], np.ndarray)
        and field.key not in _warned_of
        and all(len(row) == size for row in value)
    ):
        _warned_of.add(field.key)
        _logger.warning(
            "%s: a list of %d arrays of %d values each is read as one array for each "
            "sample. If samples hold lists of %d values, Grain's default batching made "
            "one for each position instead: batch with "
            "ds.batch(%d, batch_fn=grain_sparsecore.batch_ragged). If they are rows, "
            "np.stack makes an array of them and ends this warning.",
            *(field, size, size, size, size),
        )


def _has(value: Any, *names: str) -> bool:
    return all(hasattr(value, name) for name in names)


def _read_array(field: Field, value: Any) -> Ragged:
    array = to_array(field, value, _ACCEPTED)
    if array.ndim == 0:
        raise field.error(
            f"{shown(array[()])} is a single value, as in an element that is not "
            "batched; batch before this stage, with "
            f"ds.batch({field.batch_size}, batch_fn=grain_sparsecore.batch_ragged)."
        )
    if array.ndim not in (1, 2):
        raise field.error(
            f"an array of shape {array.shape} has {array.ndim} dimensions; {_ACCEPTED}"
        )
    if array.dtype.kind == "O":
        return read_rows(field, list(array))
    return dense(array)


def _read_tuple(field: Field, value: tuple[Any, ...]) -> Ragged:
    arrays = [not is_row_or_scalar(member) for member in value]
    if not any(arrays):
        return read_rows(field, list(value))
    if not arrays[0]:
        raise field.error(
            f"member {arrays.index(True)} of a tuple of rows is an array, which looks "
            "like (values, row_splits); put rows into a list, or give "
            '{"values": ..., "row_splits": ...}.'
        )
    if len(value) == 2:
        return compressed.read_csr_pair(field, value[0], value[1])
    if len(value) == 3:
        return compressed.read_coo(field, *value)
    raise field.error(
        f"a tuple that starts with an array and has {len(value)} members is neither "
        "(values, row_splits) nor (indices, values, dense_shape); put rows that are "
        "arrays into a list."
    )
