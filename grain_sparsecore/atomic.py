"""Files that are never seen half-written."""

import errno
import os
import stat
import tempfile
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISCHR, "character device"),
    (stat.S_ISBLK, "block device"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
)


def special_kind(path: str | os.PathLike[str]) -> str:
    """What is there in place of a regular file, such as ``"pipe"``.

    Symbolic links are followed. Empty for a regular file, and where there is nothing.

    Raises:
        OSError: It cannot be found out, for example below a file.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return ""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "")


def atomic_target(path: str | os.PathLike[str]) -> Path:
    """The file that `write_atomically` replaces: ``path``, or what it links to.

    Raises:
        OSError: There is a device, a pipe or a folder, which must not be replaced.
    """
    kind = special_kind(path)
    if kind:
        raise OSError(
            errno.EINVAL, f"it is a {kind}, not a regular file", os.fspath(path)
        )
    return Path(os.path.realpath(path))


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file that is never seen half-written, whenever the process dies.

    The bytes go to a temporary file beside it, to the disk, and only then take the
    name. A process that is killed in between leaves that hidden file behind, and the
    old contents under the name. A symbolic link stays, and its target is replaced.

    Raises:
        OSError: The file cannot be written; or a device, a pipe or a folder is there.
    """
    target = atomic_target(path)
    handle, temporary = tempfile.mkstemp(
        prefix=f".{target.name}.", suffix=".tmp", dir=target.parent
    )
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    _sync_directory(target.parent)


def _umask() -> int:
    # There is no call that only asks.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_directory(directory: Path) -> None:
    # Without it a power cut may undo the renaming; not every system allows it.
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
