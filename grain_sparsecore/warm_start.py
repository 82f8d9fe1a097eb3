"""Where a job's limits start: from files of any kind that holds some.

A job whose limits start where they would end has no change at all, and compiles once.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sparsecore.atomic import atomic_target
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.fdo import import_fdo
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import LimitsFile, fit_limits
from grain_sparsecore.limits_fit import merge_limits
from grain_sparsecore.minibatch import BUCKETS
from grain_sparsecore.stacking import INT32_MAX, StackedLayout

if TYPE_CHECKING:
    from grain_sparsecore.config import Config

_logger = logging.getLogger(__name__)

# Of Grain's own checkpoint handler, one for each process.
_CHECKPOINT_STATES = "process_*-of-*.json"

# Keys by which the state of stage 2 is found in that of a whole pipeline.
_STATE_KEYS = {"version", "parent", "start", "limits", "configuration"}


def load_start_limits(
    paths: Iterable[str | os.PathLike[str]],
    *,
    layout: StackedLayout,
    adapt: bool = False,
    minibatches: int = 1,
) -> Limits:
    """The limits to start with: the maximum over all paths, from the floors up.

    Args:
        paths: Limits files; states of a pipeline as JSON, or directories with those
            that Grain's checkpoint handler wrote; directories with FDO files of
            jax-tpu-embedding.
        layout: The stacks.
        adapt: Take limits made for something else as bounds, see `adapt_limits`.
        minibatches: Into how many a batch may be split, whose buffer holds them all.

    Raises:
        ConfigError: A path holds no limits, or those of something else.
    """
    start = Limits.start(layout)
    found = (_load(p, layout, adapt, minibatches) for p in paths)
    return merge_limits([start, *found])


def start_limits_of(config: "Config", layout: StackedLayout) -> Limits:
    """The limits that a configured job starts with.

    Raises:
        ConfigError: As `load_start_limits`.
    """
    return load_start_limits(
        config.limits.file,
        layout=layout,
        adapt=config.limits.adapt,
        minibatches=minibatches_of(config),
    )


def minibatches_of(config: "Config") -> int:
    """Into how many minibatches a batch of a configured job may be split."""
    return BUCKETS if config.limits.overflow.minibatching else 1


def _load(
    path: str | os.PathLike[str], layout: StackedLayout, adapt: bool, minibatches: int
) -> Limits:
    where = Path(path)
    if where.is_dir():
        states = sorted(where.glob(_CHECKPOINT_STATES))
        if not states:
            return _load_fdo(where, layout, minibatches)
        # Limits are the same on all hosts.
        where = states[0]
    file = _load_state(where) or LimitsFile.load(where)
    return fit_limits(
        file, layout=layout, adapt=adapt, path=where, minibatches=minibatches
    )


def _load_fdo(folder: Path, layout: StackedLayout, minibatches: int) -> Limits:
    found = import_fdo(folder, layout=layout, minibatches=minibatches)
    if found.skipped:
        name, reason = next(iter(sorted(found.skipped.items())))
        _logger.warning(
            "FDO directory %r: %d of %d files belong to another job and do not count, "
            "for example %s: %s",
            os.fspath(folder),
            len(found.skipped),
            len(found.skipped) + len(found.used),
            name,
            reason,
        )
    return found.limits


def _load_state(path: Path) -> LimitsFile | None:
    """The limits of a checkpoint state, or None where the file is none."""
    try:
        plain = json.loads(atomic_target(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        # Whoever reads it as a limits file says what is wrong.
        return None
    state = _find_state(plain)
    if state is None:
        return None
    try:
        return limits_of_state(state)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"checkpoint state {os.fspath(path)!r} is damaged, or of another release: "
            f"{error!r}."
        ) from error


def _find_state(plain: Any) -> Mapping[str, Any] | None:
    if isinstance(plain, Mapping):
        if set(plain) >= _STATE_KEYS:
            return plain
        for value in plain.values():
            found = _find_state(value)
            if found is not None:
                return found
    return None


def limits_of_state(state: Mapping[str, Any]) -> LimitsFile:
    """The limits in a state of `CoordinateLimitsIterDataset`, and what they are for."""
    saved = json.loads(state["configuration"])
    topology = saved["topology"]
    cores = topology["local_device_count"] * topology["num_sc_per_device"]
    stacks: dict[str, Any] = {}
    for kind in ("tables", "features"):
        for name, spec in sorted(saved[kind].items()):
            stack = stacks.setdefault(spec["in_stack"], {"tables": {}, "features": {}})
            if kind == "tables":
                stack[kind][name] = {
                    "vocabulary_size": spec["vocabulary_size"],
                    "rotation": spec["shard_rotation"],
                }
            else:
                stack[kind][name] = spec["table"]
    names = tuple(sorted(stacks))
    rows = np.array(state["limits"])
    if rows.dtype.kind != "i" or rows.shape != (len(names), 3):
        raise ValueError(f"limits are not three integers for each of {list(names)}")
    if rows.min() < 1 or rows.max() > INT32_MAX:
        raise ValueError(f"a limit is not from 1 to {INT32_MAX}")
    return LimitsFile(
        limits=Limits.from_array(names, rows.astype(np.int64)),
        made_for={
            "topology": {
                "num_partitions": (
                    topology["global_device_count"] * topology["num_sc_per_device"]
                ),
                "num_sc_per_device": topology["num_sc_per_device"],
                "samples_per_sc": saved["batch_size"] // cores,
            },
            "stacks": stacks,
        },
        origin={"step": state["start"]},
    )
