"""The checkpoint state of stage 2, and what a job of another shape may take from it.

Limits are maxima per SparseCore and partition. They carry over to any job whose number
of partitions N and samples per SparseCore are the same, whatever its hosts are. With
another N, ids meet in other partitions: the limits start anew and are measured again.

Positions carry over to another number of hosts where the global batch is the same and
step i of all hosts together is a fixed slice of the data: host h of n reads records
h::n. Then every host continues at the same step.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from grain_sparsecore.coordination.differences import describe_keys, differing_keys
from grain_sparsecore.errors import CheckpointError
from grain_sparsecore.limits import Limits
from grain_sparsecore.pipeline.state_values import damaged, read_number, read_rows
from grain_sparsecore.stacking import StackedLayout

STATE_VERSION = 1

# Keys of a state of this version.
_KEYS = {
    "version",
    "parent",
    "start",
    "position",
    "limits",
    "configuration",
    "skipped",
    "padded",
    "needed",
    "shrink",
}

_MOST_BATCHES = 2**62

# Keys of the state of grain.experimental.ElasticIterator.
_ELASTIC_KEYS = {"global_next_index"}

# Keys of the configuration that follow from the number of hosts and devices.
_TOPOLOGY_KEYS = ("topology", "batch_size")
_TOPOLOGY_FIELDS = {
    "padded_vocabulary_size",
    "row_offset_in_shard",
    "shard_rotation",
    "row_offset",
    "col_offset",
    "col_shift",
}

# Where limits start may differ: the state has the limits.
_IGNORED_KEYS = ("start_limits",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinateState:
    """Where stage 2 is, as JSON-able values of one shape for its life.

    Attributes:
        parent: State of the parent at the start of the window.
        start: Index of the first batch of the window.
        position: Batches of the window that were handed on.
        limits: Limits of the batches of the window that were handed on; at its start,
            those before it.
        configuration: The configuration of the pipeline, as JSON.
        skipped: Partial batches dropped before the window.
        padded: Whether a host ran out of data before the window.
        needed: What all hosts needed since the last shrink, [stacks][3].
        shrink: Whether limits shrink before the next window.
    """

    parent: Any
    start: int
    position: int
    limits: Limits
    configuration: str
    skipped: int
    padded: bool
    needed: list[list[int]]
    shrink: bool = False

    def to_plain(self) -> dict[str, Any]:
        """The dict that goes into a checkpoint."""
        return {
            "version": STATE_VERSION,
            "parent": self.parent,
            "start": self.start,
            "position": self.position,
            "limits": self.limits.to_array().tolist(),
            "configuration": self.configuration,
            "skipped": self.skipped,
            "padded": int(self.padded),
            "needed": [list(row) for row in self.needed],
            "shrink": int(self.shrink),
        }


def read_state(
    state: Mapping[str, Any],
    *,
    configuration: Mapping[str, Any],
    start_limits: Limits,
    layout: StackedLayout,
) -> tuple[CoordinateState, bool]:
    """Reads and checks a state.

    Args:
        state: From `CoordinateState.to_plain`.
        configuration: Of the pipeline that restores.
        start_limits: Its limits where those of the state do not carry over.
        layout: Its stacks.

    Returns:
        The state, and whether it comes from another number of hosts; its parent state
        is then of no use, except for an ElasticIterator's.

    Raises:
        CheckpointError: The state is of another pipeline or of an older version, or
            is damaged.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        keys = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(
            "the state is not one of CoordinateLimitsIterDataset: it has no version, "
            f"but {keys}. Was the checkpoint written by a pipeline without this stage?"
        )
    if state["version"] != STATE_VERSION:
        raise CheckpointError(
            f"the state has format version {state['version']}; this release of "
            f"grain_sparsecore reads version {STATE_VERSION}. Restore it with the "
            "release that wrote it, or start the data anew."
        )
    name = configuration["name"]
    missing = sorted(_KEYS - set(state))
    if missing:
        raise damaged(name, f"it lacks {', '.join(missing)}")
    try:
        saved = json.loads(state["configuration"])
        fixed, hosts = _fixed(saved), _hosts(saved)
        partitions, before = _partitions(saved), saved["batch_size"]
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as e:
        what = f"its configuration cannot be read ({type(e).__name__}: {e})"
        raise damaged(name, what) from e
    _check_equal(fixed, _fixed(configuration), name)
    other_hosts = hosts != _hosts(configuration)
    now = configuration["batch_size"]
    if not other_hosts and before != now and not is_elastic_parent(state["parent"]):
        raise CheckpointError(
            f"pipeline {name!r}: the state belongs to another configuration: "
            f"batch_size is {before} in the checkpoint and {now} in this pipeline, and "
            "the position counts batches, so samples would be skipped or come again. "
            f"Restore it with batch_size={before}; to keep only the limits, start a "
            "new pipeline with start_limits."
        )
    stacks = len(layout.stacks)
    limits = Limits.from_array(
        layout.stack_names, read_rows(state, "limits", stacks, low=1, name=name)
    )
    needed = read_rows(state, "needed", stacks, low=0, name=name).tolist()
    if partitions != _partitions(configuration):
        limits, needed = start_limits, [[0] * 3] * stacks
    last = configuration["window"] - 1
    result = CoordinateState(
        parent=state["parent"],
        start=read_number(state, "start", high=_MOST_BATCHES, name=name),
        position=read_number(state, "position", high=last, name=name),
        limits=limits,
        configuration=state["configuration"],
        skipped=read_number(state, "skipped", high=_MOST_BATCHES, name=name),
        padded=bool(read_number(state, "padded", high=1, name=name)),
        needed=needed,
        shrink=bool(read_number(state, "shrink", high=1, name=name)),
    )
    return result, other_hosts


