"""Stage 2 above readers that raise what readers should not, or are interrupted."""

import grain
import pytest

from grain_sparsecore.coordination.messages import describe_error
from grain_sparsecore.errors import HostFailedError
from grain_sparsecore.pipeline.coordinate import CoordinateLimitsIterDataset
from tests.coordination_helpers import EXACT, MakeBatch, layout_of, run_hosts


class Panic(BaseException):
    """As libraries in Rust raise it: no Exception."""


class WithoutTextError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class RaisesAt:
    """A map that raises at one record, as often as told."""

    def __init__(self, layout, error, *, record, times=10**9):
        self._make = MakeBatch(layout)
        self._error = error
        self._record = record
        self._times = times

    def __call__(self, element):
        if element[0] == self._record and self._times > 0:
            self._times -= 1
            raise self._error
        return self._make.map(element)


def pipeline(layout, function, *, count=9, threads=0, reducer=None, **options):
    ds = grain.MapDataset.source([(i, 1) for i in range(count)]).map(function)
    read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    options = {"window": 4, "timeout_seconds": 20, "policy": EXACT, **options}
    return ds.to_iter_dataset(read).pipe(
        CoordinateLimitsIterDataset, layout=layout, reducer=reducer, **options
    )


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (Panic("index out of bounds"), Panic, "Panic: index out of bounds"),
        (GeneratorExit(), GeneratorExit, "GeneratorExit"),
        (MemoryError(), MemoryError, "MemoryError"),
        (WithoutTextError(), WithoutTextError, "WithoutTextError (whose text raises R"),
        (OSError("part-\udcff"), OSError, "OSError: part-\\udcff"),
        (ValueError("x" * 10**6), ValueError, "ValueError: " + "x" * 1900),
        (StopIteration(), RuntimeError, "StopIteration"),
    ],
)
def test_whatever_a_reader_raises_stops_all_hosts_in_its_step(
    error, kind, told, threads
):
    layout = layout_of(2)
    runs = run_hosts(
        lambda host, reducer: NoStrayErrors(
            pipeline(
                layout,
                RaisesAt(layout, error, record=5 if host else -1),
                threads=threads,
                reducer=reducer,
            )
        ),
        2,
    )
    assert [run.indices for run in runs] == [[0, 1, 2, 3, 4]] * 2
    assert isinstance(runs[0].error, HostFailedError)
    assert f"host 1 failed in step 5: {told}" in str(runs[0].error)
    assert len(str(runs[0].error)) < 2200
    own = runs[1].error.__cause__
    assert type(own) is kind
    if kind is RuntimeError:
        assert "a map of the input raised StopIteration" in str(own)
        assert own.__cause__ is error
    else:
        assert own is error


class NoStrayErrors:
    """Reads a pipeline; what is no Exception must not end the thread of the test."""

    def __init__(self, ds):
        self._iterator = iter(ds)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self._iterator)
        except (StopIteration, HostFailedError):
            raise
        except BaseException as error:
            raise RuntimeError("this host") from error


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("record", [0, 3, 5, 8])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_reader_loses_no_batch(record, threads, interrupt):
    layout = layout_of(1)
    function = RaisesAt(layout, interrupt(), record=record, times=3)
    iterator = iter(pipeline(layout, function, threads=threads))
    indices, interrupts = [], 0
    while True:
        try:
            indices.append(int(next(iterator)["index"][0]))
        except StopIteration:
            break
        except interrupt:
            interrupts += 1
            state = iterator.get_state()
    assert interrupts == 3
    assert indices == list(range(9))
    # What was saved in between continues there too.
    again = iter(pipeline(layout, MakeBatch(layout)))
    again.set_state(state)
    first = record - record % 4
    assert [int(e["index"][0]) for e in again] == list(range(first, 9))


def test_an_interrupt_counts_no_partial_batch_twice():
    layout = layout_of(1)
    make = RaisesAt(layout, KeyboardInterrupt(), record=3, times=1)

    def partial(element):
        return make((element[0], (1, 2) if element[0] == 1 else 1))

    iterator = iter(pipeline(layout, partial, threads=2))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [int(e["index"][0]) for e in iterator] == [0, 2, 3, 4, 5, 6, 7, 8]
    assert iterator.skipped_batches == 1


def test_the_text_of_an_error_can_always_be_sent():
    assert describe_error(ValueError("naïve 日本")) == "ValueError: naïve 日本"
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(ValueError("\ud800")).encode() == b"ValueError: \\ud800"


def test_a_state_taken_while_the_first_window_is_read_is_that_of_the_start():
    layout = layout_of(1)
    states = []

    def taking(element):
        if element[0] == 2:
            states.append(iterator.get_state())
        return MakeBatch(layout).map(element)

    start = iter(pipeline(layout, taking)).get_state()
    iterator = iter(pipeline(layout, taking))
    next(iterator)
    assert states == [start]


def test_a_state_taken_after_a_failure_in_the_first_window_is_that_of_the_start():
    layout = layout_of(1)
    start = iter(pipeline(layout, MakeBatch(layout))).get_state()
    iterator = iter(pipeline(layout, RaisesAt(layout, ValueError("x"), record=0)))
    with pytest.raises(ValueError, match="x"):
        next(iterator)
    assert iterator.get_state() == start


class Fragile(grain.IterDataset):
    """Its iterators are of no use any more once they were interrupted."""

    def __init__(self, parent, interrupts):
        super().__init__(parent)
        self.interrupts = interrupts
        self.made = []

    def __iter__(self):
        self.made.append(FragileIterator(self._parent.__iter__(), self.interrupts))
        return self.made[-1]


class FragileIterator(grain.DatasetIterator):
    def __init__(self, parent, interrupts):
        super().__init__(parent)
        self._interrupts = interrupts
        self._torn = False

    def _interrupt(self, call):
        assert not self._torn
        if self._interrupts and self._interrupts[0] == call:
            del self._interrupts[0]
            self._torn = True
            raise KeyboardInterrupt

    def __next__(self):
        element = next(self._parent)
        self._interrupt("next")
        return element

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._interrupt("set_state")
        self._parent.set_state(state)


def test_readers_are_made_anew_after_an_interrupt_even_of_that():
    layout = layout_of(1)
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    source = grain.MapDataset.source([(i, 1) for i in range(9)])
    batches = source.map(MakeBatch(layout)).to_iter_dataset(read)
    fragile = Fragile(batches, ["next", "set_state", "set_state", "next"])
    iterator = iter(CoordinateLimitsIterDataset(fragile, layout=layout, window=4))
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
    assert [int(e["index"][0]) for e in iterator] == list(range(9))
    assert len(fragile.made) == 5
    assert [it._closed for it in fragile.made] == [True] * 4 + [False]
