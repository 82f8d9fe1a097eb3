"""Fills a `RunRecord` while a run goes on, in memory that does not grow with it."""

import dataclasses

import numpy as np

from grain_sparsecore.buffers import PADDING_ID, SparseCoreInput
from grain_sparsecore.dropping import DROP_FIELDS
from grain_sparsecore.features import CounterTotals
from grain_sparsecore.metrics import is_minibatched, segment_counts
from grain_sparsecore.report.record import RunRecord, StackRecord, TopId
from grain_sparsecore.stacking import ALIGNMENT, Stack, StackedLayout

# Batches whose ids are counted one by one for the skew; spread over the run.
_SKEW_BATCHES = 16

# Ids that the table of the most frequent ones shows.
_TOP_IDS = 10

# Distinct ids that are remembered for each stack between batches.
_REMEMBERED_IDS = 1 << 17


class RunRecorder:
    """Watches the batches of a run.

    Args:
        record: Filled in place; its stacks are those of the layout afterwards.
        layout: The stacks.
    """

    def __init__(self, record: RunRecord, *, layout: StackedLayout) -> None:
        self.record = record
        self._layout = layout
        record.stacks = [
            StackRecord(
                name=stack.name,
                tables=tuple(table.spec.name for table in stack.tables),
                features=tuple(feature.name for feature in stack.features),
            )
            for stack in layout.stacks
        ]
        self._batches = 0
        self._samples = 0
        partitions = layout.topology.num_partitions
        self._sums = np.zeros((len(layout.stacks), partitions))
        self._most = np.zeros((len(layout.stacks), partitions), np.int64)
        self._skew_every = 1
        self._ids = [_IdCounts() for _ in layout.stacks]
        self._counters = CounterTotals(layout)
        self._drops = np.zeros((len(layout.features), len(DROP_FIELDS) + 1))
        self._touched = 0
        self._may_drop = False

    def add_batch(self, step: int, batch: SparseCoreInput) -> None:
        """Looks at the buffers of a step; costs a pass over its ids."""
        counts = segment_counts(batch, layout=self._layout)
        look_at_ids = self._batches % self._skew_every == 0
        for stack, record in zip(self._layout.stacks, self.record.stacks, strict=True):
            limits = batch.limits[stack.name]
            if not record.limits or record.limits[-1][1] != limits:
                record.limits.append((step, limits))
            self._add_counts(step, batch, stack, record, counts[stack.name])
            if look_at_ids:
                self._ids[stack.index].add(*_entries(batch, stack, counts[stack.name]))
        if is_minibatched(batch, layout=self._layout):
            self.record.minibatches.add(step, int(batch.num_minibatches[0]))
        self._batches += 1
        if look_at_ids and self._batches // self._skew_every >= _SKEW_BATCHES:
            self._skew_every *= 2
        self._samples += int(np.sum(batch.num_valid_samples))
        if batch.counters is not None:
            self._counters.add(np.asarray(batch.counters))
        if batch.drops is not None:
            self._may_drop = True
            self._drops[:, :-1] += np.asarray(batch.drops.per_feature)
            self._drops[:, -1] += np.asarray(batch.drops.lost_weight)
            self._touched += int(batch.drops.examples)

    def _add_counts(
        self,
        step: int,
        batch: SparseCoreInput,
        stack: Stack,
        record: StackRecord,
        counts: np.ndarray,
    ) -> None:
        topology = self._layout.topology
        slots = ((counts + (ALIGNMENT - 1)) & -ALIGNMENT).sum(axis=(1, 2))
        needed = int(slots.max()) * topology.num_sc_per_device
        unique = _most_distinct(batch.embedding_ids[stack.name], counts)
        # Of one minibatch, as the limits on ids are.
        record.needed.add(step, (int(counts.max()), unique, needed))
        counts = counts.sum(axis=1)
        size = batch.limits[stack.name].buffer_size_per_device
        record.filled.add(step, counts.sum() / (size * topology.local_device_count))
        record.spread.add(step, np.quantile(counts, (0.5, 0.9, 1.0)))
        self._sums[stack.index] += counts.mean(axis=0)
        self._most[stack.index] = np.maximum(
            self._most[stack.index], counts.max(axis=0)
        )

    def finish(self) -> RunRecord:
        """Puts the sums into the record and returns it."""
        record = self.record
        for stack, one in zip(self._layout.stacks, record.stacks, strict=True):
            if self._batches:
                one.partition_mean = (self._sums[stack.index] / self._batches).tolist()
                one.partition_max = self._most[stack.index].tolist()
            ids = self._ids[stack.index]
            one.rank_shares = ids.rank_shares()
            one.top_ids = [
                _name_id(stack, partition, row, share, self._layout)
                for partition, row, share in ids.top(_TOP_IDS)
            ]
        record.counters = self._counters.totals() if self._batches else {}
        if self._may_drop:
            names = (*DROP_FIELDS, "lost_weight")
            record.drops = {
                feature.name: {
                    name: float(value) if name == "lost_weight" else int(value)
                    for name, value in zip(names, row.tolist(), strict=True)
                }
                for feature, row in zip(self._layout.features, self._drops, strict=True)
            }
            record.dropped_share = self._touched / max(self._samples, 1)
        return record


