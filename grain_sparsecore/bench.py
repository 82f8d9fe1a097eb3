"""Measures this package, beside jax-tpu-embedding's C++ preprocessing if asked to.

Three figures for each case. *once*: the limits already fit, so the peer sorts once and
we sort and lay out once. *changed*: the limits grow, so the peer sorts again and we lay
out again. *busy*: once, while a thread of pure Python computes, as a training loop
does. Ratios are the peer's time over ours: above 1, we are ahead. They are taken within
a round, peer and ours in turn, and their median is reported: other jobs on the machine
then slow both down.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grain_sparsecore.bench_cases import (
    CASES,
    make_case,
)
from grain_sparsecore.bench_growth import growth_sizes, measure_growth
from grain_sparsecore.bench_hosts import measure_coordination
from grain_sparsecore.bench_peer import PEER, make_peer
from grain_sparsecore.bench_pipeline import measure_pipeline
from grain_sparsecore.bench_timing import (
    Ours,
    count_slots,
    measure_memory,
    time_round,
    timed,
)
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.kernels import (
    KERNEL_VARIABLE,
    KERNELS,
    load_kernel,
    runnable_kernels,
)
from grain_sparsecore.pipeline.coordinate_options import MAX_WINDOW

PARTITIONS: tuple[int, ...] = (32, 256)

# Fewer rounds than this leave the median at the mercy of one slow round.
DEFAULT_ROUNDS = 11

WINDOWS: tuple[int, ...] = (1, 8, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Attributes:
        cases: Names from `CASES`; none only where growth or hosts are measured.
        partitions: Numbers of partitions, powers of two of at least 32.
        paths: Kernels, from `KERNELS`; all that can run, if not given.
        against: `PEER`, or None for absolute figures only.
        rounds: Rounds per case, 1 or more.
        workers: Numbers of worker processes, with each of which the whole pipeline is
            measured too; none leaves it out.
        reader_threads: Numbers of threads that read in each process of the pipeline.
        growth: Whether to measure batches whose sizes grow, see `run_growth`.
        hosts: Numbers of processes, powers of two of at least 2, for each of which
            their agreement is measured; none leaves it out.
        windows: Batches per agreement, from 1 to 65536; `WINDOWS` where there are hosts
            and no windows are given.

    Raises:
        ConfigError: A name is unknown, or there is nothing to measure.
    """

    cases: tuple[str, ...] = CASES
    partitions: tuple[int, ...] = PARTITIONS
    paths: tuple[str, ...] = dataclasses.field(default_factory=runnable_kernels)
    against: str | None = None
    rounds: int = DEFAULT_ROUNDS
    workers: tuple[int, ...] = ()
    reader_threads: tuple[int, ...] = (1,)
    growth: bool = False
    hosts: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field, allowed in (("cases", CASES), ("paths", KERNELS)):
            values = getattr(self, field)
            unknown = [value for value in values if value not in allowed]
            may_be_empty = field == "cases" and (self.growth or self.hosts)
            if unknown or not (values or may_be_empty):
                raise ConfigError(
                    f"bench: {field} {unknown or values} must be some of "
                    f"{', '.join(allowed)}."
                )
        if self.against not in (None, PEER):
            raise ConfigError(f"bench: against={self.against!r} must be {PEER!r}.")
        if self.rounds < 1:
            raise ConfigError(f"bench: rounds={self.rounds} must be 1 or more.")
        for field, legal, rule in (
            ("workers", lambda n: n >= 0, "0 or more"),
            ("reader_threads", lambda n: n >= 1, "1 or more"),
            ("hosts", _is_job_size, "powers of two of at least 2"),
            ("windows", lambda n: 1 <= n <= MAX_WINDOW, f"from 1 to {MAX_WINDOW}"),
        ):
            wrong = [value for value in getattr(self, field) if not legal(value)]
            if wrong:
                raise ConfigError(f"bench: {field} {wrong} must be {rule}.")
        if self.windows and not self.hosts:
            raise ConfigError(
                f"bench: windows {list(self.windows)} are what hosts agree on, and no "
                "hosts are given; give their numbers, such as --hosts 2 4."
            )


def _is_job_size(hosts: int) -> bool:
    """Whether a job can have so many, more than one: its partitions need it."""
    return hosts >= 2 and hosts & (hosts - 1) == 0


def run_bench(options: BenchOptions) -> Iterator[dict[str, Any]]:
    """Measures every case with every kernel, each in a fresh process.

    Yields:
        One JSON-able dict for each case, number of partitions and path: ``case``,
        ``n_partitions``, ``path``, ``ids``, ``slots``, ``ns_per_id``,
        ``repartition_ns_per_slot``, ``peak_bytes_per_id`` and, beside a peer, the
        ratios ``once_cpu_ratio``, ``changed_cpu_ratio``, ``once_wall_ratio``,
        ``changed_wall_ratio``, ``busy_wall_ratio`` and their quartiles in ``spread``.

    Raises:
        MissingExtraError: numba or the peer is needed and not installed.
    """
    for path in options.paths:
        load_kernel(path)
    if options.against:
        make_peer(make_case("criteo4096", num_partitions=32), limits=None)
    for name, partitions, path in itertools.product(
        options.cases, options.partitions, options.paths
    ):
        yield _in_fresh_process(
            measure, name, partitions, path, options.against, options.rounds
        )


