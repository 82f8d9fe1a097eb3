"""Keeps a failing batch without getting in the way of its error."""

import itertools
import os
from pathlib import Path
from typing import Any

from grain_sparsecore.failing.batch import FailingBatch, describe_origin, type_name
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import write_atomically
from grain_sparsecore.stacking import StackedLayout

# Files in a folder, over all hosts, workers and runs that share it, after which no more
# are added; workers that fail in the same moment can pass it by one each.
MOST_FILES = 16

# How the notes begin that `keep_failing` adds to an error.
_NOTE = "The failing batch "


def keep_failing(
    folder: str | os.PathLike[str],
    element: Any,
    error: Exception,
    *,
    layout: StackedLayout,
    key: str = "sparsecore",
    cut_above: Limits | None = None,
    columns: tuple[str, tuple[str, ...]] | None = None,
) -> None:
    """Writes a batch to ``folder``, and adds a note to ``error`` that names the file.

    The name follows from the batch and the error: writers do not clash, and a job that
    is started again adds no second file. Where the batch cannot be written the note
    says why. Notes survive the pickling of Grain's worker processes.

    Args:
        folder: Made where it does not exist.
        element: The batch, in the form it came in.
        error: What the stage raised; its type and text stay as they are.
        layout: The layout of the stage.
        key: As in `FailingBatch`.
        cut_above: Likewise.
        columns: Likewise.
    """
    folder = Path(folder)
    try:
        batch = FailingBatch(
            element=element,
            layout=layout,
            key=key,
            cut_above=cut_above,
            columns=columns,
            error_type=type_name(error),
            error_text=str(error),
            origin=describe_origin(),
        )
        error.add_note(f"{_NOTE}{_write(folder, batch)}")
    except Exception as problem:  # whatever it is, the first error says more
        error.add_note(
            f"{_NOTE}could not be kept in {os.fspath(folder)!r}: "
            f"{type(problem).__name__}: {problem}"
        )


def kept_notes(error: BaseException) -> list[str]:
    """The notes of `keep_failing`, without those of Grain and JAX."""
    notes = getattr(error, "__notes__", [])
    return [note for note in notes if note.startswith(_NOTE)]


def _write(folder: Path, batch: FailingBatch) -> str:
    """Writes the file; returns what has become of the batch."""
    folder.mkdir(parents=True, exist_ok=True)
    digest, data = batch.to_bytes()
    path = folder / f"failing-{digest}.npz"
    if not path.exists():
        # With those that a killed process left half-written under another name.
        count = sum(
            1 for _ in itertools.chain(folder.glob("failing-*"), folder.glob(".fail*"))
        )
        if count >= MOST_FILES:
            return (
                f"is not kept: {os.fspath(folder)!r} holds {count} files, and "
                f"{MOST_FILES} are the most. Remove some, or name another folder."
            )
        write_atomically(path, data)
    return (
        f"is kept in {os.fspath(path)!r}; to see the error again: "
        f"python -m grain_sparsecore replay {os.fspath(path)!r}"
    )
