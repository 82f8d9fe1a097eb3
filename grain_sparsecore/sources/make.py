"""From the source section to a Grain data set of this host's samples or batches."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from grain_sparsecore.batching import batch_ragged
from grain_sparsecore.config import Config
from grain_sparsecore.errors import ConfigError, InputError
from grain_sparsecore.sources.criteo import open_criteo
from grain_sparsecore.sources.opened import OpenedSource, Records
from grain_sparsecore.sources.order import InOrder, Order, Shuffled
from grain_sparsecore.sources.parquet import open_parquet
from grain_sparsecore.sources.python_function import open_python
from grain_sparsecore.sources.synthetic import open_synthetic
from grain_sparsecore.sources.tfrecord import open_tfrecord
from grain_sparsecore.stacking import StackedLayout

_OPENERS: dict[str, Callable[[Config, Any], OpenedSource]] = {
    "synthetic": open_synthetic,
    "parquet": open_parquet,
    "tfrecord": open_tfrecord,
    "criteo_tsv": open_criteo,
    "python": open_python,
}

# An endless Grain data set has sys.maxsize elements; permutations end before that.
_MOST_SHUFFLED = 2**62


def make_source(
    config: Config, *, host_index: int, host_count: int
) -> grain.MapDataset[Any]:
    """This host's part of the source.

    All records are shuffled by ``pipeline.seed``, anew in each epoch, the epochs
    follow one another, and record i of that order goes to host ``i % host_count``.
    So the batches of all hosts together hold the same records whatever the number of
    hosts.

    Args:
        config: The job.
        host_index: This host, ``jax.process_index()``.
        host_count: All hosts, ``jax.process_count()``.

    Returns:
        Samples as dicts; batches where the source is of kind ``python`` and
        ``batched``.

    Raises:
        ConfigError: There is no source section, or the source cannot be opened.
        InputError: The source is empty, or its contents are wrong.
        MissingExtraError: The kind needs a package that is not installed.
    """
    opened, part = _open(config, host_index, host_count)
    read = functools.partial(_read_record, records=opened.records, part=part)
    ds = opened.per_host(grain.MapDataset.range(part.size).map(read), host_index)
    return ds if opened.finish is None else ds.map(opened.finish)


def make_batches(
    config: Config, layout: StackedLayout, *, host_index: int, host_count: int
) -> grain.MapDataset[Any]:
    """This host's batches of ``layout.batch_size`` samples, from `make_source`.

    A last batch that is not full is left out if ``pipeline.on_partial_batch`` is
    ``"drop"`` and kept short otherwise.

    Args:
        config: The job.
        layout: The stacks, for the size of a batch.
        host_index: This host, ``jax.process_index()``.
        host_count: All hosts, ``jax.process_count()``.

    Raises:
        ConfigError: As `make_source`; likewise the other errors.
    """
    opened, part = _open(config, host_index, host_count)
    if opened.batched:
        read = functools.partial(_read_record, records=opened.records, part=part)
        ds = grain.MapDataset.range(part.size).map(read)
    else:
        size = layout.batch_size
        drop = config.pipeline.on_partial_batch == "drop"
        count = part.size // size if drop else -(-part.size // size)
        ds = grain.MapDataset.range(count).map(
            functools.partial(
                _read_batch,
                read=opened.read_batch
                or functools.partial(_read_each, records=opened.records),
                part=part,
                size=size,
            )
        )
    return ds if opened.finish is None else ds.map(opened.finish)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Which records a host reads, and in which order.

    Attributes:
        size: Number of them, over all epochs.
        order: The order of all hosts together.
        host_index: This host.
        host_count: All hosts.
    """

    size: int
    order: Order
    host_index: int
    host_count: int

    def records(self, first: int, count: int) -> np.ndarray:
        """Indices of ``count`` records of this host from number ``first`` on."""
        return self.order.at(
            (first + np.arange(count)) * self.host_count + self.host_index
        )


def _open(
    config: Config, host_index: int, host_count: int
) -> tuple[OpenedSource, _Part]:
    source = config.source
    if source is None:
        raise ConfigError(
            "the configuration has no [source] section; add one, or give a data set "
            "of your own to sparsecore_pipeline."
        )
    if not 0 <= host_index < host_count:
        raise ConfigError(
            f"host_index={host_index} must be from 0 to {host_count - 1}, since "
            f"host_count={host_count}."
        )
    opened = _OPENERS[source.kind](config, source.options)
    count = len(opened.records)
    if count == 0:
        raise InputError(f"source {source.kind!r}: {opened.name} has no record.")
    order: Order = InOrder(count)
    if source.shuffle:
        if count > _MOST_SHUFFLED:
            raise ConfigError(
                f"source: {opened.name} never ends, so it cannot be shuffled; set "
                "shuffle = false, and shuffle and repeat it yourself."
            )
        shuffled = opened.shuffled or functools.partial(Shuffled, count)
        order = shuffled(config.pipeline.seed)
    total = min(count * source.epochs, sys.maxsize) if source.epochs else sys.maxsize
    size = len(range(host_index, total, host_count))
    return opened, _Part(size, order, host_index, host_count)


# Samples are mostly asked for in order, and 1,024 places of a permutation take hardly
# longer than one.
_BLOCK = 1024


@functools.lru_cache(maxsize=32)
def _block_of_records(part: _Part, block: int) -> np.ndarray:
    return part.records(block * _BLOCK, min(_BLOCK, part.size - block * _BLOCK))


def _read_record(number: int, *, records: Records, part: _Part) -> Any:
    block, place = divmod(number, _BLOCK)
    return _record(records, int(_block_of_records(part, block)[place]))


def _record(records: Records, index: int) -> Any:
    record = records[index]
    if record is None:
        raise InputError(
            f"record {index} of the source is None, as a filter leaves it behind; "
            "filter before the data set is made."
        )
    return record


def _read_each(
    indices: np.ndarray,
    positions: np.ndarray,
    host_index: int,
    *,
    records: Records,
) -> dict[str, Any]:
    """`OpenedSource.read_batch` of sources that have none."""
    del positions, host_index
    return batch_ragged([_record(records, index) for index in indices.tolist()])


def _read_batch(
    number: int,
    *,
    read: Callable[[np.ndarray, np.ndarray, int], dict[str, Any]],
    part: _Part,
    size: int,
) -> dict[str, Any]:
    first = number * size
    count = min(size, part.size - first)
    positions = first + np.arange(count)
    return read(part.records(first, count), positions, part.host_index)
