"""A batch as JSON and arrays, and back, in the form it came in.

Nothing that is read back runs code. What has no form of its own in a file, such as a
set or an object of another library, becomes a stand-in with the same type name and
text, since these are what an error message says of it.
"""

import base64
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from grain_sparsecore.errors import MissingExtraError
from grain_sparsecore.failing.pools import PoolReader, PoolWriter

# Objects that stand for CSR or COO by their attributes, see grain_sparsecore.features;
# COO first, because it is looked for first.
_PARTS = (("indices", "values", "dense_shape"), ("values", "row_splits"))

# Longest text that is kept of an object without a form in a file.
_MOST_CHARACTERS = 200


def encode(value: Any, pools: PoolWriter) -> Any:
    """A JSON-able description of ``value``, whose arrays go to ``pools``.

    Raises:
        Exception: What objects of other libraries raise when they are looked at.
    """
    if isinstance(value, np.generic):
        return _encode_scalar(value, pools)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return _encode_array(value, pools)
    if isinstance(value, Mapping):
        pairs = [[encode(k, pools), encode(v, pools)] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, list):
        return {"list": [encode(item, pools) for item in value]}
    if type(value).__module__.partition(".")[0] == "pyarrow":
        return _encode_arrow(value, pools)
    if isinstance(value, tuple):
        items = [encode(item, pools) for item in value]
        fields = getattr(value, "_fields", None)
        return {"tuple": items} if fields is None else {"named": [[*fields], items]}
    for names in _PARTS:
        if all(hasattr(value, name) for name in names):
            parts = {name: encode(getattr(value, name), pools) for name in names}
            return {"parts": [type(value).__name__, parts]}
    return _encode_other(value, pools)


def _encode_scalar(value: np.generic, pools: PoolWriter) -> Any:
    # Not as arrays, which lose NULs at the end.
    if isinstance(value, np.str_):
        return {"numpy str": str(value)}
    if isinstance(value, np.bytes_):
        return {"numpy bytes": base64.b64encode(value).decode()}
    return {"scalar": pools.add(np.asarray(value))}


def _encode_array(array: np.ndarray, pools: PoolWriter) -> Any:
    if isinstance(array, np.ma.MaskedArray):
        mask = pools.add(np.ma.getmaskarray(array))
        return {"masked": [_encode_array(array.data, pools), mask]}
    array = np.asarray(array)
    kind = array.dtype.kind
    if kind not in "OT":
        if array.dtype.hasobject:
            return _encode_opaque(array)
        return {"array": pools.add(array)}
    items = [encode(item, pools) for item in array.astype(object).ravel()]
    return {"objects" if kind == "O" else "strings": [list(array.shape), items]}


def _encode_arrow(value: Any, pools: PoolWriter) -> Any:
    import pyarrow as pa

    if isinstance(value, pa.Array):
        data = pa.record_batch([value], ["values"])
    elif isinstance(value, pa.ChunkedArray):
        data = pa.table({"values": value})
    else:
        return _encode_opaque(value)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, data.schema) as writer:
        writer.write(data)
    stream = pools.add(np.frombuffer(sink.getvalue(), np.uint8))
    return {"arrow": [isinstance(value, pa.ChunkedArray), stream]}


def _encode_other(value: Any, pools: PoolWriter) -> Any:
    """What numpy reads as an array becomes one, such as an array of jax."""
    try:
        array = np.asarray(value)
    except Exception as error:  # of another library, so of any type
        return _encode_opaque(value, unreadable=str(error))
    if array.ndim == 0 and array.dtype.kind == "O":
        return _encode_opaque(value)
    return _encode_array(array, pools)


def _encode_opaque(value: Any, unreadable: str | None = None) -> Any:
    try:
        text = repr(value)[:_MOST_CHARACTERS]
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    name = type(value).__name__
    return {"opaque": [name, type(value).__module__, text, unreadable]}


class Decoder:
    """Builds what `encode` described.

    Attributes:
        replaced: Type names of what only a stand-in could be built for.
    """

    def __init__(self, pools: PoolReader) -> None:
        self._pools = pools
        self.replaced: list[str] = []

    def decode(self, plain: Any) -> Any:
        """The value.

        Raises:
            MissingExtraError: It holds a pyarrow array, and pyarrow is not installed.
            Exception: It is not what `encode` makes; of many types.
        """
        if not isinstance(plain, dict):
            if isinstance(plain, list):
                raise ValueError("a list stands outside a form")
            return plain
        ((form, content),) = plain.items()
        if form == "bytes":
            return base64.b64decode(content, validate=True)
        if form == "numpy str":
            return np.str_(content)
        if form == "numpy bytes":
            return np.bytes_(base64.b64decode(content, validate=True))
        if form == "scalar":
            return self._pools.get(content)[()]
        if form == "array":
            return self._pools.get(content)
        if form == "masked":
            data, mask = content
            return np.ma.MaskedArray(self.decode(data), mask=self._pools.get(mask))
        if form in ("objects", "strings"):
            return self._objects(form, *content)
        if form == "dict":
            return {self.decode(key): self.decode(value) for key, value in content}
        if form == "list":
            return [self.decode(item) for item in content]
        if form == "tuple":
            return tuple(self.decode(item) for item in content)
        if form == "named":
            fields, items = content
            return _named(fields, [self.decode(item) for item in items])
        if form == "parts":
            name, parts = content
            return self._parts(name, parts)
        if form == "arrow":
            return self._arrow(*content)
        if form == "opaque":
            return self._opaque(*content)
        raise ValueError(f"there is no form {form!r}")

    def _objects(self, form: str, shape: list[int], items: list[Any]) -> np.ndarray:
        array = np.empty(len(items), object)
        for index, item in enumerate(items):
            array[index] = self.decode(item)
        if form == "strings":
            array = array.astype(np.dtypes.StringDType())
        return array.reshape(shape)

    def _parts(self, name: str, parts: Mapping[str, Any]) -> Any:
        if tuple(parts) not in _PARTS:
            raise ValueError(f"{sorted(parts)} are no parts")
        return type(name, (), {key: self.decode(part) for key, part in parts.items()})()

    def _arrow(self, chunked: bool, stream: list[Any]) -> Any:
        try:
            import pyarrow as pa
        except ImportError as error:
            raise MissingExtraError(
                "the batch holds pyarrow arrays: pip install "
                "'grain_sparsecore[parquet]'."
            ) from error
        with pa.ipc.open_stream(pa.py_buffer(self._pools.get(stream))) as reader:
            column = reader.read_all().column(0)
        column.validate(full=True)
        return column if chunked else _only_chunk(column)

    def _opaque(self, name: str, module: str, text: str, unreadable: str | None) -> Any:
        self.replaced.append(name)

        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise TypeError(unreadable)

        members: dict[str, Any] = {
            "__module__": str(module),
            "__repr__": lambda self: str(text),
        }
        if unreadable is not None:
            members["__array__"] = refuse
        return type(name, (), members)()


def _only_chunk(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _named(fields: list[str], items: list[Any]) -> Any:
    if len(set(fields)) != len(items) or not all(
        field.isidentifier() and not field.startswith("_") for field in fields
    ):
        raise ValueError(f"{fields} are no fields of {len(items)} items")
    members: dict[str, Any] = {
        field: property(operator.itemgetter(index))
        for index, field in enumerate(fields)
    }
    members["_fields"] = tuple(fields)
    members["__new__"] = lambda cls, *args: tuple.__new__(cls, args)
    return type("NamedTuple", (tuple,), members)(*items)
