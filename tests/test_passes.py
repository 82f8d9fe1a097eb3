import numpy as np
import pytest

from grain_sparsecore.kernels import KERNEL_VARIABLE, KERNELS, passes


@pytest.fixture(params=[*KERNELS, "too large to hold"], autouse=True)
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param in KERNELS:
        monkeypatch.setenv(KERNEL_VARIABLE, request.param)
    else:
        monkeypatch.setattr(passes, "_MOST_HELD", 0)
        monkeypatch.setattr(passes, "_MOST_WRITTEN", 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_largest_is_found_at_every_place(
    dtype: type[np.unsignedinteger], size: int
) -> None:
    values = np.arange(size).astype(dtype)
    most = np.iinfo(dtype).max
    for place in {0, size // 2, size - 1}:
        changed = values.copy()
        changed[place] = most
        assert passes.largest(changed) == most
        assert passes.largest(changed[::-1]) == most
    assert passes.largest(values) == int(values.max())


def test_largest_reads_two_dimensions_of_any_order() -> None:
    values = np.arange(12, dtype=np.uint32).reshape(3, 4)
    assert passes.largest(values) == 11
    assert passes.largest(np.asfortranarray(values)[:, :2]) == 9


def test_rises_tells_each_fall() -> None:
    splits = np.array([0, 0, 5, 5, 9], np.int64)
    assert passes.rises(splits)
    assert passes.rises(splits[:1])
    assert not passes.rises(splits[::-1])
    for place in range(4):
        fallen = splits.copy()
        fallen[place] = 100
        assert not passes.rises(fallen)
    assert not passes.rises(np.array([0, -(2**63)], np.int64))


def test_equal_compares_lengths_and_every_entry() -> None:
    one = np.arange(20, dtype=np.int64)
    assert passes.equal(one, one)
    assert passes.equal(one, one.copy())
    assert not passes.equal(one, one[:-1])
    for place in range(20):
        other = one.copy()
        other[place] ^= 1 << 40
        assert not passes.equal(one, other)
    assert passes.equal(one[::2], one[::2].copy())


@pytest.mark.parametrize(
    "values",
    [
        [1.5],
        [-1.5],
        [3.0, -2.0, 5.0],
        [-0.0, -1e-45, 1e-45],
        [np.inf, -np.inf],
        [-3e38, 3e38],
        [-5.0, -2.0, -9.0],
    ],
)
def test_bounds_are_the_extremes(values: list[float]) -> None:
    for _ in range(len(values)):
        values = values[1:] + values[:1]
        low, high = passes.bounds(np.array(values, np.float32))
        assert (low, high) == (np.float32(min(values)), np.float32(max(values)))


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_bounds_of_any_nan_are_nan(place: int, bits: int) -> None:
    values = np.array([1, -np.inf, np.inf, 2, -3], np.float32)
    values.view(np.uint32)[place] = bits
    low, high = passes.bounds(values)
    assert np.isnan(low) or np.isnan(high)


# The bytes of what fills unused slots: ids, ids and gains.
PADS = (np.int32(2**31 - 1), np.int32(2**31 - 1), np.float32(np.nan))


def three(values: np.ndarray) -> list[np.ndarray]:
    """Embedding ids, sample ids and gains that differ."""
    return [(values + 100 * i).astype(pad.dtype) for i, pad in enumerate(PADS)]


def test_shares_are_copied_and_padded() -> None:
    # Two blocks of three shares: 2 of 4 words, then none of 1, then 3 of 3.
    lengths, strides = np.array([2, 0, 3]), np.array([4, 1, 3])
    sources = three(np.arange(15))
    for given in (sources, [np.repeat(source, 2)[::2] for source in sources]):
        targets = [np.zeros(24, pad.dtype) for pad in PADS]
        for source in given:
            source.flags.writeable = False
        passes.lay_out(given, targets, shares=3, lengths=lengths, strides=strides)
        for s, target, p in zip(sources, targets, PADS, strict=True):
            first = [s[0], s[1], p, p, s[2], s[3], p, p, s[4], s[5], p, p, p, p, p]
            expected = np.array([*first, *s[6:]], p.dtype)
            assert target.tobytes() == expected.tobytes()


def test_segments_are_packed_behind_one_another() -> None:
    sources = three(np.arange(24).reshape(4, 6))
    lengths = np.array([[6, 2], [0, 3]], np.int64)
    # Shared memory need not be laid out like the first.
    for given in (sources, [np.asfortranarray(source) for source in sources]):
        targets = [np.zeros((2, 10), pad.dtype) for pad in PADS]
        passes.pack(given, targets, lengths)
        for s, target, p in zip(sources, targets, PADS, strict=True):
            rows = [[*s[0], *s[1][:2], p, p], [*s[3][:3], *[p] * 7]]
            assert target.tobytes() == np.array(rows, p.dtype).tobytes()
