"""What the hosts of the multi-host tests do; each function runs on every host."""

import hashlib
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from grain_sparsecore.coordination import pmax, process_reducer
from grain_sparsecore.limits import Limits
from grain_sparsecore.testing import TestHost
from tests.coordination_helpers import BATCH, HostRun, coordinated, layout_of

# Records per host, by host: 10 and 7 are 2.5 and 1.75 batches of 4.
RECORDS = (10, 7, 10, 7)
BATCHES = (3, 5, 7, 7)


def pipeline(host: TestHost, needs: list[Any], **options: Any) -> Any:
    """Three hosts are no topology of a TPU, so the hosts are told, not checked."""
    layout = options.pop("layout", None) or layout_of(host.count)
    return coordinated(layout, needs, reducer=process_reducer(), **options)


def read(iterator: Any) -> HostRun:
    elements: list[dict[str, Any]] = []
    error: BaseException | None = None
    try:
        for element in iterator:
            elements.append(element)
    except Exception as caught:
        error = caught
    return HostRun(elements, error, iterator)


def summary(run: HostRun) -> dict[str, Any]:
    return {
        "indices": run.indices,
        "samples": [int(e["sparsecore"].num_valid_samples.sum()) for e in run.elements],
        "max_ids": run.max_ids,
        "error": None if run.error is None else type(run.error).__name__,
        "text": str(run.error),
    }


def digest(element: dict[str, Any]) -> str:
    """A hash over every leaf and over the limits."""
    batch = element["sparsecore"]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(element)]
    parts = [leaf.tobytes() + str((leaf.shape, leaf.dtype)).encode() for leaf in leaves]
    return hashlib.sha256(b"".join(parts) + repr(batch.limits).encode()).hexdigest()


# Scenarios that leave the connections whole: one start of processes runs them all.


def records(host: TestHost) -> Any:
    """Batches of 4 of 10 or 7 records, under every pair of policies."""
    full, rest = divmod(RECORDS[host.index], BATCH)
    needs = [(1, BATCH)] * full + [(1, rest)]
    return {
        f"{partial}-{exhausted}": summary(
            read(
                iter(
                    pipeline(
                        host,
                        needs,
                        window=2,
                        on_partial_batch=partial,
                        on_exhausted=exhausted,
                    )
                )
            )
        )
        for partial in ("drop", "pad", "error")
        for exhausted in ("stop", "pad")
    }


def unequal_batches(host: TestHost) -> Any:
    needs = [1] * BATCHES[host.index]
    return {
        policy: summary(
            read(iter(pipeline(host, needs, window=4, on_exhausted=policy)))
        )
        for policy in ("stop", "pad")
    }


def no_data(host: TestHost) -> Any:
    needs = [] if host.index == host.count - 1 else [1, 2, 3]
    return {
        policy: summary(
            read(iter(pipeline(host, needs, window=2, on_exhausted=policy)))
        )
        for policy in ("stop", "pad")
    }


def mismatch(host: TestHost) -> Any:
    """Host 1 differs in one thing, each time another."""
    other = host.index == 1
    count = host.count
    layouts = {
        "vocabulary": layout_of(count, vocabulary_size=200 if other else 100),
        "batch": layout_of(count, batch_size=8 if other else 4),
        "tables": layout_of(count, tables=3 if other else 2),
        "order": layout_of(count, backwards=other),
    }
    results = {
        name: summary(read(iter(pipeline(host, [1, 2], layout=layout, window=2))))
        for name, layout in layouts.items()
    }
    window = 3 if other else 2
    results["window"] = summary(read(iter(pipeline(host, [1, 2], window=window))))
    return results


def failing_source(host: TestHost) -> Any:
    needs: list[Any] = [1] * 8
    if host.index == 1:
        needs[5] = "record 5 is broken"
    run = read(iter(pipeline(host, needs, window=4)))
    return {**summary(run), "again": repr(read(run.iterator).error)}


