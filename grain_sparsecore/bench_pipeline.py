"""Measures the whole pipeline: reading, workers, agreement, buffers."""

import multiprocessing
import pathlib
import time
from typing import Any

import grain
from absl import flags

from grain_sparsecore.bench_cases import make_case
from grain_sparsecore.config import Config, PipelineConfig, TopologyConfig
from grain_sparsecore.pipeline import sparsecore_pipeline

# Batches before the clock starts: workers have started, limits have settled.
_WARM_UP = 24


def measure_pipeline(
    name: str,
    *,
    num_partitions: int,
    workers: int,
    reader_threads: int = 1,
    batches: int = 96,
) -> dict[str, Any]:
    """Runs a pipeline over one repeated batch and times it in the steady state.

    Args:
        name: A bench case.
        num_partitions: N.
        workers: Worker processes.
        reader_threads: Threads that read, in each process.
        batches: Batches to time.

    Returns:
        A JSON-able dict: ``case``, ``n_partitions``, ``workers``, ``reader_threads``,
        and per batch ``wall_ms``, ``main_cpu_ms`` (of the process that trains) and
        ``worker_cpu_ms`` (None where the system does not tell).
    """
    # Grain reads absl flags in its workers, which fails while nobody parsed them.
    flags.FLAGS.mark_as_parsed()
    case = make_case(name, num_partitions=num_partitions)
    topology = case.layout.topology
    config = Config(
        topology=TopologyConfig(
            num_sc_per_device=topology.num_sc_per_device,
            global_device_count=topology.global_device_count,
            local_device_count=topology.local_device_count,
        ),
        tables=tuple(t.spec for stack in case.layout.stacks for t in stack.tables),
        features=tuple(feature.spec for feature in case.layout.features),
        pipeline=PipelineConfig(
            batch_size=case.layout.batch_size,
            workers=workers,
            reader_threads=reader_threads,
        ),
    )
    # Without end: workers that ran out of it would be gone before they are counted.
    ds = grain.MapDataset.source([dict(case.element)]).repeat()
    iterator = iter(sparsecore_pipeline(ds, config, layout=case.layout))
    try:
        for _ in range(_WARM_UP):
            next(iterator)
        before = _worker_cpu()
        wall, main = time.perf_counter(), time.process_time()
        for _ in range(batches):
            next(iterator)
        wall, main = time.perf_counter() - wall, time.process_time() - main
        after = _worker_cpu()
    finally:
        iterator.close()
    per_worker = None if before is None or after is None else after - before

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds / batches * 1e3, 3)

    return {
        "case": name,
        "n_partitions": num_partitions,
        "workers": workers,
        "reader_threads": reader_threads,
        "wall_ms": milliseconds(wall),
        "main_cpu_ms": milliseconds(main),
        "worker_cpu_ms": milliseconds(per_worker),
    }


def _worker_cpu() -> float | None:
    """CPU seconds of this process's children so far."""
    ticks = 0
    for process in multiprocessing.active_children():
        try:
            text = pathlib.Path(f"/proc/{process.pid}/stat").read_text()
        except OSError:
            return None
        # After the name, which is in brackets and may hold anything: fields 3 up;
        # user and system time are 14 and 15, in hundredths of a second.
        fields = text.rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100
