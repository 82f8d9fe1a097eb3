"""numpy's own sort as a plain C function, for compiled code to call.

numpy sorts numbers with vector instructions, several times faster than a loop can. Its
C interface, which every extension module is built on, hands out the function; compiled
code calls it without the interpreter.
"""

import ctypes
import functools
import importlib

import numpy as np

# Of numpy's C interface: ``PyArray_GetNDArrayCVersion`` is the first function of the
# table, and tells the version of the ABI that the numbers below belong to.
_GET_VERSION = 0
_ABI_VERSION = 0x02000000

# ``_PyDataType_GetArrFuncs`` in the table of
# functions (numpy/__multiarray_api.h), and ``sort[0]`` in ``PyArray_ArrFuncs``
# (numpy/ndarraytypes.h), both counted in pointers.
_GET_ARR_FUNCS = 365
_SORT = 21 + 12

_SortFunction = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_void_p
)


@functools.cache
def sort_function(dtype: str) -> int:
    """Address of ``int sort(void *data, intptr_t count, void *)``, 0 if not found.

    Args:
        dtype: A number type that numpy sorts without the interpreter: ``"uint32"``.
    """
    try:
        module = importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:
        return 0
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    capsule = getattr(module, "_ARRAY_API", None)
    if capsule is None:
        return 0
    table = get_pointer(capsule, None)
    get_version = ctypes.CFUNCTYPE(ctypes.c_uint)(_pointer_at(table, _GET_VERSION))
    if get_version() != _ABI_VERSION:
        return 0
    get_functions = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
        _pointer_at(table, _GET_ARR_FUNCS)
    )
    address = _pointer_at(get_functions(np.dtype(dtype)), _SORT)
    return address if address and _sorts(address, dtype) else 0


def _pointer_at(table: int, index: int) -> int:
    place = table + index * ctypes.sizeof(ctypes.c_void_p)
    return ctypes.c_void_p.from_address(place).value or 0


def _sorts(address: int, dtype: str) -> bool:
    """Whether the function does what it should."""
    values = np.arange(1000, dtype=dtype) * np.dtype(dtype).type(7919)
    values %= np.dtype(dtype).type(1009)
    expected = np.sort(values)
    _SortFunction(address)(values.ctypes.data, values.size, None)
    return bool((values == expected).all())
