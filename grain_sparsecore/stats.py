"""What batches need, measured over a few of them, and the limits that suggests."""

import dataclasses
import json
from collections.abc import Iterable, Mapping

import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.errors import InputError
from grain_sparsecore.features import CounterTotals
from grain_sparsecore.limits import (
    GrowthPolicy,
    InputStatsPerTable,
    Limits,
    StackLimits,
    grow_limits,
    stats_by_stack,
)
from grain_sparsecore.minibatch import BUCKETS
from grain_sparsecore.stacking import INT32_MAX, StackedLayout

# Bytes of a slot: embedding id, sample id and gain, 4 each; and of a row pointer.
_BYTES_PER_SLOT = 12
_BYTES_PER_ROW_POINTER = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObservedStats:
    """What the batches of one host needed.

    Attributes:
        batches: Batches that were measured.
        largest: By stack, the most that any batch needed.
        mean: By stack, the three numbers averaged over the batches.
        suggested: Limits that hold all of these batches, as a job would arrive at:
            growth ends at a cap, but what a batch needs may be above it.
        caps: By stack and name of the limit, how far it may grow; None without a cap.
        counters: For each feature what happened to its ids, see
            `grain_sparsecore.features.COUNTERS`.
        messages: What was wrong with ids and weights, once per feature and kind.
    """

    batches: int
    largest: Mapping[str, InputStatsPerTable]
    mean: Mapping[str, tuple[float, float, float]]
    suggested: Limits
    counters: Mapping[str, Mapping[str, int]]
    messages: tuple[str, ...]
    caps: Mapping[str, Mapping[str, int | None]]

    def to_json(self) -> str:
        """As JSON text, everything by stack and by the name of the number."""
        names = [f.name for f in dataclasses.fields(InputStatsPerTable)]
        stacks = {
            name: {
                "largest": dataclasses.asdict(largest),
                "mean": dict(zip(names, self.mean[name], strict=True)),
                "suggested": dataclasses.asdict(self.suggested[name]),
                "cap": self.caps[name],
            }
            for name, largest in self.largest.items()
        }
        found = {"batches": self.batches, "stacks": stacks, "counters": self.counters}
        return json.dumps(found, indent=2)


def observe(
    batches: Iterable[PartitionedBatch],
    layout: StackedLayout,
    policy: GrowthPolicy,
    *,
    ceilings: np.ndarray | None = None,
) -> ObservedStats:
    """Measures batches.

    Args:
        batches: As `ComputeInputStats` makes them.
        layout: The stacks they were made for.
        policy: How far limits go beyond what was needed.
        ceilings: int64 [stacks, 3], the caps, as `cap_ceilings` has them; None for
            none.

    Raises:
        InputError: There is no batch.
        LimitsExceededError: The buffers would not fit int32.
    """
    totals = CounterTotals(layout)
    stats: list[np.ndarray] = []
    messages: list[str] = []
    for batch in batches:
        stats.append(np.asarray(batch.stats))
        messages += totals.add(np.asarray(batch.counters))
    if not stats:
        raise InputError(
            "there is no batch to measure: the input holds less than one batch of "
            f"{layout.batch_size} samples; lower pipeline.batch_size."
        )
    largest = np.max(stats, axis=0)
    mean = np.mean(stats, axis=0).tolist()
    highest = np.full(largest.shape, INT32_MAX) if ceilings is None else ceilings
    names = [field.name for field in dataclasses.fields(StackLimits)]
    return ObservedStats(
        batches=len(stats),
        largest=stats_by_stack(layout.stack_names, largest),
        mean={
            name: (row[0], row[1], row[2])
            for name, row in zip(layout.stack_names, mean, strict=True)
        },
        suggested=grow_limits(
            Limits.start(layout),
            largest,
            layout=layout,
            policy=policy,
            ceilings=np.maximum(highest, largest),
        ),
        counters=totals.totals(),
        messages=tuple(messages),
        caps={
            stack: {
                name: None if cap == INT32_MAX else cap
                for name, cap in zip(names, row, strict=True)
            }
            for stack, row in zip(layout.stack_names, highest.tolist(), strict=True)
        },
    )


def buffer_bytes_per_device(
    limits: StackLimits, layout: StackedLayout, *, minibatching: bool = False
) -> int:
    """Bytes of the buffers of one stack and batch on one device."""
    pointers = layout.topology.num_sc_per_device * layout.row_pointers_per_sc
    if minibatching:
        pointers *= BUCKETS
    return (
        limits.buffer_size_per_device * _BYTES_PER_SLOT
        + pointers * _BYTES_PER_ROW_POINTER
    )
