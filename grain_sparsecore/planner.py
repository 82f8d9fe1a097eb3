"""Follows the batches of one topology, and says what a job needs there."""

import collections
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grain_sparsecore.buffers import PADDING_ID, PartitionedBatch
from grain_sparsecore.chip_caps import overflow_with_file_caps
from grain_sparsecore.chips import Chip
from grain_sparsecore.config import Config
from grain_sparsecore.dropping import cut_batch
from grain_sparsecore.errors import InputError
from grain_sparsecore.limits import (
    STAT_FIELDS,
    GrowthPolicy,
    Limits,
    StackLimits,
    grow_limits,
)
from grain_sparsecore.minibatch import BUCKETS, minibatch_count, split_together
from grain_sparsecore.overflow import cap_ceilings, segment
from grain_sparsecore.partition import partition_batch, partition_counts
from grain_sparsecore.repartition import repartition
from grain_sparsecore.report.record import RunRecord, TopId
from grain_sparsecore.report.recorder import RunRecorder
from grain_sparsecore.stacking import Stack, StackedLayout
from grain_sparsecore.stats import buffer_bytes_per_device

QUANTILES: Mapping[str, float] = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}

# A rotation is worth a suggestion where it lowers the fullest partitions by a tenth.
_WORTHWHILE = 0.9

_BYTES_PER_FLOAT = 4

_KINDS = ("exact", "headroom", "geometric")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """What one stack will need.

    Attributes:
        quantiles: Of the steps, by name: what all hosts needed at most (entries and
            distinct ids of the fullest partition, slots per device).
        limits: Where the limits end.
        buffer_bytes: Of one batch on one device, with those limits.
        table_bytes: Rows of the table on one device, float32.
        waste: Share of the slots that hold no entry, the mean over the steps; what
            caps drop is no entry.
        drop_rates: Share of the entries that would be lost if the limit on ids were
            held at a quantile, by its name, and at ``"cap"`` by all caps of the stack
            together, where it has some and batches are not split.
        skew: How much fuller the fullest partition is than the average one.
        top_ids: The most frequent ids.
    """

    quantiles: Mapping[str, tuple[int, int, int]]
    limits: StackLimits
    buffer_bytes: int
    table_bytes: int
    waste: float
    drop_rates: Mapping[str, float]
    skew: float
    top_ids: Sequence[TopId]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopologyPlan:
    """What a job will need on one topology.

    Attributes:
        layout: The stacks there.
        steps: Steps that were looked at, whole windows.
        hosts_seen: Hosts whose batches were made.
        stacks: By name.
        limits: Where the limits end.
        changes: Changes of limits after the first step, by kind of growth policy;
            each is a recompilation on every host.
        minibatches: Steps by the number of minibatches of their batches; empty
            without minibatching.
        unsplittable: Of them, steps in which a bucket of ids alone is above a cap, so
            that no split holds all of it.
        rotation: A shard rotation that evens out the partitions, or None where the
            present one is as good.
        record: For the report.
        topology_name: Of a named topology, ``"v6e:4x4"``; else empty.
        too_large: By stack, or ``"all stacks"``, why its limits cannot be: they are
            above a cap, or the compiler of the topology refuses them.
    """

    layout: StackedLayout
    steps: int
    hosts_seen: int
    stacks: Mapping[str, StackPlan]
    limits: Limits
    changes: Mapping[str, int]
    minibatches: Mapping[int, int]
    unsplittable: int
    rotation: int | None
    record: RunRecord
    topology_name: str = ""
    too_large: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """``v6e:8x8, 64 devices * 2 SparseCores, 256 samples per host``."""
        topology = self.layout.topology
        return (
            f"{f'{self.topology_name}, ' if self.topology_name else ''}"
            f"{_several(topology.global_device_count, 'device')} * "
            f"{_several(topology.num_sc_per_device, 'SparseCore')}, "
            f"{_several(self.layout.batch_size, 'sample')} per host"
        )

    def to_plain(self) -> dict[str, Any]:
        """As a JSON-able dict."""
        return {
            "topology": dataclasses.asdict(self.layout.topology),
            "topology_name": self.topology_name,
            "batch_size": self.layout.batch_size,
            "steps": self.steps,
            "hosts": self.layout.topology.num_hosts,
            "hosts_seen": self.hosts_seen,
            "limit_changes": dict(self.changes),
            "minibatches": dict(self.minibatches),
            "unsplittable_steps": self.unsplittable,
            "rotation": self.rotation,
            "too_large": dict(self.too_large),
            "stacks": {
                name: dataclasses.asdict(stack) for name, stack in self.stacks.items()
            },
        }


