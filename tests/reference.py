"""A plain-Python model of the SparseCore input format, to compare everything with.

No vectorisation and no cleverness: one loop for each sentence of the format. It is
slow on purpose, so keep batches small. Expected values come as Python lists of
entries; `compact` and `buffers` lay them out as `PartitionedBatch` and
`SparseCoreInput` do.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from grain_sparsecore.features import FeatureIds
from grain_sparsecore.specs import round_up
from grain_sparsecore.stacking import Stack, StackedFeature, StackedLayout

INT32_MAX = 2**31 - 1

# One entry: embedding id, sample id, gain.
Entry = tuple[int, int, np.float32]
# Entries of one stack: [SparseCore][partition].
Cells = list[list[list[Entry]]]


@dataclasses.dataclass
class Segment:
    """The entries of one SparseCore laid out with every partition aligned to 8."""

    embedding_ids: list[int]
    sample_ids: list[int]
    gains: list[np.float32]
    row_pointers: list[int]


def rows_of(
    feature: FeatureIds, batch_size: int
) -> tuple[list[list[int]], list[list[np.float32]] | None]:
    """Ids and weights of each sample as lists; weights None without weights."""
    if feature.row_splits is None:
        splits = [feature.width * i for i in range(batch_size + 1)]
    else:
        splits = feature.row_splits.tolist()
    pairs = list(itertools.pairwise(splits))
    ids = [[int(i) for i in feature.ids[a:b]] for a, b in pairs]
    if feature.weights is None:
        return ids, None
    return ids, [list(feature.weights[a:b]) for a, b in pairs]


def row_gains(
    count: int, weights: Sequence[np.float32] | None, combiner: str
) -> list[np.float32]:
    """The gain of each id of one sample, in float32; 0 where one cannot be divided."""
    one = np.float32(1)
    if count == 0:
        return []
    if weights is None:
        if combiner == "mean":
            return [one / np.float32(count)] * count
        if combiner == "sqrtn":
            return [one / np.sqrt(np.float32(count))] * count
        return [one] * count
    if combiner == "sum":
        return list(weights)
    total = np.float32(0)
    with np.errstate(over="ignore"):
        for weight in weights:
            if combiner == "mean":
                total = np.float32(total + weight)
            else:
                square = np.float64(weight) * np.float64(weight)
                total = np.float32(np.float64(total) + square)
        divisor = total if combiner == "mean" else np.sqrt(total)
        if divisor == 0 or not np.isfinite(divisor):
            return [np.float32(0)] * count
        gains = [np.float32(weight / divisor) for weight in weights]
    if not all(np.isfinite(gain) for gain in gains):
        return [np.float32(0)] * count
    return gains


def cells(features: Sequence[FeatureIds], layout: StackedLayout) -> list[Cells]:
    """The entries of every stack, in order, duplicates merged."""
    return [_cells_of_stack(stack, features, layout) for stack in layout.stacks]


def _cells_of_stack(
    stack: Stack, features: Sequence[FeatureIds], layout: StackedLayout
) -> Cells:
    topology = layout.topology
    partitions, cores = topology.num_partitions, topology.local_sc_count
    per_core = layout.batch_size // cores
    samples_per_sc = len(stack.features) * layout.batch_size // cores
    result: Cells = [[[] for _ in range(partitions)] for _ in range(cores)]
    for core in range(cores):
        # (partition, embedding id, sample id) -> gains in input order.
        found: dict[tuple[int, int, int], list[np.float32]] = {}
        for feature in stack.features:
            ids, weights = rows_of(features[feature.index], layout.batch_size)
            for i in range(per_core):
                row = core * per_core + i
                sample = (feature.row_offset // partitions + i) % samples_per_sc
                gains = row_gains(
                    len(ids[row]),
                    None if weights is None else weights[row],
                    stack.combiner,
                )
                for id_, gain in zip(ids[row], gains, strict=True):
                    partition, embedding_id = place(id_, feature, partitions)
                    key = (partition, embedding_id, sample)
                    found.setdefault(key, []).append(gain)
        for key in sorted(found):
            partition, embedding_id, sample = key
            total, *rest = found[key]
            for gain in rest:
                total = np.float32(total + gain)
            result[core][partition].append((embedding_id, sample, total))
    return result


def place(id_: int, feature: StackedFeature, partitions: int) -> tuple[int, int]:
    """Partition of an id, and its row there."""
    bits = partitions.bit_length() - 1
    partition = (id_ + feature.col_shift) & (partitions - 1)
    return partition, (id_ >> bits) + feature.col_offset // partitions


def counts(stack_cells: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Entries and distinct embedding ids, both int32 [SparseCores, partitions]."""
    ids = [[len(cell) for cell in core] for core in stack_cells]
    unique = [[len({e for e, _, _ in cell}) for cell in core] for core in stack_cells]
    return np.array(ids, np.int32), np.array(unique, np.int32)


