"""Columns of a decoded row group, from which single rows are taken."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from grain_sparsecore.batching import RaggedValues
from grain_sparsecore.errors import ConfigError, InputError


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a row group.

    Attributes:
        values: [rows], or all list elements one behind the other.
        offsets: int64 [rows + 1], where the values of a row begin and end; None if
            each row has exactly one value.
    """

    values: np.ndarray
    offsets: np.ndarray | None

    def row(self, index: int) -> Any:
        """A scalar, or a one-dimensional view of the values of the row."""
        if self.offsets is None:
            return self.values[index]
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, rows: np.ndarray) -> "Column":
        """The column of some rows, in their order."""
        if self.offsets is None:
            return Column(self.values[rows], None)
        starts = self.offsets[rows]
        offsets = _offsets(self.offsets[rows + 1] - starts)
        return Column(self.values[_ranges(starts, offsets)], offsets)

    def to_batch(self) -> Any:
        """All rows, in the form of ``batch_ragged``."""
        if self.offsets is None:
            return self.values
        lengths = np.diff(self.offsets)
        if (lengths == lengths[0]).all():
            return self.values.reshape(len(lengths), lengths[0])
        return RaggedValues(self.values, self.offsets)


def concatenate(columns: Sequence[Column]) -> Column:
    """The rows of all columns, one behind the other."""
    if len(columns) == 1:
        return columns[0]
    values = np.concatenate([column.values for column in columns])
    if all(column.offsets is None for column in columns):
        return Column(values, None)
    lengths = [
        np.ones(len(c.values), np.int64) if c.offsets is None else np.diff(c.offsets)
        for c in columns
    ]
    return Column(values, _offsets(np.concatenate(lengths)))


def _ranges(starts: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """All of starts[i], starts[i] + 1, ..., one range of each length behind another."""
    shift = np.repeat(starts - offsets[:-1], np.diff(offsets))
    return np.arange(offsets[-1]) + shift


def check_type(kind: Any, column: str, where: str) -> None:
    """Raises ConfigError unless the pyarrow type can be ids, weights or labels."""
    import pyarrow.types as t

    inner = kind.value_type if is_list(kind) or t.is_dictionary(kind) else kind
    if is_list(kind) and t.is_dictionary(inner):
        inner = inner.value_type
    accepted = (
        t.is_integer,
        t.is_floating,
        t.is_boolean,
        t.is_string,
        t.is_large_string,
        t.is_binary,
        t.is_large_binary,
    )
    if not any(is_accepted(inner) for is_accepted in accepted):
        raise ConfigError(
            f"{where}: column {column!r} has type {kind}; it must hold numbers, text "
            "or bytes, or flat lists of them."
        )


def is_list(kind: Any) -> bool:
    """Whether the pyarrow type is one of lists."""
    import pyarrow.types as t

    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def to_column(array: Any, *, nullable: bool, where: str) -> Column:
    """Decodes a pyarrow array.

    Args:
        array: One column of a row group, without chunks.
        nullable: Whether a missing value is a row of no values. A missing list always
            is.
        where: File, row group and column, for error messages.

    Raises:
        InputError: A value is missing where none may be; the text names its row.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if is_list(array.type):
        lengths = pc.fill_null(pc.call_function("list_value_length", [array]), 0)
        offsets = _offsets(lengths.to_numpy(zero_copy_only=False))
        values = array.flatten()  # without what lies under missing lists
        if isinstance(values, pa.DictionaryArray):
            values = values.dictionary_decode()
        if values.null_count:
            element = int(np.flatnonzero(_is_null(values))[0])
            row = int(np.searchsorted(offsets, element, side="right")) - 1
            raise InputError(
                f"{where}: the list of row {row} holds a null; remove nulls from lists."
            )
        return Column(_to_numpy(values), offsets)
    if array.null_count == 0:
        return Column(_to_numpy(array), None)
    missing = _is_null(array)
    if not nullable:
        raise InputError(
            f"{where}: the value of row {int(np.flatnonzero(missing)[0])} is null; "
            "fill it in."
        )
    return Column(_to_numpy(array.drop_null()), _offsets(~missing))


def _to_numpy(array: Any) -> np.ndarray:
    return array.to_numpy(zero_copy_only=False)


def _is_null(array: Any) -> np.ndarray:
    return _to_numpy(array.is_null())


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
