"""Sees to it that what happens in Grain's worker processes is heard of outside.

A worker sends batches and exceptions through a queue whose feeding thread pickles
them. What cannot be pickled is dropped there: a batch goes missing without a word, and
for an exception the main process waits for ever. Exception types of the main script
are among them, and so is everything that holds a lock or an open file.
"""

import pickle
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import grain
import jax
import numpy as np

from grain_sparsecore.coordination.messages import comes_from_a_record, describe_error
from grain_sparsecore.errors import InputTypeError


class DeliverMapDataset(grain.MapDataset[Any]):
    """Hands on the batches of its parent; failures so that they reach the reader.

    Nothing changes for batches and exceptions that arrive by themselves. Otherwise a
    RuntimeError has the text and traceback of the exception.

    Args:
        parent: The batches.
        sends: Whether it runs in a worker.

    Raises:
        InputTypeError: A batch holds something that cannot be sent from a worker.
        RuntimeError: For an exception that cannot be sent from one. In any process,
            for a StopIteration, which would pass for the end of the data.
    """

    _MUTATES_ELEMENT_SPEC = False

    def __init__(self, parent: grain.MapDataset[Any], *, sends: bool) -> None:
        super().__init__(parent)
        self._sends = sends

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        try:
            return _deliver(lambda: self._parent[index], self._sends)
        except StopIteration as stop:
            raise _not_the_end(f"batch {index}") from stop

    def __str__(self) -> str:
        return "DeliverMapDataset"


class DeliverIterDataset(grain.IterDataset[Any]):
    """The same for an IterDataset, whose StopIteration is its end.

    Args:
        parent: The batches.
        sends: Whether it runs in a worker.

    Raises:
        InputTypeError: As for `DeliverMapDataset`.
        RuntimeError: As for `DeliverMapDataset`; for a StopIteration that comes out of
            a record of a MapDataset before it.
    """

    def __init__(self, parent: grain.IterDataset[Any], *, sends: bool) -> None:
        super().__init__(parent)
        self._sends = sends

    def __iter__(self) -> "DeliverDatasetIterator":
        return DeliverDatasetIterator(self._parent.__iter__(), sends=self._sends)

    def __str__(self) -> str:
        return "DeliverIterDataset"


class DeliverDatasetIterator(grain.DatasetIterator[Any]):
    """Iterator of `DeliverIterDataset`; its state is that of its parent."""

    def __init__(self, parent: grain.DatasetIterator[Any], *, sends: bool) -> None:
        super().__init__(parent)
        self._sends = sends

    def __next__(self) -> Any:
        self._assert_not_closed()
        try:
            return _deliver(lambda: next(self._parent), self._sends)
        except StopIteration as stop:
            if comes_from_a_record(stop):
                raise _not_the_end("a batch") from stop
            raise

    def get_state(self) -> Any:
        """State of the parent: this stage remembers nothing."""
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        """Restores the parent."""
        self._parent.set_state(state)

    def __str__(self) -> str:
        return "DeliverDatasetIterator"


def _deliver(read: Callable[[], Any], sends: bool) -> Any:
    """What ``read`` returns or raises, or what of it leaves a worker."""
    try:
        element = read()
    except (KeyboardInterrupt, StopIteration):
        raise
    except BaseException as error:
        if not sends or _arrives(error):
            raise
        raise _in_words(error) from None
    if sends:
        _check_arrives(element)
    return element


def _not_the_end(batch: str) -> RuntimeError:
    return RuntimeError(
        f"{batch}: a map of the input raised StopIteration, which ends nothing there. "
        "Look for a next() without a default in it."
    )


def _arrives(error: BaseException) -> bool:
    """Whether Grain's worker catches it, and pickling brings it back."""
    if not isinstance(error, Exception):
        return False
    try:
        again = pickle.loads(ForkingPickler.dumps(error))
    except Exception:
        return False
    return type(again) is type(error)


def _in_words(error: BaseException) -> RuntimeError:
    trace = "".join(traceback.format_tb(error.__traceback__))
    told = RuntimeError(f"{describe_error(error)}\nIn a worker, at\n{trace}")
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def _check_arrives(element: Any) -> None:
    odd = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(element)
        if not _is_plain(leaf)
    }
    for path, leaf in odd.items():
        try:
            ForkingPickler.dumps(leaf)
        except Exception as error:
            raise InputTypeError(
                f"element{path} is a {type(leaf).__name__}, which cannot be sent from "
                f"a worker ({describe_error(error)}), so the batch would go missing; "
                "drop it before, or use pipeline.workers=0."
            ) from None


def _is_plain(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return not leaf.dtype.hasobject
    return isinstance(leaf, bool | int | float | str | bytes | np.generic)
