"""Sort keys: one number for each id, of 64 bits, or of 32 where they suffice.

From the top: partition (log2 N bits), embedding id, and a *low* field which is the
*row number* (segment and sample) or, where ids carry weights, the position of the id
in the chunk: gains can then be fetched, and equal entries stay in input order.
Sorting the keys of one segment gives the order of the format. Keys of 32 bits, which
sort in half the time, count samples and positions from the start of the segment.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from grain_sparsecore.kernels.chunks import Chunk, Slice
from grain_sparsecore.kernels.gains import (
    divide,
    row_divisors,
    row_gains,
    row_lengths,
)
from grain_sparsecore.stacking import StackedFeature, StackedLayout

KEY_BITS, NARROW_KEY_BITS = 64, 32

# Ids of a row from which adding row by row beats repeating the rows.
_WIDE_ROW = 16

# Numbers that are kept from batch to batch; more than the ids of a usual chunk.
_MOST_CONSECUTIVE = 1 << 17

# Bits that ids may take before ranks replace them; smaller in tests only.
_DIRECT_KEY_BITS = KEY_BITS

# Bits from which keys are wide; smaller in tests only.
_MOST_NARROW_BITS = NARROW_KEY_BITS


@dataclasses.dataclass
class Keys:
    """The keys of a chunk, segment after segment, unsorted.

    Attributes:
        keys: uint64 or uint32 [K].
        starts: First key of each segment, and K: int64 [segments + 1].
        partition_bits: log2 N.
        low_bits: Bits of the low field.
        low_bases: What to add to the low field of a narrow key for the row number or
            the position in the chunk: int64 [segments]. None for wide keys.
        sample_bits: Bits of a row number below the segment.
        id_shift: Lowest bit of the embedding id in a key.
        id_mask: Its mask after shifting.
        ranks: int64, sorted distinct embedding ids, where keys hold ranks in it.
        gains: float32 by row number if gains differ from row to row, else None.
        by_position: If weighted, what belongs to the id at each position, in one
            number so that one look-up fetches both: the sample in its segment in the
            low half, and the bits of the float32 gain in the high one; int64 [K].
    """

    keys: np.ndarray
    starts: np.ndarray
    partition_bits: int
    low_bits: int
    low_bases: np.ndarray | None
    sample_bits: int
    id_shift: int
    id_mask: int
    ranks: np.ndarray | None
    gains: np.ndarray | None
    by_position: np.ndarray | None = None

    @property
    def bits(self) -> int:
        """Bits of a key."""
        return self.keys.itemsize * 8

    def low(self, entries: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The row numbers, or positions in the chunk, of sorted keys: int64.

        Args:
            entries: Some of the keys.
            starts: The first of them in each segment, and their number.
        """
        low = entries & entries.dtype.type((1 << self.low_bits) - 1)
        if self.low_bases is None:
            return low.view(np.int64)
        return np.repeat(self.low_bases, np.diff(starts)) + low


