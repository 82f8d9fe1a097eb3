"""A job of many hosts, run in one process: the real protocol, one host after another.

Each host reads its own shard of the data and is measured as in the job; only the
vectors that hosts exchange are kept, and their exchanges are driven in lock-step with
the true maximum. At no time is there more than one batch in memory.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.chip_caps import overflow_with_file_caps
from grain_sparsecore.config import Config
from grain_sparsecore.coordination.frames import FRAME_SIZE, Kind, Tag, hash31
from grain_sparsecore.coordination.protocol import (
    Host,
    WindowOutcome,
    WindowReport,
    agree_on_window,
    handshake,
)
from grain_sparsecore.dropping import cut_batch
from grain_sparsecore.errors import (
    GrainSparseCoreError,
    InputError,
    LimitsExceededError,
)
from grain_sparsecore.limits import Limits, grow_limits
from grain_sparsecore.minibatch import SPLIT_BITS, minibatch_count
from grain_sparsecore.overflow import Excess, find_excess, main_contributor
from grain_sparsecore.partition import partition_counts
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.pipeline.coordinate_options import CoordinateOptions
from grain_sparsecore.pipeline.excess import explain_excess
from grain_sparsecore.pipeline.splitting import (
    WindowSplits,
    agree_on_splits,
    fullest,
    needed_of_buckets,
    needs_split,
)
from grain_sparsecore.sources import make_batches
from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.warm_start import start_limits_of

T = TypeVar("T")

# Windows for which the cost of the agreement is predicted.
WINDOWS = (1, 2, 4, 8, 16, 32, 64)

# Time of one message between two hosts, of a small data-centre network.
DEFAULT_HOP_SECONDS = 100e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a job of many hosts did.

    Attributes:
        layout: The stacks on its topology.
        steps: Steps that every host made.
        stopped: Whether the data of a host ended before the steps asked for.
        limits: Step and limits, from the first step on, whenever they changed.
        waste: By stack, share of the slots that hold no entry, the mean over hosts
            and steps.
        dropped: Entries that all hosts dropped.
        minibatches: Steps by the number of minibatches of their batches.
        rounds: Frames that were exchanged, the handshake included.
        frames_per_window: Of them, in the last window.
        round_seconds: Predicted time of one frame.
        cost_per_batch: Predicted seconds of agreement per batch, by window.
    """

    layout: StackedLayout
    steps: int
    stopped: bool
    limits: Sequence[tuple[int, Limits]]
    waste: dict[str, float]
    dropped: int
    minibatches: dict[int, int]
    rounds: int
    frames_per_window: int
    round_seconds: float
    cost_per_batch: dict[int, float]

    @property
    def changes(self) -> int:
        """Changes of limits after the first step; each recompiles on every host."""
        return len(self.limits) - 1

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(
            {
                "hosts": self.layout.topology.num_hosts,
                "steps": self.steps,
                "limits": self.limits[-1][1].to_plain(),
                "limit_changes": self.changes,
                "recompiles": self.changes,
                "changed_at_steps": [step for step, _ in self.limits[1:]],
                "padding_waste": self.waste,
                "dropped_entries": self.dropped,
                "minibatches": self.minibatches,
                "rounds": self.rounds,
                "round_seconds": self.round_seconds,
                "cost_per_batch_seconds": self.cost_per_batch,
            },
            indent=2,
        )


def round_seconds(hosts: int, hop_seconds: float) -> float:
    """Predicted time of one all-reduce: a ring takes 2 * (hosts - 1) hops."""
    return 2 * (hosts - 1) * hop_seconds


