import json

import grain
import numpy as np
import pytest

from grain_sparsecore.errors import CheckpointError, ConfigError, StageMisuseError
from grain_sparsecore.interop import from_data_loader, from_iterable


def batches(count: int = 7) -> list[dict[str, np.ndarray]]:
    return [
        {"ids": np.arange(4, dtype=np.int32).reshape(2, 2) + i} for i in range(count)
    ]


class ReadAgain:
    """Stands for a PyTorch DataLoader: iterable as often as you like, no iterator."""

    def __init__(self, count: int = 7) -> None:
        self.count = count
        self.started = 0

    def __iter__(self):
        self.started += 1
        return iter(batches(self.count))


def first_ids(elements) -> list[int]:
    return [int(element["ids"][0, 0]) for element in elements]


@pytest.mark.parametrize(
    "source", [batches, ReadAgain(), batches(), lambda: (b for b in batches())]
)
def test_every_iteration_of_a_repeatable_source_gives_all_elements(source):
    dataset = from_iterable(source)
    assert first_ids(dataset) == list(range(7))
    one, two = iter(dataset), iter(dataset)
    assert first_ids([next(one), next(one)]) == [0, 1]
    assert first_ids([next(two)]) == [0]


@pytest.mark.parametrize("source", [batches, ReadAgain()])
def test_restoring_gives_the_same_elements(source):
    grain.experimental.assert_equal_output_after_checkpoint(from_iterable(source))


def test_state_is_the_count_and_restoring_skips_as_many():
    dataset = from_iterable(batches)
    iterator = iter(dataset)
    next(iterator)
    next(iterator)
    state = iterator.get_state()
    assert json.loads(json.dumps(state)) == {"consumed": 2}
    other = iter(dataset)
    other.set_state(state)
    assert first_ids(other) == [2, 3, 4, 5, 6]
    other.set_state({"consumed": 7})
    assert list(other) == []
    other.set_state(state)
    assert first_ids([next(other)]) == [2]


def test_a_one_shot_iterator_is_read_once():
    dataset = from_iterable(b for b in batches())
    assert first_ids(dataset) == list(range(7))
    with pytest.raises(StageMisuseError, match=r"generator has been read.*pass"):
        next(iter(dataset))


def test_a_one_shot_iterator_can_be_restored_before_it_is_read():
    iterator = iter(from_iterable(b for b in batches()))
    iterator.set_state({"consumed": 5})
    assert first_ids(iterator) == [5, 6]
    iterator.set_state({"consumed": 1})
    with pytest.raises(StageMisuseError, match="cannot start again"):
        next(iterator)


def test_an_end_before_the_checkpoint_is_an_error():
    iterator = iter(from_iterable(lambda: batches(3)))
    iterator.set_state({"consumed": 5})
    with pytest.raises(CheckpointError, match=r"after 5 elements.*ended after 3"):
        next(iterator)


@pytest.mark.parametrize("state", [None, {}, {"consumed": -1}, {"consumed": "2"}])
def test_a_foreign_state_is_an_error(state):
    with pytest.raises(CheckpointError, match="consumed"):
        iter(from_iterable(batches)).set_state(state)


def test_what_is_no_iterable_is_an_error():
    with pytest.raises(ConfigError, match="int is neither iterable nor a function"):
        from_iterable(3)  # type: ignore[arg-type]


def test_close_closes_the_generator_and_ends_the_iteration():
    closed = []

    def source():
        try:
            yield from batches()
        finally:
            closed.append(True)

    iterator = iter(from_iterable(source))
    next(iterator)
    iterator.close()
    assert closed == [True]
    with pytest.raises(ValueError, match="after close"):
        next(iterator)


def test_workers_share_an_iterable_and_keep_its_order():
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=2)
    dataset = from_iterable(batches).mp_prefetch(options)
    assert first_ids(dataset) == list(range(7))


class Source:
    """Seven records; importable, so that workers can unpickle it."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return batches()[index]

    def __repr__(self) -> str:
        return "Source"


def loader(workers: int, epochs: int = 1) -> grain.DataLoader:
    return grain.DataLoader(
        data_source=Source(),
        sampler=grain.samplers.IndexSampler(
            num_records=7,
            shuffle=False,
            seed=1,
            num_epochs=epochs,
            shard_options=grain.sharding.NoSharding(),
        ),
        worker_count=workers,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_gives_its_elements_and_restores(workers):
    dataset = from_data_loader(loader(workers, epochs=2))
    iterator = iter(dataset)
    assert first_ids([next(iterator) for _ in range(5)]) == [0, 1, 2, 3, 4]
    state = json.loads(json.dumps(iterator.get_state()))
    rest = [5, 6, 0, 1, 2, 3, 4, 5, 6]
    assert first_ids(iterator) == rest
    with pytest.raises(StopIteration):
        next(iterator)
    iterator.set_state(state)
    assert first_ids(iterator) == rest
    other = iter(dataset)
    other.set_state(state)
    assert first_ids(other) == rest
    other.close()
    with pytest.raises(ValueError, match="after close"):
        next(other)


def test_data_loader_restores_where_one_worker_has_ended():
    # Seven records over two workers: the second has three of them.
    iterator = iter(from_data_loader(loader(2)))
    for _ in range(6):
        next(iterator)
    state = iterator.get_state()
    assert first_ids(iterator) == [6]
    other = iter(from_data_loader(loader(2)))
    other.set_state(state)
    assert first_ids(other) == [6]


def test_data_loader_state_passes_grains_own_check():
    grain.experimental.assert_equal_output_after_checkpoint(from_data_loader(loader(0)))


def test_data_loader_state_of_another_loader_is_an_error():
    state = iter(from_data_loader(loader(0))).get_state()
    state["data_loader"]["data_source"] = "Other"
    with pytest.raises(CheckpointError, match="another DataLoader"):
        iter(from_data_loader(loader(0))).set_state(state)
    with pytest.raises(CheckpointError, match="is no state of it"):
        iter(from_data_loader(loader(0))).set_state({"consumed": 1})


def test_only_a_data_loader_is_a_data_loader():
    with pytest.raises(ConfigError, match=r"list is not a grain\.DataLoader"):
        from_data_loader([])  # type: ignore[arg-type]
