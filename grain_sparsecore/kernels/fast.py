"""Prepares a batch for the compiled kernel and calls it once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grain_sparsecore.kernels import numba_kernels as nk
from grain_sparsecore.kernels import numpy_kernels
from grain_sparsecore.kernels.chunks import stack_mode
from grain_sparsecore.kernels.partitioned import Partitioned, check_slots
from grain_sparsecore.kernels.passes import address
from grain_sparsecore.kernels.sorting import sort_function
from grain_sparsecore.slots import empty_slots, scratch
from grain_sparsecore.stacking import ALIGNMENT, StackedLayout

if TYPE_CHECKING:
    from grain_sparsecore.features import FeatureIds

_COMBINERS = {"sum": nk.SUM, "mean": nk.MEAN, "sqrtn": nk.SQRTN}

# Bits of short and long keys; smaller in tests only.
_NARROW_BITS, _WIDE_BITS = 32, 63

# Bits by which short keys may fall short, and the keys of a SparseCore from which it
# pays to deal them into buckets.
_BUCKET_BITS, _MANY_KEYS = 8, 1 << 13


class _Tables(NamedTuple):
    """What the kernel must know of a layout, columns as in `numba_kernels`."""

    layout: StackedLayout
    stacks: np.ndarray  # int64 [T, 11]
    features: np.ndarray  # int64 [F, 7]


class _Needs(NamedTuple):
    """What a batch needs of scratch memory, maxima over stacks, and of slots."""

    keys: int
    keys_per_core: np.ndarray  # int64 [T]
    rows: int
    gains: int
    longest: int
    slots: int


def partition(features: "Sequence[FeatureIds]", layout: StackedLayout) -> Partitioned:
    """See `grain_sparsecore.kernels.Kernel`."""
    cores, partitions = layout.topology.local_sc_count, layout.topology.num_partitions
    tables = _tables(layout)
    stacks, feature_table = tables.stacks.copy(), tables.features.copy()
    constants = np.ones(len(stacks), np.float32)
    needs = _fill(stacks, feature_table, constants, features, layout)
    low_bits = stacks[:, [nk.SAMPLE_BITS, nk.POSITION_BITS]].sum(axis=1)
    bits = low_bits + stacks[:, nk.ID_BITS] + (partitions.bit_length() - 1)
    if bits.max() > _WIDE_BITS:
        # Billions of rows and thousands of ids a sample at once.
        return numpy_kernels.partition(features, layout)
    shape = (len(stacks), cores, layout.row_pointers_per_sc)
    row_pointers = scratch(int(np.prod(shape)), np.int32).reshape(shape)
    stats = np.empty((len(stacks), 3), np.int32)
    slots = empty_slots(needs.slots)
    # One type for all stacks: most batches need only one, and each is compiled when
    # it is first needed.
    more_bits = np.maximum(bits - _NARROW_BITS, 0)
    narrow = not more_bits.any() or (
        more_bits.max() <= _BUCKET_BITS
        # A bucket holds whole ids, so that none goes on in the next one.
        and low_bits.max() < _NARROW_BITS
        and needs.keys_per_core[more_bits > 0].min() >= _MANY_KEYS
    )
    dtype = np.uint32 if narrow else np.int64
    if narrow:
        stacks[:, nk.BUCKET_BITS] = more_bits
    buckets = 1 << int(stacks[:, nk.BUCKET_BITS].max())
    sort = sort_function(np.dtype(dtype).name)
    keys = scratch(needs.keys, dtype)
    used = nk.sort_batch(
        stacks,
        feature_table,
        constants,
        partitions.bit_length() - 1,
        layout.samples_per_sc_per_feature,
        _NARROW_BITS,
        sort,
        address(keys),
        keys,
        scratch(0 if sort else needs.keys, dtype),
        scratch(needs.keys if buckets > 1 else 0, np.int64),
        scratch(cores * (buckets + 1), np.int64).reshape(cores, buckets + 1),
        scratch(needs.gains, np.float32),
        scratch(needs.rows, np.int64),
        np.zeros(needs.longest + 1, np.float32),
        np.zeros((2, partitions), np.int32),
        scratch(cores * partitions, np.int32).reshape(cores, partitions),
        row_pointers,
        stats,
        *slots,
    )
    per_device = stats[:, 2].astype(np.int64) * layout.topology.num_sc_per_device
    check_slots(per_device, layout)
    stats[:, 2] = per_device
    ids, samples, gains = (part[:used] for part in slots)
    return Partitioned(ids, samples, gains, row_pointers, stats)


_last: _Tables | None = None


def _tables(layout: StackedLayout) -> _Tables:
    """Made anew when the layout changes, which a job never does."""
    global _last
    known = _last
    if known is None or known.layout is not layout:
        known = _last = _make_tables(layout)
    return known


def _make_tables(layout: StackedLayout) -> _Tables:
    bits = layout.topology.num_partitions.bit_length() - 1
    stacks = np.zeros((len(layout.stacks), 11), np.int64)
    features = np.zeros((len(layout.features), 7), np.int64)
    for row, stack in zip(stacks, layout.stacks, strict=True):
        row[nk.FIRST_FEATURE] = stack.features[0].index
        row[nk.LAST_FEATURE] = stack.features[-1].index + 1
        row[nk.COMBINER] = _COMBINERS[stack.combiner]
        row[nk.ID_BITS] = ((stack.vocabulary_size >> bits) - 1).bit_length()
        row[nk.SAMPLE_BITS] = (stack.samples_per_sc - 1).bit_length()
        row[nk.SAMPLES] = stack.samples_per_sc
    for row, feature in zip(features, layout.features, strict=True):
        row[nk.SHIFT] = feature.col_shift
        row[nk.FIRST_ROW] = feature.col_offset >> bits
        row[nk.FIRST_SAMPLE] = feature.sample_offset
    return _Tables(layout, stacks, features)


def _fill(
    stacks: np.ndarray,
    feature_table: np.ndarray,
    constants: np.ndarray,
    features: "Sequence[FeatureIds]",
    layout: StackedLayout,
) -> _Needs:
    """Fills in what depends on the batch."""
    cores = layout.topology.local_sc_count
    partitions = layout.topology.num_partitions
    per_core = layout.samples_per_sc_per_feature
    keys = rows = gains = most_ids = slots = 0
    keys_per_core = np.zeros(len(stacks), np.int64)
    for stack in layout.stacks:
        mode = stack_mode(stack, features)
        row = stacks[stack.index]
        row[nk.MERGE] = mode.merge
        total = 0
        counts = np.zeros(cores, np.int64)
        for feature in stack.features:
            given = features[feature.index]
            target = feature_table[feature.index]
            target[nk.IDS] = address(given.ids)
            target[nk.WIDTH] = given.width
            if given.row_splits is not None:
                target[nk.SPLITS] = address(given.row_splits)
                mine = np.diff(given.row_splits[::per_core])
                counts += mine
                # The longest sample has no more ids than its SparseCore.
                longest = int(mine.max())
            else:
                counts += given.width * per_core
                longest = given.width
            if given.weights is not None:
                target[nk.WEIGHTS] = address(given.weights)
            row[nk.LONGEST] = max(row[nk.LONGEST], longest)
            total += given.ids.size
        most = int(counts.max())
        keys_per_core[stack.index] = most
        keys = max(keys, total)
        table = cores * stack.samples_per_sc
        if mode.weighted:
            row[nk.GAINS] = nk.BY_ID
            row[nk.POSITION_BITS] = (max(int(row[nk.LONGEST]), 1) - 1).bit_length()
            gains, rows = max(gains, total), max(rows, table)
        elif mode.constant is None:
            row[nk.GAINS] = nk.BY_ROW
            gains = max(gains, table)
        else:
            constants[stack.index] = mode.constant
            most_ids = max(most_ids, int(row[nk.LONGEST]))
        # Every partition with an id wastes up to 7 slots.
        slots += cores * (most + min(most, partitions) * (ALIGNMENT - 1))
    return _Needs(keys, keys_per_core, rows, gains, most_ids, slots)
