"""The process that compiles: one JSON job a line in, one JSON answer a line out.

It ends at once when its input ends, also in the middle of a compilation, so that it
never outlives the process that started it. Run by `compiler`.
"""

import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from grain_sparsecore.limits_file import write_atomically
from grain_sparsecore.program import Program, lower
from grain_sparsecore.rehearse.cache import program_key


def main() -> None:
    """Answers jobs until the input ends."""
    # Native code writes to standard output, too; from here on that is stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    while True:
        job = jobs.get()
        answer = _topology(job) if job["do"] == "topology" else _compile(job, answers)
        _say(answers, answer)


def _read_jobs(jobs: queue.SimpleQueue[Mapping[str, Any]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    # The parent is gone, or will not mind: its folder holds only logs.
    shutil.rmtree(Path(os.environ["TPU_LOG_DIR"]).parent, ignore_errors=True)
    os._exit(0)


def _say(stream: TextIO, what: Mapping[str, Any]) -> None:
    stream.write(f"{json.dumps(what)}\n")
    stream.flush()


def _devices(name: str) -> Any:
    from jax.experimental import topologies

    return topologies.get_topology_desc(topology_name=name, platform="tpu").devices


def _topology(job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        devices = _devices(job["topology"])
    except Exception as error:  # whatever it is, the parent has to hear of it
        return {"error": str(error)}
    return {
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "host_count": len({device.process_index for device in devices}),
    }


def _compile(job: Mapping[str, Any], answers: TextIO) -> dict[str, Any]:
    lowered = lower(Program.from_plain(job["program"]), _devices(job["topology"]))
    key = program_key(lowered.as_text(), job["topology"])
    path = Path(job["cache"], f"{key}.json") if job["cache"] else None
    if path is not None and path.is_file():
        return {**json.loads(path.read_text(encoding="utf-8")), "cached": True}
    # Only from here on does the time limit run.
    _say(answers, {"compiling": key})
    answer = {"program": key, **_run_compiler(lowered)}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(answer).encode())
    return {**answer, "cached": False}


def _run_compiler(lowered: Any) -> dict[str, Any]:
    started = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    seconds = time.monotonic() - started
    memory = compiled.memory_analysis()
    inputs, _ = compiled.in_avals[0]
    # Of jaxlib 0.12; before it, nothing tells what the SparseCore reserves.
    total = getattr(memory, "total_allocation_bytes", 0)
    temporary = max(memory.temp_size_in_bytes, total - memory.argument_size_in_bytes)
    return {
        "seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": temporary,
        # What the executable takes, without the device axis.
        "inputs": {
            field: {
                stack: [list(array.shape[1:]), str(array.dtype)]
                for stack, array in getattr(inputs, field).items()
            }
            for field in ("row_pointers", "embedding_ids", "sample_ids", "gains")
        },
    }


if __name__ == "__main__":
    main()
