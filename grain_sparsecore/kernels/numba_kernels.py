"""The whole sort of a batch as one compiled call that holds no lock.

The same arithmetic as the numpy kernel, a SparseCore at a time: build keys, sort,
measure, and, once the longest segment of the stack is known, write each slot once.
A key is, from the top: partition, embedding id, sample, and, where ids carry weights,
the position in the sample. It takes 32 bits where that suffices, else 63: signed 64-bit
arithmetic is exact for both. Short keys sort in half the time, so many keys that need a
few bits more are dealt into *buckets* by those, and sorted by the rest.

Needs numba; see `numba_tools` for the cache.
"""

# numba's decorators and intrinsics have no types that pyright could follow.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

import numba
import numpy as np

from grain_sparsecore.buffers import PADDING_GAIN, PADDING_ID
from grain_sparsecore.kernels.numba_tools import call_sort, compiled, part, pointer

# Columns of the table of features.
IDS, SPLITS, WEIGHTS, WIDTH, SHIFT, FIRST_ROW, FIRST_SAMPLE = range(7)

# Columns of the table of stacks.
(
    FIRST_FEATURE,
    LAST_FEATURE,
    COMBINER,
    GAINS,
    MERGE,
    ID_BITS,
    SAMPLE_BITS,
    POSITION_BITS,
    SAMPLES,
    LONGEST,
    BUCKET_BITS,
) = range(11)

# Values of COMBINER.
SUM, MEAN, SQRTN = range(3)

# Values of GAINS: equal for all ids, equal in each sample, different for every id.
CONSTANT, BY_ROW, BY_ID = range(3)

_ALIGNMENT = 8
_RADIX_BITS = 8

# Keys a partition holds on average from which its ends are searched for, so that the
# keys in between can be compared by vector instructions; below, each key adds to the
# count of its partition.
_LONG_RUN = 16


