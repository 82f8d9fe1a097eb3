"""Files that commands write: checked before any work, and written one by one after."""

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from grain_sparsecore.atomic import atomic_target, special_kind
from grain_sparsecore.errors import ConfigError, GrainSparseCoreError
from grain_sparsecore.metrics import MetricWriter

# What text can be written to as it is; nothing else of that kind is replaced.
_STREAMS = ("character device", "pipe")


def check_json(path: Path | None) -> None:
    """`check_file` for ``--json``."""
    check_file("json", path, in_place=True)


def check_file(option: str, path: Path | None, *, in_place: bool = False) -> None:
    """Refuses a file that cannot be written, before any work is done.

    Args:
        option: Its name, without dashes.
        path: The file; None where the option was not given.
        in_place: It is written as it is, which a pipe or a character device can be
            too; else it is replaced as a whole.

    Raises:
        ConfigError: The folder does not exist, ``path`` is one itself, or writing
            there fails.
    """
    if path is None:
        return
    try:
        kind = special_kind(path)
        missing = not kind and not os.path.exists(Path(os.path.realpath(path)).parent)
        if kind == "folder" or missing:
            what = "is a folder" if kind else "its folder does not exist"
            raise ConfigError(
                f"--{option} {path}: {what}; name a file in a folder that does."
            )
        if in_place and kind in _STREAMS:
            # Opening a pipe would wait for its reader.
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        target = atomic_target(path)
        if in_place and target.exists():
            with target.open("ab"):
                pass
        else:
            _try_folder(target.parent, target.name)
    except OSError as error:
        raise ConfigError(
            f"{cannot_write(option, path, error)}; name another file."
        ) from error


def check_folder(option: str, path: Path | None) -> None:
    """Refuses a folder in which no file can be made; makes the folder.

    Raises:
        ConfigError: It is a file, cannot be made, or no file can be written there.
    """
    if path is None:
        return
    try:
        if special_kind(path) not in ("", "folder") or path.is_file():
            raise ConfigError(f"--{option} {path}: is a file; name a folder.")
        path.mkdir(parents=True, exist_ok=True)
        _try_folder(path, option)
    except OSError as error:
        raise ConfigError(
            f"{cannot_write(option, path, error)}; name another folder."
        ) from error


def _try_folder(folder: Path, name: str) -> None:
    with tempfile.NamedTemporaryFile(
        prefix=f".{name}.", suffix=".tmp", dir=folder
    ) as file:
        # A full disk still makes empty files.
        file.write(b"\n")
        file.flush()


def cannot_write(option: str, path: Path, error: OSError) -> str:
    """``--json FILE: cannot be written: REASON``."""
    return f"--{option} {path}: cannot be written: {error.strerror or error}"


def write_json(path: Path, text: str) -> None:
    """Writes ``text`` and a line end."""
    path.write_text(f"{text}\n", encoding="utf-8")


class Outputs:
    """Writes the outputs of a command; one that fails loses none of the others.

    Attributes:
        code: Exit code: 0 as long as all were written, 1 after one could not be
            written, 2 after one was refused.
    """

    def __init__(self) -> None:
        self.code = 0

    def write(
        self, option: str, path: Path | None, write: Callable[[Path], object]
    ) -> bool:
        """Calls ``write`` with the path, where there is one, and says what failed.

        Args:
            option: Its name, without dashes.
            path: None where the option was not given.
            write: What writes it.

        Returns:
            Whether nothing failed.
        """
        if path is None:
            return True
        try:
            write(path)
        except OSError as error:
            return self._failed(f"{cannot_write(option, path, error)}.", 1)
        except GrainSparseCoreError as error:
            code = 2 if isinstance(error, ConfigError) else 1
            return self._failed(str(error), code)
        return True

    def scalars(self, option: str, path: Path, writer: MetricWriter) -> MetricWriter:
        """A writer that says once what failed, and lets the run go on without it."""
        return _Scalars(self, option, path, writer)

    def _failed(self, text: str, code: int) -> bool:
        print(f"grain-sparsecore: {text}", file=sys.stderr, flush=True)
        self.code = max(self.code, code)
        return False


class _Scalars:
    def __init__(
        self, outputs: Outputs, option: str, path: Path, writer: MetricWriter
    ) -> None:
        self._outputs = outputs
        self._where = (option, path)
        self._writer: MetricWriter | None = writer

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._try(lambda writer: writer.write_scalars(step, scalars))

    def flush(self) -> None:
        self._try(lambda writer: writer.flush())

    def close(self) -> None:
        self._try(lambda writer: writer.close())

    def _try(self, call: Callable[[MetricWriter], object]) -> None:
        writer = self._writer
        if writer is None:
            return
        if not self._outputs.write(*self._where, lambda _: call(writer)):
            self._writer = None
            with contextlib.suppress(OSError):
                writer.close()
