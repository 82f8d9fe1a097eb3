import numpy as np
import pytest

from grain_sparsecore import highway, highway_fast

MASK = 2**64 - 1

# The published test vectors of the algorithm: key bytes 0, 1, ... 31, and inputs of
# length 0 to 7 with the bytes 0, 1, 2, ...
PUBLISHED_KEY = (
    0x0706050403020100,
    0x0F0E0D0C0B0A0908,
    0x1716151413121110,
    0x1F1E1D1C1B1A1918,
)
PUBLISHED = (
    0x907A56DE22C26E53,
    0x7EAB43AAC7CDDD78,
    0xB8D0569AB0B53D62,
    0x5C6BEFAB8A463D80,
    0xF205A46893007EDA,
    0x2B8A1668E4A94541,
    0xBD4CCC325BEFCA6F,
    0x4D02AE1738F59482,
)

# Byte of the pair (words 0 and 1) that goes to each byte of the pair.
ZIPPER = (3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7)


class Scalar:
    """The algorithm for one input of fewer than 16 bytes, one word at a time."""

    def __init__(self, key):
        self.mul0, self.mul1 = list(highway._INIT0), list(highway._INIT1)
        self.v0 = [m ^ k for m, k in zip(self.mul0, key, strict=True)]
        self.v1 = [m ^ swapped(k) for m, k in zip(self.mul1, key, strict=True)]

    def hash(self, data: bytes) -> int:
        if data:
            self.remainder(data)
        for _ in range(4):
            self.update([swapped(self.v0[i]) for i in (2, 3, 0, 1)])
        return (self.v0[0] + self.v1[0] + self.mul0[0] + self.mul1[0]) & MASK

    def remainder(self, data: bytes) -> None:
        size = len(data)
        self.v0 = [(v + (size << 32) + size) & MASK for v in self.v0]
        self.v1 = [
            rotated(v & 0xFFFFFFFF, size) | rotated(v >> 32, size) << 32
            for v in self.v1
        ]
        packet = bytearray(32)
        whole = size & ~3
        packet[:whole] = data[:whole]
        tail = data[whole:]
        if tail:
            packet[16] = tail[0]
            packet[17] = tail[len(tail) >> 1]
            packet[18] = tail[-1]
        self.update(np.frombuffer(bytes(packet), "<u8").tolist())

    def update(self, block: list[int]) -> None:
        for i in range(4):
            self.v1[i] = (self.v1[i] + self.mul0[i] + block[i]) & MASK
            self.mul0[i] ^= (self.v1[i] & 0xFFFFFFFF) * (self.v0[i] >> 32)
            self.v0[i] = (self.v0[i] + self.mul1[i]) & MASK
            self.mul1[i] ^= (self.v0[i] & 0xFFFFFFFF) * (self.v1[i] >> 32)
        for source, target in ((self.v1, self.v0), (self.v0, self.v1)):
            for i in (0, 2):
                pair = np.array(source[i : i + 2], "<u8").tobytes()
                mixed = np.frombuffer(bytes(pair[b] for b in ZIPPER), "<u8").tolist()
                target[i] = (target[i] + mixed[0]) & MASK
                target[i + 1] = (target[i + 1] + mixed[1]) & MASK


def swapped(word: int) -> int:
    return (word << 32 | word >> 32) & MASK


def rotated(half: int, count: int) -> int:
    return (half << count | half >> (32 - count)) & 0xFFFFFFFF


@pytest.mark.parametrize("length", range(len(PUBLISHED)))
def test_the_model_gives_the_published_hashes(length: int) -> None:
    assert Scalar(PUBLISHED_KEY).hash(bytes(range(length))) == PUBLISHED[length]


@pytest.mark.parametrize("module", [highway, highway_fast])
def test_four_bytes_give_the_published_hash(module) -> None:
    value = np.frombuffer(bytes(range(4)), "<i4")
    assert module.highway_hash64(value, PUBLISHED_KEY).tolist() == [PUBLISHED[4]]


@pytest.mark.parametrize("module", [highway, highway_fast])
def test_random_values_and_keys_equal_the_model(module) -> None:
    rng = np.random.default_rng(5)
    for _ in range(4):
        key = rng.integers(0, 2**64, 4, np.uint64).tolist()
        values = rng.integers(-(2**31), 2**31, 20).astype(np.int32)
        values[:3] = 0, -1, 2**31 - 1
        want = [Scalar(key).hash(v.astype("<i4").tobytes()) for v in values]
        got = module.highway_hash64(values, key)
        assert got.dtype == np.uint64
        assert got.tolist() == want


def test_long_arrays_equal_the_compiled_hash() -> None:
    values = np.random.default_rng(6).integers(0, 2**32, 10_001).astype(np.uint32)
    one = highway.highway_hash64(values, PUBLISHED_KEY)
    two = highway_fast.highway_hash64(values, PUBLISHED_KEY)
    np.testing.assert_array_equal(one, two)
    assert len(np.unique(one)) == len(np.unique(values))


@pytest.mark.parametrize("module", [highway, highway_fast])
def test_nothing_and_strided_values(module) -> None:
    assert module.highway_hash64(np.array([], np.int32), PUBLISHED_KEY).size == 0
    values = np.arange(20, dtype=np.int32)
    np.testing.assert_array_equal(
        module.highway_hash64(values[::3], PUBLISHED_KEY),
        module.highway_hash64(values, PUBLISHED_KEY)[::3],
    )
