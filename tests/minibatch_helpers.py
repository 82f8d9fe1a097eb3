"""A job in which some batches of some hosts are above a cap, and what it looks up."""

from typing import Any

import grain
import numpy as np

from grain_sparsecore.limits import GrowthPolicy
from grain_sparsecore.lookup import embedding_lookup, shard_tables
from grain_sparsecore.overflow import OverflowPolicy, StackCaps
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.pipeline import (
    ComputeInputStats,
    CoordinateLimitsIterDataset,
    RepartitionIterDataset,
)
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout
from tests.strategies import Case

BATCH = 8
CAP = 10
MINIBATCH = OverflowPolicy(
    on_overflow="minibatch", caps={"item": StackCaps(max_ids_cap=CAP)}
)
DROP = OverflowPolicy(
    on_overflow="minibatch",
    on_full_bucket="drop",
    caps={"item": StackCaps(max_ids_cap=CAP)},
)


def layout_of(hosts: int = 1) -> StackedLayout:
    return make_layout(
        [
            TableSpec(name="item", vocabulary_size=5000, embedding_dim=8),
            TableSpec(name="user", vocabulary_size=64, embedding_dim=8),
        ],
        [
            FeatureSpec(name="clicks", table="item"),
            FeatureSpec(name="views", table="item"),
            FeatureSpec(name="user", table="user"),
        ],
        topology=Topology(
            # Their number must be a power of two, also for three hosts.
            global_device_count=1 << (hosts - 1).bit_length(),
            local_device_count=1,
            num_sc_per_device=2,
        ),
        batch_size=BATCH,
    )


def rows_with(most: int, *, seed: int = 0, id_step: int = 16) -> dict[str, Any]:
    """A batch whose first sample clicks on ``most`` items of partition 0."""
    clicks = [np.array([1])] * BATCH
    rng = np.random.default_rng([seed, most])
    clicks[0] = id_step * rng.permutation(5000 // id_step)[:most]
    return {
        "clicks": ragged(clicks),
        "views": ragged([np.array([3])] * BATCH),
        "user": np.arange(BATCH),
    }


def ragged(rows: list[np.ndarray]) -> np.ndarray:
    result = np.empty(len(rows), object)
    result[:] = rows
    return result


def pipeline(
    batches: list[dict[str, Any]],
    reducer: Any = None,
    *,
    layout: StackedLayout | None = None,
    **options: Any,
) -> RepartitionIterDataset:
    layout = layout or layout_of()
    options.setdefault("policy", GrowthPolicy(kind="exact"))
    options.setdefault("window", 2)
    options.setdefault("overflow", MINIBATCH)
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return (
        grain.MapDataset.source(batches)
        .map(ComputeInputStats(layout))
        .to_iter_dataset(read_options=read)
        .pipe(CoordinateLimitsIterDataset, layout=layout, reducer=reducer, **options)
        .pipe(RepartitionIterDataset, layout=layout)
    )


def whole_numbers(layout: StackedLayout) -> dict[str, np.ndarray]:
    """Tables of small whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(1)
    tables = {t.spec.name: t.spec for stack in layout.stacks for t in stack.tables}
    return {
        name: rng.integers(-9, 9, (spec.vocabulary_size, spec.embedding_dim)).astype(
            np.float32
        )
        for name, spec in tables.items()
    }


def check_lookup(batch: Any, raw: dict[str, Any], layout: StackedLayout) -> None:
    """What is looked up in the buffers is what the ids say."""
    tables = whole_numbers(layout)
    found = embedding_lookup(shard_tables(tables, layout), batch, layout)
    for feature in layout.features:
        table = tables[feature.table.name]
        expected = [table[np.ravel(ids)].sum(axis=0) for ids in raw[feature.name]]
        np.testing.assert_array_equal(found[feature.name], expected)


def batch_of(case: Case):
    return partition_batch(
        case.features,
        case.layout,
        counters=case.counters,
        num_samples=case.layout.batch_size,
    )