def check_elastic(
    state: CoordinateState,
    saved: Mapping[str, Any],
    layout: StackedLayout,
    elastic: bool,
) -> None:
    """Raises unless a state of another number of hosts may be continued.

    Args:
        state: The state.
        saved: The configuration that it was saved with.
        layout: The stacks of the pipeline that restores.
        elastic: Whether host h of n reads records h::n.

    Raises:
        CheckpointError: Saying why not.
    """
    hosts, now = _hosts(saved), layout.topology.num_hosts
    before, after = saved["batch_size"] * hosts, layout.batch_size * now
    start = f"the state was saved on {hosts} hosts and is restored on {now}: "
    if not elastic and not is_elastic_parent(state.parent):
        raise CheckpointError(
            f"{start}the position of one host cannot be that of another. If host h of "
            "n reads records h::n in batches of one global size, pass elastic=True; "
            "else restore on as many hosts, or start the data anew."
        )
    if before != after:
        raise CheckpointError(
            f"{start}the global batch changes from {before} to {after} samples, so no "
            f"step of the new job starts where the old one was; use batch_size="
            f"{before / now:g} per host."
        )
    if state.padded or state.skipped:
        raise CheckpointError(
            f"{start}the hosts were not equally far, because "
            + ("one had run out of data" if state.padded else "one dropped a batch")
            + "; restore on as many hosts, or start the data anew."
        )


def is_elastic_parent(parent: Any) -> bool:
    """Whether it is the state of an ElasticIterator, one for all hosts."""
    return isinstance(parent, Mapping) and set(parent) == _ELASTIC_KEYS


def _hosts(configuration: Mapping[str, Any]) -> int:
    topology = configuration["topology"]
    return topology["global_device_count"] // topology["local_device_count"]


def _partitions(configuration: Mapping[str, Any]) -> tuple[int, int, list[str]]:
    """What limits depend on: N, samples per SparseCore, and the stacks."""
    topology = configuration["topology"]
    cores = topology["num_sc_per_device"]
    per_sc = configuration["batch_size"] // (topology["local_device_count"] * cores)
    stacks = sorted({t["in_stack"] for t in configuration["tables"].values()})
    # The size of a buffer is per device: it also depends on S.
    return topology["global_device_count"] * cores, per_sc, [*stacks, str(cores)]


def _fixed(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that must be equal on any number of hosts."""

    def without(value: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in value.items() if k not in _TOPOLOGY_FIELDS}

    result = {
        key: value
        for key, value in configuration.items()
        if key not in _TOPOLOGY_KEYS and key not in _IGNORED_KEYS
    }
    for kind in ("tables", "features"):
        result[kind] = {k: without(v) for k, v in result[kind].items()}
    return result


def _check_equal(saved: Any, now: Any, name: str) -> None:
    keys = differing_keys(saved, json.loads(json.dumps(now)))
    if keys:
        text = describe_keys(keys, "in the checkpoint", "in this pipeline")
        raise CheckpointError(
            f"pipeline {name!r}: the state belongs to another configuration: {text}. "
            "Restore it with the configuration that it was saved with; to keep only "
            "the limits, start a new pipeline with start_limits."
        )