def growth_on_one_host(host: TestHost) -> Any:
    """The limits grow by what host 1 sees; a jitted step is traced once per change."""
    needs = [3] * 4 + [40 if host.index == 1 else 3] * 4 + [3] * 4
    traces = []

    def step(batch: Any, limits: Limits) -> Any:
        traces.append(limits)
        return batch.sum()

    jitted = jax.jit(step, static_argnums=1)
    run = read(iter(pipeline(host, needs, window=2)))
    for element in run.elements:
        jitted(np.zeros(4), element["sparsecore"].limits)
    return {
        **summary(run),
        "traces": len(traces),
        "changes": run.iterator.limit_changes,
    }


def restored(host: TestHost) -> Any:
    """From every step, a new iterator continues with the same bytes."""
    needs = [1 + i * (1 + host.index) for i in range(7 + host.index)]
    equal = {}
    for policy in ("stop", "pad"):
        ds = pipeline(host, needs, window=3, on_exhausted=policy)
        iterator = iter(ds)
        states, digests = [iterator.get_state()], []
        for element in iterator:
            digests.append(digest(element))
            states.append(iterator.get_state())
        equal[policy] = []
        for step, state in enumerate(states):
            again = iter(ds)
            again.set_state(state)
            equal[policy].append([digest(e) for e in again] == digests[step:])
    return equal


def slow_host(host: TestHost) -> Any:
    iterator = iter(pipeline(host, [1 + host.index] * 4, window=2, timeout_seconds=30))
    next(iterator)
    next(iterator)
    if host.index == 1:
        time.sleep(2.5)
    return summary(read(iterator))


def train_and_eval(host: TestHost) -> Any:
    """Evaluation every other step, with limits of its own."""
    train = iter(pipeline(host, [2] * 6, window=2, name="train"))
    evaluated = []
    for step, _ in enumerate(train):
        if step % 2 == 0:
            needs = [9 + host.index]
            run = read(
                iter(
                    pipeline(
                        host, needs, window=1, name="eval", start_limits=train.limits
                    )
                )
            )
            evaluated.append(run.max_ids)
    limits = train.limits["t0"].max_ids_per_partition
    return {"train": limits, "steps": train.step, "eval": evaluated}


def two_live_iterators(host: TestHost) -> Any:
    ds = pipeline(host, [1] * 4, window=2)
    first = iter(ds)
    next(first)
    second = read(iter(ds))
    rest = read(first)
    third = read(iter(ds))
    return [summary(second), summary(rest), summary(third)]


def other_steps(host: TestHost) -> Any:
    """Host 1 restores a later step than the others."""
    ds = pipeline(host, [1] * 8, window=2)
    iterator = iter(ds)
    states = [iterator.get_state()]
    for _ in iterator:
        states.append(iterator.get_state())
    again = iter(ds)
    again.set_state(states[4 if host.index == 1 else 3])
    return summary(read(again))


def crossed_pipelines(host: TestHost) -> Any:
    """Host 1 advances its two pipelines in the other order."""
    pair = [
        iter(pipeline(host, [1] * 4, window=2, name=name)) for name in ("one", "two")
    ]
    for iterator in pair:
        next(iterator)
        next(iterator)
    first = pair[1 if host.index == 1 else 0]
    return summary(read(first))


WHOLE: tuple[Callable[[TestHost], Any], ...] = (
    records,
    unequal_batches,
    no_data,
    mismatch,
    failing_source,
    growth_on_one_host,
    restored,
    slow_host,
    train_and_eval,
    two_live_iterators,
    other_steps,
    crossed_pipelines,
)


def all_whole(host: TestHost) -> dict[str, Any]:
    return {scenario.__name__: scenario(host) for scenario in WHOLE}


# Scenarios in which a host goes away.


def leave(
    host: TestHost, *, victim: int, how: str, timeout_seconds: float, catch: bool = True
) -> Any:
    """Host ``victim`` goes away after 3 batches; the others say what they see."""
    ds = pipeline(host, [1] * 1000, window=2, timeout_seconds=timeout_seconds)
    iterator = iter(ds)
    for _ in range(3):
        next(iterator)
    host.barrier("reading")
    if host.index == victim:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "exit":
            sys.exit(0)
        elif how == "close":
            iterator.close()
            host.barrier("others have seen it")
            return "closed"
        elif how == "raise":
            raise RuntimeError("the training step failed")
    if not catch:
        return list(iterator)
    started = time.monotonic()
    run = read(iterator)
    seconds = time.monotonic() - started
    again = str(read(iterator).error)
    fresh = str(read(iter(ds)).error)
    if how == "close":
        host.barrier("others have seen it")
    return {**summary(run), "seconds": seconds, "again": again, "fresh": fresh}


