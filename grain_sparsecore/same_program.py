"""Whether all hosts would run the same TPU program, asked when limits change.

The program follows from the limits, which hosts agree on, from the stacks, which they
compared at the start, and from the versions of jax and jax-tpu-embedding, which nobody
has compared. So the first limits of a job show nearly all that can differ, before its
first step; the others are compared as they come.
"""

import importlib.metadata
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from grain_sparsecore.coordination.differences import name_hosts
from grain_sparsecore.errors import ConfigError, HostMismatchError, MissingExtraError
from grain_sparsecore.limits import Limits
from grain_sparsecore.program import program_fingerprint
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.summary import gather_bytes

# Stands for no program; sha256 of none is all zeros.
_NO_PROGRAM = "0" * 64

_SHOWN_DIGITS = 16


class SameProgram:
    """Compares the program of new limits over all hosts.

    Args:
        layout: The stacks on the topology of the job.
        minibatching: Whether ``on_overflow`` is ``"minibatch"``.
        mesh: All devices of the job.
        axis: The one axis of the mesh.
    """

    def __init__(
        self, layout: StackedLayout, *, minibatching: bool, mesh: Mesh, axis: str
    ) -> None:
        self._layout = layout
        self._minibatching = minibatching
        self._mesh = mesh
        self._axis = axis
        self.fingerprint: str | None = None

    def compare(self, limits: Limits, *, step: int) -> None:
        """Compares the program of ``limits`` with that of the other hosts.

        A collective of 64 bytes a host in a job of several hosts; all of them must
        call it at the same step, as they do where limits change.

        Args:
            limits: The new limits.
            step: From 1; for messages.

        Raises:
            HostMismatchError: A host has another program, or no way to tell.
        """
        try:
            self.fingerprint = program_fingerprint(
                limits, self._layout, minibatching=self._minibatching
            )
        except (MissingExtraError, ConfigError):
            # Without jax-tpu-embedding, or with an optimizer that it does not have,
            # there is no such program; the limits are compared all the same.
            self.fingerprint = None
        if jax.process_count() == 1:
            return
        mine = (self.fingerprint or _NO_PROGRAM).encode()
        rows = gather_bytes(np.frombuffer(mine, np.uint8), self._mesh, self._axis)
        check_programs([row.tobytes().decode() for row in rows], step=step)


def check_programs(fingerprints: Sequence[str], *, step: int) -> None:
    """Makes sure that all hosts have the same program.

    Args:
        fingerprints: Of each host, in their order; all zeros where it has none.
        step: From 1; for the message.

    Raises:
        HostMismatchError: They have not.
    """
    without = [h for h, text in enumerate(fingerprints) if text == _NO_PROGRAM]
    if without and len(without) < len(fingerprints):
        lacks = "lacks" if len(without) == 1 else "lack"
        raise HostMismatchError(
            f"{name_hosts(without)} of {len(fingerprints)} {lacks} jax-tpu-embedding, "
            "which the others have, so it cannot be told whether all would run the "
            "same TPU program. Install it on every host, pip install "
            "'grain_sparsecore[sparsecore]', or on none."
        )
    first = fingerprints[0]
    others = [h for h, text in enumerate(fingerprints) if text != first]
    if others:
        raise HostMismatchError(
            f"in step {step} {name_hosts(others)} would run another TPU program than "
            f"host 0 ({fingerprints[others[0]][:_SHOWN_DIGITS]} on host {others[0]}, "
            f"{first[:_SHOWN_DIGITS]} on host 0). Install the same versions of jax "
            f"and jax-tpu-embedding on all of them; here they are {_versions()}."
        )


def _versions() -> str:
    found = []
    for name in ("jax", "jax-tpu-embedding"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return " and ".join(found)
