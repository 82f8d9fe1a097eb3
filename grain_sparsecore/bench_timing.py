"""Times and memory of the stages of one batch, shared by the parts of the bench."""

import contextlib
import pathlib
import time
from collections.abc import Callable
from typing import Any

from grain_sparsecore.bench_cases import BenchCase
from grain_sparsecore.limits import GrowthPolicy, Limits, grow_limits
from grain_sparsecore.pipeline.compute import DEFAULT_KEY, ComputeInputStats
from grain_sparsecore.repartition import repartition
from grain_sparsecore.slots import release_memory


class Ours:
    """The stages of one batch, to be timed one by one."""

    def __init__(self, stage: ComputeInputStats, case: BenchCase, limits: Limits):
        self._stage = stage
        self._case = case
        self._limits = limits
        self._batch: Any = None
        self._result: Any = None

    def compute(self) -> None:
        """Stage 1: validate, sort, partition."""
        self._batch = self._stage.map(self._case.element)[DEFAULT_KEY]

    def lay_out(self) -> None:
        """Stage 3: copy into buffers of the limits."""
        self._result = repartition(self._batch, self._limits, self._case.layout)


def measure_memory(case: BenchCase) -> tuple[Ours, Limits, int | None]:
    """The stages, limits that fit, and the bytes that a batch takes at most."""
    stage = ComputeInputStats(case.layout)
    # Also loads or compiles the kernel, whose memory and time are not the batch's.
    batch = stage.map(case.element)[DEFAULT_KEY]
    limits = grow_limits(
        Limits.start(case.layout),
        batch.stats,
        layout=case.layout,
        policy=GrowthPolicy(),
    )
    del batch
    release_memory()
    once = Ours(stage, case, limits)
    with PeakMemory() as memory:
        once.compute()
        once.lay_out()
    return once, limits, memory.peak


def count_slots(limits: Limits, case: BenchCase) -> int:
    """Slots of the buffers of one host."""
    per_device = sum(v.buffer_size_per_device for v in limits.values())
    return per_device * case.layout.topology.local_device_count


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds, the latter of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def time_round(
    ours: Ours, peer: Callable[[], Any] | None, *, reverse: bool
) -> dict[str, float]:
    """Seconds of one round: ours first, or the peer's; keys end in _wall and _cpu.

    Args:
        ours: Gives compute, repartition and again, once and changed.
        peer: Gives peer and peer_again, unless it is None.
        reverse: Whether ours comes first.
    """
    row: dict[str, float] = {}

    def time_ours() -> None:
        for key, work in (
            ("compute", ours.compute),
            ("repartition", ours.lay_out),
            ("again", ours.lay_out),
        ):
            row[f"{key}_wall"], row[f"{key}_cpu"] = timed(work)

    def time_peer() -> None:
        if peer is not None:
            for key in ("peer", "peer_again"):
                row[f"{key}_wall"], row[f"{key}_cpu"] = timed(peer)

    for work in (time_peer, time_ours)[:: -1 if reverse else 1]:
        work()
    for kind in ("wall", "cpu"):
        row[f"once_{kind}"] = row[f"compute_{kind}"] + row[f"repartition_{kind}"]
        row[f"changed_{kind}"] = row[f"once_{kind}"] + row[f"again_{kind}"]
    return row


class PeakMemory:
    """Bytes that a block adds to this process at most; None where nobody counts."""

    _STATUS = pathlib.Path("/proc/self/status")
    _RESET = pathlib.Path("/proc/self/clear_refs")

    peak: int | None = None

    def __enter__(self) -> "PeakMemory":
        self._before = None
        with contextlib.suppress(OSError):
            self._RESET.write_text("5")
            self._before = self._read("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            self.peak = self._read("VmHWM") - self._before

    def _read(self, key: str) -> int:
        for line in self._STATUS.read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise OSError(f"{self._STATUS} has no {key}")
