"""Any Python iterable as a Grain dataset: tf.data, PyTorch loaders, generators."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain

from grain_sparsecore.errors import CheckpointError, ConfigError, StageMisuseError


def from_iterable(
    source: Iterable[Any] | Callable[[], Iterable[Any]],
) -> grain.IterDataset[Any]:
    """A Grain dataset of the elements of an iterable.

    The state of its iterator is the number of elements consumed. Restoring starts the
    iterable anew and skips as many, which costs the time of reading them and is right
    only if the iterable gives the same elements again: fix the seeds of its shuffles.

    Args:
        source: A function that returns a fresh iterable, such as
            ``dataset.as_numpy_iterator`` of tf.data (which fills the gaps of a
            ``SparseTensor`` with id 0: pass ``dataset`` itself where there are any);
            or an object that can be iterated again and again, such as a
            ``tf.data.Dataset``, a PyTorch ``DataLoader`` or a list. A one-shot
            iterator, such as a generator, is accepted too, but it can be read once,
            and restored only before its first element is read.

    Returns:
        A dataset that goes through ``sparsecore_pipeline`` like any other. With
        worker processes, each of n workers reads everything and keeps every n-th
        element, and the source must survive pickling.

    Raises:
        ConfigError: ``source`` is neither iterable nor callable.
    """
    if not isinstance(source, Iterable) and not callable(source):
        raise ConfigError(
            f"from_iterable: {type(source).__name__} is neither iterable nor a "
            "function that returns an iterable."
        )
    return IterableIterDataset(source)


class IterableIterDataset(grain.IterDataset[Any]):
    """What `from_iterable` returns."""

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        super().__init__()
        self._source = source
        self._one_shot_taken = False
        self._start = 0
        self._step = 1

    def __iter__(self) -> "_IterableIterator":
        return _IterableIterator(self)

    def open(self) -> Iterator[Any]:
        """A fresh iterator over this worker's elements."""
        source = self._source
        # Checked first: some iterables are callable as well.
        iterable = source if isinstance(source, Iterable) else source()
        iterator = iter(iterable)
        if iterator is self._source:
            if self._one_shot_taken:
                raise StageMisuseError(
                    f"from_iterable: the {type(source).__name__} has been read "
                    "already and cannot start again; pass a function that returns a "
                    "fresh one, for example dataset.as_numpy_iterator, not its result."
                )
            self._one_shot_taken = True
        if self._start == 0 and self._step == 1:
            return iterator
        return itertools.islice(iterator, self._start, None, self._step)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Grain's hook for worker processes: this copy keeps ``sl`` of the elements."""
        if sequential_slice:
            raise StageMisuseError(
                "from_iterable: an iterable of unknown length has no sequential "
                "slices; use mp_prefetch without sequential_slice."
            )
        self._start += (sl.start or 0) * self._step
        self._step *= sl.step or 1

    def __str__(self) -> str:
        return f"FromIterable({type(self._source).__name__})"


class _IterableIterator(grain.DatasetIterator[Any]):
    """Counts what it yields; opens the iterable at the first element."""

    def __init__(self, dataset: IterableIterDataset) -> None:
        super().__init__()
        self._dataset = dataset
        self._iterator: Iterator[Any] | None = None
        self._count = 0
        self._closed = False

    def __next__(self) -> Any:
        if self._closed:
            raise ValueError("from_iterable: next() after close().")
        if self._iterator is None:
            self._iterator = self._dataset.open()
            self._skip(self._count)
        element = next(self._iterator)
        self._count += 1
        return element

    def _skip(self, count: int) -> None:
        assert self._iterator is not None
        skipped = sum(1 for _ in itertools.islice(self._iterator, count))
        if skipped < count:
            raise CheckpointError(
                f"from_iterable: the checkpoint was taken after {count} elements, but "
                f"the iterable ended after {skipped}; restore with the data it was "
                "taken with."
            )

    def get_state(self) -> dict[str, int]:
        return {"consumed": self._count}

    def set_state(self, state: dict[str, int]) -> None:
        consumed = state.get("consumed") if isinstance(state, dict) else None
        if not isinstance(consumed, int) or consumed < 0:
            raise CheckpointError(
                f"from_iterable: {state!r} is no state of it; it must be "
                "{'consumed': <number of elements>}."
            )
        self._release()
        self._iterator = None
        self._count = consumed

    def close(self) -> None:
        """Ends the iteration and closes the iterator, where it can be closed."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        # Generators hold files open until they are closed.
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()

    def __str__(self) -> str:
        return f"FromIterable(consumed={self._count})"
