"""What every kind of source hands over: records, and what is special about them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import grain
import numpy as np

from grain_sparsecore.sources.order import Order


def _as_is(ds: grain.MapDataset[Any], host_index: int) -> grain.MapDataset[Any]:
    del host_index
    return ds


class Records(Protocol):
    """Random access to records; a ``grain.MapDataset`` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedSource:
    """One opened source.

    Attributes:
        name: What error messages call it, for example the path.
        records: All its records in their own order.
        batched: Whether a record is a batch.
        shuffled: From a seed to the order in which a shuffled source is read; None
            mixes all records.
        per_host: Applied to a host's part, together with the index of the host.
        read_batch: Reads many records at once, faster than one by one, to the batch
            that ``batch_ragged`` would make of them. From the index of each record, its
            position in the part of this host, both int64 [n], and the index of the
            host.
        finish: A last step that works on a sample and on a batch alike, so that it
            runs once per batch where there are batches.
    """

    name: str
    records: Records
    batched: bool = False
    shuffled: Callable[[int], Order] | None = None
    per_host: Callable[[grain.MapDataset[Any], int], grain.MapDataset[Any]] = _as_is
    read_batch: Callable[[np.ndarray, np.ndarray, int], dict[str, Any]] | None = None
    finish: Callable[[Any], Any] | None = None
