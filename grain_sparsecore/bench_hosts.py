"""Measures what agreeing on limits costs, between real processes on this machine.

The pipeline is the real one over batches that were partitioned before the clock starts,
so that next to nothing but the agreement is left of it.
"""

import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import grain

from grain_sparsecore.bench_cases import LOCAL_DEVICES, SPARSECORES, make_growth_case
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.pipeline.coordinate import CoordinateLimitsIterDataset
from grain_sparsecore.testing import TestHost, run_hosts

# As many as Criteo has; a round carries three numbers of each.
_TABLES = 26

# Two samples for each SparseCore of a host: a batch that costs nothing to hold.
_BATCH_SIZE = 2 * LOCAL_DEVICES * SPARSECORES

# The handshake and the compilation are in the first round.
_WARM_UP = 3

DEFAULT_HOST_ROUNDS = 50

# Processes take turns where there are more of them than cores.
_TIMEOUT_SECONDS = 600.0


def measure_coordination(
    hosts: int, windows: Sequence[int], *, rounds: int = DEFAULT_HOST_ROUNDS
) -> list[dict[str, Any]]:
    """Lets ``hosts`` processes agree on windows of batches.

    Args:
        hosts: Processes, a power of two; all are on this machine.
        windows: Batches per round, one measurement each.
        rounds: Rounds of each measurement.

    Returns:
        A JSON-able dict for each window: ``hosts``, ``window``, ``round_ms`` (the
        median round, on the host where that is longest), ``batch_ms`` (of it, per
        batch) and ``cpu_ms`` (CPU time of a host per batch, all threads, mean over the
        hosts).

    Raises:
        HostsError: A process failed, or all took too long.
    """
    results = run_hosts(
        time_windows,
        hosts=hosts,
        arguments={"windows": list(windows), "rounds": rounds},
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    rows = []
    for i, window in enumerate(windows):
        seconds = max(result.value[i]["round_seconds"] for result in results)
        cpu = statistics.mean(result.value[i]["cpu_seconds"] for result in results)
        rows.append(
            {
                "hosts": hosts,
                "window": window,
                "round_ms": round(seconds * 1e3, 3),
                "batch_ms": round(seconds / window * 1e3, 4),
                "cpu_ms": round(cpu * 1e3, 4),
            }
        )
    return rows


def time_windows(
    host: TestHost, *, windows: Sequence[int], rounds: int
) -> list[dict[str, float]]:
    """What each host of `measure_coordination` runs.

    Returns:
        For each window ``round_seconds``, the median, and ``cpu_seconds`` per batch.
    """
    case = make_growth_case(
        tables=_TABLES,
        ids_per_sample=1,
        num_partitions=LOCAL_DEVICES * SPARSECORES * host.count,
        batch_size=_BATCH_SIZE,
        seed=host.index,
    )
    element = ComputeInputStats(case.layout).map(case.element)
    source = grain.MapDataset.source([element])
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    results = []
    for i, window in enumerate(windows):
        ds = source.repeat(window * (_WARM_UP + rounds))
        agreed = ds.to_iter_dataset(read).pipe(
            CoordinateLimitsIterDataset,
            layout=case.layout,
            window=window,
            name=f"bench {i}",
        )
        with contextlib.closing(iter(agreed)) as batches:
            for _ in range(_WARM_UP * window):
                next(batches)
            seconds = []
            cpu = time.process_time()
            for _ in range(rounds):
                before = batches.coordination_seconds
                for _ in range(window):
                    next(batches)
                seconds.append(batches.coordination_seconds - before)
            cpu = time.process_time() - cpu
            # A host that closes its iterator looks lost to one that still waits.
            host.barrier(f"measured-{i}", timeout_seconds=_TIMEOUT_SECONDS)
        results.append(
            {
                "round_seconds": statistics.median(seconds),
                "cpu_seconds": cpu / (rounds * window),
            }
        )
    return results
