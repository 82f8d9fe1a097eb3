"""pyarrow arrays and columns, read from their buffers without a loop over rows."""

from typing import Any

import numpy as np

from grain_sparsecore.features.field import Field
from grain_sparsecore.features.ragged import Ragged, dense, from_lengths, from_splits


def is_arrow(value: Any) -> bool:
    """Whether it is of pyarrow, which is not imported for it."""
    return type(value).__module__.partition(".")[0] == "pyarrow"


def read_arrow(field: Field, value: Any) -> Ragged:
    """Reads a pyarrow Array or ChunkedArray, of lists or of single values.

    A null row is an empty row; a null inside a list is an error.
    """
    import pyarrow as pa

    if isinstance(value, pa.ChunkedArray):
        value = value.chunk(0) if value.num_chunks == 1 else value.combine_chunks()
    if not isinstance(value, pa.Array):
        raise field.type_error(
            f"a pyarrow {type(value).__name__} is no column; pass table[name]."
        )
    if isinstance(value, pa.DictionaryArray):
        value = value.dictionary_decode()
    if _is_list(value.type):
        return _read_lists(field, value)
    if value.null_count == 0:
        return dense(_flat(field, value))
    lengths = value.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
    return from_lengths(_flat(field, value.drop_null()), lengths)


def _is_list(kind: Any) -> bool:
    import pyarrow.types as t

    return (
        t.is_list(kind)
        or t.is_large_list(kind)
        or t.is_fixed_size_list(kind)
        or t.is_list_view(kind)
        or t.is_large_list_view(kind)
    )


def _read_lists(field: Field, lists: Any) -> Ragged:
    import pyarrow.types as t

    values = lists.flatten()  # of this slice, without what lies under null rows
    simple = t.is_list(lists.type) or t.is_large_list(lists.type)
    if simple and lists.null_count == 0:
        offsets = lists.offsets.to_numpy().astype(np.int64)
        ragged = from_splits(values, offsets - offsets[:1])
    else:
        lengths = lists.value_lengths().fill_null(0)
        ragged = from_lengths(values, lengths.to_numpy().astype(np.int64))
    if values.null_count:
        at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        sample, position = ragged.locate(at)
        raise field.error(
            f"sample {sample} has a null at position {position}; leave it out, or put "
            f"there {field.filler}."
        )
    ragged.values = _flat(field, values)
    return ragged


def _flat(field: Field, values: Any) -> np.ndarray:
    import pyarrow.types as t

    kind = values.type
    if t.is_dictionary(kind):
        return _flat(field, values.dictionary_decode())
    if t.is_null(kind):
        return np.zeros(0, np.int64)
    if not (
        t.is_integer(kind)
        or t.is_floating(kind)
        or t.is_boolean(kind)
        or t.is_string(kind)
        or t.is_large_string(kind)
        or t.is_binary(kind)
        or t.is_large_binary(kind)
    ):
        raise field.type_error(f"values of pyarrow type {kind} cannot be {field.kind}.")
    return values.to_numpy(zero_copy_only=False)
