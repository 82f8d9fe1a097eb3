"""The int32 frames in which hosts exchange everything.

Every collective of this package, in every pipeline of a program, has one shape:
int32[1024]. Hosts that get out of step, or whose pipelines differ, therefore meet in
a readable header instead of in unequal shapes, which abort the process. A round costs
the same for 3 integers as for 3,000.

The protocol is written as generators that yield a frame and are sent the maximum of
that frame over all hosts. They know nothing of transports, so one thread can also run
the generators of hundreds of hosts in lock-step.
"""

import dataclasses
import enum
import hashlib
from collections.abc import Generator
from typing import TypeVar

import numpy as np

from grain_sparsecore.errors import HostMismatchError

T = TypeVar("T")

# Yields this host's frame, is sent the maximum over all hosts, returns what the hosts
# agreed on.
Exchange = Generator[np.ndarray, np.ndarray, T]

FRAME_SIZE = 1024

# Part of every frame: raise it whenever the layout of frames or their order changes.
PROTOCOL_VERSION = 1

# What a host sends where it has nothing to say: the neutral element of the maximum.
NOTHING = np.int32(-(2**31))

INT31_MASK = 2**31 - 1

# Bytes per int32 when text travels: 24 bits, so that every word is above NOTHING.
_BYTES_PER_WORD = 3

# Kinds of rounds start here for every protocol version.
_KINDS_PER_VERSION = 64


class Kind(enum.IntEnum):
    """What a frame is about."""

    HANDSHAKE = 1
    CONFIGURATION = 2
    WINDOW = 3
    TAIL = 4
    MESSAGE = 5
    STRUCTURE = 6
    OVERFLOW = 7
    SPLIT = 8
    SPLIT_NEEDS = 9


def hash31(data: bytes) -> int:
    """31 bits of SHA-256, an int32 that is never negative."""
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big") & INT31_MASK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tag:
    """What must be equal on all hosts in one round.

    Attributes:
        name: Name of the pipeline.
        kind: What the round is about.
        start: Index of the first batch of the window.
        position: Batches of that window which were already handed on.
        limits: 31 bits that stand for the limits before the round.
    """

    name: str
    kind: Kind
    start: int = 0
    position: int = 0
    limits: int = 0

    def words(self, part: int) -> dict[str, int]:
        """The header of frame number ``part`` of the round, field by field."""
        return {
            "pipeline": hash31(self.name.encode()),
            "kind": PROTOCOL_VERSION * _KINDS_PER_VERSION + self.kind,
            "step": (self.start + self.position) & INT31_MASK,
            "start": self.start & INT31_MASK,
            "limits": self.limits,
            "part": part,
        }


_HEADER_SIZE = 2 * len(Tag(name="", kind=Kind.WINDOW).words(0))
PAYLOAD_SIZE = FRAME_SIZE - _HEADER_SIZE


def exchange(tag: Tag, words: np.ndarray) -> Exchange[np.ndarray]:
    """The maximum over all hosts of ``words``, in as many frames as it takes.

    Args:
        tag: Of the round; must be equal on all hosts.
        words: int32 [n]; n must be equal on all hosts.

    Raises:
        HostMismatchError: A host sent a frame with another tag. Every host raises it.
    """
    agreed = []
    for part, first in enumerate(range(0, words.size, PAYLOAD_SIZE)):
        payload = words[first : first + PAYLOAD_SIZE]
        header = np.array(list(tag.words(part).values()), np.int32)
        frame = np.full(FRAME_SIZE, NOTHING, np.int32)
        # The maximum of the negation is the minimum: both bounds in one round.
        frame[:_HEADER_SIZE:2] = header
        frame[1:_HEADER_SIZE:2] = -header
        frame[_HEADER_SIZE : _HEADER_SIZE + payload.size] = payload
        result = yield frame
        _check_header(tag, part, result[:_HEADER_SIZE])
        agreed.append(result[_HEADER_SIZE : _HEADER_SIZE + payload.size])
    return np.concatenate(agreed)


def share_bytes(tag: Tag, data: bytes | None) -> Exchange[bytes]:
    """Gives every host the bytes of the one host that passes them.

    Args:
        tag: Of the round.
        data: The bytes on that host, None on all others.
    """
    size = NOTHING if data is None else np.int32(len(data))
    agreed = yield from exchange(tag, np.array([size], np.int32))
    length = int(agreed[0])
    if length <= 0:
        return b""
    count = -(-length // _BYTES_PER_WORD)
    words = np.full(count, NOTHING, np.int32)
    if data is not None:
        padded = data.ljust(count * _BYTES_PER_WORD, b"\0")
        octets = np.frombuffer(padded, np.uint8).reshape(count, _BYTES_PER_WORD)
        words[:] = octets.astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], np.int32)
    agreed = yield from exchange(tag, words)
    shifts = np.array([16, 8, 0], np.int32)
    return ((agreed[:, None] >> shifts) & 0xFF).astype(np.uint8).tobytes()[:length]


def _check_header(tag: Tag, part: int, header: np.ndarray) -> None:
    largest = header[::2].astype(np.int64)
    smallest = -header[1::2].astype(np.int64)
    if np.array_equal(largest, smallest):
        return
    mine = tag.words(part)
    bounds = dict(zip(mine, zip(smallest, largest, strict=True), strict=True))
    raise HostMismatchError(_explain(tag, mine, bounds))


def _explain(
    tag: Tag, mine: dict[str, int], bounds: dict[str, tuple[np.int64, np.int64]]
) -> str:
    def differs(field: str) -> bool:
        return bounds[field][0] != bounds[field][1]

    here = f"pipeline {tag.name!r} step {mine['step']}"
    versions = [int(b) // _KINDS_PER_VERSION for b in bounds["kind"]]
    if versions[0] != versions[1]:
        return (
            f"{here}: hosts run different versions of grain_sparsecore (protocol "
            f"{versions[0]} and {versions[1]}; this host: {PROTOCOL_VERSION}); install "
            "one version on all hosts."
        )
    if differs("pipeline"):
        return (
            f"{here}: another host advanced another pipeline at the same time. All "
            "hosts must call next() on their pipelines in the same order."
        )
    if differs("kind"):
        low, high = (Kind(int(b) % _KINDS_PER_VERSION).name for b in bounds["kind"])
        return (
            f"{here}: hosts are out of step: one is in a round of kind {low}, "
            f"another in {high}. Create the iterators, and call next(), in the same "
            "order on all hosts."
        )
    if differs("step") or differs("start"):
        low, high = bounds["step"]
        starts = bounds["start"]
        return (
            f"{here}: hosts are in different steps, from {low} to {high} (windows "
            f"start at {starts[0]} to {starts[1]}); restore all hosts from the same "
            "checkpoint, and call next() equally often on all of them."
        )
    if differs("limits"):
        return (
            f"{here}: hosts come into this step with different limits; restore all "
            "hosts from the same checkpoint, and call shrink() on all of them or none."
        )
    low, high = bounds["part"]
    return f"{here}: hosts are in different frames of one round, {low} to {high}."