class Planner:
    """Follows the batches of one topology."""

    def __init__(
        self,
        config: Config,
        layout: StackedLayout,
        hosts: int,
        *,
        cap_files: Sequence[str | os.PathLike[str]] = (),
        topology_name: str = "",
    ) -> None:
        self._overflow = overflow_with_file_caps(
            config, layout, more=cap_files, chip=Chip(topology=topology_name)
        )
        self._topology_name = topology_name
        self.config = config
        self.layout = layout
        self.hosts = hosts
        limits = config.limits
        policies = {kind: GrowthPolicy(kind=kind) for kind in _KINDS}
        policies[limits.growth.kind] = limits.growth
        self._policies = policies
        self._limits = dict.fromkeys(policies, Limits.start(layout))
        self._changes = dict.fromkeys(policies, -1)
        self._caps = cap_ceilings(self._overflow.caps, layout=layout)
        # Caps, and needs above them: a job grows as far as a cap and stops there, but
        # a plan goes on to say how much would have been needed.
        self._reached = self._caps.copy()
        self._needs: list[np.ndarray] = []
        self._minibatches: collections.Counter[int] = collections.Counter()
        self._unsplittable = 0
        # Of the window that is not complete: needs after cutting, first host's batches.
        self._window: list[tuple[np.ndarray, PartitionedBatch]] = []
        # How often a (SparseCore, partition) had 0, 1, ... entries, by stack.
        self._often = [np.zeros(1, np.int64) for _ in layout.stacks]
        self._loads: list[list[np.ndarray]] = [[] for _ in layout.stacks]
        # Entries by stack, all of them and those that caps would not let pass.
        self._entries = np.zeros(len(layout.stacks), np.int64)
        self._lost = np.zeros(len(layout.stacks), np.int64)
        self._recorder = RunRecorder(RunRecord(command="plan", title=""), layout=layout)

    def add(self, read: list[dict[str, Any]]) -> None:
        """Measures one step, the features of one batch of each host."""
        layout, overflow = self.layout, self._overflow
        step = len(self._needs)
        needs, cut_needs, batches = [], [], []
        for host in read:
            batch = partition_batch(
                [host["features"][f.name] for f in layout.features],
                layout,
                counters=np.array([host["counters"][f.name] for f in layout.features]),
                num_samples=host["num_samples"],
            )
            before = self._count(batch, not needs)
            needs.append(batch.stats)
            if overflow.caps and not overflow.minibatching:
                order = overflow.drop_order
                cut, _ = cut_batch(
                    batch, self._caps, layout=layout, order=order, step=step
                )
                self._lost += before - _count_entries(cut, layout)
                batch = cut if overflow.may_drop else batch
            cut_needs.append(batch.stats)
            if overflow.minibatching or not batches:
                batches.append(batch)
        self._needs.append(np.max(needs, axis=0))
        most, first = np.max(cut_needs, axis=0), batches[0]
        if overflow.minibatching:
            found = split_together(batches, self._caps, layout)
            most = found.needs
            first = dataclasses.replace(first, split=found.splits[0])
            self._minibatches[minibatch_count(found.splits[0].bits)] += 1
            self._unsplittable += found.lost > 0
        self._window.append((most, first))
        if len(self._window) == self.config.pipeline.window:
            self._end_window()

    def _count(self, batch: PartitionedBatch, of_first_host: bool) -> np.ndarray:
        """Entries of each stack, int64 [stacks]."""
        entries = np.zeros(len(self.layout.stacks), np.int64)
        for stack, (counts, _) in zip(
            self.layout.stacks, partition_counts(batch, self.layout), strict=True
        ):
            entries[stack.index] = counts.sum()
            often = np.bincount(counts.ravel())
            known = self._often[stack.index]
            if often.size < known.size:
                often, known = known, often
            often[: known.size] += known
            self._often[stack.index] = often
            if of_first_host:
                loads = _table_loads(batch, stack, counts, self.layout)
                self._loads[stack.index].append(loads)
        self._entries += entries
        return entries

    def _end_window(self) -> None:
        """Limits follow the window, as they do in a job."""
        if not self._window:
            return
        needed = np.max([need for need, _ in self._window], axis=0)
        overflow = self._overflow
        self._reached = np.maximum(self._reached, needed)
        ceilings = self._caps if overflow.may_drop else self._reached
        if overflow.minibatching:
            # What the buffer needs is planned even where its cap is below.
            ceilings = self._caps.copy()
            ceilings[:, 2] = self._reached[:, 2]
        for kind, policy in self._policies.items():
            grown = grow_limits(
                self._limits[kind],
                needed,
                layout=self.layout,
                policy=policy,
                ceilings=ceilings,
                minibatches=BUCKETS if overflow.minibatching else 1,
            )
            # The first window compiles in any case.
            self._changes[kind] += grown != self._limits[kind] or (
                self._changes[kind] < 0
            )
            self._limits[kind] = grown
        reached = self._limits[self.config.limits.growth.kind]
        first = len(self._needs) - len(self._window)
        for i, (_, batch) in enumerate(self._window):
            buffers = repartition(batch, reached, self.layout)
            self._recorder.add_batch(first + i, buffers)
        self._window = []

    def result(self) -> TopologyPlan:
        """The plan; raises where there was no batch."""
        layout = self.layout
        if not self._needs:
            raise InputError(
                "there is no batch to plan with: a host of "
                f"{layout.topology.num_hosts} has less than one batch of "
                f"{layout.batch_size} samples; lower the batch size."
            )
        self._end_window()
        record = self._recorder.finish()
        final = self._limits[self.config.limits.growth.kind]
        return TopologyPlan(
            layout=layout,
            steps=len(self._needs),
            hosts_seen=self.hosts,
            stacks={
                stack.name: self._stack(stack, record, final) for stack in layout.stacks
            },
            limits=final,
            changes=self._changes,
            minibatches=dict(sorted(self._minibatches.items())),
            unsplittable=self._unsplittable,
            rotation=self._rotation(),
            record=record,
            topology_name=self._topology_name,
            too_large=self._above_caps(final),
        )

    def _above_caps(self, final: Limits) -> dict[str, str]:
        """The stacks whose limits a job would not let grow so far."""
        found = {}
        remedy = ', or set on_overflow to "minibatch" or "drop"'
        if self._overflow.minibatching:
            # No split makes a buffer smaller.
            remedy = ", or raise buffer_cap_bytes"
        above = final.to_array() > self._caps
        for stack, over in zip(self.layout.stacks, above, strict=True):
            if over.any():
                column = int(over.argmax())
                number = final.to_array()[stack.index, column]
                origin = self._overflow.cap_origin(stack.name, column)
                found[stack.name] = (
                    f"stack {stack.name!r}: the data needs {STAT_FIELDS[column]}="
                    f"{number}, but its cap is {self._caps[stack.index, column]}"
                    f"{f', by {origin}' if origin else ''}; lower pipeline.batch_size, "
                    f"use more devices{remedy}."
                )
        return found

    def _stack(self, stack: Stack, record: RunRecord, final: Limits) -> StackPlan:
        layout = self.layout
        needs = np.array([need[stack.index] for need in self._needs])
        quantiles: dict[str, tuple[int, int, int]] = {}
        for name, q in QUANTILES.items():
            ids, unique, used = np.quantile(needs, q, axis=0, method="higher").tolist()
            quantiles[name] = (ids, unique, used)
        limits = final[stack.name]
        lost = self._lost[stack.index]
        entries = self._entries[stack.index]
        drop_rates = {
            name: self._drop_rate(stack, numbers[0])
            for name, numbers in quantiles.items()
            if name != "max"
        }
        # Where batches are split, a cap costs nothing.
        if stack.name in self._overflow.caps and not self._overflow.minibatching:
            drop_rates["cap"] = float(lost / entries) if entries else 0.0
        kept = entries - lost if self._overflow.may_drop else entries
        devices = layout.topology.local_device_count
        slots = limits.buffer_size_per_device * devices * self.hosts * len(needs)
        one = record.stacks[stack.index]
        mean = np.asarray(one.partition_mean)
        size = stack.vocabulary_size * stack.embedding_dim * _BYTES_PER_FLOAT
        return StackPlan(
            quantiles=quantiles,
            limits=limits,
            buffer_bytes=buffer_bytes_per_device(
                limits,
                layout,
                minibatching=self._overflow.minibatching,
            ),
            table_bytes=size // layout.topology.global_device_count,
            waste=float(1 - kept / slots),
            drop_rates=drop_rates,
            skew=float(mean.max() / mean.mean()) if mean.any() else 1.0,
            top_ids=one.top_ids,
        )

    def _drop_rate(self, stack: Stack, max_ids: int) -> float:
        often = self._often[stack.index]
        sizes = np.arange(often.size)
        total = int((sizes * often).sum())
        lost = int((np.maximum(sizes - max_ids, 0) * often).sum())
        return lost / total if total else 0.0

    def _rotation(self) -> int | None:
        """The rotation with the lowest fullest partitions, where it is worth it."""
        layout = self.layout
        partitions = layout.topology.num_partitions
        if all(len(stack.tables) == 1 for stack in layout.stacks):
            return None
        own = self.config.topology.rotation
        present = layout.topology.num_sc_per_device if own is None else own
        heights = {r: self._height(r) for r in range(partitions)}
        best = min(heights, key=lambda r: (heights[r], r))
        good = heights[best] < _WORTHWHILE * heights[present % partitions]
        return best if good else None

    def _height(self, rotation: int) -> float:
        """Fullest partition of every stack, the mean over steps, added up."""
        total = 0.0
        for steps in self._loads:
            loads = np.array(steps)  # [steps, tables, N]
            rotated = [
                np.roll(loads[:, i], i * rotation, axis=-1)
                for i in range(loads.shape[1])
            ]
            total += float(np.sum(rotated, axis=0).max(axis=-1).mean())
        return total


def _count_entries(batch: PartitionedBatch, layout: StackedLayout) -> np.ndarray:
    """Entries of each stack, int64 [stacks]."""
    counts = partition_counts(batch, layout)
    return np.array([of_stack.sum() for of_stack, _ in counts], np.int64)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _table_loads(
    batch: PartitionedBatch, stack: Stack, counts: np.ndarray, layout: StackedLayout
) -> np.ndarray:
    """Entries of each table in each partition, not rotated: [tables, N]."""
    partitions = layout.topology.num_partitions
    rows = segment(batch.embedding_ids, batch.stats, stack, layout)
    rows = rows[rows != PADDING_ID]
    place = np.repeat(np.tile(np.arange(partitions), len(counts)), counts.ravel())
    offsets = [table.row_offset_in_shard for table in stack.tables]
    table = np.searchsorted(offsets, rows, side="right") - 1
    size = len(offsets) * partitions
    loads = np.bincount(table * partitions + place, minlength=size)
    turned = [
        np.roll(load, -t.shard_rotation)
        for load, t in zip(loads.reshape(-1, partitions), stack.tables, strict=True)
    ]
    return np.array(turned)