def required(stack_cells: Cells) -> np.ndarray:
    """Slots that each SparseCore needs, int32 [SparseCores]."""
    per_core = [sum(round_up(len(cell), 8) for cell in core) for core in stack_cells]
    return np.array(per_core, np.int32)


def stats(all_cells: Sequence[Cells], layout: StackedLayout) -> np.ndarray:
    """int32 [stacks, 3], as `PartitionedBatch.stats`."""
    rows = []
    for stack_cells in all_cells:
        ids, unique = counts(stack_cells)
        slots = required(stack_cells).max() * layout.topology.num_sc_per_device
        rows.append([ids.max(), unique.max(), slots])
    return np.array(rows, np.int32)


def segment(core_cells: Sequence[Sequence[Entry]]) -> Segment:
    """Lays out the partitions of one SparseCore."""
    out = Segment([], [], [], [])
    for cell in core_cells:
        for embedding_id, sample, gain in cell:
            out.embedding_ids.append(embedding_id)
            out.sample_ids.append(sample)
            out.gains.append(gain)
        out.row_pointers.append(len(out.gains))
        pad(out, round_up(len(out.gains), 8))
    missing = 8 - len(out.row_pointers)
    out.row_pointers.extend([len(out.gains)] * missing)
    return out


def pad(out: Segment, length: int) -> None:
    """Fills a segment with padding up to ``length`` slots."""
    missing = length - len(out.gains)
    out.embedding_ids.extend([INT32_MAX] * missing)
    out.sample_ids.extend([INT32_MAX] * missing)
    out.gains.extend([np.float32(np.nan)] * missing)


def segments(stack_cells: Cells, length: int) -> list[Segment]:
    """The segments of one stack, each padded to ``length`` slots."""
    result = [segment(core) for core in stack_cells]
    for one in result:
        pad(one, length)
    return result


def compact(
    all_cells: Sequence[Cells], layout: StackedLayout
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Embedding ids, sample ids, gains, row pointers of a `PartitionedBatch`."""
    done = [
        one
        for stack_cells in all_cells
        for one in segments(stack_cells, int(required(stack_cells).max()))
    ]
    shape = (len(layout.stacks), layout.topology.local_sc_count, -1)
    return (
        np.array([x for one in done for x in one.embedding_ids], np.int32),
        np.array([x for one in done for x in one.sample_ids], np.int32),
        np.array([x for one in done for x in one.gains], np.float32),
        np.array([one.row_pointers for one in done], np.int32).reshape(shape),
    )


def buffers(
    stack_cells: Cells, size_per_device: int, layout: StackedLayout
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Row pointers [L, S*W], embedding ids, sample ids, gains [L, size] of a stack."""
    devices = layout.topology.local_device_count
    per_sc = size_per_device // layout.topology.num_sc_per_device
    done = segments(stack_cells, per_sc)
    assert all(len(one.gains) == per_sc for one in done)

    def stacked(values: list[list], dtype: type) -> np.ndarray:
        return np.array(values, dtype).reshape(devices, -1)

    return (
        stacked([one.row_pointers for one in done], np.int32),
        stacked([one.embedding_ids for one in done], np.int32),
        stacked([one.sample_ids for one in done], np.int32),
        stacked([one.gains for one in done], np.float32),
    )