@part
def _radix_sort(keys, spare, bits):
    """Sorts keys of ``bits`` bits; ``spare`` has at least their size."""
    counts = np.empty(1 << _RADIX_BITS, np.int64)
    source, target = keys, spare[: keys.size]
    for shift in range(0, bits, _RADIX_BITS):
        counts[:] = 0
        for i in range(source.size):
            counts[(np.int64(source[i]) >> shift) & 255] += 1
        total = 0
        for i in range(counts.size):
            total, counts[i] = total + counts[i], total
        for i in range(source.size):
            digit = (np.int64(source[i]) >> shift) & 255
            target[counts[digit]] = source[i]
            counts[digit] += 1
        source, target = target, source
    if (-(-bits // _RADIX_BITS)) & 1:
        keys[:] = source


@part
def _row_gain(count, combiner):
    """Gain of each of ``count`` ids without weights."""
    if combiner == SUM or count == 0:
        return np.float32(1)
    divisor = np.float32(count)
    if combiner == SQRTN:
        divisor = np.sqrt(divisor)
    return np.float32(1) / divisor


@part
def _weighted_gains(weights, start, count, combiner, gains, target):
    """Writes the weight over the divisor of its row; 0 where that cannot be divided.

    Sums are rounded to float32 at every step. See `gains.zeroed_rows` for the rule.
    """
    total = np.float32(1)
    if combiner == MEAN:
        total = np.float32(0)
        for i in range(count):
            total += weights[start + i]
    elif combiner == SQRTN:
        total = np.float32(0)
        for i in range(count):
            weight = np.float64(weights[start + i])
            total = np.float32(np.float64(total) + weight * weight)
        total = np.sqrt(total)
    divides = total != 0 and np.isfinite(total)
    if divides and np.abs(total) < 1:
        # A weight is finite, so only then can the quotient overflow.
        for i in range(count):
            divides &= np.isfinite(weights[start + i] / total)
    if not divides:
        for i in range(count):
            gains[target + i] = 0
        return
    for i in range(count):
        gains[target + i] = weights[start + i] / total


@part
def _build(feature, stack, core, per_core, partition_bits, keys, gains, starts, used):
    """Appends the keys of one feature on one SparseCore.

    Args:
        feature: Row of the table of features.
        stack: Row of the table of stacks.
        core: The SparseCore.
        per_core: Samples of the feature on it.
        partition_bits: log2 N.
        keys: The keys of the SparseCore.
        gains: float32, gain of each sample or, in input order, of each id.
        starts: int64, position of the first id of each sample in ``gains``.
        used: Keys, and gains of ids, already there.

    Returns:
        Keys there afterwards.
    """
    position_bits = stack[POSITION_BITS]
    low_bits = stack[SAMPLE_BITS] + position_bits
    top = low_bits + stack[ID_BITS]
    mask = (1 << partition_bits) - 1
    shift, first_row = feature[SHIFT], feature[FIRST_ROW]
    width, first = feature[WIDTH], feature[FIRST_SAMPLE]
    combiner, kind = stack[COMBINER], stack[GAINS]
    row = core * per_core
    ragged = feature[SPLITS] != 0
    splits = numba.carray(pointer(feature[SPLITS]), row + per_core + 1, np.int64)
    start = splits[row] if ragged else row * width
    end = splits[row + per_core] if ragged else start + per_core * width
    all_ids = numba.carray(pointer(feature[IDS]), end, np.int32)
    if width == 1 and kind == CONSTANT:
        # By far the most frequent case, and one loop for vector instructions.
        ids, out = all_ids[start:end], keys[used : used + per_core]
        for i in range(per_core):
            one = np.int64(ids[i])
            out[i] = (
                (((one + shift) & mask) << top)
                | (((one >> partition_bits) + first_row) << low_bits)
                | (first + i)
            )
        return used + per_core
    weights = numba.carray(pointer(feature[WEIGHTS]), end, np.float32)
    step = 1 if position_bits else 0
    for i in range(per_core):
        count = splits[row + i + 1] - start if ragged else width
        low = (first + i) << position_bits
        # Unsigned indices are not checked for being negative.
        source, target = np.uintp(start), np.uintp(used)
        for j in range(count):
            one = np.int64(all_ids[source + np.uintp(j)])
            keys[target + np.uintp(j)] = (
                (((one + shift) & mask) << top)
                | (((one >> partition_bits) + first_row) << low_bits)
                | (low + j * step)
            )
        if kind == BY_ROW:
            gains[first + i] = _row_gain(count, combiner)
        elif kind == BY_ID:
            starts[first + i] = used
            if feature[WEIGHTS]:
                _weighted_gains(weights, start, count, combiner, gains, used)
            else:
                gain = _row_gain(count, combiner)
                for j in range(count):
                    gains[used + j] = gain
        start += count
        used += count
    return used


@part
def _deal(keys, key_bits, bucket_bits, target, ends):
    """Deals keys into buckets by what they have above ``key_bits``.

    Args:
        keys: int64 [n].
        key_bits: Bits of a key in a bucket.
        bucket_bits: Bits above.
        target: uint32 [n], filled with the keys, bucket after bucket, in their order.
        ends: int64, filled with 0 and where each bucket ends.
    """
    buckets = 1 << bucket_bits
    mask = (1 << key_bits) - 1
    ends[: buckets + 1] = 0
    for i in range(keys.size):
        ends[np.uintp((keys[i] >> key_bits) + 1)] += 1
    # Where the next key of each bucket goes; in the end, where the bucket ends.
    total = np.int64(0)
    for b in range(1, buckets + 1):
        total, ends[b] = total + ends[b], total
    for i in range(keys.size):
        b = np.uintp((keys[i] >> key_bits) + 1)
        place = ends[b]
        target[np.uintp(place)] = keys[i] & mask
        ends[b] = place + 1


@part
def _count_long_runs(keys, high, entry_shift, id_shift, top, entries, unique):
    """Counts entries and distinct ids of each partition of a bucket; runs are long.

    Keys of different buckets differ in partition or id; ``high`` is what they have in
    common above.
    """
    end = keys.size
    a = 0
    while a < end:
        partition = (np.int64(keys[a]) | high) >> top
        bound = ((partition + 1) << top) - high
        b = a + 1
        while b + 16 <= end and np.int64(keys[b + 15]) < bound:
            b += 16
        while b < end and np.int64(keys[b]) < bound:
            b += 1
        run = keys[a:b]
        new_entries = new_ids = np.int32(1)
        for i in range(run.size - 1):
            new_ids += (run[i + 1] >> id_shift) != (run[i] >> id_shift)
        for i in range(run.size - 1):
            new_entries += (run[i + 1] >> entry_shift) != (run[i] >> entry_shift)
        entries[partition] += new_entries
        unique[partition] += new_ids
        a = b


@part
def _count_short_runs(keys, high, entry_shift, id_shift, top, entries, unique):
    """The same where runs are short, or where there are none."""
    before = np.int64(-1)
    for i in range(keys.size):
        key = np.int64(keys[i]) | high
        partition = np.uintp(key >> top)
        entries[partition] += (key >> entry_shift) != (before >> entry_shift)
        unique[partition] += (key >> id_shift) != (before >> id_shift)
        before = key


@part
def _place(entries, unique, pointers, moves, most):
    """Aligns the partitions of one SparseCore.

    Args:
        entries: int32 [N], cleared.
        unique: int32 [N], cleared.
        pointers: int32 [W], filled with row pointers.
        moves: int32 [N], filled: from the index of an entry to its slot.
        most: int64 [2], raised to the most entries and distinct ids of a partition.

    Returns:
        Slots.
    """
    slots = np.int32(0)
    before = np.int32(0)
    most_entries = most_unique = np.int32(0)
    for p in range(entries.size):
        count = entries[p]
        moves[p] = slots - before
        pointers[p] = slots + count
        before += count
        slots += (count + np.int32(_ALIGNMENT - 1)) & np.int32(-_ALIGNMENT)
        most_entries = max(most_entries, count)
        most_unique = max(most_unique, unique[p])
    for p in range(entries.size, pointers.size):
        pointers[p] = slots
    entries[:] = 0
    unique[:] = 0
    most[0] = max(most[0], most_entries)
    most[1] = max(most[1], most_unique)
    return slots


@part
def _write(keys, high, first, stack, repeated, gains, starts, moves, ids, samples, out):
    """Writes the entries of one bucket into the padded slots of its SparseCore.

    Whether a key repeats the one before cannot be predicted, so every key is written
    to the current slot, and only a new one moves on.

    Returns:
        Entries of this bucket and of those before, of which there were ``first``.
    """
    position_bits = stack[POSITION_BITS]
    sample_mask = (1 << stack[SAMPLE_BITS]) - 1
    position_mask = (1 << position_bits) - 1
    low_bits = stack[SAMPLE_BITS] + position_bits
    id_mask = (1 << stack[ID_BITS]) - 1
    top = low_bits + stack[ID_BITS]
    kind = stack[GAINS]
    if not stack[MERGE] and kind == CONSTANT:
        for i in range(keys.size):
            key = np.int64(keys[i]) | high
            slot = np.uintp(first + i + moves[np.uintp(key >> top)])
            ids[slot] = (key >> low_bits) & id_mask
            samples[slot] = key & sample_mask
            out[slot] = repeated[1]
        return first + keys.size
    entry_index = first - 1
    before = np.int64(-1)
    if kind == CONSTANT:
        # The gain follows from how often the id occurs, and counting is a shorter
        # chain of instructions than adding up.
        times = 0
        for i in range(keys.size):
            key = np.int64(keys[i]) | high
            new = key != before
            times = 1 if new else times + 1
            entry_index += new
            before = key
            slot = np.uintp(entry_index + moves[np.uintp(key >> top)])
            ids[slot] = (key >> low_bits) & id_mask
            samples[slot] = key & sample_mask
            out[slot] = repeated[np.uintp(times)]
        return entry_index + 1
    total = np.float32(0)
    for i in range(keys.size):
        key = np.int64(keys[i]) | high
        entry = key >> position_bits
        sample = entry & sample_mask
        if kind == BY_ROW:
            gain = gains[np.uintp(sample)]
        else:
            start = starts[np.uintp(sample)]
            gain = gains[np.uintp(start + (key & position_mask))]
        new = entry != before
        total = gain if new else total + gain
        entry_index += new
        before = entry
        slot = np.uintp(entry_index + moves[np.uintp(key >> top)])
        ids[slot] = (key >> low_bits) & id_mask
        samples[slot] = sample
        out[slot] = total
    return entry_index + 1


@compiled
def sort_batch(
    stacks,
    features,
    constants,
    partition_bits,
    per_core,
    key_bits,
    sort,
    keys_address,
    keys,
    spare,
    wide,
    bucket_ends,
    scratch_gains,
    starts,
    repeated,
    counts,
    moves,
    row_pointers,
    stats,
    all_ids,
    all_samples,
    all_gains,
):
    """Sorts a batch.

    T stacks, F features, R SparseCores of this host, N partitions. The sizes of
    scratch arrays are those of the stack that needs most.

    Args:
        stacks: int64 [T, 11], columns as above.
        features: int64 [F, 7], columns as above: addresses of C-contiguous arrays
            (0 where there is none), and numbers.
        constants: float32 [T], gain of every id where GAINS is CONSTANT.
        partition_bits: log2 N.
        per_core: Samples of each feature on one SparseCore.
        key_bits: Bits of a key in a bucket.
        sort: Address of a function that sorts keys, or 0.
        keys_address: Address of ``keys``.
        keys: uint32 or int64 [ids of a stack], scratch.
        spare: Of the same type; scratch, used only where ``sort`` is 0.
        wide: int64 [ids of a stack], scratch, used only where there are buckets.
        bucket_ends: int64 [R, most buckets + 1], scratch.
        scratch_gains: float32, ids or samples of a stack, scratch.
        starts: int64, samples of a stack, scratch.
        repeated: float32 [longest sample + 1], 0 first, scratch.
        counts: int32 [2, N] of zeros, and zeros again in the end.
        moves: int32 [R, N], scratch.
        row_pointers: int32 [T, R, W], filled.
        stats: int32 [T, 3], filled; the last column per SparseCore.
        all_ids: int32 [slots], filled from the start.
        all_samples: int32 [slots], filled from the start.
        all_gains: float32 [slots], filled from the start.

    Returns:
        Slots filled.
    """
    cores = row_pointers.shape[1]
    entries, unique = counts[0], counts[1]
    ends = np.zeros(cores + 1, np.int64)
    most = np.zeros(2, np.int64)
    base = 0
    for t in range(stacks.shape[0]):
        stack = stacks[t]
        entry_shift = stack[POSITION_BITS]
        id_shift = entry_shift + stack[SAMPLE_BITS]
        top = id_shift + stack[ID_BITS]
        per_id = stack[GAINS] == BY_ID
        bucket_bits = stack[BUCKET_BITS]
        most[:] = 0
        length = 0
        for core in range(cores):
            first = ends[core]
            row = core * stack[SAMPLES]
            my_gains, my_starts = (
                scratch_gains[first if per_id else row :],
                starts[row:],
            )
            used = np.int64(0)
            for f in range(stack[FIRST_FEATURE], stack[LAST_FEATURE]):
                args = (features[f], stack, core, per_core, partition_bits)
                if bucket_bits:
                    used = _build(*args, wide, my_gains, my_starts, used)
                else:
                    used = _build(*args, keys[first:], my_gains, my_starts, used)
            ends[core + 1] = first + used
            bucket_ends[core, 0], bucket_ends[core, 1] = 0, used
            if bucket_bits:
                target = keys[first : first + used]
                _deal(wide[:used], key_bits, bucket_bits, target, bucket_ends[core])
            for b in range(1 << bucket_bits):
                start = first + bucket_ends[core, b]
                mine = keys[start : first + bucket_ends[core, b + 1]]
                high = b << key_bits
                if sort:
                    call_sort(sort, keys_address + start * keys.itemsize, mine.size)
                else:
                    _radix_sort(mine, spare, top + partition_bits - bucket_bits)
                shifts = (entry_shift, id_shift, top)
                if used >= entries.size * _LONG_RUN:
                    _count_long_runs(mine, high, *shifts, entries, unique)
                else:
                    _count_short_runs(mine, high, *shifts, entries, unique)
            slots = _place(entries, unique, row_pointers[t, core], moves[core], most)
            length = max(length, np.int64(slots))
        if stack[GAINS] == CONSTANT:
            for i in range(stack[LONGEST]):
                repeated[i + 1] = repeated[i] + constants[t]
        for core in range(cores):
            begin, end = base + core * length, base + (core + 1) * length
            row = core * stack[SAMPLES]
            ids, samples = all_ids[begin:end], all_samples[begin:end]
            gains = all_gains[begin:end]
            ids[:] = PADDING_ID
            samples[:] = PADDING_ID
            gains[:] = PADDING_GAIN
            first = ends[core]
            my_gains = scratch_gains[first if per_id else row :]
            entry = np.int64(0)
            for b in range(1 << bucket_bits):
                start, stop = bucket_ends[core, b], bucket_ends[core, b + 1]
                entry = _write(
                    keys[first + start : first + stop],
                    b << key_bits,
                    entry,
                    stack,
                    repeated,
                    my_gains,
                    starts[row:],
                    moves[core],
                    ids,
                    samples,
                    gains,
                )
        base += cores * length
        stats[t, 0] = most[0]
        stats[t, 1] = most[1]
        stats[t, 2] = length
    return base
