import collections
import dataclasses
import zlib

import numpy as np
import pytest
from jax_tpu_embedding.sparsecore.lib.nn import embedding

from grain_sparsecore.dropping import count_raw_ids, cut_batch
from grain_sparsecore.features import COUNTERS, FeatureIds
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.repartition import repartition
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout, theoretical_buffer_size
from tests.reference import rows_of
from tests.strategies import Case, random_case
from tests.test_parity import defined_slots, peer_input, peer_specs

NO_CAP = 2**31 - 1


def batch_of(case):
    return partition_batch(
        case.features,
        case.layout,
        counters=case.counters,
        num_samples=case.layout.batch_size,
    )


def with_raw_counts(case):
    return dataclasses.replace(
        batch_of(case), raw_counts=count_raw_ids(case.features, case.layout)
    )


def cells_of(batch, layout):
    """Entries as lists, [stack][SparseCore][partition]."""
    cores, sc = layout.topology.local_sc_count, layout.topology.num_sc_per_device
    result, position = [], 0
    for stack in layout.stacks:
        length = int(batch.stats[stack.index, 2]) // sc
        result.append([])
        for core in range(cores):
            first, cells = 0, []
            for p in range(layout.topology.num_partitions):
                end = int(batch.row_pointers[stack.index, core, p])
                here = slice(position + first, position + end)
                cells.append(
                    list(
                        zip(
                            batch.embedding_ids[here].tolist(),
                            batch.sample_ids[here].tolist(),
                            batch.gains[here].tolist(),
                            strict=True,
                        )
                    )
                )
                first = -(-end // 8) * 8
            result[-1].append(cells)
            position += length
    return result


def prefix_rule(entries, max_ids, max_unique):
    distinct = list(dict.fromkeys(e[0] for e in entries))[:max_unique]
    return [e for e in entries[:max_ids] if e[0] in distinct]


def random_ceilings(rng, batch, layout):
    ceilings = np.full(batch.stats.shape, NO_CAP, np.int64)
    for row, need in zip(ceilings, batch.stats, strict=True):
        for column in (0, 1):
            if need[column] > 1 and rng.random() < 0.7:
                row[column] = rng.integers(1, need[column] + 1)
        if rng.random() < 0.4:
            unit = 8 * layout.topology.num_sc_per_device
            row[2] = max(unit, rng.integers(1, need[2] + 2) // unit * unit)
    return ceilings


@pytest.mark.parametrize("seed", range(40))
def test_prefix_against_the_rule_in_words(seed):
    rng = np.random.default_rng(seed)
    case = random_case(rng, max_partitions=32)
    layout = case.layout
    batch = batch_of(case)
    ceilings = random_ceilings(rng, batch, layout)
    ceilings[:, 2] = NO_CAP
    cut, _ = cut_batch(batch, ceilings, layout=layout)
    expected = [
        [[prefix_rule(cell, *row[:2].tolist()) for cell in core] for core in stack]
        for stack, row in zip(cells_of(batch, layout), ceilings, strict=True)
    ]
    assert cells_of(cut, layout) == expected
    # The statistics are those of what is left.
    for stack, need in zip(expected, cut.stats.tolist(), strict=True):
        assert need[0] == max(len(cell) for core in stack for cell in core)
        assert need[1] == max(
            len({e[0] for e in cell}) for core in stack for cell in core
        )
        slots = max(sum(-(-len(cell) // 8) * 8 for cell in core) for core in stack)
        assert need[2] == slots * layout.topology.num_sc_per_device


@pytest.mark.parametrize("order", ["prefix", "balanced"])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_cut_fits_and_is_laid_out_like_any_batch(seed, order):
    rng = np.random.default_rng(100 + seed)
    case = random_case(rng, max_partitions=32, max_ids=30)
    layout, batch = case.layout, batch_of(case)
    ceilings = random_ceilings(rng, batch, layout)
    cut, lost = cut_batch(batch, ceilings, layout=layout, order=order, step=seed)
    assert (cut.stats <= ceilings).all()
    before, after = cells_of(batch, layout), cells_of(cut, layout)
    gone = 0
    for stack, row in zip(layout.stacks, ceilings.tolist(), strict=True):
        for old, new in zip(before[stack.index], after[stack.index], strict=True):
            slots = row[2] // layout.topology.num_sc_per_device
            used = sum(-(-len(cell) // 8) * 8 for cell in new)
            assert used <= slots
            for one, two in zip(old, new, strict=True):
                assert [e for e in one if e in two] == two
                gone += len(one) - len(two)
                # A partition that fits is not touched, and none is cut further than
                # to where 8 more slots would be too many.
                allowed = prefix_rule(one, row[0], row[1])
                if order == "prefix" and len(two) < len(allowed):
                    assert len(two) % 8 == 0
                    assert used + 8 > slots or any(
                        -(-len(cell) // 8) * 8 > len(two) for cell in new
                    )
                    assert two == allowed[: len(two)]
    assert lost.per_feature[:, 1].sum() == gone
    limits = Limits.from_array(layout.stack_names, cut.stats.clip(1))
    limits = Limits(
        {
            name: StackLimits(
                max_ids_per_partition=v.max_ids_per_partition,
                max_unique_ids_per_partition=v.max_unique_ids_per_partition,
                buffer_size_per_device=max(
                    v.buffer_size_per_device, 8 * layout.topology.num_sc_per_device
                ),
            )
            for name, v in limits.items()
        }
    )
    # Nobody downstream needs to know.
    result = repartition(cut, limits, layout)
    for stack in layout.stacks:
        ids = result.embedding_ids[stack.name]
        kept = sum(len(cell) for core in after[stack.index] for cell in core)
        assert (ids != 2**31 - 1).sum() == kept


def small_case(rows, *, sc=2, weights=None, combiner="sum"):
    layout = make_layout(
        [TableSpec(name="t", vocabulary_size=64, embedding_dim=8, combiner=combiner)],
        [FeatureSpec(name="f", table="t", weights="w" if weights else None)],
        topology=Topology(
            global_device_count=1, local_device_count=1, num_sc_per_device=sc
        ),
        batch_size=len(rows),
    )
    splits = np.cumsum([0] + [len(row) for row in rows])
    ids = np.array([i for row in rows for i in row], np.int32)
    given = None
    if weights:
        given = np.array([w for row in weights for w in row], np.float32)
    return Case(
        layout, [FeatureIds(ids=ids, row_splits=splits, width=0, weights=given)]
    )


def test_by_hand():
    # Two SparseCores and partitions; SparseCore 0 has 0, 2, 4, 6 in partition 0.
    case = small_case([[6, 4, 2, 0], [1]])
    ceilings = np.array([[2, NO_CAP, NO_CAP]])
    cut, lost = cut_batch(batch_of(case), ceilings, layout=case.layout)
    kept = [[e[0] for e in cell] for cell in cells_of(cut, case.layout)[0][0]]
    assert kept == [[0, 1], []]
    np.testing.assert_array_equal(lost.per_feature, [[2, 2, 1]])
    assert lost.lost_weight == [2.0]
    assert lost.examples == 1
    np.testing.assert_array_equal(cut.stats, [[2, 2, 16]])


def test_duplicates_count_as_ids_and_as_one_entry():
    case = small_case(
        [[0, 2, 2, 2, 4, 4], [1]],
        weights=[[1, 0.5, 0.25, 0.25, 2, -1], [1]],
        combiner="sum",
    )
    ceilings = np.array([[1, NO_CAP, NO_CAP]])
    _, lost = cut_batch(with_raw_counts(case), ceilings, layout=case.layout)
    # Entry 2 stands for three ids and gain 1, entry 4 for two and gain 1.
    np.testing.assert_array_equal(lost.per_feature, [[5, 2, 1]])
    assert lost.lost_weight == [2.0]


def test_a_batch_that_fits_is_passed_on_as_it_is():
    batch = batch_of(small_case([[0], [1]]))
    layout = small_case([[0], [1]]).layout
    same, lost = cut_batch(batch, np.array([[1, 1, 16]]), layout=layout)
    assert same is batch
    assert not lost.per_feature.any()


def test_examples_are_counted_once_over_features():
    layout = make_layout(
        [TableSpec(name="t", vocabulary_size=64, embedding_dim=8)],
        [FeatureSpec(name=n, table="t") for n in "ab"],
        topology=Topology(
            global_device_count=1, local_device_count=1, num_sc_per_device=1
        ),
        batch_size=2,
    )
    both = FeatureIds(
        ids=np.array([0, 1, 2, 3], np.int32), row_splits=None, width=2, weights=None
    )
    batch = partition_batch(
        [both, both],
        layout,
        counters=np.zeros((2, len(COUNTERS)), np.int32),
        num_samples=2,
    )
    ceilings = np.array([[3, NO_CAP, NO_CAP]])
    _, lost = cut_batch(batch, ceilings, layout=layout)
    # Kept: id 0 of sample 0 in a and b, id 1 of sample 0 in a.
    np.testing.assert_array_equal(lost.per_feature, [[2, 2, 1], [3, 3, 2]])
    assert lost.examples == 2


def places(batch, layout):
    """Every entry with where it is, and the number of entries there."""
    for core, cells in enumerate(cells_of(batch, layout)[0]):
        for partition, cell in enumerate(cells):
            for entry in cell:
                yield (core, partition, entry), len(cell)


def test_balanced_loses_every_entry_about_equally_often():
    rng = np.random.default_rng(0)
    rows = [rng.choice(64, 40, replace=False).tolist() for _ in range(4)]
    case = small_case(rows)
    batch, layout = batch_of(case), case.layout
    ceilings = np.array([[12, NO_CAP, NO_CAP]])
    kept = collections.Counter()
    steps = 400
    for step in range(steps):
        cut, _ = cut_batch(batch, ceilings, layout=layout, order="balanced", step=step)
        kept.update(entry for entry, _ in places(cut, layout))
    everything = dict(places(batch, layout))
    assert set(kept) == set(everything)
    for key, size in everything.items():
        fair = min(1, 12 / size) * steps
        assert abs(kept[key] - fair) <= 5, key
    again, _ = cut_batch(batch, ceilings, layout=layout, order="balanced", step=7)
    first, _ = cut_batch(batch, ceilings, layout=layout, order="balanced", step=7)
    assert cells_of(first, layout) == cells_of(again, layout)


def test_raw_counts_are_the_ids_of_each_entry():
    rng = np.random.default_rng(5)
    for _ in range(20):
        case = random_case(rng, max_partitions=16)
        layout = case.layout
        raw = count_raw_ids(case.features, layout)
        batch = batch_of(case)
        assert raw.dtype == np.int32
        assert raw.shape == batch.embedding_ids.shape
        np.testing.assert_array_equal(raw == 0, batch.embedding_ids == 2**31 - 1)
        total = sum(
            len(row) for f in case.features for row in rows_of(f, layout.batch_size)[0]
        )
        assert raw.sum() == total


def limits_to_drop_at(rng, batch, layout):
    """Limits below the need, with buffers in which all that is left fits."""
    stacks = {}
    for stack, need in zip(layout.stacks, batch.stats.tolist(), strict=True):
        ids = int(rng.integers(1, max(need[0], 1) + 1))
        stacks[stack.name] = StackLimits(
            max_ids_per_partition=ids,
            max_unique_ids_per_partition=int(rng.integers(1, max(need[1], 1) + 1)),
            buffer_size_per_device=theoretical_buffer_size(ids, layout.topology),
        )
    return Limits(stacks)


@pytest.mark.parametrize("number", range(20))
def test_drops_equal_the_peer_with_dropping_allowed(number):
    rng = np.random.default_rng(zlib.crc32(b"drops") + number)
    for _ in range(10):
        case = random_case(rng, max_partitions=64, max_ids=20)
        check_drops_against_peer(rng, case)


def check_drops_against_peer(rng, case):
    layout, topology = case.layout, case.layout.topology
    batch = with_raw_counts(case)
    limits = limits_to_drop_at(rng, batch, layout)
    cut, lost = cut_batch(batch, limits.to_array().astype(np.int64), layout=layout)
    ours = repartition(cut, limits, layout)
    ids, weights = peer_input(case)
    weighted = any(f.weights is not None for f in case.features)
    peer, stats = embedding.preprocess_sparse_dense_matmul_input(
        ids,
        weights if weighted else None,
        peer_specs(layout, limits, case),
        local_device_count=topology.local_device_count,
        global_device_count=topology.global_device_count,
        num_sc_per_device=topology.num_sc_per_device,
        has_leading_dimension=True,
        allow_id_dropping=True,
    )
    for stack in layout.stacks:
        name = stack.name
        np.testing.assert_array_equal(
            peer.lhs_row_pointers[name], ours.row_pointers[name]
        )
        defined = defined_slots(
            ours.row_pointers[name], ours.embedding_ids[name].shape, layout
        )
        for want, got in (
            (peer.lhs_embedding_ids[name], ours.embedding_ids[name]),
            (peer.lhs_sample_ids[name], ours.sample_ids[name]),
        ):
            np.testing.assert_array_equal(want[defined], got[defined])
        want, got = peer.lhs_gains[name], ours.gains[name]
        nan = np.isnan(got)
        np.testing.assert_array_equal(np.isnan(want)[defined], nan[defined])
        kept = defined & ~nan
        np.testing.assert_array_equal(
            want[kept].view(np.int32), got[kept].view(np.int32)
        )
        mine = [f.index for f in stack.features]
        assert stats.id_drop_counters[name] == lost.per_feature[mine, 0].sum()
        assert (lost.per_feature[mine, 1] <= lost.per_feature[mine, 0]).all()
