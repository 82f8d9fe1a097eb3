"""Random access to the lines of a large text file."""

import os
import weakref
from pathlib import Path

import numpy as np

from grain_sparsecore.errors import InputError

# Lines per entry of the index. 45 million lines take 11 MiB instead of 700, and to
# read 64 lines of 250 bytes costs hardly more than to read one.
LINES_PER_BLOCK = 64

_CHUNK = 2**24
_LF, _CR = ord("\n"), ord("\r")


class TextLines:
    """The lines of a file by number, from 0; blank ones do not count.

    Making one reads the file once, to index every `LINES_PER_BLOCK`-th line. Lines end
    in LF or CR LF; the end of the last may be missing. Threads may share an instance.

    Args:
        path: The file. It must not change any more.

    Raises:
        InputError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        try:
            self._starts, self._numbers, self._count = _index(self.path)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error}") from error
        self._fd = -1

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_fd": -1}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> bytes:
        """The line without its end."""
        block, line = divmod(index, LINES_PER_BLOCK)
        lines = [x for x in self._block(block).split(b"\n") if not _is_blank(x)]
        return lines[line].removesuffix(b"\r")

    def where(self, index: int) -> str:
        """``path, line 7``, counted from 1 and with blank lines, for messages."""
        block, line = divmod(index, LINES_PER_BLOCK)
        lines = self._block(block).split(b"\n")
        filled = [i for i, x in enumerate(lines) if not _is_blank(x)]
        return f"{self.path}, line {int(self._numbers[block]) + filled[line]}"

    def is_cut_off(self, index: int) -> bool:
        """Whether it is a last line without an end."""
        return index == self._count - 1 and not self._block(-1).endswith(b"\n")

    def _block(self, block: int) -> bytes:
        block %= len(self._numbers)
        start, end = int(self._starts[block]), int(self._starts[block + 1])
        if self._fd < 0:
            fd = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, fd)
            self._fd = fd
        data = os.pread(self._fd, end - start, start)
        if len(data) < end - start:
            raise InputError(
                f"{self.path} has become shorter since it was opened; it must not "
                "change while it is read."
            )
        return data


def _is_blank(line: bytes) -> bool:
    return line in (b"", b"\r")


def _index(path: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Blocks of lines: their first bytes and the end, their first line numbers.

    Returns:
        int64 [blocks + 1] bytes; int64 [blocks] line numbers counted from 1, blank
        lines included; the number of lines that are not blank.
    """
    starts: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    count = 0
    line = 1
    base = 0
    rest = b""
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            rest += chunk
            data = np.frombuffer(rest, np.uint8)
            ends = np.flatnonzero(data == _LF)
            if ends.size:
                count += _index_lines(data, ends, base, line, count, starts, numbers)
                line += len(ends)
                base += int(ends[-1]) + 1
                rest = rest[int(ends[-1]) + 1 :]
    if rest:
        data = np.frombuffer(rest, np.uint8)
        ends = np.array([len(data)])
        count += _index_lines(data, ends, base, line, count, starts, numbers)
        base += len(rest)
    return (
        np.concatenate([*starts, [base]]).astype(np.int64),
        np.concatenate([*numbers, []]).astype(np.int64),
        count,
    )


def _index_lines(
    data: np.ndarray,
    ends: np.ndarray,
    base: int,
    line: int,
    count: int,
    starts: list[np.ndarray],
    numbers: list[np.ndarray],
) -> int:
    """Adds the blocks that begin in ``data``; returns its lines that are not blank."""
    begins = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - begins
    blank = (lengths == 0) | ((lengths == 1) & (data[begins % len(data)] == _CR))
    filled = np.flatnonzero(~blank)
    first = filled[-count % LINES_PER_BLOCK :: LINES_PER_BLOCK]
    starts.append(begins[first] + base)
    numbers.append(first + line)
    return len(filled)
