"""Random layouts and batches: from a seed, and for hypothesis."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from grain_sparsecore.features import COUNTERS, FeatureIds
from grain_sparsecore.specs import Combiner, FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout

COMBINERS: tuple[Combiner, ...] = ("sum", "mean", "sqrtn")


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout and one batch of it, ready for `partition_batch`."""

    layout: StackedLayout
    features: list[FeatureIds]

    @property
    def counters(self) -> np.ndarray:
        """Counters of a batch in which nothing happened."""
        return np.zeros((len(self.layout.features), len(COUNTERS)), np.int32)


def random_case(
    rng: np.random.Generator, *, max_partitions: int = 256, max_ids: int = 12
) -> Case:
    """A random topology, one to five tables, one to seven features, a batch.

    Args:
        rng: Source of all choices.
        max_partitions: Largest number of partitions, a power of two.
        max_ids: Most ids of a sample.
    """
    layout = random_layout(rng, max_partitions=max_partitions)
    return Case(layout, random_features(rng, layout, max_ids=max_ids))


def random_layout(
    rng: np.random.Generator, *, max_partitions: int = 256
) -> StackedLayout:
    """Tables alone, stacked automatically or by name, with 1 to 3 features each."""
    sc_count = int(rng.choice([2, 4]))
    local = int(rng.choice([1, 2, 4, 8]))
    hosts = 1
    while local * hosts * 2 * sc_count <= max_partitions and rng.random() < 0.5:
        hosts *= 2
    topology = Topology(
        global_device_count=local * hosts,
        local_device_count=local,
        num_sc_per_device=sc_count,
    )
    tables = []
    features = []
    shared = COMBINERS[rng.integers(3)]
    for i in range(int(rng.integers(1, 6))):
        stack = [None, "auto", "one"][int(rng.integers(3))]
        tables.append(
            TableSpec(
                name=f"table{rng.integers(1000)}_{i}",
                vocabulary_size=int(rng.choice([1, 3, 17, 100, 5000, 40_000_000])),
                embedding_dim=8,
                combiner=shared if stack else COMBINERS[rng.integers(3)],
                stack=stack,
            )
        )
        for j in range(int(rng.choice([1, 1, 2, 3]))):
            name = f"feature{rng.integers(1000)}_{i}_{j}"
            weights = f"{name}_weights" if rng.random() < 0.4 else None
            features.append(
                FeatureSpec(name=name, table=tables[-1].name, weights=weights)
            )
    return make_layout(
        tables,
        features,
        topology=topology,
        batch_size=topology.local_sc_count * int(rng.integers(1, 5)),
    )


def random_features(
    rng: np.random.Generator, layout: StackedLayout, *, max_ids: int = 12
) -> list[FeatureIds]:
    """Dense and ragged ids, often repeated within a sample, some samples empty."""
    return [
        _random_feature(
            rng,
            feature.table.vocabulary_size,
            layout.batch_size,
            feature.spec.weights is not None,
            max_ids,
        )
        for feature in layout.features
    ]


def _random_feature(
    rng: np.random.Generator, vocabulary: int, batch: int, weighted: bool, max_ids: int
) -> FeatureIds:
    kind = rng.choice(["single", "dense", "ragged", "empty"], p=[0.3, 0.3, 0.35, 0.05])
    splits = None
    width = 1 if kind == "single" else int(rng.integers(2, max_ids + 1))
    if kind in ("ragged", "empty"):
        lengths = rng.integers(0, max_ids + 1, batch) * (rng.random(batch) < 0.8)
        lengths *= kind == "ragged"
        splits = np.zeros(batch + 1, np.int64)
        np.cumsum(lengths, out=splits[1:])
        width = 0
    n = batch * width if splits is None else int(splits[-1])
    # A narrow range makes duplicates; the whole range makes many partitions.
    high = min(vocabulary, 8) if rng.random() < 0.5 else vocabulary
    ids = rng.integers(0, high, n)
    if rng.random() < 0.3:
        ids = vocabulary - 1 - ids
    weights = None
    if weighted:
        weights = (rng.random(n) * 2 + 0.01).astype(np.float32)
    return FeatureIds(
        ids=ids.astype(np.int32), row_splits=splits, width=width, weights=weights
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small cases that hypothesis can shrink: few samples, few ids, few devices."""
    sc_count = draw(st.sampled_from([1, 2, 4]))
    local = draw(st.sampled_from([1, 2]))
    hosts = draw(st.sampled_from([1, 2, 8]))
    topology = Topology(
        global_device_count=local * hosts,
        local_device_count=local,
        num_sc_per_device=sc_count,
    )
    combiner = draw(st.sampled_from(COMBINERS))
    tables = []
    features = []
    for i in range(draw(st.integers(1, 3))):
        tables.append(
            TableSpec(
                name=f"table{i}",
                vocabulary_size=draw(st.sampled_from([1, 5, 1000, 2**29])),
                embedding_dim=8,
                combiner=combiner,
                stack=draw(st.sampled_from([None, "one"])),
            )
        )
        for j in range(draw(st.integers(1, 2))):
            name = f"feature{i}_{j}"
            weights = draw(st.sampled_from([None, f"{name}_weights"]))
            features.append(FeatureSpec(name=name, table=f"table{i}", weights=weights))
    layout = make_layout(
        tables,
        features,
        topology=topology,
        batch_size=topology.local_sc_count * draw(st.integers(1, 2)),
    )
    return Case(layout, [draw(_feature_ids(f, layout)) for f in layout.features])


@st.composite
def _feature_ids(draw: st.DrawFn, feature, layout: StackedLayout) -> FeatureIds:
    width = draw(st.sampled_from([0, 1, 2]))
    splits = None
    n = layout.batch_size * width
    if not width:
        lengths = draw(
            st.lists(
                st.integers(0, 3),
                min_size=layout.batch_size,
                max_size=layout.batch_size,
            )
        )
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        n = sum(lengths)
    last = feature.table.vocabulary_size - 1
    one_id = st.one_of(st.integers(0, min(last, 3)), st.integers(0, last))
    ids = draw(st.lists(one_id, min_size=n, max_size=n))
    weights = None
    if feature.spec.weights is not None:
        one_weight = st.floats(-2, 4, width=32)
        weights = draw(st.lists(one_weight, min_size=n, max_size=n))
        weights = np.array(weights, np.float32)
    return FeatureIds(
        ids=np.array(ids, np.int32),
        row_splits=splits,
        width=width,
        weights=weights,
    )
