"""Bit-for-bit comparison with jax-tpu-embedding's C++ preprocessing."""

import zlib

import jax
import numpy as np
import pytest
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec

from grain_sparsecore.kernels import KERNEL_VARIABLE, KERNELS
from grain_sparsecore.limits import GrowthPolicy, Limits, grow_limits
from grain_sparsecore.partition import (
    partition_batch,
    partition_counts,
    required_per_sc,
)
from grain_sparsecore.repartition import repartition
from grain_sparsecore.stacking import StackedLayout
from tests.strategies import Case, random_case

# Random batches are compared in this many tests of this many batches each.
TESTS, BATCHES = 32, 10


def peer_specs(
    layout: StackedLayout, limits: Limits, case: Case
) -> dict[str, embedding_spec.FeatureSpec]:
    """The specs that make the peer use exactly our layout and limits."""
    global_batch = layout.batch_size * layout.topology.num_hosts
    specs = {}
    for stack in layout.stacks:
        agreed = limits[stack.name]
        stacked = embedding_spec.StackedTableSpec(
            stack_name=stack.name,
            stack_vocab_size=stack.vocabulary_size,
            stack_embedding_dim=stack.embedding_dim,
            optimizer=embedding_spec.SGDOptimizerSpec(),
            combiner=stack.combiner,
            total_sample_count=global_batch * len(stack.features),
            max_ids_per_partition=agreed.max_ids_per_partition,
            max_unique_ids_per_partition=agreed.max_unique_ids_per_partition,
            suggested_coo_buffer_size_per_device=agreed.buffer_size_per_device,
        )
        tables = {}
        for table in stack.tables:
            spec = embedding_spec.TableSpec(
                name=table.spec.name,
                vocabulary_size=table.spec.vocabulary_size,
                embedding_dim=table.spec.embedding_dim,
                initializer=jax.nn.initializers.zeros,
                optimizer=embedding_spec.SGDOptimizerSpec(),
                combiner=table.spec.combiner,
            )
            spec.setting_in_stack = embedding_spec.TableSettingInStack(
                stack_name=stack.name,
                padded_vocab_size=table.padded_vocabulary_size,
                padded_embedding_dim=stack.embedding_dim,
                row_offset_in_shard=table.row_offset_in_shard,
                shard_rotation=table.shard_rotation,
            )
            spec.stacked_table_spec = stacked
            tables[spec.name] = spec
        for feature in stack.features:
            width = case.features[feature.index].width
            spec = embedding_spec.FeatureSpec(
                name=feature.name,
                table_spec=tables[feature.table.name],
                input_shape=[global_batch, width] if width else [global_batch],
                output_shape=[global_batch, feature.table.embedding_dim],
            )
            spec.id_transformation = embedding_spec.FeatureIdTransformation(
                row_offset=feature.row_offset,
                col_offset=feature.col_offset,
                col_shift=feature.col_shift,
            )
            specs[feature.name] = spec
    return specs


