"""Stage 2 where something goes wrong: bad input, misuse, failures of other hosts."""

import gc
import threading
import time

import grain
import numpy as np
import pytest

from grain_sparsecore.coordination import LocalGroup
from grain_sparsecore.errors import (
    CoordinationError,
    HostFailedError,
    InputError,
    LimitsExceededError,
    StageMisuseError,
)
from tests.coordination_helpers import (
    BATCH,
    MakeBatch,
    batch_of,
    coordinated,
    layout_of,
    run_hosts,
)


def as_it_is(element):
    return element


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("policy", ["stop", "pad"])
def test_a_failing_source_stops_all_hosts_in_its_step(window, policy):
    needs = [[1] * 9, [1, 1, 1, 1, 1, "record 5 is broken", 1], [1] * 9]
    layout = layout_of(3)
    runs = run_hosts(
        lambda host, reducer: coordinated(
            layout, needs[host], reducer, window=window, on_exhausted=policy
        ),
        3,
    )
    for host, run in enumerate(runs):
        assert run.indices == [0, 1, 2, 3, 4]
        if host == 1:
            assert isinstance(run.error, ValueError)
            assert str(run.error) == "record 5 is broken"
            names = [entry.name for entry in _traceback(run.error)]
            assert "map" in names, "its own traceback"
        else:
            assert isinstance(run.error, HostFailedError)
            assert (
                "the input pipeline of host 1 failed in step 5: ValueError: record 5"
                in str(run.error)
            )
        # The iterator stays failed, without another round.
        with pytest.raises(type(run.error)) as again:
            next(run.iterator)
        assert str(again.value) == str(run.error)


def _traceback(error):
    import traceback

    return traceback.extract_tb(error.__traceback__)


def test_a_failure_behind_the_end_of_another_host_is_never_reached():
    needs = [[1, 1, 1, 1, "broken"], [1, 1, 1]]
    layout = layout_of(2)
    runs = run_hosts(
        lambda host, reducer: coordinated(layout, needs[host], reducer, window=8), 2
    )
    assert [run.error for run in runs] == [None, None]
    assert [run.indices for run in runs] == [[0, 1, 2]] * 2


def test_of_two_failing_hosts_the_earlier_is_named():
    needs = [[1] * 4 + ["later"], [1] * 2 + ["first"], [1] * 9]
    layout = layout_of(3)
    runs = run_hosts(
        lambda host, reducer: coordinated(layout, needs[host], reducer, window=8), 3
    )
    assert [run.indices for run in runs] == [[0, 1]] * 3
    assert "host 1 failed in step 2: ValueError: first" in str(runs[0].error)
    assert str(runs[1].error) == "first"


@pytest.mark.parametrize(
    ("policy", "samples"), [("drop", [4, 4]), ("pad", [4, 0, 3, 4])]
)
def test_partial_batches(policy, samples):
    needs = [(1, 4), (1, 0), (1, 3), (1, 4)]
    it = iter(coordinated(layout_of(1), needs, window=3, on_partial_batch=policy))
    valid = [int(e["sparsecore"].num_valid_samples.sum()) for e in it]
    assert valid == samples
    assert it.skipped_batches == 4 - len(samples)


def test_a_partial_batch_can_be_an_error():
    it = iter(
        coordinated(layout_of(1), [(1, 4), (1, 3)], window=3, on_partial_batch="error")
    )
    next(it)
    with pytest.raises(InputError, match="step 1: the batch has 3 samples, not 4"):
        next(it)


def test_a_need_that_no_buffer_can_hold_is_an_error_on_all_hosts():
    layout = layout_of(2)
    runs = run_hosts(
        lambda host, reducer: coordinated(
            layout, [1, 2**30 if host else 1], reducer, window=1
        ),
        2,
    )
    for run in runs:
        assert run.indices == [0]
        assert isinstance(run.error, LimitsExceededError)


@pytest.mark.parametrize(
    ("element", "text"),
    [
        ({"x": np.zeros(2)}, "element['sparsecore'] is missing; put ComputeInputStats"),
        ({"sparsecore": 1}, "element['sparsecore'] is a int; put ComputeInputStats"),
        (
            {"sparsecore": batch_of(layout_of(1, tables=3), 1)},
            "statistics of a batch have shape (3, 3), but the layout has 2 stacks",
        ),
    ],
)
def test_an_element_that_is_not_of_stage_1_is_named(element, text):
    ds = coordinated(layout_of(1), [1])
    iterator = iter(ds)
    source = grain.MapDataset.source([0]).map(lambda _: element).to_iter_dataset()
    iterator._parents = (iter(source),)
    with pytest.raises(StageMisuseError) as caught:
        next(iterator)
    assert text in str(caught.value)


def test_a_leaf_without_an_empty_value_is_an_error_on_all_hosts():
    layout = layout_of(2)

    def with_secret(element):
        return {**element, "secret": object()}

    def make(host, reducer):
        parent = coordinated(layout, [1] * (2 - host), reducer)._parent
        return type(coordinated(layout, []))(
            parent.map(with_secret),
            layout=layout,
            reducer=reducer,
            on_exhausted="pad",
            window=1,
            timeout_seconds=20,
        )

    runs = run_hosts(make, 2)
    assert "element['secret'] is a object, for which there is no" in str(runs[1].error)
    assert isinstance(runs[1].error, CoordinationError)
    # The other host learns it as soon as it waits.
    assert isinstance(runs[0].error, HostFailedError)
    assert "host 1 failed (CoordinationError" in str(runs[0].error)


