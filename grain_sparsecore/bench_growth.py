"""Measures how the cost of an id changes as one size of a batch grows."""

import os
import statistics
from typing import Any

from grain_sparsecore.bench_cases import LOCAL_DEVICES, SPARSECORES, make_growth_case
from grain_sparsecore.bench_timing import count_slots, measure_memory, time_round
from grain_sparsecore.kernels import KERNEL_VARIABLE

# Ids of a batch, whatever grows: four samples for each SparseCore where samples are
# largest.
GROWTH_IDS = 1_280_000

# Tables, partitions and ids per sample: where they stay while one of them grows.
BASE_SIZES = (10, 32, 10)
GROWING_SIZES = (
    (1, 10, 100, 1000),
    (8, 32, 128, 512, 2048, 8192),
    (1, 10, 100, 1000),
)


def growth_sizes() -> list[tuple[int, int, int]]:
    """Tables, partitions and ids per sample of each batch to measure."""
    tables, partitions, ids_per_sample = BASE_SIZES
    more_tables, more_partitions, more_ids = GROWING_SIZES
    sizes = [
        *((value, partitions, ids_per_sample) for value in more_tables),
        *((tables, value, ids_per_sample) for value in more_partitions),
        *((tables, partitions, value) for value in more_ids),
    ]
    return list(dict.fromkeys(sizes))


def measure_growth(
    tables: int, partitions: int, ids_per_sample: int, path: str, rounds: int
) -> dict[str, Any]:
    """Measures one batch of `GROWTH_IDS` ids in this process.

    Args:
        tables: Tables, of a million rows and one feature each.
        partitions: N.
        ids_per_sample: Ids of each sample in each table.
        path: Kernel.
        rounds: Rounds to take the median of.

    Returns:
        A JSON-able dict: ``tables``, ``n_partitions``, ``ids_per_sample``, ``path``,
        ``ids``, ``slots``, ``ns_per_id`` (CPU time, once) and ``peak_bytes_per_id``
        (None where the system does not tell).
    """
    os.environ[KERNEL_VARIABLE] = path
    sparsecores = LOCAL_DEVICES * SPARSECORES
    samples = GROWTH_IDS // (tables * ids_per_sample * sparsecores) * sparsecores
    case = make_growth_case(
        tables=tables,
        ids_per_sample=ids_per_sample,
        num_partitions=partitions,
        batch_size=samples,
    )
    once, limits, peak = measure_memory(case)
    rows = [time_round(once, None, reverse=False) for _ in range(rounds + 1)][1:]
    cpu = statistics.median(row["once_cpu"] for row in rows)
    return {
        "tables": tables,
        "n_partitions": partitions,
        "ids_per_sample": ids_per_sample,
        "path": path,
        "ids": case.ids,
        "slots": count_slots(limits, case),
        "ns_per_id": round(cpu / case.ids * 1e9, 3),
        "peak_bytes_per_id": None if peak is None else peak // case.ids,
    }
