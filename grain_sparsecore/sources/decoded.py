"""The parts of a source that were decoded last, shared by the readers of a process."""

import collections
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Part = TypeVar("_Part")


class DecodedParts(Generic[_Part]):
    """Keeps the parts used last, up to a number of bytes, and always the newest.

    Readers of several threads may share an instance. Threads that need the same part
    wait for it instead of decoding it too. Copies and pickles are empty.

    Args:
        most_bytes: Bytes that all parts together may have.
        decoders: How many parts are decoded at the same time, at most.
    """

    def __init__(self, *, most_bytes: int, decoders: int) -> None:
        self._most_bytes = most_bytes
        self._decoders = decoders
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._decoding = [threading.Lock() for _ in range(self._decoders)]
        self._parts: collections.OrderedDict[int, tuple[_Part, int]] = (
            collections.OrderedDict()
        )
        self._bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_most_bytes": self._most_bytes, "_decoders": self._decoders}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._clear()

    def __len__(self) -> int:
        return len(self._parts)

    def get(
        self, index: int, decode: Callable[[int], tuple[_Part, int]]
    ) -> tuple[_Part, int]:
        """A part and its bytes; ``decode`` makes both of the index where it is absent.

        Raises:
            Exception: What ``decode`` raises; the part stays absent.
        """
        if (found := self._find(index)) is not None:
            return found
        with self._decoding[index % self._decoders]:
            if (found := self._find(index)) is not None:
                return found
            made = decode(index)
            with self._lock:
                self._parts[index] = made
                self._bytes += made[1]
                while self._bytes > self._most_bytes and len(self._parts) > 1:
                    _, (_, size) = self._parts.popitem(last=False)
                    self._bytes -= size
            return made

    def _find(self, index: int) -> tuple[_Part, int] | None:
        with self._lock:
            found = self._parts.get(index)
            if found is not None:
                self._parts.move_to_end(index)
            return found
