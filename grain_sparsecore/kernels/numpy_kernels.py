"""Sorting, merging and aligning a batch with numpy alone.

The batch goes through in chunks that stay in cache, in two passes: sort and measure
all chunks; then, once the longest segment of every stack is known, write them out.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from grain_sparsecore.buffers import PADDINGS
from grain_sparsecore.kernels.chunks import Chunk, feature_slice, make_chunks
from grain_sparsecore.kernels.gains import repeated_sums
from grain_sparsecore.kernels.keys import (
    Keys,
    consecutive,
    make_keys,
    sort_segments,
)
from grain_sparsecore.kernels.partitioned import Partitioned, check_slots
from grain_sparsecore.slots import empty_slots
from grain_sparsecore.stacking import ALIGNMENT, StackedLayout

if TYPE_CHECKING:
    from grain_sparsecore.features import FeatureIds

# Stands for the difference to the key before at the first key of a segment, as a key
# with all bits set: so different are no two keys of one segment and partition.
_BOUNDARY = -1

# Slots for each entry up to which fetching beats sending.
_DENSE = 1.3


@dataclasses.dataclass(frozen=True)
class _Sorted:
    """A chunk after sorting and merging: K entries in P runs.

    A run is the entries of one partition of one segment.
    """

    chunk: Chunk
    embedding_ids: np.ndarray  # int32 [K]
    sample_ids: np.ndarray  # int32 [K]
    gains: np.ndarray | float  # float32 [K], or one for all
    run_starts: np.ndarray  # int64 [P], first entry
    run_lengths: np.ndarray  # int64 [P], entries
    run_unique: np.ndarray  # int64 [P], distinct embedding ids
    run_segments: np.ndarray  # int64 [P], counted over all stacks and SparseCores
    run_partitions: np.ndarray  # int64 [P]


def partition(features: "Sequence[FeatureIds]", layout: StackedLayout) -> Partitioned:
    """See `grain_sparsecore.kernels.Kernel`."""
    done = []
    per_core = layout.samples_per_sc_per_feature
    for chunk in make_chunks(features, layout):
        slices = [
            [feature_slice(features[f.index], per_core, chunk) for f in stack.features]
            for stack in chunk.stacks
        ]
        keys = make_keys(chunk, slices, layout)
        sort_segments(keys)
        done.append(_merge(chunk, keys, layout.topology.local_sc_count))
    return _assemble(done, layout)


def _merge(chunk: Chunk, keys: Keys, cores: int) -> _Sorted:
    """Merges equal entries of sorted keys and finds the runs."""
    entries, starts = keys.keys, keys.starts
    payload = gains = None
    if keys.by_position is not None:
        payload = _payload(keys)
    if chunk.mode.merge:
        new = _is_new(keys, payload)
        kept = np.flatnonzero(new)
        if kept.size < new.size:
            entries = entries.take(kept)
            all_payload = payload
            payload = None if payload is None else payload.take(kept)
            starts = np.searchsorted(kept, starts)
            if chunk.mode.constant is None:
                gains = np.asarray(_gains(chunk, keys, entries, starts, payload))
                _add_merged(gains, new, all_payload)
            else:
                gains = _repeated_gains(chunk.mode.constant, kept, new.size)
    differences = _differences(entries, starts)
    if gains is None:
        gains = _gains(chunk, keys, entries, starts, payload)
    number = entries.dtype.type
    unique = np.flatnonzero(differences >= number(1 << keys.low_bits))
    shift = keys.bits - keys.partition_bits
    threshold = number(min(1 << shift, 2**keys.bits - 1))
    run_of_unique = np.flatnonzero(differences.take(unique) >= threshold)
    run_starts = unique.take(run_of_unique)
    first_runs = np.searchsorted(run_starts, starts)
    # Both fields are below 2 ** 31, so they can be masked after narrowing, which is
    # half the work.
    embedding_ids = (entries >> number(keys.id_shift)).astype(np.uint32, copy=False)
    embedding_ids &= np.uint32(keys.id_mask)
    if keys.ranks is not None:
        embedding_ids = keys.ranks.take(embedding_ids).astype(np.uint32)
    if payload is None:
        sample_ids = entries.astype(np.uint32)
        sample_ids &= np.uint32((1 << keys.sample_bits) - 1)
    else:
        sample_ids = _samples_of(payload)
    run_keys = entries.take(run_starts)
    return _Sorted(
        chunk=chunk,
        embedding_ids=embedding_ids.view(np.int32),
        sample_ids=sample_ids.view(np.int32),
        gains=gains,
        run_starts=run_starts,
        run_lengths=_lengths(run_starts, entries.size),
        run_unique=_lengths(run_of_unique, unique.size),
        run_segments=np.repeat(
            chunk.first_segment(cores) + np.arange(chunk.segments), np.diff(first_runs)
        ),
        run_partitions=(
            (run_keys >> number(shift)).astype(np.int64)
            if keys.partition_bits
            else np.zeros(run_keys.size, np.int64)
        ),
    )


def _lengths(starts: np.ndarray, end: int) -> np.ndarray:
    """From each start to the next, and from the last to the end."""
    lengths = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1:] = end - starts[-1:]
    return lengths


def _differences(keys: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Bits in which each key differs from the one before it in its segment."""
    differences = np.empty_like(keys)
    np.bitwise_xor(keys[1:], keys[:-1], out=differences[1:])
    firsts = starts[:-1][starts[1:] > starts[:-1]]
    differences.view(f"i{keys.itemsize}")[firsts] = _BOUNDARY
    return differences


