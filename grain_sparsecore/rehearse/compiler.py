"""The TPU compiler in a child process, with a time limit.

libtpu can abort or run for minutes; a child can be given up. Several may run at the
same time, and none leaves a lock behind: no TPU is touched, so libtpu's lock for its
one owner is not taken.
"""

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from grain_sparsecore.errors import ConfigError, GrainSparseCoreError
from grain_sparsecore.program import Program
from grain_sparsecore.rehearse.installation import check_installation
from grain_sparsecore.rehearse.topologies import (
    EXAMPLES,
    NamedTopology,
    from_devices,
    sparsecores,
)

# Near the largest limits a compilation takes up to 2 minutes with libtpu 0.0.42, and
# seconds everywhere else.
DEFAULT_TIMEOUT_SECONDS = 600.0

# Seconds for what is not compiling: importing jax, loading libtpu, lowering.
_START_SECONDS = 300.0

# Characters of the child's last words that are shown when it dies.
_LAST_WORDS = 600

_COMMAND = (sys.executable, "-m", "grain_sparsecore.rehearse.worker")

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # A compilation read from JAX's cache would tell nothing about its time.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    # There is no TPU whose metadata could be asked for, and none to lock.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one compilation.

    Attributes:
        fits: Whether it compiled.
        error: The compiler's words where it refused, else empty.
        timed_out: Whether it was given up at the time limit.
        seconds: Time it took, up to its time limit where it was given up.
        argument_bytes: Per device: tables, optimizer slots and buffers.
        temporary_bytes: Per device; with the SparseCore's own, where jaxlib tells.
        inputs: By field and stack, shape per device and dtype that were compiled.
        program: Key of the program, see `cache.program_key`; empty if given up.
        cached: Whether it was compiled at an earlier time.
    """

    fits: bool
    error: str = ""
    timed_out: bool = False
    seconds: float = 0.0
    argument_bytes: int = 0
    temporary_bytes: int = 0
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    program: str = ""
    cached: bool = False


class Compiler:
    """Compiles programs one after another; a context manager.

    Args:
        timeout_seconds: After so many seconds of compiling for each of its stacks, a
            program is given up.
        cache: Folder of earlier outcomes; None to compile anew.

    Raises:
        MissingExtraError: jax-tpu-embedding or the right libtpu is not installed.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        cache: Path | None = None,
    ) -> None:
        if not timeout_seconds > 0:
            raise ConfigError(
                f"timeout_seconds={timeout_seconds} must be above 0; it limits each "
                "compilation, for every stack in it."
            )
        check_installation()
        self.timeout_seconds = timeout_seconds
        self._cache = cache
        self._child: _Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child process, also in the middle of a compilation."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def topology(self, name: str) -> NamedTopology:
        """What the compiler knows under a name.

        Raises:
            ConfigError: The compiler does not know it, or it has no SparseCores.
        """
        sparsecores(name)
        answer = self._ask({"do": "topology", "topology": name}, _START_SECONDS)
        if "error" in answer:
            raise ConfigError(
                f"topology {name!r} is unknown to the TPU compiler "
                f"({answer['error'].splitlines()[0]}); for example {EXAMPLES}."
            )
        return from_devices(name, **answer)

    def compile(self, program: Program, topology: str) -> Outcome:
        """Compiles a program for a topology.

        Raises:
            GrainSparseCoreError: The child could not even lower the program.
        """
        job = {
            "do": "compile",
            "program": program.to_plain(),
            "topology": topology,
            "cache": os.fspath(self._cache) if self._cache else None,
        }
        answer = self._ask(job, _START_SECONDS)
        if "compiling" in answer:
            key = answer["compiling"]
            # Stacks are compiled one after another, in one program too.
            seconds = self.timeout_seconds * len(program.stacks)
            try:
                answer = self._listen(seconds)
            except TimeoutError:
                self.close()
                return Outcome(fits=False, timed_out=True, seconds=seconds)
            except _ChildDiedError as error:
                self.close()
                return Outcome(fits=False, error=str(error), program=key)
        return Outcome(fits="error" not in answer, **answer)

    def _ask(self, job: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if self._child is None:
            self._child = _Child()
        try:
            self._child.say(job)
            return self._listen(seconds)
        except (TimeoutError, _ChildDiedError) as error:
            self.close()
            raise GrainSparseCoreError(
                f"the process that compiles did not answer: {error}"
            ) from error

    def _listen(self, seconds: float) -> dict[str, Any]:
        assert self._child is not None
        return self._child.listen(seconds)


class _ChildDiedError(Exception):
    pass


class _Child:
    """The worker process and the two pipes to it."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="grain_sparsecore_")
        self._log = Path(self._folder, "stderr")
        logs = Path(self._folder, "tpu_logs")
        logs.mkdir()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT, "TPU_LOG_DIR": str(logs)},
                # Ctrl-C is for us alone; we end the child.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._input = self._process.stdin
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def say(self, job: Mapping[str, Any]) -> None:
        try:
            self._input.write(f"{json.dumps(job)}\n".encode())
            self._input.flush()
        except BrokenPipeError:
            raise self._died() from None

    def listen(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer after {seconds:.0f} s.") from None
        if not line:
            raise self._died()
        return json.loads(line)

    def _died(self) -> _ChildDiedError:
        code = self._process.wait()
        words = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return _ChildDiedError(
            f"it ended with code {code}; its last words: {words[-_LAST_WORDS:]}"
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)
