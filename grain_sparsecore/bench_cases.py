"""The batches that speed is measured on.

Shapes from published models: the 26 tables of MLPerf's DLRM benchmark with one id a
sample (Criteo) or with the multi-hot sizes of DLRM-DCNv2, long ragged features with
and without weights, and one huge table. Ids follow Zipf's law with exponent 1.2,
scattered over the vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from grain_sparsecore.errors import ConfigError
from grain_sparsecore.specs import Combiner, FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout

ZIPF_EXPONENT = 1.2

# A host of 8 devices with 4 SparseCores each, as a TPU v5p host has at most.
LOCAL_DEVICES, SPARSECORES = 8, 4

# Rows of the tables of MLPerf DLRM, and ids a sample of DLRM-DCNv2.
DLRM_ROWS = (
    *(40_000_000,) * 5,
    *(39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 3067956, 405282, 10, 2209),
    *(11938, 155, 4, 976, 14, 590152, 12973, 108, 36),
)
DLRM_HOTNESS = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
    *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """One batch and what it takes to process it.

    Attributes:
        name: Name of the case.
        layout: Its stacks; every table is a stack of its own.
        element: The batch: int32 [B, k] arrays, or CSR dicts with int32 values and
            int64 row_splits; float32 weights in the same form.
        ids: Ids in the batch.
    """

    name: str
    layout: StackedLayout
    element: Mapping[str, Any]
    ids: int


@dataclasses.dataclass(frozen=True)
class _Shape:
    batch_size: int
    vocabularies: tuple[int, ...]
    # Ids of a sample for each table, or the range of a ragged one.
    hotness: tuple[int | tuple[int, int], ...]
    combiner: Combiner = "sum"
    weighted: bool = False


_SHAPES: dict[str, _Shape] = {
    "criteo4096": _Shape(4096, DLRM_ROWS, (1,) * 26),
    "criteo16384": _Shape(16384, DLRM_ROWS, (1,) * 26),
    "mlperf": _Shape(2048, DLRM_ROWS, DLRM_HOTNESS),
    "ragged": _Shape(4096, (1_000_000,) * 10, ((1, 39),) * 10, "mean"),
    "weighted": _Shape(4096, (1_000_000,) * 10, ((1, 39),) * 10, "mean", True),
    "huge": _Shape(16384, (40_000_000,), (100,), "mean"),
}

CASES: tuple[str, ...] = tuple(_SHAPES)


def make_case(name: str, *, num_partitions: int, seed: int = 0) -> BenchCase:
    """Builds a case; equal arguments give equal batches.

    Args:
        name: One of `CASES`.
        num_partitions: N, a power of two of at least 32: the job's SparseCores, of
            which 32 are on this host.
        seed: Of the ids.

    Raises:
        ConfigError: The case is unknown, or the partitions are too few or no power of
            two.
    """
    if name not in _SHAPES:
        raise ConfigError(f"case {name!r} is not one of {', '.join(CASES)}.")
    return _build(name, _SHAPES[name], num_partitions, seed)


def make_growth_case(
    *,
    tables: int,
    ids_per_sample: int,
    num_partitions: int,
    batch_size: int,
    seed: int = 0,
) -> BenchCase:
    """A batch of equal tables, to see how cost grows with their number and sizes.

    With fewer than 32 partitions, the host has fewer devices.
    """
    devices = min(LOCAL_DEVICES, max(num_partitions // SPARSECORES, 1))
    shape = _Shape(batch_size, (1_000_000,) * tables, (ids_per_sample,) * tables)
    name = f"{tables}x{ids_per_sample}"
    return _build(name, shape, num_partitions, seed, devices)


def _build(
    name: str,
    shape: _Shape,
    num_partitions: int,
    seed: int,
    local_devices: int = LOCAL_DEVICES,
) -> BenchCase:
    topology = Topology(
        global_device_count=max(num_partitions // SPARSECORES, local_devices),
        local_device_count=local_devices,
        num_sc_per_device=SPARSECORES,
    )
    if topology.num_partitions != num_partitions:
        raise ConfigError(
            f"num_partitions={num_partitions} is not {topology.num_partitions} or "
            "more; one host alone has that many."
        )
    rng = np.random.default_rng(seed)
    tables, features, element, ids = [], [], {}, 0
    pairs = zip(shape.vocabularies, shape.hotness, strict=True)
    for i, (rows, hotness) in enumerate(pairs):
        table, feature = f"table{i:04}", f"feature{i:04}"
        weights = f"{feature}_weights" if shape.weighted else None
        tables.append(
            TableSpec(
                name=table,
                vocabulary_size=rows,
                embedding_dim=16,
                combiner=shape.combiner,
            )
        )
        features.append(FeatureSpec(name=feature, table=table, weights=weights))
        form, count = _form(rng, shape.batch_size, hotness)
        ids += count
        element[feature] = form(_zipf_ids(rng, count, rows))
        if weights:
            element[weights] = form(rng.random(count, np.float32) + np.float32(0.5))
    layout = make_layout(
        tables, features, topology=topology, batch_size=shape.batch_size
    )
    return BenchCase(name, layout, element, ids)


def _form(
    rng: np.random.Generator, batch_size: int, hotness: int | tuple[int, int]
) -> tuple[Callable[[np.ndarray], Any], int]:
    """What to make of the flat values of a feature, and how many there are."""
    if isinstance(hotness, int):
        return lambda flat: flat.reshape(batch_size, hotness), batch_size * hotness
    low, high = hotness
    splits = np.zeros(batch_size + 1, np.int64)
    np.cumsum(rng.integers(low, high + 1, batch_size), out=splits[1:])
    return lambda flat: {"values": flat, "row_splits": splits}, int(splits[-1])


def _zipf_ids(rng: np.random.Generator, count: int, rows: int) -> np.ndarray:
    ranks = rng.zipf(ZIPF_EXPONENT, count) % rows
    # A product with a number prime to the table's rows scatters neighbours.
    factor = 2_654_435_761
    while np.gcd(factor, rows) != 1:
        factor += 2
    return (ranks * (factor % rows) % rows).astype(np.int32)