def run_pipelines(options: BenchOptions) -> Iterator[dict[str, Any]]:
    """Measures the whole pipeline with the fastest kernel, if workers are given.

    Yields:
        The results of `bench_pipeline.measure_pipeline`, and ``main_share``: the CPU
        time of the process that trains, as a share from 0 to 1 of that and the
        workers'; None without workers, and where the system does not tell theirs.
    """
    for name, partitions, workers, threads in itertools.product(
        options.cases, options.partitions, options.workers, options.reader_threads
    ):
        row = _in_fresh_process(
            measure_pipeline,
            name,
            num_partitions=partitions,
            workers=workers,
            reader_threads=threads,
        )
        yield {**row, "main_share": main_share(row)}


def main_share(row: dict[str, Any]) -> float | None:
    """``main_share`` of a row of the pipeline; see `run_pipelines`."""
    main, worker = row["main_cpu_ms"], row["worker_cpu_ms"]
    if not row["workers"] or worker is None or main + worker <= 0:
        return None
    return round(main / (main + worker), 3)


def run_growth(options: BenchOptions) -> Iterator[dict[str, Any]]:
    """Measures batches of which one size grows, each in a fresh process, if asked to.

    Yields:
        The results of `bench_growth.measure_growth`.

    Raises:
        MissingExtraError: numba is needed and not installed.
    """
    if not options.growth:
        return
    for path in options.paths:
        load_kernel(path)
    for sizes, path in itertools.product(growth_sizes(), options.paths):
        yield _in_fresh_process(measure_growth, *sizes, path, options.rounds)


def run_coordination(options: BenchOptions) -> Iterator[dict[str, Any]]:
    """Measures the agreement of real processes, if hosts are given.

    Yields:
        The results of `bench_hosts.measure_coordination`.

    Raises:
        HostsError: A process failed.
    """
    for hosts in options.hosts:
        yield from measure_coordination(hosts, options.windows or WINDOWS)


def _in_fresh_process(
    work: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Peak memory and the state of the allocator are then those of one case alone."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *args, **kwargs).result()


def measure(
    name: str, partitions: int, path: str, against: str | None, rounds: int
) -> dict[str, Any]:
    """Measures one case in this process; see `run_bench`."""
    os.environ[KERNEL_VARIABLE] = path
    case = make_case(name, num_partitions=partitions)
    once, limits, peak = measure_memory(case)
    peer = make_peer(case, limits=limits) if against else None
    rows = [time_round(once, peer, reverse=i % 2 == 1) for i in range(rounds + 1)][1:]
    with _busy_thread():
        busy = [_busy_round(once, peer) for _ in range(rounds)]
    slots = count_slots(limits, case)
    result = {
        "case": name,
        "n_partitions": partitions,
        "path": path,
        "ids": case.ids,
        "slots": slots,
        "ns_per_id": {
            key: round(statistics.median(row[key] for row in rows) / case.ids * 1e9, 3)
            for key in rows[0]
        },
        "repartition_ns_per_slot": round(
            statistics.median(row["repartition_cpu"] for row in rows) / slots * 1e9, 3
        ),
        "peak_bytes_per_id": None if peak is None else peak // case.ids,
    }
    result["ns_per_id"]["busy_wall"] = round(
        statistics.median(ours for ours, _ in busy) / case.ids * 1e9, 3
    )
    if peer is not None:
        result |= _ratios(rows, busy)
    return result


def _busy_round(
    ours: Ours, peer: Callable[[], Any] | None
) -> tuple[float, float | None]:
    def once() -> None:
        ours.compute()
        ours.lay_out()

    theirs = None if peer is None else timed(peer)[0]
    return timed(once)[0], theirs


def _ratios(
    rows: Sequence[dict[str, float]], busy: Sequence[tuple[float, float | None]]
) -> dict[str, Any]:
    ratios = {}
    for kind in ("cpu", "wall"):
        ratios[f"once_{kind}_ratio"] = [
            row[f"peer_{kind}"] / row[f"once_{kind}"] for row in rows
        ]
        ratios[f"changed_{kind}_ratio"] = [
            (row[f"peer_{kind}"] + row[f"peer_again_{kind}"]) / row[f"changed_{kind}"]
            for row in rows
        ]
    ratios["busy_wall_ratio"] = [theirs / ours for ours, theirs in busy if theirs]
    medians = {key: round(statistics.median(v), 3) for key, v in ratios.items()}
    return {**medians, "spread": {key: _quartiles(v) for key, v in ratios.items()}}


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [round(values[0], 3)] * 2
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, 3), round(high, 3)]


@contextlib.contextmanager
def _busy_thread() -> Iterator[None]:
    """A thread that computes in pure Python and gives the lock up only when told to."""
    done = False

    def spin() -> None:
        count = 0
        while not done:
            count += 1

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done = True
        thread.join()