# Misuse.


def test_use_after_close():
    it = iter(coordinated(layout_of(1), [1, 2, 3]))
    next(it)
    it.close()
    it.close()
    with pytest.raises(ValueError, match="closed iterator"):
        next(it)


def test_close_returns_at_once_while_next_waits_for_other_hosts():
    it = iter(coordinated(layout_of(2), [1] * 4, LocalGroup(2).reducer(0)))
    errors = []

    def read():
        try:
            next(it)
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.3)
    started = time.monotonic()
    it.close()
    assert time.monotonic() - started < 1
    reader.join(5)
    assert not reader.is_alive()
    assert isinstance(errors[0], ValueError)
    assert "closed while it waited" in str(errors[0])


def test_a_host_that_leaves_during_the_handshake_is_named_at_once():
    layout = layout_of(2)
    group = LocalGroup(2)
    left, stays = (
        iter(coordinated(layout, [1, 2, 3], group.reducer(h), timeout_seconds=60))
        for h in range(2)
    )
    errors = []

    def read():
        try:
            next(left)
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.2)
    left.close()
    reader.join(5)
    assert "was closed while it waited" in str(errors[0])
    # Its part of the handshake is there, so the other host gets as far as the window.
    started = time.monotonic()
    with pytest.raises(HostFailedError, match="host 0 closed its iterator after"):
        next(stays)
    assert time.monotonic() - started < 10


def test_close_returns_at_once_while_the_source_blocks():
    release = threading.Event()

    def blocking(element):
        index, _ = element
        if index:
            release.wait(20)
        return MakeBatch(layout_of(1)).map(element)

    ds = grain.MapDataset.source([(0, 1), (1, 1)]).map(blocking).to_iter_dataset()
    it = iter(
        ds.pipe(type(coordinated(layout_of(1), [])), layout=layout_of(1), window=2)
    )
    errors = []

    def read():
        try:
            next(it)
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.2)
    started = time.monotonic()
    it.close()
    assert time.monotonic() - started < 1
    release.set()
    reader.join(5)
    assert not reader.is_alive()
    assert isinstance(errors[0], ValueError)


def test_next_from_a_second_thread_is_refused_and_harmless():
    it = iter(coordinated(layout_of(1), [1, 2, 3]))
    next(it)
    errors = []

    def read():
        try:
            next(it)
        except Exception as error:
            errors.append(error)

    other = threading.Thread(target=read)
    other.start()
    other.join(5)
    assert isinstance(errors[0], StageMisuseError)
    assert "next() was called from a second thread" in str(errors[0])
    assert len(list(it)) == 2


@pytest.mark.parametrize(
    ("wrap", "reader"),
    [
        (
            lambda ds: grain.experimental.ThreadPrefetchIterDataset(
                ds, prefetch_buffer_size=2
            ),
            "ThreadPrefetchIterDataset or device_put",
        ),
        (
            lambda ds: grain.experimental.device_put(ds, None),
            "ThreadPrefetchIterDataset or device_put",
        ),
        (
            lambda ds: grain.experimental.multithread_prefetch(
                ds, num_threads=1, buffer_size=2
            ),
            "mp_prefetch, multithread_prefetch or an interleave",
        ),
        (
            lambda ds: grain.experimental.multithread_prefetch(
                ds, num_threads=2, buffer_size=2
            ),
            "ThreadPrefetchIterDataset or device_put",
        ),
        (
            lambda ds: ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)),
            "mp_prefetch",
        ),
        (
            lambda ds: ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)),
            "mp_prefetch",
        ),
    ],
)
def test_stages_that_read_ahead_are_refused(wrap, reader):
    ds = coordinated(layout_of(1), [1, 2, 3]).map(as_it_is)
    with pytest.raises(StageMisuseError) as caught:
        list(wrap(ds))
    text = str(caught.value)
    assert f"CoordinateLimitsIterDataset runs inside {reader}, where" in text
    assert "behind every prefetch" in text


def test_a_data_loader_cannot_be_the_parent():
    loader = grain.DataLoader(
        data_source=[1, 2],
        sampler=grain.samplers.IndexSampler(num_records=2, num_epochs=1, seed=0),
    )
    with pytest.raises(StageMisuseError, match="cannot follow a DataLoader; it follow"):
        type(coordinated(layout_of(1), []))(loader, layout=layout_of(1))


def test_an_iterator_that_is_dropped_leaves_no_thread():
    gc.collect()
    before = threading.active_count()
    for _ in range(3):
        it = iter(coordinated(layout_of(1), [1, 2, 3]))
        next(it)
    del it
    gc.collect()
    assert threading.active_count() <= before


def test_the_summary_names_the_stage_shortly():
    ds = coordinated(layout_of(1), [1], window=32)
    assert str(ds) == str(iter(ds)) == "CoordinateLimits(window=32)"
    assert len(str(ds)) <= 30


def test_batches_are_not_copied():
    needs = [1] * 3
    ds = coordinated(layout_of(1), needs, window=2)
    element = next(iter(ds))
    assert element["sparsecore"].embedding_ids.shape == (8,)
    assert element["index"].shape == (BATCH,)
