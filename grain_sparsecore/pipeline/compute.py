"""Stage 1: validate, sort and measure a batch. The CPU-heavy stage, for workers."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import grain

from grain_sparsecore.dropping import count_raw_ids
from grain_sparsecore.errors import InputError
from grain_sparsecore.failing import keep_failing
from grain_sparsecore.features import pad_leaves, read_features, split_element
from grain_sparsecore.limits import Limits
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.stacking import StackedLayout

DEFAULT_KEY = "sparsecore"


@dataclasses.dataclass(frozen=True)
class ComputeInputStats(grain.transforms.Map):
    """Replaces the ids and weights of a batch by one `PartitionedBatch`.

    Runs wherever a Grain ``Map`` runs: on a MapDataset or IterDataset, in
    ``mp_prefetch`` workers and among ``DataLoader(operations=...)``. It knows nothing
    of limits or of other hosts, so batches may be processed in any order.

    A batch shorter than ``layout.batch_size`` is padded with empty samples, and its
    other leaves along axis 0; ``num_valid_samples`` tells how many are real.

    Attributes:
        layout: The stacks; its ``batch_size`` is the number of samples of a batch.
        key: Key under which the `PartitionedBatch` is put.
        cut_above: Batches that need more than this will be cut: they note how many ids
            of the input each entry stands for, which costs them a second sort.
        dump_failing: Folder for batches that cannot be mapped, raw ids and all: each
            goes to a file for the command ``replay``, 16 of them at most, and a note
            on the exception names it. Batches read ahead are kept as well, even if
            nobody asks for them any more. None keeps none.

    Raises:
        InputError: From ``map``, naming feature, sample and value of what is wrong.
    """

    layout: StackedLayout
    _: dataclasses.KW_ONLY
    key: str = DEFAULT_KEY
    cut_above: Limits | None = None
    dump_failing: str | os.PathLike[str] | None = None

    def map(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, element: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Maps one batch, a dict of arrays, to a dict with a `PartitionedBatch`."""
        try:
            return self._map(element)
        except Exception as error:
            if self.dump_failing is not None:
                keep_failing(
                    self.dump_failing,
                    element,
                    error,
                    layout=self.layout,
                    key=self.key,
                    cut_above=self.cut_above,
                )
            raise

    def _map(self, element: Mapping[str, Any]) -> dict[str, Any]:
        features, counters, num_samples = read_features(element, self.layout)
        rest = split_element(element, self.layout)
        if self.key in rest:
            raise InputError(
                f"the batch already has a key {self.key!r}, under which the buffers "
                "would go; rename it, or choose another key for the buffers "
                "(pipeline.key)."
            )
        if num_samples < self.layout.batch_size:
            rest = pad_leaves(rest, num_samples, self.layout.batch_size)
        batch = partition_batch(
            features, self.layout, counters=counters, num_samples=num_samples
        )
        above = self.cut_above
        if above is not None and (batch.stats > above.to_array()).any():
            raw_counts = count_raw_ids(features, self.layout)
            batch = dataclasses.replace(batch, raw_counts=raw_counts)
        return {**rest, self.key: batch}
