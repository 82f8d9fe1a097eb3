"""What a training job reports: its progress, and how it went on all hosts."""

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grain_sparsecore.errors import HostMismatchError
from grain_sparsecore.limits import Limits
from grain_sparsecore.lookup import to_global_arrays
from grain_sparsecore.minibatch import BUCKETS
from grain_sparsecore.overflow import SLOT_BYTES
from grain_sparsecore.pipeline.splitting import SplitTotals
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.tally import Tally


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """What is known after a step.

    Attributes:
        step: Steps done, from 1.
        steps: Steps to do.
        loss: Loss of this step, the mean over the samples of all hosts.
        examples_per_second: Samples per second, as many on every host as on this one,
            since the end of the first step; 0 after the first.
        recompiles: Compilations of the step so far, without the first.
        messages: What happened to ids of this host for the first time, such as ids
            that ``on_invalid_id`` dropped.
    """

    step: int
    steps: int
    loss: float
    examples_per_second: float
    recompiles: int
    messages: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinibatchSummary:
    """How the batches of a job were split; equal on every host.

    Attributes:
        batches: Batches by their number of minibatches, ``{1: 90, 4: 10}``.
        share_split: Share of the batches with more than one, from 0 to 1.
        extra_buffer_bytes: Bytes per device and batch that minibatching costs: the
            row pointers of 64 minibatches, and the slots that the alignment of each
            minibatch took in the window where it took most. 0 without minibatching.
    """

    batches: Mapping[int, int] = dataclasses.field(default_factory=dict)
    share_split: float = 0.0
    extra_buffer_bytes: int = 0

    @classmethod
    def of(
        cls, splits: SplitTotals, layout: StackedLayout, *, minibatching: bool
    ) -> "MinibatchSummary":
        """From what a pipeline counted."""
        batches = dict(sorted(splits.batches.items()))
        whole = batches.get(1, 0)
        total = sum(batches.values())
        return cls(
            batches=batches,
            share_split=1 - whole / total if total else 0.0,
            extra_buffer_bytes=extra_buffer_bytes(splits.extra_slots, layout)
            if minibatching
            else 0,
        )