def make_keys(
    chunk: Chunk, slices: Sequence[Sequence[Slice]], layout: StackedLayout
) -> Keys:
    """Builds the keys of a chunk; ``slices`` by stack and feature."""
    counts = np.array([sum(s.counts for s in parts) for parts in slices])
    starts = np.zeros(chunk.segments + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    total = int(starts[-1])
    partition_bits = layout.topology.num_partitions.bit_length() - 1
    sample_bits = max(s.samples_per_sc - 1 for s in chunk.stacks).bit_length()
    weighted = chunk.mode.weighted
    embedding_rows = max(s.vocabulary_size for s in chunk.stacks) >> partition_bits
    id_bits = (embedding_rows - 1).bit_length()
    by_position: list[np.ndarray] = []
    gains = None
    if not weighted and chunk.mode.constant is None:
        gains = np.zeros(chunk.segments << sample_bits, np.float32)

    ranks = low_bases = None
    low_bits = _bits(int(np.diff(starts).max())) if weighted else sample_bits
    # Between features of one stack, positions in a segment do not follow the input.
    narrow = not weighted or all(len(stack.features) == 1 for stack in chunk.stacks)
    if narrow and low_bits + id_bits + max(partition_bits, 1) <= _MOST_NARROW_BITS:
        dtype = np.uint32
        low_bases = (
            starts[:-1] if weighted else np.arange(chunk.segments) << sample_bits
        )
        id_shift = low_bits
    else:
        dtype = np.uint64
        low_bits = _bits(total) if weighted else sample_bits + _bits(chunk.segments)
        # The low bits of the id, which give its partition, also stay in the key below
        # the embedding id: they are equal wherever partition and table are, and masking
        # them out would cost a pass. Where that does not fit, ranks take the place of
        # the embedding ids. Without partitions the top bit stays free, so that no
        # difference of keys has all bits set.
        id_shift = low_bits + partition_bits
        if id_shift + id_bits + max(partition_bits, 1) > _DIRECT_KEY_BITS:
            ranks = _distinct_embedding_ids(chunk, slices, partition_bits)
            id_bits = _bits(ranks.size)
            id_shift = low_bits

    result = Keys(
        np.empty(total, dtype),
        starts,
        partition_bits,
        low_bits,
        low_bases,
        sample_bits,
        id_shift,
        (1 << id_bits) - 1,
        ranks,
        gains,
    )
    position = 0
    per_core = layout.samples_per_sc_per_feature
    for i, (stack, parts) in enumerate(zip(chunk.stacks, slices, strict=True)):
        first = i * chunk.cores
        bounds = starts[first : first + chunk.cores + 1]
        offsets = bounds[:-1].copy()
        segments = np.arange(first, first + chunk.cores)[:, None] << sample_bits
        for feature, part in zip(stack.features, parts, strict=True):
            samples = np.arange(per_core) + feature.sample_offset
            row_numbers = (segments + samples).ravel()
            if weighted:
                by_sample = np.tile(samples, chunk.cores)
                by_position.append(_by_position(by_sample, part, stack.combiner))
            elif gains is not None:
                gains[row_numbers] = row_gains(part.lengths, stack.combiner)
            single = len(parts) == 1
            target = (
                result.keys[bounds[0] : bounds[-1]]
                if single
                else np.empty(part.ids.size, dtype)
            )
            if low_bases is None:
                constant = _fill(target, part.ids, feature, result)
                row_keys = row_numbers.view(np.uint64) + constant
            else:
                constant = _fill_narrow(target, part.ids, feature, result)
                row_keys = np.tile(samples.astype(np.uint32) + constant, chunk.cores)
            if not weighted:
                _add_rows(target, row_keys, part.lengths)
            else:
                if low_bases is None:
                    _add_positions(target, position)
                else:
                    for start, end in itertools.pairwise((bounds - bounds[0]).tolist()):
                        _add_positions(target[start:end], 0)
                if constant:
                    target += constant
                position += part.ids.size
            if not single:
                _interleave(target, part.counts, result.keys, bounds, offsets)
    if weighted:
        single = len(by_position) == 1
        result.by_position = by_position[0] if single else np.concatenate(by_position)
    return result


def consecutive(
    count: int, dtype: np.typing.DTypeLike = np.int64, *, first: int = 0
) -> np.ndarray:
    """Integers [count] from ``first`` up; not to be written to."""
    end = first + count
    if end > _MOST_CONSECUTIVE:
        return np.arange(first, end, dtype=dtype)
    return _consecutive(np.dtype(dtype))[first:end]


@functools.cache
def _consecutive(dtype: np.dtype) -> np.ndarray:
    numbers = np.arange(_MOST_CONSECUTIVE, dtype=dtype)
    numbers.flags.writeable = False
    return numbers


def _by_position(samples: np.ndarray, part: Slice, combiner: str) -> np.ndarray:
    """See `Keys`, for the ids of one feature.

    Args:
        samples: int64 [rows], the sample of each row in its segment.
        part: The ids, where a feature of the stack has weights.
        combiner: That of the stack.
    """
    weights, lengths = part.weights, part.lengths
    rows = samples.astype("<i8")
    row_values = rows.view("<f4")[1::2]
    divisors = zero = None
    if weights is None or not weights.size:
        # A feature without weights beside weighted ones in one stack.
        row_values[:] = row_gains(lengths, combiner)
    elif combiner != "sum":
        lengths = row_lengths(weights, lengths)
        divisors, zero = row_divisors(weights, lengths, combiner)
        row_values[:] = divisors
    result = np.repeat(rows, lengths)
    gains = result.view("<f4")[1::2]
    if divisors is not None and zero is not None:
        assert weights is not None
        assert not isinstance(lengths, int)
        divide(weights, gains, lengths, divisors, zero)
    elif weights is not None:
        gains[:] = weights
    return result


def _fill(
    target: np.ndarray, ids: np.ndarray, feature: StackedFeature, keys: Keys
) -> np.uint64:
    """Writes what depends on the ids; arithmetic is modulo 2**64.

    Returns:
        What is still to be added to every key, like the low field.
    """
    bits = keys.partition_bits
    shift = KEY_BITS - bits
    first_row = feature.col_offset >> bits
    top = feature.col_shift << shift
    if keys.ranks is None:
        # One multiplication puts the low bits of the id on top (the rest overflows)
        # and all of it above the low field.
        factor = (1 << keys.low_bits) + (1 << shift)
        np.multiply(ids, np.uint64(factor % 2**64), out=target, dtype=np.uint64)
        return np.uint64((top + (first_row << keys.id_shift)) % 2**64)
    ranks = np.searchsorted(keys.ranks, (ids >> bits) + np.int64(first_row))
    np.left_shift(ranks.view(np.uint64), np.uint64(keys.id_shift), out=target)
    if bits:
        target += ids.astype(np.uint64) << np.uint64(shift)
    return np.uint64(top % 2**64)


def _fill_narrow(
    target: np.ndarray, ids: np.ndarray, feature: StackedFeature, keys: Keys
) -> np.uint32:
    """As `_fill`, modulo 2**32."""
    bits = keys.partition_bits
    shift = NARROW_KEY_BITS - bits
    np.right_shift(ids, bits, out=target)
    target <<= np.uint32(keys.id_shift)
    if bits:
        target += ids << np.uint32(shift)
    first_row = (feature.col_offset >> bits) << keys.id_shift
    return np.uint32(((feature.col_shift << shift) + first_row) % 2**32)


def _add_positions(keys: np.ndarray, first: int) -> None:
    """Adds ``first``, ``first + 1`` and so on."""
    keys += consecutive(keys.size, keys.dtype, first=first)


def _bits(count: int) -> int:
    """Bits that tell so many things apart."""
    return max(count - 1, 0).bit_length()


def _add_rows(target: np.ndarray, rows: np.ndarray, lengths: np.ndarray | int) -> None:
    """Adds a number for each row to the keys of its ids."""
    if isinstance(lengths, int) and lengths == 1:
        target += rows
    elif isinstance(lengths, int) and lengths >= _WIDE_ROW:
        by_row = target.reshape(rows.size, lengths)
        by_row += rows[:, None]
    else:
        target += np.repeat(rows, lengths)


def _interleave(
    values: np.ndarray,
    counts: np.ndarray,
    out: np.ndarray,
    bounds: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """Copies each SparseCore's part of a feature to its place in its segment."""
    columns = offsets - bounds[:-1]
    column = int(columns[0])
    if all((x == x[0]).all() for x in (counts, columns, np.diff(bounds))):
        block = out[bounds[0] : bounds[-1]].reshape(counts.size, -1)
        block[:, column : column + int(counts[0])] = values.reshape(counts.size, -1)
    else:
        start = 0
        for offset, count in zip(offsets.tolist(), counts.tolist(), strict=True):
            out[offset : offset + count] = values[start : start + count]
            start += count
    offsets += counts


def _distinct_embedding_ids(
    chunk: Chunk, slices: Sequence[Sequence[Slice]], partition_bits: int
) -> np.ndarray:
    return np.unique(
        np.concatenate(
            [
                (part.ids >> partition_bits)
                + np.int64(feature.col_offset >> partition_bits)
                for stack, parts in zip(chunk.stacks, slices, strict=True)
                for feature, part in zip(stack.features, parts, strict=True)
            ]
        )
    )


def sort_segments(keys: Keys) -> None:
    """Sorts the keys of every segment in place."""
    lengths = np.diff(keys.starts)
    if keys.keys.size and (lengths == lengths[0]).all():
        keys.keys.reshape(lengths.size, -1).sort(axis=1)
        return
    bounds = keys.starts.tolist()
    for start, end in itertools.pairwise(bounds):
        keys.keys[start:end].sort()
