"""Standard output that somebody stops reading, as ``head`` does."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _LeavableStream:
    """Writes to a stream until its reader has gone, and then to nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        # Under the stream, which still holds text that it will flush at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


def leavable(stream: TextIO) -> TextIO:
    """The stream; what is written after its reader has gone is lost, and no error."""
    return cast(TextIO, _LeavableStream(stream))


@contextlib.contextmanager
def readers_may_leave() -> Iterator[None]:
    """Meanwhile nobody needs to read what is printed: the files are still written."""
    stream = sys.stdout
    sys.stdout = leavable(stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = stream
