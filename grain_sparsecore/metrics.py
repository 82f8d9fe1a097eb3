"""Scalars of a run for other systems: JSON lines, TensorBoard, or a writer of yours.

A writer has the shape of those of clu, so one of them fits as it is. Only host 0
writes: limits are the same everywhere, and what differs between hosts is agreed on or
summed up where it matters.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grain_sparsecore.buffers import SparseCoreInput, check_buffers
from grain_sparsecore.dropping import DROP_FIELDS
from grain_sparsecore.errors import ConfigError, MissingExtraError
from grain_sparsecore.features import COUNTERS
from grain_sparsecore.limits import STAT_FIELDS
from grain_sparsecore.stacking import ALIGNMENT, StackedLayout


class MetricWriter(Protocol):
    """Takes scalars; the shape of ``clu.metric_writers.MetricWriter``."""

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records numbers by name for a step; steps rise from call to call."""
        ...

    def flush(self) -> None:
        """Makes everything visible to readers."""
        ...

    def close(self) -> None:
        """Flushes, and lets go of files. Nothing is written afterwards."""
        ...


class JsonLinesWriter:
    """One JSON object a line: ``{"step": 3, "limits/item/buffer_size": 4096, ...}``.

    A run that is restarted goes on in the same file.

    Args:
        path: The file; its directory exists.

    Raises:
        ConfigError: The file cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            # Open for as long as the writer.
            self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"metrics file {os.fspath(path)!r} cannot be written: {error}."
            ) from error

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `MetricWriter`; infinite and undefined numbers become null."""
        values = {name: _json_number(value) for name, value in scalars.items()}
        self._file.write(json.dumps({"step": int(step), **values}) + "\n")
        # Whoever ends this process next may give no chance to.
        self._file.flush()

    def flush(self) -> None:
        """See `MetricWriter`."""
        self._file.flush()

    def close(self) -> None:
        """See `MetricWriter`."""
        self._file.close()


class TensorBoardWriter:
    """Event files that TensorBoard shows; needs the extra ``[tensorboard]``.

    Args:
        directory: Log directory of the run; made where it does not exist.

    Raises:
        MissingExtraError: The package tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            # Not tensorboard itself, which imports TensorFlow where it is installed.
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                "metrics for TensorBoard need the package tensorboardX: "
                "pip install 'grain_sparsecore[tensorboard]'."
            ) from error
        self._writer = SummaryWriter(os.fspath(directory))

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `MetricWriter`."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, float(value), int(step))

    def flush(self) -> None:
        """See `MetricWriter`."""
        self._writer.flush()

    def close(self) -> None:
        """See `MetricWriter`."""
        self._writer.close()


class MultiWriter:
    """Writes to several writers.

    Args:
        writers: In the order in which they are called.
    """

    def __init__(self, writers: Iterable[MetricWriter]) -> None:
        self._writers = tuple(writers)

    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `MetricWriter`."""
        for writer in self._writers:
            writer.write_scalars(step, scalars)

    def flush(self) -> None:
        """See `MetricWriter`."""
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        """See `MetricWriter`."""
        for writer in self._writers:
            writer.close()


def batch_scalars(batch: SparseCoreInput, *, layout: StackedLayout) -> dict[str, float]:
    """What one batch says of itself, by the name under which it is written.

    ``minibatches``, ``limits/<stack>/<limit>``, ``padding_waste/<stack>`` (share of the
    slots that hold no entry, 0 to 1), ``counters/<feature>/<counter>`` and, where
    entries may be dropped, ``drops/<feature>/<what>`` and ``drops/examples``.

    Raises:
        InputTypeError: ``batch`` is no `SparseCoreInput`, but the whole batch for one.
    """
    check_buffers(batch, function="batch_scalars")
    scalars: dict[str, float] = {"minibatches": int(np.ravel(batch.num_minibatches)[0])}
    for name, value in batch.limits.items():
        numbers = (
            value.max_ids_per_partition,
            value.max_unique_ids_per_partition,
            value.buffer_size_per_device,
        )
        for field, number in zip(STAT_FIELDS, numbers, strict=True):
            scalars[f"limits/{name}/{field}"] = number
    for name, waste in padding_waste(batch, layout=layout).items():
        scalars[f"padding_waste/{name}"] = waste
    if batch.counters is not None:
        scalars |= _per_feature("counters", COUNTERS, batch.counters, layout)
    if batch.drops is not None:
        drops = batch.drops
        scalars |= _per_feature("drops", DROP_FIELDS, drops.per_feature, layout)
        weights = np.asarray(drops.lost_weight)[:, None]
        scalars |= _per_feature("drops", ("lost_weight",), weights, layout)
        scalars["drops/examples"] = int(drops.examples)
    return scalars


def padding_waste(batch: SparseCoreInput, *, layout: StackedLayout) -> dict[str, float]:
    """Share of each stack's slots that hold no entry, from 0 to 1."""
    counts = entry_counts(batch, layout=layout)
    devices = layout.topology.local_device_count
    return {
        name: 1
        - int(count.sum()) / (batch.limits[name].buffer_size_per_device * devices)
        for name, count in counts.items()
    }


def entry_counts(
    batch: SparseCoreInput, *, layout: StackedLayout
) -> dict[str, np.ndarray]:
    """Entries of every (SparseCore, partition) by stack, int32 [R, N].

    Those of several minibatches are added up.
    """
    counts = segment_counts(batch, layout=layout)
    return {name: c.sum(axis=1, dtype=np.int32) for name, c in counts.items()}


def is_minibatched(batch: SparseCoreInput, *, layout: StackedLayout) -> bool:
    """Whether the buffers have a place for several minibatches."""
    pointers = next(iter(batch.row_pointers.values()))
    whole = layout.topology.local_sc_count * layout.row_pointers_per_sc
    return np.size(pointers) != whole


def segment_counts(
    batch: SparseCoreInput, *, layout: StackedLayout
) -> dict[str, np.ndarray]:
    """Entries of every (SparseCore, minibatch, partition), int32 [R, K, N]."""
    topology = layout.topology
    width, cores = layout.row_pointers_per_sc, topology.num_sc_per_device
    by_device = is_minibatched(batch, layout=layout)
    minibatches = int(np.ravel(batch.num_minibatches)[0])
    result = {}
    for name, pointers in batch.row_pointers.items():
        pointers = np.asarray(pointers).reshape(topology.local_device_count, -1)
        # With minibatching row pointers count from the start of the device's buffer,
        # without it from that of each SparseCore.
        used = pointers[:, : cores * minibatches * width]
        ends = used.reshape(-1, cores * minibatches * width if by_device else width)
        starts = np.zeros_like(ends)
        starts[:, 1:] = (ends[:, :-1] + (ALIGNMENT - 1)) & -ALIGNMENT
        counts = (ends - starts).reshape(-1, minibatches, width)
        result[name] = counts[:, :, : topology.num_partitions]
    return result


def _per_feature(
    group: str, columns: tuple[str, ...], table: Any, layout: StackedLayout
) -> dict[str, float]:
    return {
        f"{group}/{feature.name}/{column}": number
        for feature, row in zip(layout.features, np.asarray(table), strict=True)
        for column, number in zip(columns, row.tolist(), strict=True)
    }


def _json_number(value: float) -> float | None:
    number = float(value)
    if not np.isfinite(number):
        return None
    return int(number) if number.is_integer() else number