def extra_buffer_bytes(extra_slots: int, layout: StackedLayout) -> int:
    """Bytes per device that minibatching adds to all buffers of a batch."""
    pointers = layout.topology.num_sc_per_device * layout.row_pointers_per_sc
    more = (BUCKETS - 1) * pointers * np.dtype(np.int32).itemsize
    return len(layout.stacks) * more + extra_slots * SLOT_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSummary:
    """How a job went; equal on every host.

    Attributes:
        steps: Steps done; fewer than asked for where the input ended earlier.
        hosts: Hosts (JAX processes).
        examples_per_second: Samples of all hosts per second, from the end of the
            first step, and so without its compilation, to the end of the last.
        loss_first: Loss of the first step.
        loss_last: Loss of the last step.
        limits: Limits of the last batch.
        limit_changes: How often a batch had other limits than the one before it.
        recompiles: Compilations of the train step after the first.
        dropped_ids: Ids of all hosts that were given and not looked up.
        input_wait_fraction: Share of that time in which the devices had nothing to do
            because the next batch was not ready; the largest of all hosts.
        batch_digest: For each host sha256, in hexadecimal, over the buffers of all
            its batches.
        minibatches: How batches were split.
        program_fingerprint: Of the TPU program of ``limits``, see
            `grain_sparsecore.program.program_fingerprint`; None where
            jax-tpu-embedding is not installed or lacks the optimizer of a table.
        counters: For each feature what happened to its ids on all hosts, see
            `grain_sparsecore.features.COUNTERS`.
        given_ids: For each feature the ids that came in on all hosts: those looked up
            (``ids`` of ``counters``), padding, and those ``on_invalid_id`` dropped.
        drops: What was cut at limits, by stack, see `Tally.drops`.
        dropped_example_share: Share of all samples that lost an entry there.
    """

    steps: int
    hosts: int
    examples_per_second: float
    loss_first: float
    loss_last: float
    limits: Limits
    limit_changes: int
    recompiles: int
    dropped_ids: int
    input_wait_fraction: float
    batch_digest: tuple[str, ...]
    minibatches: MinibatchSummary = dataclasses.field(default_factory=MinibatchSummary)
    program_fingerprint: str | None = None
    counters: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    given_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    drops: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    dropped_example_share: float = 0.0

    def to_json(self) -> str:
        """All fields as JSON text; limits as ``{stack: {limit: number}}``."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["limits"] = self.limits.to_plain()
        fields["minibatches"] = dataclasses.asdict(self.minibatches)
        return json.dumps(fields, indent=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOutcome:
    """What one host tells the others when the job ends.

    Attributes:
        recompiles: As in `TrainSummary`.
        limit_changes: As in `TrainSummary`.
        samples: Real samples of this host after the first step.
        input_wait_fraction: Of this host.
        limits_digest: sha256 of the limits of the last batch.
        batch_digest: sha256 of the buffers of all batches.
    """

    recompiles: int
    limit_changes: int
    samples: int
    input_wait_fraction: float
    limits_digest: bytes
    batch_digest: bytes

    # Little-endian whatever the hosts are.
    _FORMAT = "<qqqd32s32s"

    def to_bytes(self) -> np.ndarray:
        """uint8, of one length for all hosts."""
        packed = struct.pack(
            self._FORMAT, *(getattr(self, f.name) for f in dataclasses.fields(self))
        )
        return np.frombuffer(packed, np.uint8)

    @classmethod
    def from_bytes(cls, packed: np.ndarray) -> "HostOutcome":
        """The inverse of `to_bytes`."""
        names = [f.name for f in dataclasses.fields(cls)]
        values: tuple[Any, ...] = struct.unpack(cls._FORMAT, packed.tobytes())
        return cls(**dict(zip(names, values, strict=True)))


_EQUAL_ON_ALL_HOSTS = (
    "recompiles",
    "limit_changes",
    "limits_digest",
)


def digest_of_limits(limits: Limits) -> bytes:
    """sha256 of the names and numbers of limits."""
    text = json.dumps(limits.to_plain(), sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def gather_outcomes(mine: HostOutcome, mesh: Mesh, axis: str) -> list[HostOutcome]:
    """The outcomes of all hosts, in their order; a collective that each must call."""
    rows = gather_bytes(mine.to_bytes(), mesh, axis)
    return [HostOutcome.from_bytes(row) for row in rows]


def add_tallies(mine: Tally, layout: StackedLayout, mesh: Mesh, axis: str) -> Tally:
    """The sum over all hosts; a collective that each must call."""
    rows = gather_bytes(mine.to_vector().view(np.uint8), mesh, axis)
    return Tally.of(layout, rows.view(np.float64).sum(axis=0))


def gather_bytes(mine: np.ndarray, mesh: Mesh, axis: str) -> np.ndarray:
    """uint8 [n] of every host, in their order: [hosts, n]; each must call it."""
    local = len(mesh.local_devices)
    packed = to_global_arrays(np.tile(mine, (local, 1)), mesh, axis)
    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(packed))
    return np.ascontiguousarray(rows[::local])


def check_outcomes(outcomes: Sequence[HostOutcome]) -> None:
    """Makes sure that all hosts saw the same limits and compiled as often.

    Raises:
        HostMismatchError: Hosts ended with other limits, or compiled more or less
            often, so at least one of them worked with wrong buffers.
    """
    first = outcomes[0]
    for host, other in enumerate(outcomes):
        for field in _EQUAL_ON_ALL_HOSTS:
            one, two = getattr(first, field), getattr(other, field)
            if one != two:
                raise HostMismatchError(
                    f"host {host} ended with {field} {_shown(two)}, host 0 with "
                    f"{_shown(one)}; hosts must switch limits at the same batch. Run "
                    "the same configuration and version on all of them."
                )


def _shown(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
