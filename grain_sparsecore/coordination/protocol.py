"""What hosts say to each other: the handshake, and the round of each window.

All of it is arithmetic on plain numbers. The functions are `Exchange` generators: a
coordinator drives them with a reducer.
"""

import dataclasses
import json
import math
import zlib
from collections.abc import Callable
from typing import Literal

import numpy as np

from grain_sparsecore.coordination.differences import (
    canonical_json,
    describe_keys,
    differing_keys,
    name_hosts,
)
from grain_sparsecore.coordination.frames import (
    NOTHING,
    Exchange,
    Kind,
    Tag,
    exchange,
    hash31,
    share_bytes,
)
from grain_sparsecore.errors import CoordinationError, HostMismatchError

OnExhausted = Literal["stop", "pad"]
ON_EXHAUSTED: tuple[str, ...] = ("stop", "pad")

# Configurations that a mismatch message compares; more are counted only.
_COMPARED_GROUPS = 4

# Bytes of a failing host's message that travel to the others.
MAX_MESSAGE_BYTES = 2000

_WORDS_PER_HOST = 3
_WORDS_BEFORE_STATS = 5

# First byte of a shared structure: whether it is one, or the reason why there is none.
_STRUCTURE_OK = b"+"
_STRUCTURE_FAILED = b"!"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """This host among the hosts of the job."""

    index: int
    count: int


def handshake(
    *, name: str, configuration: dict, host: Host, nonce: int
) -> Exchange[int]:
    """Makes sure that all hosts run the same configuration.

    Args:
        name: Name of the pipeline.
        configuration: Everything that shapes the vectors and the buffers, JSON-able.
        host: This host.
        nonce: A random int32, 0 or more.

    Returns:
        A number all hosts share and no other handshake has: the nonce of host 0.

    Raises:
        HostMismatchError: On every host, naming the hosts that differ and in what, or
            two hosts that claim the same index.
    """
    text = canonical_json(configuration)
    words = np.full((host.count, _WORDS_PER_HOST), NOTHING, np.int32)
    words[host.index] = hash31(text.encode()), nonce, -nonce
    tag = Tag(name=name, kind=Kind.HANDSHAKE)
    agreed = yield from exchange(tag, words.ravel())
    agreed = agreed.reshape(host.count, _WORDS_PER_HOST)
    absent = np.flatnonzero(agreed[:, 0] == NOTHING).tolist()
    doubled = np.flatnonzero(agreed[:, 1] != -agreed[:, 2]).tolist()
    if absent or doubled:
        raise HostMismatchError(
            f"pipeline {name!r}: two processes claim to be "
            f"{name_hosts(sorted({*doubled} - {*absent}))}, and none is "
            f"{name_hosts(absent)} of {host.count}; give every process an index of "
            "its own."
        )
    if len(set(agreed[:, 0].tolist())) > 1:
        yield from _raise_mismatch(name, text, host, agreed[:, 0].tolist())
    return int(agreed[0, 1])


