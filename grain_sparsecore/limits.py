"""Statistics, limits, and the policy by which limits follow statistics.

Everything here is arithmetic on small integers: no data, no hosts. The order of the
stacks is always the sorted order of their names, on every host, whatever order a
dictionary came in.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import numpy as np

from grain_sparsecore.errors import ConfigError, LimitsExceededError
from grain_sparsecore.specs import round_up
from grain_sparsecore.stacking import (
    ALIGNMENT,
    INT32_MAX,
    Stack,
    StackedLayout,
    max_ids_that_fit_int32,
    theoretical_buffer_size,
)

# Columns of every statistics array and of ``Limits.to_array``.
STAT_FIELDS = ("max_ids_per_partition", "max_unique_ids_per_partition", "buffer_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputStatsPerTable:
    """What a batch needs of one stack.

    Attributes:
        max_ids_per_partition: Most entries of one SparseCore in one partition.
        max_unique_ids_per_partition: Most distinct embedding ids there.
        required_buffer_size_per_device: Slots per device: the fullest SparseCore,
            every partition rounded up to 8, times the SparseCores per device.
    """

    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    required_buffer_size_per_device: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLimits:
    """What the buffers of one stack are made for.

    Attributes:
        max_ids_per_partition: Entries per (SparseCore, partition), 1 or more.
        max_unique_ids_per_partition: Distinct embedding ids there, 1 or more.
        buffer_size_per_device: Slots per device, a multiple of 8 * S.
    """

    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    buffer_size_per_device: int


class Limits(Mapping[str, StackLimits]):
    """The limits of every stack: an immutable, hashable mapping by stack name.

    It is static metadata of `SparseCoreInput`, so a jitted function recompiles
    exactly when it changes.
    """

    __slots__ = ("_array", "_by_name", "_hash")

    def __init__(self, stacks: Mapping[str, StackLimits]) -> None:
        self._by_name = {name: stacks[name] for name in sorted(stacks)}
        self._hash = hash(tuple(self._by_name.items()))
        self._array: np.ndarray | None = None

    def __getitem__(self, name: str) -> StackLimits:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Limits) and self._by_name == other._by_name

    def __reduce__(self) -> tuple[type, tuple[dict[str, StackLimits]]]:
        # String hashes differ between processes, so the hash is not pickled.
        return Limits, (self._by_name,)

    def __repr__(self) -> str:
        parts = (
            f"{name}: ids {v.max_ids_per_partition}, unique "
            f"{v.max_unique_ids_per_partition}, buffer {v.buffer_size_per_device}"
            for name, v in self._by_name.items()
        )
        return f"Limits({'; '.join(parts)})"

    @classmethod
    def start(cls, layout: StackedLayout) -> Self:
        """The limits a job starts with and never goes below."""
        return cls(
            {
                stack.name: StackLimits(
                    max_ids_per_partition=stack.start_max_ids_per_partition,
                    max_unique_ids_per_partition=(
                        stack.start_max_unique_ids_per_partition
                    ),
                    buffer_size_per_device=stack.start_buffer_size_per_device,
                )
                for stack in layout.stacks
            }
        )

    def to_array(self) -> np.ndarray:
        """int32 [stacks, 3], rows in sorted order of the names; read-only."""
        # Every batch is compared with it.
        if self._array is None:
            rows = [
                (
                    v.max_ids_per_partition,
                    v.max_unique_ids_per_partition,
                    v.buffer_size_per_device,
                )
                for v in self._by_name.values()
            ]
            array = np.array(rows, np.int32).reshape(-1, 3)
            array.flags.writeable = False
            self._array = array
        return self._array

    @classmethod
    def from_array(cls, names: tuple[str, ...], array: np.ndarray) -> Self:
        """The inverse of `to_array`; ``names`` are sorted."""
        return cls(
            {
                name: StackLimits(
                    max_ids_per_partition=int(row[0]),
                    max_unique_ids_per_partition=int(row[1]),
                    buffer_size_per_device=int(row[2]),
                )
                for name, row in zip(names, array, strict=True)
            }
        )

    def to_plain(self) -> dict[str, dict[str, int]]:
        """A JSON-able dict, for files and checkpoint states."""
        return {name: dataclasses.asdict(v) for name, v in self._by_name.items()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Mapping[str, Any]]) -> Self:
        """The inverse of `to_plain`."""
        return cls({name: StackLimits(**value) for name, value in plain.items()})


def stats_by_stack(
    names: tuple[str, ...], stats: np.ndarray
) -> dict[str, InputStatsPerTable]:
    """Names the rows of an int32 [stacks, 3] statistics array."""
    return {
        name: InputStatsPerTable(
            max_ids_per_partition=int(row[0]),
            max_unique_ids_per_partition=int(row[1]),
            required_buffer_size_per_device=int(row[2]),
        )
        for name, row in zip(names, stats, strict=True)
    }


# A policy beyond these is a slip of the pen, whose buffers fit no machine.
_LARGEST_FACTOR = 1024
_LARGEST_STEP = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthPolicy:
    """How far a limit goes when a batch needs more than it.

    Attributes:
        kind: ``"exact"``: just what is needed. ``"headroom"``: that times ``factor``,
            rounded up to ``step``. ``"geometric"``: the next value of a fixed grid of
            multiples of 8 with ``steps_per_octave`` values an octave, so that a limit
            changes at most a few times whatever the data does.
        factor: Of ``"headroom"``; from 1 to 1024.
        step: Of ``"headroom"``; 1 or more, for example 8.
        steps_per_octave: Of ``"geometric"``; 1 or more.

    Raises:
        ConfigError: An option is out of range.
    """

    kind: Literal["exact", "headroom", "geometric"] = "geometric"
    factor: float = 1.25
    step: int = 8
    steps_per_octave: int = 4

    def __post_init__(self) -> None:
        if self.kind not in ("exact", "headroom", "geometric"):
            raise ConfigError(
                f"growth: kind={self.kind!r} is not one of exact, headroom, geometric."
            )
        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float):
            raise ConfigError(f"growth: factor must be a number, not {self.factor!r}.")
        if not 1 <= self.factor <= _LARGEST_FACTOR:
            raise ConfigError(
                f"growth: factor={self.factor} must be from 1 to {_LARGEST_FACTOR}; "
                "buffers are as many times larger than what is needed."
            )
        object.__setattr__(self, "factor", float(self.factor))
        for field in ("step", "steps_per_octave"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"growth: {field}={value!r} must be 1 or more.")
            if value > _LARGEST_STEP:
                raise ConfigError(
                    f"growth: {field}={value} must be {_LARGEST_STEP} or less."
                )

    def target(self, needed: int) -> int:
        """The limit for a need of ``needed``: at least ``needed``, never falling."""
        if needed <= 0:
            return 0
        if self.kind == "exact":
            return needed
        if self.kind == "headroom":
            return round_up(math.ceil(needed * self.factor), self.step)
        return _next_on_grid(needed, self.steps_per_octave)

    def grow(self, current: int, needed: int) -> int:
        """``current`` where it suffices, else ``target(needed)``."""
        return current if needed <= current else self.target(needed)


def _next_on_grid(needed: int, steps_per_octave: int) -> int:
    """Smallest round_up(8 * 2 ** (i / steps_per_octave), 8) that is >= needed."""
    # Start one step low: the logarithm may round either way, and grid values that
    # are rounded up to 8 may already suffice.
    i = max(0, math.floor(math.log2(needed / ALIGNMENT) * steps_per_octave) - 1)
    while True:
        # Exact at whole octaves, where 2 ** (i / n) is a whole power of two.
        octave, part = divmod(i, steps_per_octave)
        value = math.ceil((ALIGNMENT << octave) * 2 ** (part / steps_per_octave))
        value = round_up(value, ALIGNMENT)
        if value >= needed:
            return value
        i += 1


def grow_limits(
    current: Limits,
    needed: np.ndarray,
    *,
    layout: StackedLayout,
    policy: GrowthPolicy,
    ceilings: np.ndarray | None = None,
    minibatches: int = 1,
) -> Limits:
    """Limits that suffice for ``needed`` and are nowhere below ``current``.

    Args:
        current: The limits so far.
        needed: int32 [stacks, 3], the maximum over batches and hosts.
        layout: The stacks.
        policy: How far to grow.
        ceilings: int64 [stacks, 3], how far each number may grow at most; ``needed``
            must be within them. What is above them already stays.
        minibatches: Into how many a batch may be split, each with the limits on ids;
            the buffer of a device holds all of them.

    Returns:
        ``current`` itself where nothing has to grow.

    Raises:
        LimitsExceededError: The buffer would not fit int32, or ``needed`` is above
            ``ceilings``.
    """
    if ceilings is None:
        ceilings = np.full(needed.shape, INT32_MAX)
    if (needed > ceilings).any():
        raise LimitsExceededError(
            f"needs {needed.tolist()} are above the caps {ceilings.tolist()}; cut the "
            "batches first."
        )
    grown = {
        stack.name: _grow_stack(
            stack, current[stack.name], row, caps, layout, policy, minibatches
        )
        for stack, row, caps in zip(
            layout.stacks, needed.tolist(), ceilings.tolist(), strict=True
        )
    }
    limits = Limits(grown)
    return current if limits == current else limits


def _grow_stack(
    stack: Stack,
    current: StackLimits,
    needed: list[int],
    caps: list[int],
    layout: StackedLayout,
    policy: GrowthPolicy,
    minibatches: int,
) -> StackLimits:
    topology = layout.topology
    ids, unique, slots = needed
    cap_ids, cap_unique, cap_slots = caps
    most_ids = max_ids_that_fit_int32(topology)
    if ids > most_ids:
        raise LimitsExceededError(
            f"stack {stack.name!r}: a batch has {ids} ids in one partition, but "
            f"max_ids_per_partition above {most_ids} overflows int32 buffers on "
            f"{topology.num_partitions} partitions; lower the batch size."
        )
    max_ids = policy.grow(current.max_ids_per_partition, ids)
    max_ids = max(min(max_ids, most_ids, cap_ids), current.max_ids_per_partition)
    max_unique = policy.grow(current.max_unique_ids_per_partition, unique)
    max_unique = max(
        min(max_unique, most_ids, cap_unique), current.max_unique_ids_per_partition
    )
    # The policy works on slots per SparseCore and in units of 8, so that the size
    # per device divides by 8 * S and the grid is the same for every S.
    sc_count = topology.num_sc_per_device
    per_sc = policy.grow(
        current.buffer_size_per_device // sc_count, -(-slots // sc_count)
    )
    size = round_up(per_sc, ALIGNMENT) * sc_count
    theoretical = theoretical_buffer_size(max_ids, topology) * minibatches
    size = min(size, theoretical, _largest(topology), cap_slots)
    return StackLimits(
        max_ids_per_partition=max_ids,
        max_unique_ids_per_partition=max_unique,
        buffer_size_per_device=max(size, current.buffer_size_per_device),
    )


@functools.lru_cache
def _largest(topology: Any) -> int:
    unit = ALIGNMENT * topology.num_sc_per_device
    return INT32_MAX // unit * unit
