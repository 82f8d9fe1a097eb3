"""What leaves a worker process: all of it arrives, or is told."""

import multiprocessing
import threading
import time

import grain
import numpy as np
import pytest

import grain_sparsecore as gsc
from grain_sparsecore.config import Config, PipelineConfig, TopologyConfig
from grain_sparsecore.errors import InputTypeError
from grain_sparsecore.pipeline.delivery import DeliverIterDataset, DeliverMapDataset


class LockedError(Exception):
    def __init__(self):
        super().__init__("the reader is locked")
        self.lock = threading.Lock()


class TwoPartsError(Exception):
    def __init__(self, one, two):
        super().__init__(one)
        self.two = two


class Raises:
    def __init__(self, kind):
        self._kind = kind

    def __call__(self, record):
        if record["n"] < 9:
            return record
        errors = {
            "locked": LockedError,
            "two parts": lambda: TwoPartsError(1, 2),
            "plain": lambda: ValueError("record 9"),
            "exit": lambda: SystemExit(0),
            "stop": StopIteration,
            "interrupt": KeyboardInterrupt,
        }
        if self._kind == "leaf":
            return {**record, "more": {"f": lambda: 1}}
        error = errors[self._kind]()
        if isinstance(error, Exception):
            error.add_note("a note")
        raise error


def config_with_worker():
    return Config(
        topology=TopologyConfig(
            num_sc_per_device=2, global_device_count=1, local_device_count=1
        ),
        pipeline=PipelineConfig(batch_size=2, workers=1, window=2),
        tables=(gsc.TableSpec(name="m", vocabulary_size=100, embedding_dim=8),),
        features=(gsc.FeatureSpec(name="m", table="m"),),
    )


def records(kind):
    source = [{"m": [i], "n": i} for i in range(20)]
    return grain.MapDataset.source(source).map(Raises(kind))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("locked", "LockedError: the reader is locked\nIn a worker, at\n"),
        ("two parts", "TwoPartsError: 1\nIn a worker, at\n"),
        ("exit", "SystemExit: 0\nIn a worker, at\n"),
        ("stop", "batch 9: a map of the input raised StopIteration"),
    ],
)
def test_what_would_be_lost_in_a_worker_is_told_in_words(kind, text):
    ds = DeliverMapDataset(records(kind), sends=True)
    assert ds[8]["n"] == 8
    with pytest.raises(RuntimeError) as caught:
        ds[9]
    assert str(caught.value).startswith(text)
    if kind in ("locked", "two parts"):
        assert "test_delivery.py" in str(caught.value), "its own traceback"
        assert caught.value.__notes__ == ["a note"]


@pytest.mark.parametrize(
    ("kind", "error"), [("plain", ValueError), ("interrupt", KeyboardInterrupt)]
)
def test_what_arrives_by_itself_stays_as_it_is(kind, error):
    with pytest.raises(error):
        DeliverMapDataset(records(kind), sends=True)[9]


def test_in_the_main_process_exceptions_stay_as_they_are():
    with pytest.raises(LockedError):
        DeliverMapDataset(records("locked"), sends=False)[9]
    with pytest.raises(SystemExit):
        DeliverMapDataset(records("exit"), sends=False)[9]
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        DeliverMapDataset(records("stop"), sends=False)[9]
    assert DeliverMapDataset(records("leaf"), sends=False)[9]["more"]["f"]() == 1


def test_a_leaf_that_would_take_its_batch_along_is_named():
    with pytest.raises(InputTypeError) as caught:
        DeliverMapDataset(records("leaf"), sends=True)[9]
    text = str(caught.value)
    assert "element['more']['f'] is a function, which cannot be sent from" in text
    assert "use pipeline.workers=0" in text


def test_leaves_that_can_be_sent_are_left_alone():
    element = {
        "array": np.zeros(3),
        "texts": np.array(["a", b"b", None], object),
        "scalar": np.float32(1),
        "nested": (1, "x", [b"y"]),
    }
    ds = DeliverMapDataset(grain.MapDataset.source([element]), sends=True)
    assert ds[0] is element


def test_it_slices_and_repeats_as_its_parent_does():
    ds = DeliverMapDataset(grain.MapDataset.range(10), sends=True)
    assert len(ds) == 10
    assert list(ds[1::3]) == [1, 4, 7]
    assert list(ds.repeat(2)) == [*range(10)] * 2
    assert str(ds) == "DeliverMapDataset"


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("locked", RuntimeError, "LockedError: the reader is locked"),
        ("exit", RuntimeError, "SystemExit: 0"),
        ("stop", RuntimeError, "a batch: a map of the input raised StopIteration"),
        ("plain", ValueError, "record 9"),
        ("leaf", InputTypeError, "is a function, which cannot be sent"),
    ],
)
def test_an_iter_dataset_in_a_worker_is_heard_as_well(kind, error, text):
    iterator = iter(DeliverIterDataset(records(kind).to_iter_dataset(), sends=True))
    assert [next(iterator)["n"] for _ in range(8)] == [*range(8)]
    state = iterator.get_state()
    assert next(iterator)["n"] == 8
    with pytest.raises(error, match=text):
        next(iterator)
    iterator = iter(DeliverIterDataset(records(kind).to_iter_dataset(), sends=True))
    iterator.set_state(state)
    assert next(iterator)["n"] == 8


def test_an_iter_dataset_ends_where_its_parent_does():
    ds = DeliverIterDataset(grain.MapDataset.range(3).to_iter_dataset(), sends=True)
    assert list(ds) == [0, 1, 2]
    assert str(ds) == "DeliverIterDataset"


@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("locked", "LockedError: the reader is locked"),
        ("leaf", "is a function, which cannot be sent from a worker"),
    ],
)
def test_a_real_worker_neither_hangs_nor_loses_a_batch(kind, text, iterable):
    ds = grain.MapDataset.source([{"m": [i], "n": i} for i in range(20)])
    if kind == "locked":
        ds = ds.map(Raises(kind)).batch(2, batch_fn=gsc.batch_ragged)
    else:
        ds = ds.batch(2, batch_fn=gsc.batch_ragged).map(with_function_in_batch_4)
    if iterable:
        ds = ds.to_iter_dataset()
    iterator = iter(gsc.sparsecore_pipeline(ds, config_with_worker()))
    firsts = [int(next(iterator)["n"][0]) for _ in range(4)]
    with pytest.raises((RuntimeError, InputTypeError), match=text):
        next(iterator)
    iterator.close()
    assert firsts == [0, 2, 4, 6]


def with_function_in_batch_4(batch):
    return {**batch, "f": (lambda: 1) if batch["n"][0] == 8 else len}


def sleep_long(batch):
    if batch["n"][0] >= 8:
        time.sleep(60)
    return batch


def test_closing_does_not_wait_for_a_worker_that_is_busy():
    ds = grain.MapDataset.source([{"m": [i], "n": i} for i in range(40)])
    ds = ds.batch(2, batch_fn=gsc.batch_ragged).map(sleep_long)
    iterator = iter(gsc.sparsecore_pipeline(ds, config_with_worker()))
    next(iterator)
    started = time.monotonic()
    iterator.close()
    # 0.7 seconds for workers that are about to end.
    assert time.monotonic() - started < 2
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    for process in multiprocessing.active_children():
        process.kill()