def _raise_mismatch(
    name: str, text: str, host: Host, fingerprints: list[int]
) -> Exchange[None]:
    members: dict[int, list[int]] = {}
    for index, fingerprint in enumerate(fingerprints):
        members.setdefault(fingerprint, []).append(index)
    # The largest group is what the others are compared to; sorting is stable, so
    # among equals the one with the lowest host.
    groups = sorted(members.values(), key=len, reverse=True)
    texts = []
    for group in groups[:_COMPARED_GROUPS]:
        mine = zlib.compress(text.encode()) if host.index == group[0] else None
        tag = Tag(name=name, kind=Kind.CONFIGURATION)
        shared = yield from share_bytes(tag, mine)
        texts.append(json.loads(zlib.decompress(shared)))
    usual = f"on {name_hosts(groups[0])}"
    parts = []
    for group, other in zip(groups[1:_COMPARED_GROUPS], texts[1:], strict=True):
        hosts = name_hosts(group)
        differing = differing_keys(texts[0], other)
        keys = describe_keys(differing, usual, f"on {hosts}")
        parts.append(f"{hosts} differ{'s' if len(group) == 1 else ''}: {keys}")
    if len(groups) > _COMPARED_GROUPS:
        more = sorted(h for group in groups[_COMPARED_GROUPS:] for h in group)
        parts.append(f"{name_hosts(more)} differ as well")
    raise HostMismatchError(
        f"pipeline {name!r}: hosts run different configurations. {'. '.join(parts)}. "
        f"Start all hosts with the same one (this is host {host.index})."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowReport:
    """What one host brings to the round of a window.

    Attributes:
        stats: int32 [n, T, 3], of the n batches that were read; fewer than the window
            where the input ended or failed.
        failure: Why batch n could not be read; None if it could, or there was none.
        structure: Makes the description of an element, on a host that has seen one;
            None on the others.
    """

    stats: np.ndarray
    failure: str | None = None
    structure: Callable[[], bytes] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowOutcome:
    """What all hosts agreed on for a window, equal on every host.

    Attributes:
        count: Batches every host hands on, from the start of the window.
        stops: Whether the data ends after them.
        some_ended: Whether a host ran out of data in this window.
        failed_host: The host whose input fails after them, or None.
        failure: Its message.
        needed: int32 [T, 3], the maximum over those batches and all hosts.
        structure: Description of an element, where a host needed it; else None.
    """

    count: int
    stops: bool
    some_ended: bool
    failed_host: int | None
    failure: str
    needed: np.ndarray
    structure: bytes | None


def agree_on_window(
    *,
    report: WindowReport,
    window: int,
    on_exhausted: OnExhausted,
    tag: Tag,
    host: Host,
) -> Exchange[WindowOutcome]:
    """The round of one window: how many batches, how it goes on, what they need.

    The outcome does not depend on the window: with any window the same batches are
    handed on, and the data ends or fails at the same step.

    Raises:
        HostMismatchError: The hosts are not in the same step.
        CoordinationError: A host must pad, has never had a batch, and no other host
            can describe one.
    """
    read = len(report.stats)
    exhausted = report.failure is None and read < window
    pads = on_exhausted == "pad"
    size = math.prod(report.stats.shape[1:])
    words = np.empty(_WORDS_BEFORE_STATS + size, np.int32)
    # The earliest failure wins, and among equals the highest host; 0 is none.
    failing = report.failure is not None
    words[0] = (window - read) * host.count + host.index + 1 if failing else 0
    words[1] = read if exhausted else window
    words[2] = -words[1]
    words[3] = pads and exhausted and report.structure is None
    words[4] = host.index + 1 if pads and report.structure is not None else 0
    words[_WORDS_BEFORE_STATS:] = _maximum(report.stats)
    agreed = yield from exchange(tag, words)
    most, least = int(agreed[1]), -int(agreed[2])
    count = most if pads else least
    failed_host, failure = None, ""
    if agreed[0] > 0:
        before, index = divmod(int(agreed[0]) - 1, host.count)
        failed_at = window - before
        # A failure that comes after the end of the data of another host is never
        # reached, as with a window of one.
        if failed_at <= count:
            count, failed_host = failed_at, index
    needed = agreed[_WORDS_BEFORE_STATS:]
    if count < most:
        # Some host has read batches that nobody hands on: limits must not follow them.
        tail = dataclasses.replace(tag, kind=Kind.TAIL)
        needed = yield from exchange(tail, _maximum(report.stats[:count]))
    if failed_host is not None:
        mine = (report.failure or "").encode()[:MAX_MESSAGE_BYTES]
        message = yield from share_bytes(
            dataclasses.replace(tag, kind=Kind.MESSAGE),
            mine if host.index == failed_host else None,
        )
        failure = message.decode(errors="replace")
    structure = None
    if agreed[3] > 0 and agreed[4] > 0 and count > 0:
        structure = yield from _share_structure(report, int(agreed[4]) - 1, tag, host)
    return WindowOutcome(
        count=count,
        stops=failed_host is None and count < window,
        some_ended=least < window,
        failed_host=failed_host,
        failure=failure,
        needed=needed.reshape(report.stats.shape[1:]),
        structure=structure,
    )


def _maximum(stats: np.ndarray) -> np.ndarray:
    """int32 [T * 3]: the maximum over the batches, 0 where there is none."""
    return stats.max(axis=0, initial=0).ravel().astype(np.int32)


def _share_structure(
    report: WindowReport, owner: int, tag: Tag, host: Host
) -> Exchange[bytes]:
    mine = None
    if host.index == owner:
        assert report.structure is not None
        try:
            mine = _STRUCTURE_OK + report.structure()
        except CoordinationError as error:
            # The others wait for it: the reason travels in its place.
            mine = _STRUCTURE_FAILED + str(error).encode()[:MAX_MESSAGE_BYTES]
    shared = yield from share_bytes(dataclasses.replace(tag, kind=Kind.STRUCTURE), mine)
    if shared[:1] != _STRUCTURE_OK:
        raise CoordinationError(shared[1:].decode(errors="replace"))
    return shared[1:]
