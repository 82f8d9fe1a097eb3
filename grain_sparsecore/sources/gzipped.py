"""Gzipped files, decompressed once: a gzip stream has no random access."""

import fcntl
import gzip
import hashlib
import os
import shutil
import tempfile
import zlib
from pathlib import Path

from grain_sparsecore.errors import ConfigError, InputError

_CHUNK = 2**20
# Decompression looks at the disk this often, and stops before it is full.
_CHECK_EVERY = 2**28
_KEEP_FREE = 2**30


def decompressed(path: Path, cache_dir: str | None) -> Path:
    """A plain copy of a gzipped file, made unless there is one already.

    The copy stays for the next run and may be deleted between runs. Its name holds the
    path, size and time of the original, so a changed file gets another copy. Processes
    that ask at the same time wait for the first.

    Args:
        path: The gzipped file.
        cache_dir: Folder of the copies. None: ``$XDG_CACHE_HOME/grain_sparsecore``, or
            ``~/.cache/grain_sparsecore``.

    Raises:
        ConfigError: The folder cannot be written, or its disk would be filled.
        InputError: The file is damaged or cut off.
    """
    folder = Path(cache_dir).expanduser() if cache_dir else _default_folder()
    status = path.stat()
    text = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    copy = folder / f"{path.name.removesuffix('.gz')}-{digest}"
    if copy.exists():
        return copy
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{digest}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.exists():
                _decompress(path, copy)
    except OSError as error:
        raise ConfigError(
            f"source.cache_dir: cannot decompress {path} into {folder} ({error}); name "
            "a folder that can be written and has room for the plain file."
        ) from error
    return copy


def _default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "grain_sparsecore"


def _decompress(path: Path, copy: Path) -> None:
    fd, temporary = tempfile.mkstemp(dir=copy.parent, prefix=f"{copy.name}.")
    try:
        with os.fdopen(fd, "wb") as target, gzip.open(path, "rb") as source:
            _check_disk(copy.parent, path)
            written = 0
            while chunk := source.read(_CHUNK):
                target.write(chunk)
                written += len(chunk)
                if written % _CHECK_EVERY < _CHUNK:
                    _check_disk(copy.parent, path)
        os.replace(temporary, copy)
    except EOFError as error:
        raise InputError(f"{path} is cut off: {error}") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is no valid gzip file: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _check_disk(folder: Path, path: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _KEEP_FREE:
        raise ConfigError(
            f"source.cache_dir: {folder} has {free >> 20} MiB left, too few to "
            f"decompress {path}; name a folder on a larger disk, or decompress the "
            "file yourself."
        )