def _payload(keys: Keys) -> np.ndarray:
    """What ``keys.by_position`` has for each key: int64."""
    assert keys.by_position is not None
    positions = keys.low(keys.keys, keys.starts)
    return keys.by_position.take(positions)


def _samples_of(payload: np.ndarray) -> np.ndarray:
    return payload.astype(np.int32)


def _gains_of(payload: np.ndarray) -> np.ndarray:
    return payload.view("<f4")[1::2].copy()


def _is_new(keys: Keys, payload: np.ndarray | None) -> np.ndarray:
    """Whether each sorted key begins an entry; with ``payload``, if weighted."""
    if payload is not None:
        # The low field is a position, so keys of equal entries differ in it.
        differences = _differences(keys.keys, keys.starts)
        new = differences >= differences.dtype.type(1 << keys.low_bits)
        samples = _samples_of(payload)
        new[1:] |= samples[1:] != samples[:-1]
        return new
    new = np.empty(keys.keys.size, bool)
    np.not_equal(keys.keys[1:], keys.keys[:-1], out=new[1:])
    new[keys.starts[:-1][keys.starts[1:] > keys.starts[:-1]]] = True
    return new


def _gains(
    chunk: Chunk,
    keys: Keys,
    entries: np.ndarray,
    starts: np.ndarray,
    payload: np.ndarray | None,
) -> np.ndarray | float:
    """The gain of each entry by itself; with its ``payload``, if weighted."""
    if payload is not None:
        return _gains_of(payload)
    if keys.gains is None:
        assert chunk.mode.constant is not None
        return chunk.mode.constant
    return keys.gains.take(keys.low(entries, starts))


def _repeated_gains(gain: float, kept: np.ndarray, keys: int) -> np.ndarray:
    """The gain of each entry where all keys have the same.

    Args:
        gain: That of one key.
        kept: Indices of the keys that begin an entry: int64 [K].
        keys: Number of keys.
    """
    times = _lengths(kept, keys)
    return repeated_sums(gain, int(times.max())).take(times)


def _add_merged(gains: np.ndarray, new: np.ndarray, payload: np.ndarray | None) -> None:
    """Adds the gain of each merged key to that of its entry.

    Args:
        gains: float32 [entries], changed in place.
        new: Which keys begin an entry.
        payload: If weighted, that of every key.
    """
    merged = np.flatnonzero(~new)
    # The i-th merged key belongs to the last entry before it.
    entry = merged - consecutive(merged.size, first=1)
    # Without weights, all ids of a row weigh the same.
    added = gains.take(entry) if payload is None else _gains_of(payload.take(merged))
    np.add.at(gains, entry, added)


