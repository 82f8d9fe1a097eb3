"""Empty batches, which a host hands on while other hosts still have data."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.errors import CoordinationError
from grain_sparsecore.features import COUNTERS
from grain_sparsecore.stacking import StackedLayout

# Stands for the PartitionedBatch in a description: every host makes it from its layout.
_BATCH = "batch"

_SCALARS: Mapping[str, Any] = {
    "bool": False,
    "int": 0,
    "float": 0.0,
    "str": "",
    "bytes": b"",
    "NoneType": None,
}


def empty_batch(layout: StackedLayout) -> PartitionedBatch:
    """A batch without any sample: no entries, and nothing that limits must hold."""
    topology = layout.topology
    pointers = (len(layout.stacks), topology.local_sc_count, layout.row_pointers_per_sc)
    return PartitionedBatch(
        embedding_ids=np.zeros(0, np.int32),
        sample_ids=np.zeros(0, np.int32),
        gains=np.zeros(0, np.float32),
        row_pointers=np.zeros(pointers, np.int32),
        stats=np.zeros((len(layout.stacks), 3), np.int32),
        counters=np.zeros((len(layout.features), len(COUNTERS)), np.int32),
        num_valid_samples=np.zeros(topology.local_device_count, np.int32),
    )


def describe_element(element: Mapping[str, Any], key: str) -> bytes:
    """The structure, shapes and dtypes of an element, for hosts that never had one.

    Args:
        element: A batch of stage 1.
        key: Key of its `PartitionedBatch`.

    Raises:
        CoordinationError: A leaf is neither an array nor a plain value, or a key is
            neither text nor an int.
    """
    return json.dumps(_describe_items(element, "", batch_key=key)).encode()


def empty_element(description: bytes, layout: StackedLayout) -> dict[str, Any]:
    """An element of that structure, all of whose arrays are zero."""
    return _build(json.loads(description), layout)


def _describe_items(
    items: Mapping[Any, Any], path: str, *, batch_key: str | None = None
) -> list[Any]:
    pairs = []
    for key, value in items.items():
        if type(key) not in (str, int):
            # Others come back from JSON as something else.
            raise _no_empty_value(f"{path}{key!r}", "a key that is no text or int")
        described = [_BATCH] if key == batch_key else _describe(value, f"{path}{key}")
        pairs.append([key, described])
    return ["dict", pairs]


def _describe(value: Any, path: str) -> list[Any]:
    if isinstance(value, Mapping):
        return _describe_items(value, f"{path}/")
    if type(value) in (list, tuple):
        items = [_describe(v, f"{path}/{i}") for i, v in enumerate(value)]
        return [type(value).__name__, items]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return ["objects", list(value.shape), _describe_object(value, path)]
    if isinstance(value, np.ndarray):
        return ["array", list(value.shape), _dtype_name(value.dtype, path)]
    if isinstance(value, np.generic):
        return ["number", _dtype_name(value.dtype, path)]
    name = type(value).__name__
    if name in _SCALARS:
        return ["scalar", name]
    raise _no_empty_value(path, f"a {name}")


def _describe_object(values: np.ndarray, path: str) -> list[Any]:
    """What stands in each place of an object array: rows become empty rows."""
    first = next((v for v in values.flat if v is not None), None)
    if isinstance(first, np.ndarray) and first.ndim:
        return ["array", [0, *first.shape[1:]], _dtype_name(first.dtype, path)]
    return ["list", []] if isinstance(first, list) else _describe(first, path)


def _dtype_name(dtype: np.dtype, path: str) -> str:
    # The short form says void for types that numpy does not have, such as bfloat16.
    for text in (dtype.str, dtype.name):
        try:
            if np.dtype(text) == dtype:
                return text
        except TypeError:
            continue
    raise _no_empty_value(path, f"an array of {dtype}")


def _no_empty_value(path: str, what: str) -> CoordinationError:
    return CoordinationError(
        "on_exhausted='pad': a host that has run out of data needs an empty batch, but "
        f"element[{path!r}] is {what}, for which there is no empty value; keep "
        "arrays and plain numbers in the elements, or use on_exhausted='stop'."
    )


def _build(description: list[Any], layout: StackedLayout) -> Any:
    kind, *rest = description
    if kind == _BATCH:
        return empty_batch(layout)
    if kind == "dict":
        return {key: _build(value, layout) for key, value in rest[0]}
    if kind in ("list", "tuple"):
        items = [_build(value, layout) for value in rest[0]]
        return items if kind == "list" else tuple(items)
    if kind == "objects":
        values = np.empty(rest[0], object)
        for place in np.ndindex(values.shape):
            values[place] = _build(rest[1], layout)
        return values
    if kind == "array":
        return np.zeros(rest[0], np.dtype(rest[1]))
    if kind == "number":
        return np.zeros((), np.dtype(rest[0]))[()]
    return _SCALARS[rest[0]]
