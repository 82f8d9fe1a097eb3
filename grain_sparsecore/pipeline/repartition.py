"""Stage 3: lay agreed batches out in buffers of the agreed sizes. Close to a copy."""

import sys
from typing import Any

import grain

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.errors import StageMisuseError
from grain_sparsecore.limits import Limits
from grain_sparsecore.pipeline.compute import DEFAULT_KEY
from grain_sparsecore.pipeline.coordinate import CoordinateLimitsDatasetIterator
from grain_sparsecore.pipeline.leftovers import LeftoverWatch
from grain_sparsecore.pipeline.transport import forget_unused_segments
from grain_sparsecore.repartition import repartition
from grain_sparsecore.stacking import StackedLayout


class RepartitionIterDataset(grain.IterDataset[dict[str, Any]]):
    """Replaces each agreed `PartitionedBatch` by its `SparseCoreInput`.

    Attach it right behind `CoordinateLimitsIterDataset`:
    ``ds.pipe(RepartitionIterDataset, layout=layout)``.

    Warns once, by logging, of ragged arrays that no feature reads.

    Args:
        parent: A dataset of dicts with a `PartitionedBatch` whose limits are agreed.
        layout: The stacks, equal to those of stage 1.
        key: Key of the `PartitionedBatch`; the `SparseCoreInput` takes its place.
    """

    def __init__(
        self,
        parent: grain.IterDataset[dict[str, Any]],
        *,
        layout: StackedLayout,
        key: str = DEFAULT_KEY,
    ) -> None:
        super().__init__(parent)
        self._layout = layout
        self._key = key
        self._watch = LeftoverWatch(key)

    def __iter__(self) -> "RepartitionDatasetIterator":
        return RepartitionDatasetIterator(
            self._parent.__iter__(),
            layout=self._layout,
            key=self._key,
            watch=self._watch,
        )

    def __str__(self) -> str:
        return "RepartitionIterDataset"


class RepartitionDatasetIterator(grain.DatasetIterator[dict[str, Any]]):
    """Iterator of `RepartitionIterDataset`; its state is that of its parent."""

    # When the interpreter ends, names of modules go before iterators do.
    _is_finalizing = staticmethod(sys.is_finalizing)

    def __init__(
        self,
        parent: grain.DatasetIterator[dict[str, Any]],
        *,
        layout: StackedLayout,
        key: str,
        watch: LeftoverWatch,
    ) -> None:
        super().__init__(parent)
        self._layout = layout
        self._key = key
        self._watch = watch

    def __next__(self) -> dict[str, Any]:
        self._assert_not_closed()
        element = next(self._parent)
        with self._stats.record_self_time():  # pyright: ignore[reportGeneralTypeIssues]
            batch = element.get(self._key)
            if not isinstance(batch, PartitionedBatch) or batch.limits is None:
                raise StageMisuseError(
                    f"RepartitionIterDataset: element[{self._key!r}] is "
                    f"{_describe(batch)}; put ComputeInputStats and "
                    "CoordinateLimitsIterDataset before this stage, with the same key."
                )
            self._watch.see(element)
            result = repartition(batch, batch.limits, self._layout)
            return self._stats.record_output_spec({**element, self._key: result})

    def close(self) -> None:
        """Closes the parent, and gives the memory of its workers back."""
        # Called again when this iterator goes, maybe with the interpreter and its
        # modules.
        if self._closed:
            return
        super().close()
        if not self._is_finalizing():
            forget_unused_segments()

    def get_state(self) -> dict[str, Any]:
        """State of the parent: this stage remembers nothing."""
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the parent."""
        self._parent.set_state(state)

    @property
    def coordinator(self) -> CoordinateLimitsDatasetIterator:
        """The iterator of stage 2: limits, their changes, waiting times."""
        parent = self._parent
        if not isinstance(parent, CoordinateLimitsDatasetIterator):
            raise StageMisuseError(
                "RepartitionIterDataset does not directly follow "
                f"CoordinateLimitsIterDataset but {parent}; keep the two together."
            )
        return parent

    @property
    def limits(self) -> Limits:
        """The limits of the batch that comes next, or of the last one."""
        return self.coordinator.limits

    def __str__(self) -> str:
        return "RepartitionDatasetIterator"


def _describe(batch: Any) -> str:
    if isinstance(batch, PartitionedBatch):
        return "a PartitionedBatch without agreed limits"
    return "missing" if batch is None else f"a {type(batch).__name__}"
