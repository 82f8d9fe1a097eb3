"""Arrays of any number in a few: one flat array for each dtype.

A batch of 16,384 rows that are arrays would otherwise be a file of 16,384 members.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

# Names of dtypes that are not numpy's own, such as bfloat16 and float8_e4m3fn.
_FOREIGN_DTYPE = re.compile(r"b?(float|int)\d+(_\w+)?|uint\d+")


class PoolWriter:
    """Takes arrays without Python objects in them, and tells where they went."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._dtypes: list[np.dtype] = []
        self._parts: list[list[np.ndarray]] = []
        self._sizes: list[int] = []

    def add(self, array: np.ndarray) -> list[Any]:
        """Where `PoolReader.get` finds the array: a JSON-able list.

        The memory order is kept if it is that of C or Fortran.
        """
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        order = "F" if fortran else "C"
        shape, foreign = list(array.shape), ""
        if array.dtype.kind == "V" and not issubclass(array.dtype.type, np.void):
            foreign = array.dtype.name
            array = array.copy(order).view(f"V{array.dtype.itemsize}")
        number, start = self._add_flat(array.ravel(order))
        return [number, start, shape, order, foreign]

    def _add_flat(self, flat: np.ndarray) -> tuple[int, int]:
        name = str(np.lib.format.dtype_to_descr(flat.dtype))
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self._parts):
            self._dtypes.append(flat.dtype)
            self._parts.append([])
            self._sizes.append(0)
        start = self._sizes[number]
        self._parts[number].append(flat)
        self._sizes[number] += flat.size
        return number, start

    def arrays(self) -> dict[str, np.ndarray]:
        """The pools by name."""
        pools = {}
        for number, (dtype, parts) in enumerate(
            zip(self._dtypes, self._parts, strict=True)
        ):
            # Not np.concatenate: its result is in the byte order of the machine.
            pool = np.empty(self._sizes[number], dtype)
            start = 0
            for part in parts:
                pool[start : start + part.size] = part
                start += part.size
            pools[_name(number)] = pool
        return pools


class PoolReader:
    """Gives the arrays back; `ValueError` where a place lies outside the pools."""

    def __init__(self, pools: Mapping[str, np.ndarray]) -> None:
        self._pools = pools

    def get(self, place: list[Any]) -> np.ndarray:
        """The array that `PoolWriter.add` put there."""
        number, start, shape, order, foreign = place
        pool = self._pools[_name(number)]
        size = 1
        for length in shape:
            if type(length) is not int or length < 0:
                raise ValueError(f"shape {shape} is no shape")
            size *= length
        if type(start) is not int or not 0 <= start <= pool.size - size:
            raise ValueError(f"{size} values at {start} of {pool.size} values")
        array = pool[start : start + size].reshape(shape, order=order)
        return array.view(_foreign_dtype(foreign)) if foreign else array


def _name(number: int) -> str:
    return f"pool_{number}"


def _foreign_dtype(name: str) -> np.dtype:
    if not _FOREIGN_DTYPE.fullmatch(name):
        raise ValueError(f"{name!r} is no dtype")
    import ml_dtypes  # jax needs it too

    return np.dtype(getattr(ml_dtypes, name))