def _assemble(done: Sequence[_Sorted], layout: StackedLayout) -> Partitioned:
    """Writes all chunks out at their aligned places."""
    cores = layout.topology.local_sc_count
    width = layout.row_pointers_per_sc
    segments = np.concatenate([part.run_segments for part in done])
    lengths = np.concatenate([part.run_lengths for part in done])
    cells = np.concatenate([part.run_partitions for part in done])
    cells += segments * width
    row_pointers = np.zeros((len(layout.stacks), cores, width), np.int32)
    flat = row_pointers.reshape(-1)
    aligned = (lengths + (ALIGNMENT - 1)) & -ALIGNMENT
    flat[cells] = aligned
    np.cumsum(row_pointers, axis=2, dtype=np.int32, out=row_pointers)
    longest = row_pointers[:, :, -1].max(axis=1).astype(np.int64)
    targets = flat[cells] - aligned
    flat[cells] = targets + lengths

    stats = np.zeros((len(layout.stacks), 3), np.int32)
    unique = np.concatenate([part.run_unique for part in done])
    first_runs = np.searchsorted(segments, np.arange(len(layout.stacks)) * cores)
    present = np.flatnonzero(_lengths(first_runs, segments.size))
    if present.size:
        for column, values in enumerate((lengths, unique)):
            most = np.maximum.reduceat(values, first_runs[present])
            stats[present, column] = most
    per_device = longest * layout.topology.num_sc_per_device
    check_slots(per_device, layout)
    stats[:, 2] = per_device

    bases = np.zeros(longest.size * cores + 1, np.int64)
    np.cumsum(np.repeat(longest, cores), out=bases[1:])
    targets += bases[segments]
    slots = empty_slots(int(bases[-1]))
    run = 0
    for part in done:
        mine = targets[run : run + part.run_segments.size]
        run += mine.size
        start = bases[part.chunk.first_segment(cores)]
        end = bases[part.chunk.last_segment(cores)]
        mine -= start
        _write(part, mine, [array[start:end] for array in slots])
    return Partitioned(*slots, row_pointers, stats)


def _write(part: _Sorted, run_targets: np.ndarray, slots: Sequence[np.ndarray]) -> None:
    """Writes a chunk to its slots, and padding between.

    Args:
        part: The chunk.
        run_targets: int64 [P], the slot of each run's first entry.
        slots: The chunk's own embedding ids, sample ids and gains, filled.
    """
    count = slots[0].size
    entries = part.embedding_ids.size
    values = (part.embedding_ids, part.sample_ids, part.gains)
    if not entries or count > _DENSE * entries:
        moves = run_targets - part.run_starts
        targets = np.repeat(moves, part.run_lengths)
        targets += consecutive(entries)
        for array, value, padding in zip(slots, values, PADDINGS, strict=True):
            array.fill(padding)
            array[targets] = value
        return
    # Fetching what belongs to each slot is half the work of sending each entry to its
    # slot. What is between two runs is overwritten.
    ends = run_targets + part.run_lengths
    gap_starts = np.concatenate(([0], ends))
    gaps = np.concatenate((run_targets, [count])) - gap_starts
    spans = part.run_lengths + gaps[1:]
    spans[0] += gaps[0]
    sources = np.repeat(part.run_starts - run_targets, spans)
    sources += consecutive(count)
    padded = np.repeat(gap_starts - (np.cumsum(gaps) - gaps), gaps)
    padded += consecutive(padded.size)
    for array, value, padding in zip(slots, values, PADDINGS, strict=True):
        if isinstance(value, np.ndarray):
            # Any mode but the default writes to ``out`` without a copy between.
            value.take(sources, out=array, mode="wrap")
        else:
            array.fill(value)
        array[padded] = padding
