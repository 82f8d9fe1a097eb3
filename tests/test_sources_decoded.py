"""Decoded parts of a source: bounded, decoded once, and left behind by pickles."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from grain_sparsecore.sources.decoded import DecodedParts


def test_the_parts_used_last_stay():
    parts = DecodedParts[str](most_bytes=30, decoders=2)
    decoded = []

    def decode(index):
        decoded.append(index)
        return f"part {index}", 10

    for index in (0, 1, 2, 0, 3):
        assert parts.get(index, decode) == (f"part {index}", 10)
    assert len(parts) == 3
    assert decoded == [0, 1, 2, 3]
    for index in (0, 2, 3):
        parts.get(index, decode)
    assert decoded == [0, 1, 2, 3]
    parts.get(1, decode)
    assert decoded[-1] == 1


def test_the_newest_stays_however_large():
    parts = DecodedParts[str](most_bytes=30, decoders=1)
    parts.get(0, lambda _: ("small", 10))
    for _ in range(2):
        assert parts.get(1, lambda _: ("large", 100)) == ("large", 100)
        assert len(parts) == 1
    # And makes room when it goes.
    for index in range(2, 6):
        parts.get(index, lambda _: ("small", 10))
    assert len(parts) == 3


def test_a_part_that_cannot_be_decoded_is_tried_again():
    parts = DecodedParts[str](most_bytes=30, decoders=1)
    with pytest.raises(ZeroDivisionError):
        parts.get(0, lambda _: ("", 1 // 0))
    assert parts.get(0, lambda _: ("there", 1)) == ("there", 1)


def test_threads_decode_a_part_once_and_others_meanwhile():
    parts = DecodedParts[int](most_bytes=1000, decoders=2)
    decoded = []
    # Each of the two decoders waits until the other decodes too.
    together = threading.Barrier(2, timeout=30)

    def decode(index):
        together.wait()
        decoded.append(index)
        return index, 1

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: parts.get(i % 2, decode)[0], range(40)))
    assert got == [0, 1] * 20
    assert sorted(decoded) == [0, 1]


def test_pickles_are_empty():
    parts = DecodedParts[bytes](most_bytes=2**20, decoders=3)
    parts.get(0, lambda _: (bytes(10_000), 10_000))
    data = pickle.dumps(parts)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert len(again) == 0
    assert again.get(0, lambda _: (b"new", 3)) == (b"new", 3)
