"""Orders of records: each exactly once an epoch, computed place by place."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from grain_sparsecore.sources.order import InOrder, Shuffled, ShuffledGroups
from grain_sparsecore.sources.scramble import mix, permute


def key(value: int) -> np.ndarray:
    return mix(np.array([value], np.uint64))


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 1000, 4097])
def test_a_permutation_hits_every_place_once(size: int) -> None:
    places = np.arange(size)
    for seed in range(3):
        result = permute(places, size, key(seed))
        assert result.dtype == np.int64
        assert sorted(result.tolist()) == list(range(size))


def test_permutations_of_large_sizes_stay_inside() -> None:
    for size in (2**32, 2**32 + 1, 2**62):
        places = np.array([0, 1, 2, size - 2, size - 1])
        result = permute(places, size, key(1))
        assert len(set(result.tolist())) == 5
        assert ((result >= 0) & (result < size)).all()


def test_every_key_is_another_permutation_and_all_places_are_equally_likely() -> None:
    keys = mix(np.arange(6000, dtype=np.uint64))
    for place in range(6):
        result = permute(np.full(6000, place), 6, keys)
        counts = np.bincount(result, minlength=6)
        # 1,000 each on average; 5 standard deviations are 144.
        assert (abs(counts - 1000) < 144).all()


def test_places_do_not_depend_on_what_is_asked_with_them() -> None:
    order = Shuffled(size=50, seed=1)
    together = order.at(np.arange(100))
    alone = [int(order.at(np.array([p]))[0]) for p in range(100)]
    assert together.tolist() == alone


def test_in_order() -> None:
    assert InOrder(3).at(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_each_epoch_and_each_seed_is_shuffled_anew() -> None:
    epochs = Shuffled(size=40, seed=1).at(np.arange(120)).reshape(3, 40).tolist()
    epochs.append(Shuffled(size=40, seed=2).at(np.arange(40)).tolist())
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@hypothesis.given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    groups_in_run=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_groups_are_shuffled_and_mixed_in_runs(
    sizes: list[int], groups_in_run: int, seed: int
) -> None:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(starts[-1])
    order = ShuffledGroups(starts, groups_in_run=groups_in_run, seed=seed)
    # Two epochs and a half at once, as a batch may span them.
    records = order.at(np.arange(total * 5 // 2)).tolist()
    for epoch in (records[:total], records[total : 2 * total]):
        assert sorted(epoch) == list(range(total))
        left = epoch
        seen: set[int] = set()
        while left:
            # The next run: as many records as its groups hold, and all of them.
            size = next(
                n
                for n in range(1, len(left) + 1)
                if _are_whole_groups(left[:n], starts)
                and (n == len(left) or len(_groups(left[:n], starts)) >= groups_in_run)
            )
            groups = _groups(left[:size], starts)
            assert len(groups) <= groups_in_run
            assert not groups & seen
            seen |= groups
            left = left[size:]
    half = records[2 * total :]
    assert len(set(half)) == len(half)
    again = ShuffledGroups(starts, groups_in_run=groups_in_run, seed=seed)
    backwards = [int(again.at(np.array([p]))[0]) for p in range(len(records))[::-1]]
    assert backwards[::-1] == records


def _groups(records: list[int], starts: np.ndarray) -> set[int]:
    return set((np.searchsorted(starts, records, "right") - 1).tolist())


def _are_whole_groups(records: list[int], starts: np.ndarray) -> bool:
    sizes = np.diff(starts)
    return len(records) == sum(int(sizes[g]) for g in _groups(records, starts))
