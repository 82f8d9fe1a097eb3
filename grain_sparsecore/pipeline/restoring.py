"""Puts the iterator before stage 2 where a checkpoint state says."""

import copy
import dataclasses
from typing import Any

import grain

from grain_sparsecore.errors import CheckpointError
from grain_sparsecore.pipeline.coordinate_options import CoordinateOptions
from grain_sparsecore.pipeline.state import CoordinateState, is_elastic_parent


def state_of(parent: grain.DatasetIterator[Any]) -> Any:
    """The state of ``parent``, unchanged by what it does later."""
    return copy.deepcopy(parent.get_state())


def restore(
    parent: grain.DatasetIterator[Any], state: Any, options: CoordinateOptions
) -> None:
    """Gives ``parent`` its part of a state.

    Raises:
        CheckpointError: It does not take it.
    """
    try:
        parent.set_state(state)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"pipeline {options.name!r}: {parent} does not take its part of the state "
            f"({type(error).__name__}: {error}). Build the dataset before this stage "
            "as it was when the state was saved, with as many pipeline.workers, or "
            "start the data anew."
        ) from error


def move(
    parent: grain.DatasetIterator[Any], at: CoordinateState, options: CoordinateOptions
) -> CoordinateState:
    """Puts ``parent`` to the step of a state of another number of hosts.

    Returns:
        The state of this number of hosts: a window begins at that step.

    Raises:
        CheckpointError: The parent cannot be put to a step.
    """
    step = at.start + at.position
    if is_elastic_parent(at.parent):
        layout = options.layout
        ahead = at.position * layout.batch_size * layout.topology.num_hosts
        parent.set_state({key: value + ahead for key, value in at.parent.items()})
    else:
        try:
            grain.experimental.set_next_index(parent, step)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"pipeline {options.name!r}: the state was saved on another number of "
                f"hosts, and {parent} cannot be put to step {step}; restore on as many "
                "hosts, or start the data anew."
            ) from error
    return dataclasses.replace(at, parent=state_of(parent), start=step, position=0)
