"""What the user declares: tables, the features that look them up, and the topology.

All three are frozen, keyword-only and checked where they are built, so that a wrong
value is reported with its name before any batch is read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from grain_sparsecore.errors import ConfigError

Combiner = Literal["sum", "mean", "sqrtn"]
OnInvalidId = Literal["error", "drop", "clip", "mod"]
OnInvalidWeight = Literal["error", "zero"]

COMBINERS: tuple[str, ...] = ("sum", "mean", "sqrtn")
ON_INVALID_ID: tuple[str, ...] = ("error", "drop", "clip", "mod")
ON_INVALID_WEIGHT: tuple[str, ...] = ("error", "zero")

# Ids are int32 in the buffers and INT32_MAX is the padding value there.
MAX_VOCABULARY_SIZE = 2**31 - 1

# The SparseCore reads buffers in units of 8 slots: every partition starts at a
# multiple of it, and vocabularies are padded to 8 rows a partition.
ALIGNMENT = 8

# Stack names that TableSpec.stack reserves.
AUTO_STACK = "auto"


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def _require_int(owner: str, field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"{owner}: {field} must be an integer, not {value!r} "
            f"({type(value).__name__})."
        )
    if not low <= value <= high:
        raise ConfigError(
            f"{owner}: {field}={value} is out of range; it must be from {low} to "
            f"{high}."
        )


def _require_name(owner: str, field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{owner}: {field} must be a non-empty string, not {value!r}."
        )


def _require_choice(
    owner: str, field: str, value: Any, allowed: tuple[str, ...]
) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{owner}: {field}={value!r} is not one of {', '.join(allowed)}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One embedding table.

    Attributes:
        name: Unique name, for example ``"item"``.
        vocabulary_size: Number of rows. Legal ids are ``0 .. vocabulary_size - 1``.
        embedding_dim: Number of float32 columns, for example 32.
        combiner: How the rows of one sample become one vector: ``"sum"``,
            ``"mean"`` (weighted mean if the feature has weights) or ``"sqrtn"``
            (sum divided by the root of the sum of squared weights).
        optimizer: Label of the optimizer; only tables with equal labels are stacked.
        stack: ``None`` keeps the table for itself, ``"auto"`` stacks it with every
            other ``"auto"`` table of the same padded dimension, combiner and
            optimizer, any other text names an explicit stack.
        max_ids_per_partition: Where the limit on ids per (SparseCore, partition)
            starts; it grows with the data. Tables of one stack add up.
        max_unique_ids_per_partition: The same for distinct ids.
        suggested_coo_buffer_size_per_device: Where the buffer size starts, in slots
            per device; rounded up to a multiple of 8 SparseCores. ``None`` starts at
            the smallest legal buffer.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    combiner: Combiner = "sum"
    optimizer: str = "adagrad"
    stack: str | None = None
    max_ids_per_partition: int = 1
    max_unique_ids_per_partition: int = 1
    suggested_coo_buffer_size_per_device: int | None = None

    def __post_init__(self) -> None:
        _require_name("table", "name", self.name)
        owner = f"table {self.name!r}"
        _require_int(
            owner, "vocabulary_size", self.vocabulary_size, 1, MAX_VOCABULARY_SIZE
        )
        _require_int(owner, "embedding_dim", self.embedding_dim, 1, 2**20)
        _require_choice(owner, "combiner", self.combiner, COMBINERS)
        _require_name(owner, "optimizer", self.optimizer)
        if self.stack is not None:
            _require_name(owner, "stack", self.stack)
        for field in ("max_ids_per_partition", "max_unique_ids_per_partition"):
            _require_int(owner, field, getattr(self, field), 1, 2**31 - 8)
        if self.suggested_coo_buffer_size_per_device is not None:
            _require_int(
                owner,
                "suggested_coo_buffer_size_per_device",
                self.suggested_coo_buffer_size_per_device,
                1,
                2**31 - 8,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """One input feature: where its ids are in the batch and which table it reads.

    Attributes:
        name: Unique name; the key of its activations after the lookup.
        table: Name of the table.
        ids: Key of the ids in the batch, ``"user/history"`` for a nested one.
            Defaults to ``name``.
        weights: Key of the weights, or ``None`` for weight 1 everywhere.
        on_invalid_id: What to do with an id below 0 or at or above the vocabulary:
            ``"error"``, ``"drop"`` it, ``"clip"`` it to the nearest legal id, or
            take it ``"mod"`` the vocabulary. All but ``"error"`` are counted.
        padding_id: An id that stands for "nothing": neither counted nor looked up.
        hash: Map any 64-bit integer, bytes or string id onto the vocabulary.
        hash_seed: Seed of that hash; another seed gives another mapping.
        on_invalid_weight: NaN and infinite weights: ``"error"``, or ``"zero"``,
            which is counted.
        allow_negative_weights: Whether weights below 0 are accepted.

    Raises:
        ConfigError: A value is of the wrong type or not allowed.
    """

    name: str
    table: str
    ids: str = ""
    weights: str | None = None
    on_invalid_id: OnInvalidId = "error"
    padding_id: int | None = None
    hash: bool = False
    hash_seed: int = 0
    on_invalid_weight: OnInvalidWeight = "error"
    allow_negative_weights: bool = True

    def __post_init__(self) -> None:
        _require_name("feature", "name", self.name)
        owner = f"feature {self.name!r}"
        _require_name(owner, "table", self.table)
        if self.ids == "":
            object.__setattr__(self, "ids", self.name)
        _require_name(owner, "ids", self.ids)
        if self.weights is not None:
            _require_name(owner, "weights", self.weights)
        _require_choice(owner, "on_invalid_id", self.on_invalid_id, ON_INVALID_ID)
        _require_choice(
            owner, "on_invalid_weight", self.on_invalid_weight, ON_INVALID_WEIGHT
        )
        if self.padding_id is not None:
            _require_int(owner, "padding_id", self.padding_id, -(2**63), 2**64 - 1)
        _require_int(owner, "hash_seed", self.hash_seed, 0, 2**64 - 1)
        for field in ("hash", "allow_negative_weights"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(
                    f"{owner}: {field} must be true or false, not "
                    f"{getattr(self, field)!r}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """The devices that the buffers are made for.

    Attributes:
        global_device_count: Devices of the whole job (G).
        local_device_count: Devices of this host (L). Every host has the same number.
        num_sc_per_device: SparseCores per device (S): 4 on TPU v5p, 2 on v6e and
            TPU7x. It is stated, not detected, so that a host without a TPU can
            prepare input for one.

    Raises:
        ConfigError: A count is out of range, G is no multiple of L, or the number of
            partitions G * S is no power of two (ids are spread over partitions by
            their low bits).
    """

    global_device_count: int
    local_device_count: int
    num_sc_per_device: int

    def __post_init__(self) -> None:
        _require_int(
            "topology", "global_device_count", self.global_device_count, 1, 2**20
        )
        _require_int(
            "topology", "local_device_count", self.local_device_count, 1, 2**20
        )
        _require_int("topology", "num_sc_per_device", self.num_sc_per_device, 1, 64)
        if self.global_device_count % self.local_device_count:
            raise ConfigError(
                f"topology: global_device_count={self.global_device_count} is not a "
                f"multiple of local_device_count={self.local_device_count}; every "
                "host must have the same number of devices."
            )
        partitions = self.global_device_count * self.num_sc_per_device
        if partitions & (partitions - 1):
            lower = 1 << (partitions.bit_length() - 1)
            raise ConfigError(
                f"topology: global_device_count={self.global_device_count} * "
                f"num_sc_per_device={self.num_sc_per_device} = {partitions} "
                "partitions is not a power of two; the nearest are "
                f"{lower} and {2 * lower}."
            )

    @property
    def num_partitions(self) -> int:
        """N: SparseCores of the whole job, and so partitions of each table."""
        return self.global_device_count * self.num_sc_per_device

    @property
    def local_sc_count(self) -> int:
        """R: SparseCores of this host."""
        return self.local_device_count * self.num_sc_per_device

    @property
    def num_hosts(self) -> int:
        """Number of hosts (JAX processes)."""
        return self.global_device_count // self.local_device_count

    @classmethod
    def from_jax(cls, *, num_sc_per_device: int) -> Self:
        """The topology of the running JAX job.

        Starts JAX's default backend; call ``jax.distributed.initialize`` first in a
        job of several hosts.
        """
        import jax

        return cls(
            global_device_count=jax.device_count(),
            local_device_count=jax.local_device_count(),
            num_sc_per_device=num_sc_per_device,
        )


def as_plain(spec: TableSpec | FeatureSpec | Topology) -> Mapping[str, Any]:
    """The fields of a spec as a JSON-able dict, for fingerprints and files."""
    return dataclasses.asdict(spec)
