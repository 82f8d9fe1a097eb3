"""The two forms a batch takes between the stages, as registered pytrees.

`PartitionedBatch` is what the sort leaves behind: each SparseCore's entries, compact,
whatever the limits. `SparseCoreInput` is the same entries in buffers of the agreed
sizes. Both are plain containers; `partition` and `repartition` make them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from grain_sparsecore.errors import InputTypeError
from grain_sparsecore.limits import Limits

# Padding of embedding_ids and sample_ids; gains are padded with NaN.
PADDING_ID = np.int32(2**31 - 1)
PADDING_GAIN = np.float32(np.nan)

# Of embedding ids, sample ids and gains.
PADDINGS = (PADDING_ID, PADDING_ID, PADDING_GAIN)


class _ComparedBitwise:
    """Equality of pytrees of arrays: equal metadata, dtypes, shapes and bytes."""

    # NaN is the padding of gains, so comparing by value would find nothing equal.
    def __eq__(self, other: object) -> bool:
        leaves, tree = jax.tree.flatten(self)
        others, other_tree = jax.tree.flatten(other)
        return tree == other_tree and all(
            one.dtype == two.dtype
            and one.shape == two.shape
            and one.tobytes() == two.tobytes()
            for one, two in zip(
                map(np.asarray, leaves), map(np.asarray, others), strict=True
            )
        )

    def __repr__(self) -> str:
        # A batch has millions of numbers; what matters is what it is made for.
        limits = getattr(self, "limits", None)
        return f"{type(self).__name__}({limits or 'no limits yet'})"

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PartitionedBatch(_ComparedBitwise):
    """One batch of one host, sorted by partition, before any limit applies.

    The entries of SparseCore r of stack t are one *segment*: its partitions in order,
    each starting at a multiple of 8, alignment gaps padded. Segments follow one
    another, stack by stack (sorted names), SparseCore by SparseCore. All segments of a
    stack have the length of its longest, ``stats[t, 2] / S`` slots, and are padded up
    to it, so that a stack is one block [R, length].

    Types are not checked here: Grain maps the leaves of elements to placeholders.

    Attributes:
        embedding_ids: int32 [E], row on its partition; INT32_MAX in gaps.
        sample_ids: int32 [E], sample on its SparseCore; INT32_MAX in gaps.
        gains: float32 [E], factor of the row; NaN in gaps.
        row_pointers: int32 [T, R, W], as in the final buffers: end of partition p
            before alignment, relative to the start of the segment.
        stats: int32 [T, 3], what the batch needs, see `InputStatsPerTable`.
        counters: int32 [F, C], what happened to the ids of each feature, columns as
            `grain_sparsecore.features.COUNTERS`.
        num_valid_samples: int32 [L], real samples on each local device; fewer than
            the batch holds where a short batch was padded.
        limits: The agreed limits; None until stage 2 sets them. Static.
        raw_counts: int32 [E], how many ids of the input each entry stands for; None
            unless the batch may have to be cut.
        drops: `grain_sparsecore.dropping.DropCounts`; None where nothing may be
            dropped.
        split: `grain_sparsecore.minibatch.Split`, set by stage 2; None where batches
            are not split into minibatches.
    """

    embedding_ids: Any
    sample_ids: Any
    gains: Any
    row_pointers: Any
    stats: Any
    counters: Any
    num_valid_samples: Any
    limits: Limits | None = None
    raw_counts: Any = None
    drops: Any = None
    split: Any = None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SparseCoreInput(_ComparedBitwise):
    """One batch of one host in SparseCore buffers of the agreed sizes.

    Dictionaries are keyed by stack name. The leading axis of every array is the local
    device; ``size`` is ``limits[stack].buffer_size_per_device``.

    Attributes:
        row_pointers: int32 [L, S * W] for each stack; [L, S * 64 * W] with
            minibatching, counted from the start of the device's buffer.
        embedding_ids: int32 [L, size] for each stack; padding INT32_MAX.
        sample_ids: int32 [L, size] for each stack; padding INT32_MAX.
        gains: float32 [L, size] for each stack; padding NaN.
        num_minibatches: int32 [L], equal on all devices of all hosts; 1 without
            minibatching.
        num_valid_samples: int32 [L], real samples on each local device.
        counters: int32 [F, C], as in `PartitionedBatch`; None in global arrays.
        limits: The agreed limits. Static: a jitted step recompiles exactly when they
            change.
        drops: As in `PartitionedBatch`; None in global arrays.
    """

    row_pointers: dict[str, Any]
    embedding_ids: dict[str, Any]
    sample_ids: dict[str, Any]
    gains: dict[str, Any]
    num_minibatches: Any
    num_valid_samples: Any
    counters: Any
    limits: Limits
    drops: Any = None

    def to_jax_tpu_embedding(self, *, has_leading_dimension: bool = False) -> Any:
        """The ``PreprocessedInput`` of jax-tpu-embedding over the same memory.

        See `grain_sparsecore.interop.to_jax_tpu_embedding`.
        """
        from grain_sparsecore.interop import to_jax_tpu_embedding

        return to_jax_tpu_embedding(self, has_leading_dimension=has_leading_dimension)


def check_buffers(value: Any, *, function: str) -> None:
    """Refuses what is no `SparseCoreInput`, such as the whole batch that holds one.

    Args:
        value: What was passed.
        function: Name of the function that it was passed to.

    Raises:
        InputTypeError: It is something else; the text names the key to pass.
    """
    if isinstance(value, SparseCoreInput):
        return
    fix = "pass what the last stage makes of the batch"
    if isinstance(value, Mapping):
        keys = [k for k, v in value.items() if isinstance(v, SparseCoreInput)]
        fix = (
            f"pass batch[{keys[0]!r}]"
            if keys
            else f"none is under its keys {', '.join(map(repr, value))}; {fix}"
        )
    raise InputTypeError(
        f"{function} takes a SparseCoreInput, not a {type(value).__name__}; {fix}."
    )


jax.tree_util.register_dataclass(
    PartitionedBatch,
    data_fields=[
        "embedding_ids",
        "sample_ids",
        "gains",
        "row_pointers",
        "stats",
        "counters",
        "num_valid_samples",
        "raw_counts",
        "drops",
        "split",
    ],
    meta_fields=["limits"],
)
jax.tree_util.register_dataclass(
    SparseCoreInput,
    data_fields=[
        "row_pointers",
        "embedding_ids",
        "sample_ids",
        "gains",
        "num_minibatches",
        "num_valid_samples",
        "counters",
        "drops",
    ],
    meta_fields=["limits"],
)