def simulate(
    config: Config,
    topology: Topology,
    *,
    steps: int,
    hop_seconds: float = DEFAULT_HOP_SECONDS,
    on_progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """Runs the agreement of a job over as many hosts as ``topology`` has.

    Args:
        config: The job.
        topology: Its devices; the hosts follow from it.
        steps: Steps to make; whole windows are read, as in the job.
        hop_seconds: Time of one message between two hosts, for the prediction.
        on_progress: Called with the host batches that were measured, and all of them.

    Raises:
        ConfigError: The job does not fit the topology, or its source is wrong.
        InputError: A batch is wrong, or there is none.
        LimitsExceededError: A batch is above a cap, as in the job.
    """
    layout = config.layout(topology)
    hosts = _Hosts(config, layout, on_progress, steps)
    hosts.shake_hands()
    window = config.pipeline.window
    limits = [(0, hosts.limits)]
    minibatches: collections.Counter[int] = collections.Counter()
    done, stopped = 0, False
    while done < steps and not stopped:
        outcome = hosts.open_window(done)
        if outcome.count:
            if done == 0:
                limits = [(0, hosts.limits)]
            elif hosts.limits != limits[-1][1]:
                limits.append((done, hosts.limits))
        hosts.count_waste(min(outcome.count, steps - done))
        minibatches.update(hosts.minibatches[: steps - done])
        done += min(outcome.count, steps - done)
        stopped = outcome.stops
    if not done:
        raise InputError(
            "there is no step to simulate: a host has less than one batch of "
            f"{layout.batch_size} samples; lower pipeline.batch_size or the hosts."
        )
    one = round_seconds(topology.num_hosts, hop_seconds)
    frames = hosts.frames_per_window
    return Simulation(
        layout=layout,
        steps=done,
        stopped=stopped and done < steps,
        limits=limits,
        waste=hosts.waste(),
        dropped=hosts.dropped,
        minibatches=dict(sorted(minibatches.items())),
        rounds=hosts.rounds,
        frames_per_window=frames,
        round_seconds=one,
        cost_per_batch={w: one * frames / w for w in sorted({*WINDOWS, window})},
    )


class _Hosts:
    """All hosts of a job, in lock-step."""

    def __init__(
        self,
        config: Config,
        layout: StackedLayout,
        on_progress: Callable[[int, int], None] | None,
        steps: int,
    ) -> None:
        pipeline, limits = config.pipeline, config.limits
        self._layout = layout
        self._options = CoordinateOptions(
            layout=layout,
            policy=limits.growth,
            window=pipeline.window,
            start_limits=start_limits_of(config, layout),
            name=pipeline.name,
            key=pipeline.key,
            on_partial_batch=pipeline.on_partial_batch,
            on_exhausted=pipeline.on_exhausted,
            overflow=overflow_with_file_caps(config, layout),
        )
        count = layout.topology.num_hosts
        self._hosts = [Host(index=i, count=count) for i in range(count)]
        stage = ComputeInputStats(layout, key=pipeline.key)
        self._batches = [
            make_batches(config, layout, host_index=h, host_count=count).map(stage)
            for h in range(count)
        ]
        self._on_progress = on_progress
        self._measured = 0
        self._to_measure = -(-steps // pipeline.window) * pipeline.window * count
        self.limits = self._options.first_limits()
        self.rounds = 0
        self.frames_per_window = 0
        self.dropped = 0
        # Of each batch of the window.
        self.minibatches: list[int] = []
        # Entries of each host, batch of the window and stack.
        self._entries: list[np.ndarray] = []
        self._filled = np.zeros(len(layout.stacks))
        self._slots = np.zeros(len(layout.stacks))

    def shake_hands(self) -> None:
        """The handshake of all hosts."""
        configuration = self._options.configuration()
        self._drive(
            [
                handshake(
                    name=self._options.name,
                    configuration=configuration,
                    host=host,
                    nonce=host.index,
                )
                for host in self._hosts
            ]
        )

    def open_window(self, start: int) -> WindowOutcome:
        """Every host reads its window; all agree; limits grow."""
        options = self._options
        ceilings = options.ceilings(self.limits)
        self._entries = []
        reports = []
        worst = []
        for batches in self._batches:
            last = min(start + options.window, len(batches))
            stats, entries, most = self._measure(batches, start, last, ceilings)
            self._entries.append(entries)
            worst.append(most)
            reports.append(
                WindowReport(stats=stats, structure=_no_structure if last else None)
            )
        before = self.rounds
        outcome = self._drive(
            [
                agree_on_window(
                    report=report,
                    window=options.window,
                    on_exhausted=options.on_exhausted,
                    tag=self._tag(Kind.WINDOW, start),
                    host=host,
                )
                for host, report in zip(self._hosts, reports, strict=True)
            ]
        )
        self.frames_per_window = self.rounds - before
        needed = outcome.needed
        bits = np.zeros((outcome.count, SPLIT_BITS), np.uint8)
        if options.overflow.minibatching and needs_split(needed, ceilings):
            splits = self._split(outcome, start, ceilings)
            needed = needed_of_buckets(needed, splits, ceilings)
            bits = splits.bits
        self.minibatches = [minibatch_count(b) for b in bits]
        excess = find_excess(needed, ceilings)
        if excess is not None:
            place = (excess.stack, excess.column)
            self._raise_excess(excess, [most.get(place) for most in worst], start)
        self.limits = grow_limits(
            self.limits,
            needed,
            layout=self._layout,
            policy=options.policy,
            ceilings=ceilings,
            minibatches=options.minibatches,
        )
        return outcome

    def _split(
        self, outcome: WindowOutcome, start: int, ceilings: np.ndarray
    ) -> WindowSplits:
        """All hosts split the window alike; each makes its batches again."""
        options = self._options
        last = start + outcome.count
        mine = [
            _Again(batches, options.key, start, min(last, len(batches)))
            for batches in self._batches
        ]
        every = self._drive_all(
            [
                agree_on_splits(
                    batches,
                    ceilings,
                    count=outcome.count,
                    tag=self._tag(Kind.SPLIT, start),
                    options=options,
                )
                for batches in mine
            ]
        )
        for splits in every:
            for lost in splits.drops:
                if lost is not None:
                    self.dropped += int(lost.per_feature[:, 1].sum())
        excess = find_excess(every[0].needs, ceilings)
        if excess is not None:
            worst = [
                fullest(splits, batches, excess, options)
                for splits, batches in zip(every, mine, strict=True)
            ]
            self._raise_excess(excess, worst, start)
        return every[0]

    def _raise_excess(
        self,
        excess: Excess,
        worst: Sequence[tuple[int, int, int, float] | None],
        start: int,
    ) -> NoReturn:
        """Raises what all hosts raise; ``worst`` is of each host."""
        message = self._drive(
            [
                explain_excess(
                    excess,
                    most,
                    tag=self._tag(Kind.OVERFLOW, start),
                    host=host,
                    options=self._options,
                )
                for host, most in zip(self._hosts, worst, strict=True)
            ]
        )
        raise LimitsExceededError(f"pipeline {self._options.name!r}: {message}")

    def _measure(
        self, batches: Any, first: int, last: int, ceilings: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, dict[tuple[int, int], Any]]:
        """Statistics [n, T, 3] and entries [n, T] of one host; where it needs most."""
        options, stacks = self._options, len(self._layout.stacks)
        stats = np.zeros((max(last - first, 0), stacks, 3), np.int32)
        entries = np.zeros((len(stats), stacks), np.int64)
        worst: dict[tuple[int, int], Any] = {}
        for i in range(len(stats)):
            batch = batches[first + i][options.key]
            if options.overflow.may_drop:
                batch, lost = cut_batch(
                    batch,
                    ceilings,
                    layout=self._layout,
                    order=options.overflow.drop_order,
                    step=first + i,
                )
                self.dropped += int(lost.per_feature[:, 1].sum())
            stats[i] = batch.stats
            entries[i] = [c.sum() for c, _ in partition_counts(batch, self._layout)]
            excess = find_excess(batch.stats, ceilings)
            if excess is not None:
                place = (excess.stack, excess.column)
                if place not in worst or worst[place][1] < excess.needed:
                    found = main_contributor(batch, excess, self._layout)
                    worst[place] = (i, excess.needed, *found)
            self._measured += 1
            if self._on_progress is not None:
                self._on_progress(self._measured, self._to_measure)
        return stats, entries, worst

    def count_waste(self, count: int) -> None:
        """Adds up the first ``count`` batches of the window."""
        devices = self._layout.topology.local_device_count
        sizes = self.limits.to_array()[:, 2].astype(np.float64) * devices
        for entries in self._entries:
            self._filled += entries[:count].sum(axis=0)
        self._slots += sizes * count * len(self._hosts)

    def waste(self) -> dict[str, float]:
        """By stack, the share of all slots that held no entry."""
        shares = 1 - self._filled / self._slots
        return dict(zip(self._layout.stack_names, shares.tolist(), strict=True))

    def _tag(self, kind: Kind, start: int) -> Tag:
        limits = hash31(self.limits.to_array().tobytes())
        return Tag(name=self._options.name, kind=kind, start=start, limits=limits)

    def _drive(self, exchanges: Sequence[Generator[np.ndarray, np.ndarray, T]]) -> T:
        """Runs the exchanges of all hosts in lock-step to their equal results."""
        return self._drive_all(exchanges)[0]

    def _drive_all(
        self, exchanges: Sequence[Generator[np.ndarray, np.ndarray, T]]
    ) -> list[T]:
        """The same for results that hosts have of their own."""
        frames = [next(exchange) for exchange in exchanges]
        while True:
            assert all(frame.shape == (FRAME_SIZE,) for frame in frames)
            agreed = np.max(frames, axis=0)
            self.rounds += 1
            frames, results = [], []
            for exchange in exchanges:
                try:
                    frames.append(exchange.send(agreed.copy()))
                except StopIteration as stop:
                    results.append(stop.value)
            if results:
                if frames:
                    raise GrainSparseCoreError("hosts fell out of step: a defect.")
                return results


class _Again(Sequence[PartitionedBatch]):
    """The batches of a window, made each time they are asked for."""

    def __init__(self, batches: Any, key: str, first: int, last: int) -> None:
        self._batches = batches
        self._key = key
        self._range = range(first, last)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> Any:
        return self._batches[self._range[index]][self._key]


def _no_structure() -> bytes:
    # Empty batches are not made here; hosts only have to agree that they could be.
    return b"{}"
