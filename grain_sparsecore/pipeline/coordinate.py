"""Stage 2: read a window of batches, agree with all hosts on limits, hand them on."""

from typing import Any

import grain

from grain_sparsecore.coordination import Reducer
from grain_sparsecore.coordination.farewell import prepare_farewell
from grain_sparsecore.coordination.protocol import OnExhausted
from grain_sparsecore.errors import StageMisuseError
from grain_sparsecore.limits import GrowthPolicy, Limits
from grain_sparsecore.overflow import OverflowPolicy
from grain_sparsecore.pipeline.compute import DEFAULT_KEY
from grain_sparsecore.pipeline.coordinate_iterator import (
    CoordinateLimitsDatasetIterator as CoordinateLimitsDatasetIterator,
)
from grain_sparsecore.pipeline.coordinate_options import (
    DEFAULT_TIMEOUT_SECONDS,
    CoordinateOptions,
    OnPartialBatch,
)
from grain_sparsecore.pipeline.placement import check_placement
from grain_sparsecore.stacking import StackedLayout


class CoordinateLimitsIterDataset(grain.IterDataset[dict[str, Any]]):
    """Gives every batch the limits that all hosts agreed on for its window.

    Reads ``window`` batches, takes the maximum of what they need over all hosts, grows
    the limits by ``policy``, and hands the batches on, with equal limits on every host.
    Limits never fall.

    Every host must read its pipeline equally far. Hosts that end early, fail or stall
    end on all hosts in the same step, see ``on_exhausted``, or within the time-out.

    Attach it behind every prefetch, with
    ``ds.pipe(CoordinateLimitsIterDataset, layout=layout)``.

    Args:
        parent: A dataset of dicts with the `PartitionedBatch` of stage 1.
        layout: The stacks, equal to those of stage 1.
        policy: How far limits grow beyond what a window needs.
        window: Batches that are read, held and agreed on at once, for example 8.
        timeout_seconds: How long this host waits for the others in one round. Longer
            than reading a window may take on the slowest host.
        start_limits: Where limits start, for example those of the training pipeline
            for evaluation, or of an earlier job. Every pipeline has limits of its own.
        name: Name of the pipeline. Pipelines that live side by side in one program,
            such as "train" and "eval", need different names.
        key: Key of the `PartitionedBatch`.
        on_partial_batch: What to do with a batch of fewer than ``layout.batch_size``
            samples: ``"drop"`` it, hand it on as it was padded (``"pad"``), or stop all
            hosts with an ``"error"``.
        on_exhausted: What hosts do when one runs out of batches: all ``"stop"`` after
            the last batch that every host had, or the host goes on with empty batches
            (``"pad"``) until the last host ends.
        elastic: Whether checkpoints may be restored on another number of hosts: true
            where host h of n reads records h::n.
        overflow: Caps on the limits, and what happens to batches above them. To count
            dropped ids exactly, give stage 1 ``cut_above`` as well.
        reducer: Who the other hosts are. Default: the processes of the JAX job, looked
            up at the first ``next``.

    Raises:
        ConfigError: An option is wrong.
        StageMisuseError: ``parent`` is no IterDataset.
    """

    def __init__(
        self,
        parent: grain.IterDataset[dict[str, Any]],
        *,
        layout: StackedLayout,
        policy: GrowthPolicy | None = None,
        window: int = 8,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        start_limits: Limits | None = None,
        name: str = "train",
        key: str = DEFAULT_KEY,
        on_partial_batch: OnPartialBatch = "drop",
        on_exhausted: OnExhausted = "stop",
        elastic: bool = False,
        overflow: OverflowPolicy | None = None,
        reducer: Reducer | None = None,
    ) -> None:
        if not isinstance(parent, grain.IterDataset):
            raise StageMisuseError(
                f"CoordinateLimitsIterDataset cannot follow a {type(parent).__name__}; "
                "it follows an IterDataset. Call to_iter_dataset() on a MapDataset; a "
                "DataLoader has no place for it among its operations or behind them, "
                "so wrap the DataLoader in an IterDataset first."
            )
        super().__init__(parent)
        prepare_farewell()
        self._reducer = reducer
        self._options = CoordinateOptions(
            layout=layout,
            policy=policy or GrowthPolicy(),
            window=window,
            timeout_seconds=timeout_seconds,
            start_limits=start_limits,
            name=name,
            key=key,
            on_partial_batch=on_partial_batch,
            on_exhausted=on_exhausted,
            elastic=elastic,
            overflow=overflow or OverflowPolicy(),
        )

    def __iter__(self) -> "CoordinateLimitsDatasetIterator":
        check_placement()
        prepare_farewell()
        return CoordinateLimitsDatasetIterator(
            self._parent.__iter__, options=self._options, reducer=self._reducer
        )

    def __getstate__(self) -> dict[str, Any]:
        # Prefetches that read this stage elsewhere first pickle or copy it.
        check_placement()
        return dict(self.__dict__)

    def __str__(self) -> str:
        return f"CoordinateLimits(window={self._options.window})"