def peer_input(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Ids and weights as the peer takes them: 2-D, or object arrays of rows."""
    ids = {}
    weights = {}
    for feature in case.layout.features:
        values = case.features[feature.index]
        given = values.weights
        if given is None:
            given = np.ones(values.ids.size, np.float32)
        if values.row_splits is None:
            shape = (case.layout.batch_size, values.width)
            ids[feature.name] = values.ids.reshape(shape)
            weights[feature.name] = given.reshape(shape)
        else:
            ids[feature.name] = object_rows(values.ids, values.row_splits)
            weights[feature.name] = object_rows(given, values.row_splits)
    return ids, weights


def object_rows(values: np.ndarray, splits: np.ndarray) -> np.ndarray:
    rows = np.empty(len(splits) - 1, object)
    for i in range(len(rows)):
        rows[i] = values[splits[i] : splits[i + 1]].copy()
    return rows


def check_against_peer(case: Case) -> None:
    layout = case.layout
    topology = layout.topology
    batches = []
    for kernel in KERNELS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KERNEL_VARIABLE, kernel)
            batches.append(
                partition_batch(
                    case.features,
                    layout,
                    counters=case.counters,
                    num_samples=layout.batch_size,
                )
            )
    batch = batches[0]
    for name in ("embedding_ids", "sample_ids", "gains", "row_pointers", "stats"):
        one, two = (getattr(b, name).view(np.int32) for b in batches)
        np.testing.assert_array_equal(one, two, f"{name} of {KERNELS}")
    limits = grow_limits(
        Limits.start(layout),
        batch.stats,
        layout=layout,
        policy=GrowthPolicy(kind="geometric"),
    )
    ours = repartition(batch, limits, layout)
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
        allow_id_dropping=False,
    )
    counts = partition_counts(batch, layout)
    slots = required_per_sc(batch, layout)
    for stack, (count, unique) in zip(layout.stacks, counts, strict=True):
        name = stack.name
        by_device = (topology.local_device_count, topology.num_sc_per_device, -1)
        for want, got in (
            (stats.max_ids_per_partition, count.reshape(by_device).max(axis=1)),
            (stats.max_unique_ids_per_partition, unique.reshape(by_device).max(axis=1)),
            (stats.required_buffer_size_per_sc, slots[stack.index]),
        ):
            np.testing.assert_array_equal(np.ravel(want[name]), got.ravel(), name)
        np.testing.assert_array_equal(
            peer.lhs_row_pointers[name], ours.row_pointers[name], name
        )
        defined = defined_slots(
            ours.row_pointers[name], ours.embedding_ids[name].shape, layout
        )
        for want, got in (
            (peer.lhs_embedding_ids[name], ours.embedding_ids[name]),
            (peer.lhs_sample_ids[name], ours.sample_ids[name]),
        ):
            assert want.dtype == got.dtype == np.int32
            np.testing.assert_array_equal(want[defined], got[defined], name)
        want, got = peer.lhs_gains[name], ours.gains[name]
        assert want.dtype == got.dtype == np.float32
        # Bits, not values; any NaN is padding.
        nan = np.isnan(got)
        np.testing.assert_array_equal(np.isnan(want)[defined], nan[defined], name)
        compared = defined & ~nan
        np.testing.assert_array_equal(
            want[compared].view(np.int32), got[compared].view(np.int32), name
        )


def defined_slots(
    row_pointers: np.ndarray, shape: tuple[int, ...], layout: StackedLayout
) -> np.ndarray:
    """The slots that the peer writes: up to the aligned end of each SparseCore."""
    topology = layout.topology
    ends = row_pointers.reshape(topology.local_sc_count, -1)
    ends = -(-ends[:, topology.num_partitions - 1] // 8) * 8
    share = shape[1] // topology.num_sc_per_device
    return (np.arange(share) < ends[:, None]).reshape(shape)


@pytest.mark.parametrize("number", range(TESTS))
def test_random_batches_equal_the_peer_bit_for_bit(number: int) -> None:
    rng = np.random.default_rng(zlib.crc32(b"parity") + number)
    for _ in range(BATCHES):
        check_against_peer(random_case(rng, max_ids=40))


def test_random_batches_cover_every_kind() -> None:
    seen = set()
    for number in range(TESTS):
        rng = np.random.default_rng(zlib.crc32(b"parity") + number)
        for _ in range(BATCHES):
            case = random_case(rng, max_ids=40)
            topology = case.layout.topology
            seen.add(("L", topology.local_device_count))
            seen.add(("S", topology.num_sc_per_device))
            seen.add(("N", topology.num_partitions))
            for stack in case.layout.stacks:
                mine = [case.features[f.index] for f in stack.features]
                seen.add(("several tables", len(stack.tables) > 1))
                seen.add(("shared table", len(stack.features) > len(stack.tables)))
                for feature in mine:
                    ragged = feature.row_splits is not None
                    weighted = feature.weights is not None
                    seen.add((stack.combiner, ragged, weighted))
    wanted = {("L", n) for n in (1, 2, 4, 8)}
    wanted |= {("S", n) for n in (2, 4)}
    wanted |= {("N", 2**n) for n in range(1, 9)}
    wanted |= {
        (w, b) for w in ("several tables", "shared table") for b in (False, True)
    }
    wanted |= {
        (combiner, ragged, weighted)
        for combiner in ("sum", "mean", "sqrtn")
        for ragged in (False, True)
        for weighted in (False, True)
    }
    assert seen == wanted
