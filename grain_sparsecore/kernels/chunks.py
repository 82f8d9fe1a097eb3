"""How a batch is cut into chunks that are sorted together."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from grain_sparsecore.kernels.gains import constant_gain
from grain_sparsecore.stacking import Stack, StackedLayout

if TYPE_CHECKING:
    from grain_sparsecore.features import FeatureIds

# Ids of a chunk: the arrays made of 64 Ki keys stay in a usual second-level cache.
CHUNK_IDS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Mode:
    """How the gains of a stack come about; chunks hold stacks of one mode.

    Attributes:
        weighted: Some feature has weights.
        constant: The gain of every id before merging, where all are equal.
        merge: Whether a sample can hold an id twice.
    """

    weighted: bool
    constant: float | None
    merge: bool


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Whole stacks, or some SparseCores of one stack.

    Its *segments* are its SparseCores, stack by stack.
    """

    stacks: tuple[Stack, ...]
    first_core: int
    last_core: int
    mode: Mode

    @property
    def cores(self) -> int:
        """SparseCores of each stack."""
        return self.last_core - self.first_core

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.stacks) * self.cores

    def first_segment(self, cores: int) -> int:
        """The first segment, counted over all stacks of ``cores`` SparseCores."""
        return self.stacks[0].index * cores + self.first_core

    def last_segment(self, cores: int) -> int:
        """The one after the last."""
        return self.first_segment(cores) + self.segments


@dataclasses.dataclass(frozen=True)
class Slice:
    """The ids of one feature on the SparseCores of a chunk, in input order.

    Attributes:
        ids: uint32 [n].
        weights: float32 [n] or None.
        lengths: Ids of each sample: int64 [samples], or one int for all.
        counts: Ids on each SparseCore: int64 [cores].
    """

    ids: np.ndarray
    weights: np.ndarray | None
    lengths: np.ndarray | int
    counts: np.ndarray


def make_chunks(
    features: "Sequence[FeatureIds]", layout: StackedLayout
) -> Iterator[Chunk]:
    """Covers every SparseCore of every stack once, in order of the stacks."""
    cores = layout.topology.local_sc_count
    pending: list[Stack] = []
    pending_ids = 0
    pending_mode: Mode | None = None
    for stack in layout.stacks:
        mode = stack_mode(stack, features)
        ids = sum(features[f.index].ids.size for f in stack.features)
        if pending_mode is not None and (
            mode != pending_mode or pending_ids + ids > CHUNK_IDS
        ):
            yield Chunk(tuple(pending), 0, cores, pending_mode)
            pending, pending_ids, pending_mode = [], 0, None
        if ids > CHUNK_IDS:
            parts = min(-(-ids // CHUNK_IDS), cores)
            bounds = [cores * i // parts for i in range(parts + 1)]
            for first, last in itertools.pairwise(bounds):
                yield Chunk((stack,), first, last, mode)
        else:
            pending.append(stack)
            pending_ids += ids
            pending_mode = mode
    if pending_mode is not None:
        yield Chunk(tuple(pending), 0, cores, pending_mode)


def stack_mode(stack: Stack, features: "Sequence[FeatureIds]") -> Mode:
    """How the gains of a stack come about in this batch."""
    mine = [features[f.index] for f in stack.features]
    widths = {None if f.row_splits is not None else f.width for f in mine}
    merge = any(width is None or width > 1 for width in widths)
    if any(f.weights is not None for f in mine):
        return Mode(True, None, merge)
    if stack.combiner == "sum":
        return Mode(False, 1.0, merge)
    (width, *others) = widths
    if width and not others:
        return Mode(False, float(constant_gain(stack.combiner, width)), merge)
    return Mode(False, None, merge)


def feature_slice(feature: "FeatureIds", per_core: int, chunk: Chunk) -> Slice:
    """The part of a feature that belongs to a chunk, without a copy.

    Args:
        feature: The whole feature.
        per_core: Its samples on one SparseCore.
        chunk: The chunk.
    """
    first, last = chunk.first_core * per_core, chunk.last_core * per_core
    if feature.row_splits is None:
        width = feature.width
        start, end = first * width, last * width
        lengths: np.ndarray | int = width
        counts = np.full(chunk.cores, per_core * width, np.int64)
    else:
        splits = feature.row_splits[first : last + 1]
        start, end = int(splits[0]), int(splits[-1])
        lengths = np.diff(splits)
        counts = np.diff(splits[::per_core])
    return Slice(
        ids=feature.ids[start:end].view(np.uint32),
        weights=None if feature.weights is None else feature.weights[start:end],
        lengths=lengths,
        counts=counts,
    )