# Our rounds beside the collectives of a training step on the same CPU devices.


def _training_sum() -> tuple[Callable[[np.ndarray], np.ndarray], int]:
    """A psum over one CPU device per process, in their natural order."""
    devices = pmax._one_cpu_device_per_process()
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, spec("data"))
    jitted = jax.jit(
        jax.shard_map(
            lambda rows: jax.lax.psum(rows[0], "data"),
            mesh=mesh,
            in_specs=spec("data"),
            out_specs=spec(),
        )
    )
    local = devices[jax.process_index("cpu")]

    def total(vector: np.ndarray) -> np.ndarray:
        row = jax.device_put(vector[None], local)
        shape = (len(devices), vector.size)
        rows = jax.make_array_from_single_device_arrays(shape, sharding, [row])
        return np.asarray(jitted(rows).addressable_data(0))

    return total, len(devices)


def crossed_collectives(host: TestHost, *, rotate: bool, times: int) -> int:
    """Host 0 starts pmax, then psum; the others psum, then pmax. Counts wrong results.

    Both exchange int32[1024], so that mixed data shows as numbers, not as an abort.
    """
    if not rotate:
        pmax.rotated = list
    total, count = _training_sum()
    reducer = pmax.PmaxReducer()
    wrong = 0
    frame = np.arange(1024, dtype=np.int32) + 1000 * host.index
    expected = np.arange(1024, dtype=np.int32) + 1000 * (count - 1)
    ones = np.ones(1024, np.int32)
    # Connections are made at the first round of each.
    total(ones)
    reducer.start(frame).result(60)
    for turn in range(times):
        host.barrier(f"turn-{turn}")
        if host.index == 0:
            future = reducer.start(frame)
            time.sleep(0.05)
            added = total(ones)
        else:
            with ThreadPoolExecutor(1) as executor:
                adding = executor.submit(total, ones)
                time.sleep(0.05)
                future = reducer.start(frame)
                added = adding.result(60)
        largest = future.result(60)
        wrong += not np.array_equal(largest, expected)
        wrong += not np.array_equal(added, ones * count)
    return wrong


def training_beside_windows(host: TestHost, *, windows: int) -> list[Any]:
    """A psum in every step, with random pauses, beside a round in every window."""
    total, count = _training_sum()
    needs = [1 + (i * (host.index + 1)) % 50 for i in range(windows)]
    iterator = iter(pipeline(host, needs, window=1))
    pauses = random.Random(host.index)
    wrong = []
    highest = 1
    for step, element in zip(itertools.count(), iterator):
        time.sleep(pauses.random() * 0.004)
        highest = max(highest, *(1 + (step * (h + 1)) % 50 for h in range(host.count)))
        if element["sparsecore"].limits["t0"].max_ids_per_partition != highest:
            wrong.append(("limits", step))
        added = total(np.full(1024, step, np.int32))
        if not np.array_equal(added, np.full(1024, step * count)):
            wrong.append(("psum", step))
    return [iterator.step, wrong]


# Of the harness itself.


def fails_on_host_1(host: TestHost) -> None:
    if host.index == 1:
        raise ValueError("said by host 1")
    print("said by host 0")


def hangs_on_host_1(host: TestHost) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while host.index == 1:
        time.sleep(1)


# Of jobs that were started wrongly.


def first_error(host: TestHost, *, hosts: int) -> str:
    """The error of a pipeline for ``hosts`` hosts, which asks JAX who they are."""
    run = read(iter(coordinated(layout_of(hosts), [1], timeout_seconds=20)))
    return f"{type(run.error).__name__}: {run.error}"
