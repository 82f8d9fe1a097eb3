"""Where a feature's input is in a batch, and what remains when it is taken out."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from grain_sparsecore.batching import RaggedValues
from grain_sparsecore.errors import InputError, InputTypeError
from grain_sparsecore.stacking import StackedLayout

# Between the keys of nested dicts: "user/history" is element["user"]["history"].
SEPARATOR = "/"

# How many keys of a batch a message lists before it stops.
_MOST_LISTED = 20

_MISSING = object()


def feature_keys(layout: StackedLayout) -> tuple[str, ...]:
    """Keys of all ids and weights, each once, in the order of the features."""
    return tuple(feature_readers(layout))


def feature_readers(layout: StackedLayout) -> dict[str, str]:
    """For each of `feature_keys`, what it is for: the first feature that reads it."""
    readers: dict[str, str] = {}
    for feature in layout.features:
        for what, key in (("ids", feature.spec.ids), ("weights", feature.spec.weights)):
            if key is not None:
                reader = f"{what} of feature {feature.name!r}, table "
                readers.setdefault(key, f"{reader}{feature.table.name!r}")
    return readers


def find_values(element: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """The value of each key; a key that exists as such goes before a path.

    Args:
        element: The batch.
        keys: The keys, and for the message what each is for, see `feature_readers`.

    Raises:
        InputTypeError: ``element`` is not a mapping.
        InputError: Keys are missing; the text names them, the keys that no feature
            reads, and the nearest of those.
    """
    if not isinstance(element, Mapping):
        raise InputTypeError(
            f"a batch must be a dict of arrays, not {type(element).__name__}; map it "
            f"to a dict with the keys {_listed(keys)}."
        )
    found = {key: _get(element, key) for key in keys}
    missing = [key for key, value in found.items() if value is _MISSING]
    if missing:
        raise InputError(_missing_text(element, keys, missing))
    return found


def _get(element: Mapping[str, Any], key: str) -> Any:
    if key in element:
        return element[key]
    # The longest first key that leads on, so that "a/b" may be a key itself.
    head, separator, _ = key.rpartition(SEPARATOR)
    while separator:
        inner = element.get(head)
        if isinstance(inner, Mapping):
            value = _get(inner, key[len(head) + 1 :])
            if value is not _MISSING:
                return value
        head, separator, _ = head.rpartition(SEPARATOR)
    return _MISSING


def _missing_text(
    element: Mapping[str, Any], keys: Mapping[str, str], missing: list[str]
) -> str:
    unread = [path for path in _paths(element) if path not in keys]
    more = len(missing) - _MOST_LISTED
    lacks = ", ".join(f"{key!r} ({keys[key]})" for key in missing[:_MOST_LISTED])
    parts = [f"the batch lacks {lacks}{f' and {more} more' if more > 0 else ''}"]
    parts.append(f"no feature reads {_listed(unread)}" if unread else "it has no more")
    folded = {path.casefold(): path for path in unread}
    near = {
        key: folded[matches[0]]
        for key in missing
        if (matches := difflib.get_close_matches(key.casefold(), folded, n=1))
    }
    hints = [f"did you mean {unread_!r} for {key!r}?" for key, unread_ in near.items()]
    hints.append("Set ids or weights of the feature to the key, or rename the key.")
    return f"missing keys: {'; '.join(parts)}. {' '.join(hints)}"


def _paths(element: Mapping[str, Any]) -> Iterator[str]:
    for key, value in element.items():
        yield str(key)
        if isinstance(value, Mapping):
            for path in _paths(value):
                yield f"{key}{SEPARATOR}{path}"


def _listed(keys: Any) -> str:
    keys = list(keys)
    more = f" and {len(keys) - _MOST_LISTED} more" if len(keys) > _MOST_LISTED else ""
    return ", ".join(repr(key) for key in keys[:_MOST_LISTED]) + more


def split_element(element: Mapping[str, Any], layout: StackedLayout) -> dict[str, Any]:
    """The batch without the ids and weights of the features; nothing is changed.

    Dicts that hold nothing but ids and weights go with them.
    """
    rest = dict(element)
    for key in feature_keys(layout):
        _remove(rest, key)
    return rest


def _remove(element: dict[str, Any], key: str) -> bool:
    if key in element:
        del element[key]
        return True
    head, separator, _ = key.rpartition(SEPARATOR)
    while separator:
        inner = element.get(head)
        if isinstance(inner, Mapping):
            copy = dict(inner)
            if _remove(copy, key[len(head) + 1 :]):
                element[head] = copy
                if not copy:
                    del element[head]
                return True
        head, separator, _ = head.rpartition(SEPARATOR)
    return False


def pad_leaves(
    rest: Mapping[str, Any], num_samples: int, batch_size: int
) -> dict[str, Any]:
    """Pads what belongs to samples from ``num_samples`` to ``batch_size`` rows.

    That is every array with ``num_samples`` entries along axis 0 and all
    `RaggedValues` of that many rows, in dicts, lists and tuples at any depth; the new
    rows are 0, False, the empty string, or empty. Everything else belongs to the batch
    as a whole and stays as it is.
    """
    if num_samples == batch_size:
        return dict(rest)
    return {key: _pad(value, num_samples, batch_size) for key, value in rest.items()}


def leading_sizes(value: Any) -> Iterator[int]:
    """Entries along axis 0 of every array in nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leading_sizes(item)
    elif shape := getattr(value, "shape", ()):
        yield shape[0]


def _pad(value: Any, num_samples: int, batch_size: int) -> Any:
    if isinstance(value, Mapping):
        return {k: _pad(v, num_samples, batch_size) for k, v in value.items()}
    if isinstance(value, RaggedValues):
        more = batch_size - num_samples
        if len(value.row_splits) != num_samples + 1:
            more = 0
        return value._replace(row_splits=np.pad(value.row_splits, (0, more), "edge"))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_pad(v, num_samples, batch_size) for v in value))
    if isinstance(value, list | tuple):
        return type(value)(_pad(v, num_samples, batch_size) for v in value)
    shape = getattr(value, "shape", ())
    if not shape or shape[0] != num_samples or not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    padded = np.zeros((batch_size, *array.shape[1:]), array.dtype)
    padded[:num_samples] = array
    if array.dtype == object:
        for place in np.ndindex(batch_size - num_samples, *array.shape[1:]):
            padded[num_samples + place[0], *place[1:]] = _empty_like(array)
    return padded


def _empty_like(values: np.ndarray) -> Any:
    """What an object array of texts, rows or numbers has where there is nothing."""
    first = next((value for value in values.flat if value is not None), None)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.zeros((0, *first.shape[1:]), first.dtype)
    if isinstance(first, list | str | bytes | bool | int | float):
        return type(first)()
    return None
