"""Caps on limits, and what happens to a batch that needs more.

A cap is a number that a limit may grow to and not beyond, because the chip has no more
memory or the compiler no more room. Whether a batch is above it follows from the
agreed statistics, so every host knows, in the same step.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import STAT_FIELDS, Limits
from grain_sparsecore.partition import partition_counts, required_per_sc
from grain_sparsecore.stacking import ALIGNMENT, INT32_MAX, Stack, StackedLayout

# One slot of a buffer: embedding id, sample id and gain, 4 bytes each.
SLOT_BYTES = 12

ON_OVERFLOW: tuple[str, ...] = ("error", "drop", "minibatch")
DROP_ORDERS: tuple[str, ...] = ("prefix", "balanced")
ON_FULL_BUCKET: tuple[str, ...] = ("error", "drop")

# Configuration keys of the caps, in the order of STAT_FIELDS.
CAP_FIELDS = ("max_ids_cap", "max_unique_ids_cap", "buffer_cap_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackCaps:
    """How far the limits of one stack may grow; ``None`` sets no cap.

    Attributes:
        max_ids_cap: Of ``max_ids_per_partition``.
        max_unique_ids_cap: Of ``max_unique_ids_per_partition``.
        buffer_cap_bytes: Of the three input buffers of one device together, 12 bytes
            a slot: 1_200_000 allows 100_000 slots, rounded down to 8 for each
            SparseCore.

    Raises:
        ConfigError: A cap is no positive integer.
    """

    max_ids_cap: int | None = None
    max_unique_ids_cap: int | None = None
    buffer_cap_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in CAP_FIELDS:
            value = getattr(self, field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{field} must be an integer of 1 or more, not {value!r}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverflowPolicy:
    """What happens where a batch needs more than it may get.

    Attributes:
        on_overflow: ``"error"`` stops all hosts in the same step; ``"drop"`` leaves
            entries out and counts them; ``"minibatch"`` splits the batch into up to 64
            minibatches, by a hash of its ids and on all hosts alike, and loses
            nothing. Buffers are then laid out for minibatching in every step, and
            ``buffer_cap_bytes``, which all minibatches share, stays an error.
        drop_order: Which entries of a partition stay. ``"prefix"``: the first ones by
            embedding id, as jax-tpu-embedding has it, so that it is always the high
            ids that never train. ``"balanced"``: from a point that moves from batch
            to batch, the same on every run.
        on_full_bucket: With ``"minibatch"``, what happens where one of the 64 buckets
            of ids alone is above a cap, so that no split helps: an ``"error"`` on all
            hosts, or ``"drop"`` what is behind the prefix of that bucket. A dropped
            entry counts as one id.
        frozen: Limits do not grow at all; they are caps themselves.
        caps: By stack name.
        cap_origins: Where a cap comes from, by stack and field of `StackCaps`, where
            that is not the configuration but a file. For messages; no part of what
            hosts compare.

    Raises:
        ConfigError: An option is not one of those allowed.
    """

    on_overflow: Literal["error", "drop", "minibatch"] = "error"
    drop_order: Literal["prefix", "balanced"] = "prefix"
    on_full_bucket: Literal["error", "drop"] = "error"
    frozen: bool = False
    caps: Mapping[str, StackCaps] = dataclasses.field(default_factory=dict)
    cap_origins: Mapping[str, Mapping[str, str]] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def __post_init__(self) -> None:
        for field, allowed in (
            ("on_overflow", ON_OVERFLOW),
            ("drop_order", DROP_ORDERS),
            ("on_full_bucket", ON_FULL_BUCKET),
        ):
            value = getattr(self, field)
            if value not in allowed:
                raise ConfigError(
                    f"limits: {field}={value!r} is not one of {', '.join(allowed)}."
                )

    @property
    def may_drop(self) -> bool:
        """Whether batches can be cut to fit."""
        return self.on_overflow == "drop" and (self.frozen or bool(self.caps))

    @property
    def minibatching(self) -> bool:
        """Whether batches can be split; buffers are laid out for it."""
        return self.on_overflow == "minibatch"

    def cap_origin(self, stack: str, column: int) -> str:
        """The file that the cap in force comes from, empty for the configuration.

        Args:
            stack: Its name.
            column: Index into STAT_FIELDS.
        """
        return self.cap_origins.get(stack, {}).get(CAP_FIELDS[column], "")

    def plain(self) -> dict[str, Any]:
        """What hosts and checkpoints compare, as JSON-able values."""
        plain = dataclasses.asdict(self)
        del plain["cap_origins"]
        return plain

    @property
    def counts_drops(self) -> bool:
        """Whether every batch says what it lost."""
        return self.may_drop or (self.minibatching and self.on_full_bucket == "drop")


def cap_ceilings(caps: Mapping[str, StackCaps], *, layout: StackedLayout) -> np.ndarray:
    """The largest limits that the caps allow, int64 [stacks, 3] as in STAT_FIELDS.

    INT32_MAX where there is no cap.

    Raises:
        ConfigError: A stack is unknown, or a cap is below what the stack starts with.
    """
    unknown = sorted(set(caps) - set(layout.stack_names))
    if unknown:
        raise ConfigError(
            f"limits.stack.{unknown[0]}: there is no such stack; the stacks are "
            f"{', '.join(layout.stack_names)}."
        )
    start = Limits.start(layout).to_array()
    ceilings = np.full(start.shape, INT32_MAX, np.int64)
    unit = ALIGNMENT * layout.topology.num_sc_per_device
    for stack in layout.stacks:
        cap = caps.get(stack.name)
        if cap is None:
            continue
        row = ceilings[stack.index]
        if cap.max_ids_cap is not None:
            row[0] = min(cap.max_ids_cap, INT32_MAX)
        if cap.max_unique_ids_cap is not None:
            row[1] = min(cap.max_unique_ids_cap, INT32_MAX)
        if cap.buffer_cap_bytes is not None:
            row[2] = min(cap.buffer_cap_bytes // SLOT_BYTES, INT32_MAX) // unit * unit
        for column, field in enumerate(CAP_FIELDS):
            low = int(start[stack.index, column])
            if row[column] < low:
                least = low * SLOT_BYTES if field == "buffer_cap_bytes" else low
                raise ConfigError(
                    f"limits.stack.{stack.name}.{field}={getattr(cap, field)} is below "
                    f"{least}, which the stack starts with ({STAT_FIELDS[column]} "
                    f"{low}); raise the cap or lower the start in its tables."
                )
    return ceilings


def largest_limits(
    policy: OverflowPolicy, start: Limits, *, layout: StackedLayout
) -> Limits:
    """What limits can grow to; INT32_MAX where nothing holds them."""
    ceilings = cap_ceilings(policy.caps, layout=layout)
    if policy.frozen:
        ceilings = np.minimum(ceilings, start.to_array())
    return Limits.from_array(layout.stack_names, ceilings)


class Excess(NamedTuple):
    """A need above a ceiling.

    Attributes:
        stack: Index of the stack.
        column: Index into STAT_FIELDS.
        needed: What is needed.
        ceiling: What is allowed.
    """

    stack: int
    column: int
    needed: int
    ceiling: int


def find_excess(needed: np.ndarray, ceilings: np.ndarray) -> Excess | None:
    """The need that is above its ceiling by the largest factor, or None.

    Args:
        needed: int32 [stacks, 3], of a batch or agreed.
        ceilings: int64 [stacks, 3].
    """
    over = needed > ceilings
    if not over.any():
        return None
    ratio = np.where(over, needed / np.maximum(ceilings, 1), 0)
    stack, column = (int(i) for i in np.unravel_index(ratio.argmax(), ratio.shape))
    return Excess(
        stack, column, int(needed[stack, column]), int(ceilings[stack, column])
    )


def main_contributor(
    batch: PartitionedBatch, excess: Excess, layout: StackedLayout
) -> tuple[int, float]:
    """The feature with most entries where a batch needs most of a limit.

    Returns:
        Its index in ``layout.features``, and its share of the entries there: of the
        fullest (SparseCore, partition), or for the buffer of the fullest SparseCore.
    """
    stack = layout.stacks[excess.stack]
    counts = partition_counts(batch, layout)[stack.index]
    if excess.column == 2:
        core = int(required_per_sc(batch, layout)[stack.index].argmax())
        first, last = 0, None
    else:
        worst = counts[excess.column].argmax()
        core, partition = divmod(int(worst), layout.topology.num_partitions)
        ends = batch.row_pointers[stack.index, core]
        last = int(ends[partition])
        first = last - int(counts[0][core, partition])
    samples = segment(batch.sample_ids, batch.stats, stack, layout)[core, first:last]
    samples = samples[samples < stack.samples_per_sc]
    if not samples.size:
        return stack.features[0].index, 0.0
    per_feature = np.bincount(
        samples // layout.samples_per_sc_per_feature, minlength=len(stack.features)
    )
    most = int(per_feature.argmax())
    return stack.features[most].index, float(per_feature[most] / samples.size)


def excess_message(
    excess: Excess,
    *,
    layout: StackedLayout,
    host: int,
    step: int,
    feature: int,
    share: float,
    frozen: bool,
    minibatching: bool = False,
    origin: str = "",
) -> str:
    """The text of the error that all hosts raise.

    Args:
        excess: What is exceeded.
        layout: The stacks.
        host: The host that needs most.
        step: Of the batch.
        feature: Index of the feature with most entries there.
        share: Its share of them, from 0 to 1.
        frozen: Whether limits are frozen.
        minibatching: Whether batches are split.
        origin: The file that the cap comes from; empty for the configuration.
    """
    stack = layout.stacks[excess.stack]
    field = STAT_FIELDS[excess.column]
    cap = CAP_FIELDS[excess.column]
    found = layout.features[feature]
    allowed = (
        f"the frozen limit is {excess.ceiling}"
        if frozen
        else f"{cap} allows {excess.ceiling}"
    )
    if origin and not frozen:
        allowed += f", by {origin}"
    if excess.column == 2:
        bytes_needed = excess.needed * SLOT_BYTES
        allowed += f" slots ({excess.needed} slots are {bytes_needed} bytes)"
    place = "fullest SparseCore" if excess.column == 2 else "fullest partition"
    # No split makes the buffer, which all minibatches share, any smaller.
    choices = '"drop"' if excess.column == 2 else '"minibatch" or "drop"'
    otherwise = f"set limits.on_overflow = {choices}"
    if minibatching and excess.column < 2:
        allowed += " even for a single one of the 64 buckets that a batch is split into"
        place = "fullest bucket"
        otherwise = 'set limits.on_full_bucket = "drop"'
    elif minibatching:
        otherwise = "spread the samples over more hosts"
    if frozen:
        fix = f"set limits.frozen = false, load limits that suffice, or {otherwise}."
    elif origin:
        # The chip has no more: a higher cap in the configuration would not count.
        fix = (
            f"{otherwise}, or find caps again with rehearse --find-caps: for the "
            "limits that the data needs now, a smaller batch, or more devices. Raising "
            f"limits.stack.{stack.name}.{cap} is no help: the lower cap counts."
        )
    else:
        fix = (
            f"raise limits.stack.{stack.name}.{cap} to {_cap_for(excess)} or more (the "
            "command plan tells what all batches need), lower the batch size, or "
            f"{otherwise}."
        )
    return (
        f"stack {stack.name!r}: host {host} needs {field}={excess.needed} in step "
        f"{step}, but {allowed}. Feature {found.name!r} (table {found.table.name!r}) "
        f"makes {share:.0%} of its {place}. To go on, {fix}"
    )


def _cap_for(excess: Excess) -> int:
    return excess.needed * (SLOT_BYTES if excess.column == 2 else 1)


def segment(
    array: np.ndarray, stats: np.ndarray, stack: Stack, layout: StackedLayout
) -> np.ndarray:
    """The part of a flat array of a `PartitionedBatch` of one stack, [R, length]."""
    cores = layout.topology.local_sc_count
    lengths = stats[:, 2].astype(np.int64) // layout.topology.num_sc_per_device
    first = int(lengths[: stack.index].sum()) * cores
    length = int(lengths[stack.index])
    return array[first : first + cores * length].reshape(cores, length)
