"""What compiled passes are made with: addresses, a C function, and a cache on disk.

Compiled code is cached by numba, next to its file or in its cache folder. Files there
are replaced as a whole, so processes may start together. numba looks at the file of a
function, not at those of what it calls: keep together what changes together.
"""

# numba's decorators and intrinsics have no types that pyright could follow.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def pointer(_typing, address):
    """An address as a pointer, for `numba.carray`."""

    def generate(_context, builder, _signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def call_sort(_typing, function, data, count):
    """Calls ``int function(void *data, intptr count, void *)``."""

    def generate(_context, builder, _signature, args):
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.IntType(32), [pointer, ir.IntType(64), pointer])
        callee = builder.inttoptr(args[0], kind.as_pointer())
        data = builder.inttoptr(args[1], pointer)
        result = builder.call(callee, [data, args[2], ir.Constant(pointer, None)])
        return builder.sext(result, ir.IntType(64))

    return types.int64(types.int64, types.int64, types.int64), generate


def part(function):
    """Compiles what compiled functions of the same file call; cached with those."""
    return numba.njit(
        error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
    )(function)


def compiled(function, *, nogil=True):
    """Compiles what Python calls; cached on disk where some folder can be written.

    Args:
        function: What to compile.
        nogil: Whether to give up the interpreter's lock meanwhile. Beside a thread that
            computes in Python, getting it back takes 5 ms, so a pass of microseconds
            had better keep it.
    """
    options = {"nogil": nogil, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)
