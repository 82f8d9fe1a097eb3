"""The file of a failing batch: an npz archive of arrays and JSON, without pickles."""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import socket
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from grain_sparsecore.errors import ConfigError, MissingExtraError
from grain_sparsecore.failing.layouts import layout_from_plain, layout_to_plain
from grain_sparsecore.failing.pools import PoolReader, PoolWriter
from grain_sparsecore.failing.values import Decoder, encode
from grain_sparsecore.limits import Limits
from grain_sparsecore.stacking import StackedLayout

FORMAT = "grain_sparsecore failing batch"
VERSION = 1

# Packages whose releases can make a difference to what a batch gives.
_PACKAGES = ("grain_sparsecore", "grain", "jax", "numpy", "numba", "pyarrow")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailingBatch:
    """A batch that a stage could not map, and how it tried.

    Attributes:
        element: The batch as it came in.
        layout: The layout of the stage.
        key: That of `ComputeInputStats`.
        cut_above: Likewise.
        columns: Label and dense features of a `TakeColumns` that goes before it, where
            that failed.
        error_type: Module and name of the exception's type.
        error_text: Text of the exception.
        origin: Where and when it failed, and with which packages. For people; nothing
            depends on it.
        replaced: After `load`, type names of what could not be kept and has a
            stand-in in ``element``.
    """

    element: Any
    layout: StackedLayout
    key: str
    cut_above: Limits | None
    error_type: str
    error_text: str
    columns: tuple[str, tuple[str, ...]] | None = None
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replaced: tuple[str, ...] = ()

    def to_bytes(self) -> tuple[str, bytes]:
        """16 hexadecimal digits that stand for batch and error, and the file.

        Two hosts, or two runs, that fail on the same batch get the same digits.
        """
        pools = PoolWriter()
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "layout": layout_to_plain(self.layout),
            "key": self.key,
            "cut_above": None if self.cut_above is None else self.cut_above.to_plain(),
            "columns": self.columns,
            "error": [self.error_type, self.error_text],
            "element": encode(self.element, pools),
        }
        members = {"batch": _to_array(plain), **pools.arrays()}
        digest = hashlib.sha256()
        for array in members.values():
            digest.update(np.ascontiguousarray(array).tobytes())
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **members, origin=_to_array(self.origin))
        return digest.hexdigest()[:16], file.getvalue()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that holds `to_bytes`, and runs no code from it.

        Raises:
            ConfigError: There is no such file, it is another kind of file, it is
                damaged, or it is of another release.
            MissingExtraError: The batch holds pyarrow arrays, and pyarrow is not
                installed.
        """
        where = f"replay file {os.fspath(path)!r}"
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError as error:
            raise ConfigError(
                f"{where} does not exist; train and stats write one for a failing "
                "batch with --dump-failing DIR."
            ) from error
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error}.") from error
        try:
            members = _read_members(data)
            plain = _from_array(members["batch"])
            known = plain["format"] == FORMAT
        except Exception as error:  # zipfile, numpy and json raise many types
            raise ConfigError(
                f"{where} is not a file of --dump-failing, or is damaged "
                f"({type(error).__name__}: {error}). Copy it again, or make a new one."
            ) from error
        if not known or plain.get("version") != VERSION:
            raise ConfigError(
                f"{where} is {plain['format']!r} of version {plain.get('version')!r}; "
                f"this release reads {FORMAT!r} of version {VERSION}. Replay it with "
                "the release that wrote it."
            )
        try:
            return cls._from_plain(plain, members)
        except MissingExtraError as error:
            raise MissingExtraError(f"{where}: {error}") from error
        except Exception as error:  # whatever a damaged description leads to
            raise ConfigError(
                f"{where} does not hold a batch that this release can read "
                f"({type(error).__name__}: {error}). Replay it with the release that "
                "wrote it, or make a new one."
            ) from error

    @classmethod
    def _from_plain(
        cls, plain: Mapping[str, Any], members: Mapping[str, np.ndarray]
    ) -> Self:
        layout = layout_from_plain(plain["layout"])
        cut_above = plain["cut_above"]
        if cut_above is not None:
            cut_above = Limits.from_plain(cut_above)
            if tuple(cut_above) != layout.stack_names:
                raise ValueError("cut_above is of other stacks than the layout")
            cut_above.to_array()  # raises unless all are integers of 32 bits
        columns = plain["columns"]
        texts = []
        if columns is not None:
            label, dense = columns
            columns = label, tuple(dense)
            texts = [label, *dense]
        error_type, error_text = plain["error"]
        key, origin = plain["key"], _from_array(members["origin"])
        texts += [error_type, error_text, key]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("the error and the keys must be texts")
        if not isinstance(origin, dict):
            raise TypeError("the origin must be a dict")
        decoder = Decoder(PoolReader(members))
        return cls(
            element=decoder.decode(plain["element"]),
            layout=layout,
            key=key,
            cut_above=cut_above,
            error_type=error_type,
            error_text=error_text,
            columns=columns,
            origin=origin,
            replaced=tuple(decoder.replaced),
        )


def type_name(error: BaseException) -> str:
    """``builtins.ValueError``: what the type of an exception is recorded as."""
    return f"{type(error).__module__}.{type(error).__qualname__}"


def describe_origin() -> dict[str, Any]:
    """Where this process runs, and with what."""
    now = datetime.datetime.now(datetime.UTC)
    origin: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": now.isoformat(timespec="seconds"),
        "python": platform.python_version(),
    }
    # Workers must not start JAX to ask for it; it is set in jobs of `train`.
    if process := os.environ.get("JAX_PROCESS_ID"):
        origin["process"] = process
    for package in _PACKAGES:
        try:
            origin[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            origin[package] = None
    return origin


def _to_array(plain: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(plain).encode(), np.uint8)


def _from_array(array: np.ndarray) -> Any:
    return json.loads(array.tobytes())


def _read_members(data: bytes) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # As they are written; others could be larger than memory.
        if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
            raise ValueError("a member of the archive is compressed")
        if (name := archive.testzip()) is not None:
            raise ValueError(f"member {name!r} of the archive is damaged")
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        return dict(archive)
