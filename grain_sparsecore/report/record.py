"""What a run leaves for its report: plain data, bounded however long the run is."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grain_sparsecore.limits import StackLimits
from grain_sparsecore.report.charts import Figure

# Points of a curve; more cannot be told apart on a page 560 pixels wide.
MAX_POINTS = 256


class Curve:
    """Values over the steps of a run, in at most `MAX_POINTS` intervals of one length.

    Args:
        columns: Values of each step.
        how: Whether an interval shows the ``"max"`` or the ``"mean"`` of its steps.
    """

    def __init__(self, columns: int = 1, *, how: str = "max") -> None:
        self._reduce_with_max = how == "max"
        self._length = 1
        self._first: int | None = None
        self._rows = np.zeros((MAX_POINTS, columns))
        self._counts = np.zeros(MAX_POINTS, np.int64)

    def add(self, step: int, values: Any) -> None:
        """Adds the values of a step; steps rise from call to call."""
        row = np.atleast_1d(np.asarray(values, np.float64))
        if self._first is None:
            self._first = step
        while (index := (step - self._first) // self._length) >= MAX_POINTS:
            self._halve()
        if not self._counts[index]:
            self._rows[index] = row
        elif self._reduce_with_max:
            self._rows[index] = np.maximum(self._rows[index], row)
        else:
            self._rows[index] += row
        self._counts[index] += 1

    def _halve(self) -> None:
        pairs = self._rows.reshape(MAX_POINTS // 2, 2, -1)
        merged = pairs.max(axis=1) if self._reduce_with_max else pairs.sum(axis=1)
        self._rows = np.concatenate([merged, np.zeros_like(merged)])
        counts = self._counts.reshape(-1, 2).sum(axis=1)
        self._counts = np.concatenate([counts, np.zeros_like(counts)])
        self._length *= 2

    def __len__(self) -> int:
        return int(np.count_nonzero(self._counts))

    @property
    def x(self) -> list[int]:
        """First step of each interval that has one."""
        if self._first is None:
            return []
        return (np.flatnonzero(self._counts) * self._length + self._first).tolist()

    def y(self, column: int = 0) -> list[float]:
        """The values of a column, as many as ``x``."""
        filled = self._counts > 0
        values = self._rows[filled, column]
        if not self._reduce_with_max:
            values = values / self._counts[filled]
        return values.tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopId:
    """An id that occurs often.

    Attributes:
        table: Its table.
        id: The id, after any hashing.
        share: Share of the entries of the stack.
        partition: Where it is looked up.
    """

    table: str
    id: int
    share: float
    partition: int


@dataclasses.dataclass(kw_only=True)
class StackRecord:
    """One stack over a run.

    Attributes:
        name: Of the stack.
        tables: Their names.
        features: Their names.
        limits: Step and limits, from the first batch on, whenever they changed.
        needed: What batches needed: entries of the fullest partition, distinct ids of
            the one with most, slots per device; the largest of each interval.
        spread: Entries of a (SparseCore, partition): the median, nine tenths, and the
            largest of a batch.
        filled: Share of the slots that hold an entry.
        partition_mean: Entries of each partition, the mean over batches and
            SparseCores, [N].
        partition_max: The largest, [N].
        top_ids: The most frequent ids, most frequent first.
        rank_shares: (rank, share of the entries of that many most frequent ids).
    """

    name: str
    tables: tuple[str, ...]
    features: tuple[str, ...]
    limits: list[tuple[int, StackLimits]] = dataclasses.field(default_factory=list)
    needed: Curve = dataclasses.field(default_factory=lambda: Curve(3))
    spread: Curve = dataclasses.field(default_factory=lambda: Curve(3))
    filled: Curve = dataclasses.field(default_factory=lambda: Curve(how="mean"))
    partition_mean: Sequence[float] = ()
    partition_max: Sequence[int] = ()
    top_ids: Sequence[TopId] = ()
    rank_shares: Sequence[tuple[int, float]] = ()

    @property
    def changes(self) -> int:
        """How often the limits changed."""
        return max(len(self.limits) - 1, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a report.

    Attributes:
        title: Above it.
        columns: Heads; the first column is text, the others are numbers.
        rows: Cells as they are shown.
        caption: How to read it.
        beside: Few columns: shown among the figures, after them.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    beside: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report that only some commands have.

    Attributes:
        title: Head.
        text: Paragraphs.
        tables: Shown first, unless they belong beside the figures.
        figures: Shown after them.
    """

    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclasses.dataclass(kw_only=True)
class RunRecord:
    """A run of any command, as its report shows it.

    Attributes:
        command: ``"train"``, ``"stats"``, ``"plan"`` or ``"simulate"``.
        title: Head of the page, for example the name of the configuration file.
        facts: Name and value of what is shown large at the top.
        config: `Config.canonical`, or any nested dict.
        stacks: In the order of the layout.
        loss: Of each step.
        step_seconds: Duration of each step and, of it, waiting for input.
        coordination_seconds: Duration of the rounds of agreement.
        minibatches: Of each batch; empty without minibatching.
        counters: Feature -> counter -> total of the hosts that were counted.
        drops: Feature -> what was dropped -> total; empty where nothing may be.
        dropped_share: Share of the examples that lost an entry.
        sections: What only this command has to say, shown after the overview.
        notes: Sentences for the reader, for example what was left out.
    """

    command: str
    title: str
    facts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stacks: list[StackRecord] = dataclasses.field(default_factory=list)
    loss: Curve = dataclasses.field(default_factory=lambda: Curve(how="mean"))
    step_seconds: Curve = dataclasses.field(
        default_factory=lambda: Curve(2, how="mean")
    )
    coordination_seconds: Curve = dataclasses.field(
        default_factory=lambda: Curve(how="mean")
    )
    minibatches: Curve = dataclasses.field(default_factory=Curve)
    counters: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    drops: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    dropped_share: float = 0.0
    sections: list[Section] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