@dataclasses.dataclass
class _IdCounts:
    """How often (partition, row) occurs, for the most frequent of them."""

    keys: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    counts: np.ndarray = dataclasses.field(
        default_factory=lambda: np.empty(0, np.int64)
    )
    total: int = 0

    def add(self, partitions: np.ndarray, rows: np.ndarray) -> None:
        """Adds entries; both int64 [n]."""
        keys, counts = np.unique(partitions << 32 | rows, return_counts=True)
        self.total += rows.size
        self.keys, where = np.unique(
            np.concatenate([self.keys, keys]), return_inverse=True
        )
        self.counts = np.bincount(
            where, np.concatenate([self.counts, counts]), minlength=self.keys.size
        ).astype(np.int64)
        if self.keys.size > _REMEMBERED_IDS:
            kept = np.argpartition(self.counts, -_REMEMBERED_IDS)[-_REMEMBERED_IDS:]
            kept.sort()
            self.keys, self.counts = self.keys[kept], self.counts[kept]

    def rank_shares(self) -> list[tuple[int, float]]:
        """Share of all entries of the 1, 2, 5, 10, ... most frequent."""
        if not self.total:
            return []
        below = np.cumsum(np.sort(self.counts)[::-1]) / self.total
        ranks = [m * 10**e for e in range(10) for m in (1, 2, 5)]
        ranks = [r for r in ranks if r < below.size] + [below.size]
        return [(rank, float(below[rank - 1])) for rank in ranks]

    def top(self, most: int) -> list[tuple[int, int, float]]:
        """Partition, row and share of the most frequent, most frequent first."""
        # Among equals the lower key, so that two runs agree.
        order = np.lexsort((self.keys, -self.counts))[:most]
        return [
            (int(key >> 32), int(key & 0xFFFFFFFF), float(count / self.total))
            for key, count in zip(self.keys[order], self.counts[order], strict=True)
        ]


def _entries(
    batch: SparseCoreInput, stack: Stack, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Partition and row of every entry, int64; counts are [R, K, N]."""
    rows = np.asarray(batch.embedding_ids[stack.name]).ravel()
    cores, minibatches, width = counts.shape
    partitions = np.tile(np.arange(width), cores * minibatches)
    return (
        np.repeat(partitions, counts.ravel()),
        rows[rows != PADDING_ID].astype(np.int64),
    )


def _most_distinct(embedding_ids: np.ndarray, counts: np.ndarray) -> int:
    """Most distinct ids in one partition of a minibatch; equal ids are neighbours."""
    rows = np.asarray(embedding_ids).ravel()
    rows = rows[rows != PADDING_ID]
    if not rows.size:
        return 0
    new = np.ones(rows.size, np.int64)
    new[1:] = rows[1:] != rows[:-1]
    lengths = counts.ravel()
    starts = np.cumsum(lengths) - lengths
    starts = starts[lengths > 0]
    # Where a partition begins with the id that the one before it ended with.
    new[starts] = 1
    return int(np.add.reduceat(new, starts).max())


def _name_id(
    stack: Stack, partition: int, row: int, share: float, layout: StackedLayout
) -> TopId:
    """Undoes stacking: from a row of a partition to a table and its id."""
    table = next(t for t in reversed(stack.tables) if t.row_offset_in_shard <= row)
    partitions = layout.topology.num_partitions
    return TopId(
        table=table.spec.name,
        id=(row - table.row_offset_in_shard) * partitions
        + (partition - table.shard_rotation) % partitions,
        share=share,
        partition=partition,
    )
