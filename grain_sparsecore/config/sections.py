"""The plain sections of a configuration: topology, pipeline, limits, train."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from grain_sparsecore.config.checks import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_ints,
    check_str,
    check_strs,
)
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import GrowthPolicy
from grain_sparsecore.overflow import (
    DROP_ORDERS,
    ON_FULL_BUCKET,
    ON_OVERFLOW,
    OverflowPolicy,
    StackCaps,
)
from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import DEFAULT_ACTIVATION_BYTES_LIMIT

OnPartialBatch = Literal["drop", "pad", "error"]
OnExhausted = Literal["stop", "pad"]

ON_PARTIAL_BATCH: tuple[str, ...] = ("drop", "pad", "error")
ON_EXHAUSTED: tuple[str, ...] = ("stop", "pad")

# Seeds have 32 bits, as those of Grain do.
MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopologyConfig:
    """The devices; what is left out is taken from the running JAX job.

    Attributes:
        num_sc_per_device: SparseCores per device: 4 on TPU v5p, 2 on v6e and TPU7x.
        global_device_count: Devices of the whole job. None: as JAX counts them.
        local_device_count: Devices of this host. None: as JAX counts them.
        rotation: Partitions by which each further table of a stack is rotated. None:
            ``num_sc_per_device``.
        activation_bytes_limit: Bytes of activations per SparseCore at which
            ``stack = "auto"`` starts another stack.

    Raises:
        ConfigError: A value is of the wrong type or out of range, or both counts are
            given and do not go together.
    """

    num_sc_per_device: int
    global_device_count: int | None = None
    local_device_count: int | None = None
    rotation: int | None = None
    activation_bytes_limit: int = DEFAULT_ACTIVATION_BYTES_LIMIT

    def __post_init__(self) -> None:
        owner = "topology"
        check_int(owner, "num_sc_per_device", self.num_sc_per_device, low=1, high=64)
        if self.num_sc_per_device & (self.num_sc_per_device - 1):
            raise ConfigError(
                f"{owner}: num_sc_per_device={self.num_sc_per_device} must be a power "
                "of two: 4 on TPU v5p, 2 on v6e and TPU7x."
            )
        for field in ("global_device_count", "local_device_count"):
            if getattr(self, field) is not None:
                check_int(owner, field, getattr(self, field), low=1, high=2**20)
        if self.rotation is not None:
            check_int(owner, "rotation", self.rotation, low=0)
        check_int(owner, "activation_bytes_limit", self.activation_bytes_limit, low=1)
        if self.global_device_count and self.local_device_count:
            self.resolve()

    def on_devices(self, *, global_count: int, local_count: int) -> Topology:
        """The topology of a job with these devices.

        Args:
            global_count: Devices of the whole job.
            local_count: Devices of each host.

        Raises:
            ConfigError: The configuration names another count, or they do not go
                together, see `Topology`.
        """
        for name, actual in (
            ("global_device_count", global_count),
            ("local_device_count", local_count),
        ):
            declared = getattr(self, name)
            if declared not in (None, actual):
                raise ConfigError(
                    f"topology: {name}={declared}, but this job has {actual}; leave it "
                    "out to train on the devices there are."
                )
        return Topology(
            global_device_count=global_count,
            local_device_count=local_count,
            num_sc_per_device=self.num_sc_per_device,
        )

    def resolve(self) -> Topology:
        """The topology; starts JAX's default backend if a count is left out.

        Raises:
            ConfigError: The counts do not go together, see `Topology`.
        """
        global_count, local_count = self.global_device_count, self.local_device_count
        if global_count is None or local_count is None:
            job = Topology.from_jax(num_sc_per_device=self.num_sc_per_device)
            global_count = global_count or job.global_device_count
            local_count = local_count or job.local_device_count
        return Topology(
            global_device_count=global_count,
            local_device_count=local_count,
            num_sc_per_device=self.num_sc_per_device,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How batches are made and agreed on.

    Attributes:
        batch_size: Samples per *host* and batch. The global batch is this times the
            number of hosts.
        name: Name of the pipeline in the handshake between hosts; give a training
            and an evaluation pipeline of one job different names.
        window: Batches per round of agreement; one collective per window.
        workers: Worker processes that compute the statistics; 0 runs them in reader
            threads of this process.
        reader_threads: Threads that read and prepare batches, in each process.
        read_ahead: Batches read ahead by those threads, in each process.
        seed: Seed of the shuffle.
        timeout_seconds: Seconds a host waits for the others before it raises.
        on_partial_batch: What becomes of a last batch that is not full: ``"drop"``
            it, ``"pad"`` it with empty samples, or raise an ``"error"``.
        on_exhausted: When the first host runs out of data, all ``"stop"`` after the
            last batch that every host had, or those that ran out ``"pad"`` with
            empty batches until the last host ends.
        key: Key of the buffers in the batch.
        dump_failing: Folder for batches that cannot be prepared, see
            `ComputeInputStats`; each host writes to its own or to one that they share.
            None keeps none.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    batch_size: int
    name: str = "train"
    window: int = 8
    workers: int = 0
    reader_threads: int = 2
    read_ahead: int = 8
    seed: int = 0
    timeout_seconds: float = 300.0
    on_partial_batch: OnPartialBatch = "drop"
    on_exhausted: OnExhausted = "stop"
    key: str = "sparsecore"
    dump_failing: str | None = None

    def __post_init__(self) -> None:
        owner = "pipeline"
        try:
            check_int(owner, "batch_size", self.batch_size, low=1, high=2**31 - 1)
        except ConfigError as error:
            raise ConfigError(f"{error} It counts the samples of one host.") from None
        check_str(owner, "name", self.name)
        check_int(owner, "window", self.window, low=1, high=2**16)
        check_int(owner, "workers", self.workers, low=0, high=2**10)
        check_int(owner, "reader_threads", self.reader_threads, low=1, high=2**10)
        check_int(owner, "read_ahead", self.read_ahead, low=1, high=2**16)
        check_int(owner, "seed", self.seed, low=0, high=MAX_SEED)
        seconds = check_float(
            owner, "timeout_seconds", self.timeout_seconds, low=0, open_end=True
        )
        object.__setattr__(self, "timeout_seconds", seconds)
        check_choice(owner, "on_partial_batch", self.on_partial_batch, ON_PARTIAL_BATCH)
        check_choice(owner, "on_exhausted", self.on_exhausted, ON_EXHAUSTED)
        check_str(owner, "key", self.key)
        if self.dump_failing is not None:
            check_str(owner, "dump_failing", self.dump_failing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """How limits follow the data. Where they start is said by each table, or a file.

    Attributes:
        growth: How far a limit goes when a batch needs more than it.
        file: Where limits start: limits files of ``plan``, ``stats`` or ``train``,
            checkpoint states, or directories of FDO files; the maximum of several.
        adapt: Take limits made for other tables or another topology as bounds,
            instead of refusing them.
        frozen: Limits do not grow; what is above them is an overflow.
        on_overflow: What happens above a cap: ``"error"``, ``"drop"`` or
            ``"minibatch"``, see `OverflowPolicy`.
        drop_order: What is dropped, see `OverflowPolicy`.
        on_full_bucket: What happens where no split helps, see `OverflowPolicy`:
            ``"error"`` or ``"drop"``.
        stack: Caps by stack name.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    growth: GrowthPolicy = dataclasses.field(
        default_factory=GrowthPolicy, metadata={"section": GrowthPolicy}
    )
    file: tuple[str, ...] = ()
    adapt: bool = False
    frozen: bool = False
    on_overflow: Literal["error", "drop", "minibatch"] = "error"
    drop_order: Literal["prefix", "balanced"] = "prefix"
    on_full_bucket: Literal["error", "drop"] = "error"
    stack: Mapping[str, StackCaps] = dataclasses.field(
        default_factory=dict, metadata={"section_of_each": StackCaps}
    )

    def __post_init__(self) -> None:
        owner = "limits"
        files = [self.file] if isinstance(self.file, str) else self.file
        object.__setattr__(self, "file", check_strs(owner, "file", files))
        check_bool(owner, "adapt", self.adapt)
        check_bool(owner, "frozen", self.frozen)
        check_choice(owner, "on_overflow", self.on_overflow, ON_OVERFLOW)
        check_choice(owner, "drop_order", self.drop_order, DROP_ORDERS)
        check_choice(owner, "on_full_bucket", self.on_full_bucket, ON_FULL_BUCKET)
        if not isinstance(self.stack, Mapping) or not all(
            isinstance(caps, StackCaps) for caps in self.stack.values()
        ):
            raise ConfigError(
                "limits: stack must hold grain_sparsecore.overflow.StackCaps by stack "
                f"name, not {self.stack!r}."
            )
        if not isinstance(self.growth, GrowthPolicy):
            raise ConfigError(
                f"limits: growth must be a GrowthPolicy, not {self.growth!r}."
            )

    @property
    def overflow(self) -> OverflowPolicy:
        """The caps, and what happens above them."""
        return OverflowPolicy(
            on_overflow=self.on_overflow,
            drop_order=self.drop_order,
            on_full_bucket=self.on_full_bucket,
            frozen=self.frozen,
            caps=self.stack,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training job of the command line.

    Attributes:
        steps: Steps to train; it ends earlier when the input does.
        learning_rate: Of Adagrad, for tables and network alike.
        label: Key of the label in the batch, a number from 0 to 1 per sample.
        dense: Keys of dense features in the batch, each [batch] or [batch, n].
        hidden: Sizes of the hidden layers of the network; may be empty.
        seed: Seed of the initial parameters.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    steps: int = 100
    learning_rate: float = 0.05
    label: str = "label"
    dense: tuple[str, ...] = ()
    hidden: tuple[int, ...] = (64, 32)
    seed: int = 0

    def __post_init__(self) -> None:
        owner = "train"
        check_int(owner, "steps", self.steps, low=1)
        rate = check_float(
            owner, "learning_rate", self.learning_rate, low=0, open_end=True
        )
        check_str(owner, "label", self.label)
        check_int(owner, "seed", self.seed, low=0, high=MAX_SEED)
        checked: dict[str, Any] = {
            "learning_rate": rate,
            "dense": check_strs(owner, "dense", self.dense),
            "hidden": check_ints(owner, "hidden", self.hidden, low=1),
        }
        for field, value in checked.items():
            object.__setattr__(self, field, value)
