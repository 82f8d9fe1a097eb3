"""The batches of one window on one host: read, measured, and made ready."""

import collections
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.coordination.messages import comes_from_a_record, describe_error
from grain_sparsecore.coordination.protocol import WindowOutcome, WindowReport
from grain_sparsecore.dropping import DropCounts, cut_batch
from grain_sparsecore.errors import InputError, StageMisuseError
from grain_sparsecore.limits import Limits
from grain_sparsecore.minibatch import Split
from grain_sparsecore.overflow import Excess, main_contributor
from grain_sparsecore.pipeline.coordinate_options import CoordinateOptions
from grain_sparsecore.pipeline.padding import describe_element, empty_element
from grain_sparsecore.pipeline.splitting import WindowSplits
from grain_sparsecore.pipeline.transport import LostBatch, own_arrays

# Short batches with which data may begin before they are taken for a mistake. Only
# the last batch of an epoch is short, or of each worker of a batch made in workers.
_SHORT_BATCHES = 3


class Window:
    """Reads windows of batches. It knows nothing of other hosts.

    Attributes:
        error: Why the batch after those that were read could not be; None if it could.
        skipped: Partial batches dropped in this window.
        total_skipped: The same in all windows.
        total_empty: Empty batches made so far.
        seconds: Time spent waiting for the parent in all windows.
    """

    def __init__(self, options: CoordinateOptions) -> None:
        self.error: BaseException | None = None
        self.skipped = 0
        self.total_skipped = 0
        self.total_empty = 0
        self.seconds = 0.0
        self._options = options
        self._elements: list[dict[str, Any]] = []
        # Of the last element, for empty ones: kept over windows.
        self._last: Mapping[str, Any] | None = None
        self._description: bytes | None = None

    def restart(self) -> None:
        """Forgets what was read of this window, which will be read again."""
        self.total_skipped -= self.skipped
        self.clear()

    def clear(self) -> None:
        """Forgets what was read of this window."""
        self.error = None
        self.skipped = 0
        self._elements = []

    def read(
        self, parent: Iterator[dict[str, Any]], first_step: int, ceilings: np.ndarray
    ) -> None:
        """Reads until the window is full, or the input ends or fails.

        After an interrupt the parent may have lost the batch that it was at: put it
        back to the start of the window, and call `restart`.

        Args:
            parent: The batches.
            first_step: Step of the first batch of the window.
            ceilings: int64 [stacks, 3], what batches are cut to where entries may be
                dropped.
        """
        while len(self._elements) < self._options.window and self.error is None:
            started = time.monotonic()
            try:
                element = next(parent)
                step = first_step + len(self._elements)
                if self._accept(element, step):
                    element = own_arrays(element, self._options.key)
                    self._elements.append(self._cut(element, step, ceilings))
            except StopIteration as stop:
                if not comes_from_a_record(stop):
                    break
                self.error = stop
            except (KeyboardInterrupt, SystemExit):
                # Somebody wants this process to end now.
                raise
            except BaseException as error:
                # Raised only after the round, so that no host waits for this one.
                # Panics of libraries in Rust, for one, are no Exceptions.
                self.error = error
            finally:
                self.seconds += time.monotonic() - started
        if self._elements and self._options.on_exhausted == "pad":
            self._last = self._elements[-1]

    def report(self) -> WindowReport:
        """What this host brings to the round."""
        key = self._options.key
        stats = [element[key].stats for element in self._elements]
        shape = (len(stats), len(self._options.layout.stacks), 3)
        error = self.error
        known = self._last is not None or self._description is not None
        return WindowReport(
            stats=np.array(stats, np.int32).reshape(shape),
            failure=None if error is None else describe_error(error),
            structure=self._describe if known else None,
        )

    def hand_over(
        self,
        outcome: WindowOutcome,
        position: int,
        limits: Limits,
        splits: WindowSplits | None = None,
    ) -> collections.deque[dict[str, Any]]:
        """The batches of the window from ``position``, with their limits.

        Empty ones take the place of those this host does not have.

        Args:
            outcome: Of the window.
            position: Batches that were handed on before.
            limits: The agreed limits.
            splits: How batches are split; None where none of the window is.
        """
        key = self._options.key
        read = self._elements[position : outcome.count]
        missing = outcome.count - max(len(self._elements), position)
        self._elements = []
        if outcome.structure is not None:
            self._description = outcome.structure
        ready: collections.deque[dict[str, Any]] = collections.deque()
        overflow = self._options.overflow
        none = Split.none() if overflow.minibatching else None
        lost_nothing = None
        if overflow.counts_drops:
            lost_nothing = DropCounts.zeros(len(self._options.layout.features))
        for index, element in enumerate(read, start=position):
            batch = dataclasses.replace(element[key], limits=limits, split=none)
            if overflow.minibatching:
                drops = lost_nothing
                if splits is not None:
                    batch = dataclasses.replace(batch, split=splits.of(index))
                    drops = splits.drops[index]
                batch = dataclasses.replace(batch, drops=drops)
            ready.append({**element, key: batch})
        for index in range(position + len(read), position + len(read) + missing):
            element = empty_element(self._describe(), self._options.layout)
            element[key] = dataclasses.replace(
                element[key],
                limits=limits,
                drops=lost_nothing,
                split=none if splits is None else splits.of(index),
            )
            ready.append(element)
            self.total_empty += 1
        return ready

    def first_batches(self, count: int) -> list[PartitionedBatch]:
        """Those of the first ``count`` batches that this host has."""
        return [e[self._options.key] for e in self._elements[:count]]

    def worst(self, excess: Excess, count: int) -> tuple[int, int, int, float] | None:
        """Where this host needs most of what is exceeded, in its first batches.

        Args:
            excess: What is exceeded.
            count: Batches of the window that count.

        Returns:
            Position in the window, the need, index of the feature that contributes
            most, and its share; None without any batch.
        """
        batches = self.first_batches(count)
        if not batches:
            return None
        needs = [int(b.stats[excess.stack, excess.column]) for b in batches]
        position = int(np.argmax(needs))
        found = main_contributor(batches[position], excess, self._options.layout)
        return position, needs[position], *found

    def _cut(
        self, element: dict[str, Any], step: int, ceilings: np.ndarray
    ) -> dict[str, Any]:
        """Leaves out what does not fit, where that is allowed."""
        options = self._options
        if not options.overflow.may_drop:
            return element
        batch, drops = cut_batch(
            element[options.key],
            ceilings,
            layout=options.layout,
            order=options.overflow.drop_order,
            step=step,
        )
        batch = dataclasses.replace(batch, drops=drops, raw_counts=None)
        return {**element, options.key: batch}

    def _accept(self, element: dict[str, Any], step: int) -> bool:
        """Whether to hand on an element; checks that it is one of stage 1."""
        options = self._options
        batch = element.get(options.key) if isinstance(element, Mapping) else None
        if isinstance(batch, LostBatch):
            raise InputError(
                f"pipeline {options.name!r} step {step}: worker process "
                f"{batch.worker} ended, and the memory of the batch that it sent is "
                "gone. Look at what ended it (out of memory?), and restart from the "
                "last checkpoint."
            )
        if not isinstance(batch, PartitionedBatch):
            raise StageMisuseError(
                f"CoordinateLimitsIterDataset: element[{options.key!r}] is "
                f"{'missing' if batch is None else f'a {type(batch).__name__}'}; put "
                "ComputeInputStats before this stage, with the same key."
            )
        stacks = len(options.layout.stacks)
        if np.shape(batch.stats) != (stacks, 3):
            raise StageMisuseError(
                f"CoordinateLimitsIterDataset: the statistics of a batch have shape "
                f"{np.shape(batch.stats)}, but the layout has {stacks} stacks; give "
                "ComputeInputStats and this stage the same layout."
            )
        samples = int(np.sum(batch.num_valid_samples))
        if samples >= options.layout.batch_size or options.on_partial_batch == "pad":
            return True
        if options.on_partial_batch == "error":
            raise InputError(
                f"pipeline {options.name!r} step {step}: the batch has {samples} "
                f"samples, not {options.layout.batch_size}; use "
                'on_partial_batch="pad" or "drop".'
            )
        self.skipped += 1
        self.total_skipped += 1
        if step == 0 and self.skipped >= _SHORT_BATCHES:
            raise InputError(
                f"pipeline {options.name!r}: the first {self.skipped} batches of this "
                f"host all had fewer than batch_size={options.layout.batch_size} "
                f"samples (the last one {samples}), and on_partial_batch="
                '"drop" would leave out everything. Batch '
                f"{options.layout.batch_size} samples before this stage (with "
                "batch_fn=grain_sparsecore.batch_ragged if samples hold lists, which "
                "Grain's default turns into one array for each position), set "
                'batch_size to what there is, or use on_partial_batch="pad".'
            )
        return False

    def _describe(self) -> bytes:
        if self._description is None:
            assert self._last is not None
            self._description = describe_element(self._last, self._options.key)
        return self._description
