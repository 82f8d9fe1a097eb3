"""Notices ragged arrays that no feature reads, which make jit compile in every step."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from grain_sparsecore.batching import RaggedValues

_logger = logging.getLogger(__name__)

# Batches that are looked at; what is ragged nearly always differs in the second.
_BATCHES = 64

# How many keys the warning names.
_MOST_NAMED = 8

_ROWS = (list, tuple, Mapping)

_OBJECT = "an object array of rows"


class LeftoverWatch:
    """Compares the first batches of a pipeline and warns once, by logging.

    A jitted step is traced and compiled for every new shape, and for every new length
    of a list; object arrays of rows it does not take at all.

    Args:
        key: Key of the buffers, which are left alone.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._left = _BATCHES
        self._before: dict[str, str] | None = None

    def see(self, element: Mapping[str, Any]) -> None:
        """Looks at a batch; costs nothing once it has warned or seen enough."""
        if not self._left:
            return
        self._left -= 1
        now = dict(_described(element, "", self._key))
        before = now if self._before is None else self._before
        self._before = now
        ragged = [
            f"{path!r} ({one}, then {two})"
            for path in dict.fromkeys([*before, *now])
            if (one := before.get(path, "absent")) != (two := now.get(path, "absent"))
        ]
        ragged += [
            f"{path!r} ({what})" for path, what in now.items() if what == _OBJECT
        ]
        if ragged:
            self._left = 0
            more = len(ragged) - _MOST_NAMED
            _logger.warning(
                "no feature reads %s%s of the batch: a jitted step that is given them "
                "is traced and compiled again for each new shape, and takes no object "
                "arrays. Drop them before the step, pad them to one shape, or give the "
                "step only what it reads.",
                ", ".join(ragged[:_MOST_NAMED]),
                f" and {more} more" if more > 0 else "",
            )


def _described(value: Any, path: str, key: str = "") -> Iterator[tuple[str, str]]:
    """The path of every array and list of a batch, and what jit sees of it."""
    if isinstance(value, Mapping):
        items = [(name, item) for name, item in value.items() if path or name != key]
    elif isinstance(value, RaggedValues):
        items = list(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        yield path, f"{len(value)} values"
        items = [
            (i, item)
            for i, item in enumerate(value)
            if isinstance(item, _ROWS) or hasattr(item, "shape")
        ]
    else:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None and dtype is not None:
            rows = getattr(dtype, "kind", "") == "O" and value.size
            ragged = rows and _is_row(value.flat[0])
            yield path, _OBJECT if ragged else f"{dtype}{list(shape)}"
        return
    for name, item in items:
        yield from _described(item, f"{path}/{name}" if path else str(name))


def _is_row(value: Any) -> bool:
    return isinstance(value, _ROWS) or bool(getattr(value, "shape", ()))
