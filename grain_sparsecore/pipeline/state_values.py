"""The values of a checkpoint state, which a checkpointer may have lost or changed."""

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from grain_sparsecore.errors import CheckpointError
from grain_sparsecore.stacking import INT32_MAX


def damaged(name: str, what: str) -> CheckpointError:
    """The error of a state of pipeline ``name`` that nothing can be read from."""
    return CheckpointError(
        f"pipeline {name!r}: the state is damaged: {what}. Restore another checkpoint, "
        "or start the data anew."
    )


def read_number(state: Mapping[str, Any], key: str, *, high: int, name: str) -> int:
    """A whole number from 0 to ``high``, a numpy or jax scalar as well.

    Raises:
        CheckpointError: It is something else.
    """
    value = state[key]
    try:
        number = operator.index(value)
    except TypeError as error:
        raise damaged(name, f"{key} is {value!r:.60}, no whole number") from error
    if not 0 <= number <= high:
        raise damaged(name, f"{key}={number} is not from 0 to {high}")
    return number


def read_rows(
    state: Mapping[str, Any], key: str, stacks: int, *, low: int, name: str
) -> np.ndarray:
    """int64 [stacks, 3]: three numbers for each stack, from ``low`` up.

    Raises:
        CheckpointError: It is something else.
    """
    value = state[key]
    try:
        rows = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise damaged(name, f"{key} is {value!r:.60}, no rows of numbers") from error
    if rows.shape != (stacks, 3) or rows.dtype.kind not in "iu":
        what = f"{key} is {value!r:.60}, not three whole numbers for each stack"
        raise damaged(name, f"{what} ({stacks})")
    if rows.min() < low or rows.max() > INT32_MAX:
        what = f"{key} has a number outside {low} to {INT32_MAX}: {rows.tolist()!s:.60}"
        raise damaged(name, what)
    return rows.astype(np.int64)
