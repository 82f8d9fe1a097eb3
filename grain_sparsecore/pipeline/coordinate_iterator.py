"""The iterator of stage 2: windows, their ends, checkpoints."""

import collections
import copy
import dataclasses
import json
import multiprocessing.util
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import grain
import numpy as np

from grain_sparsecore.coordination import Coordinator, Reducer, process_reducer
from grain_sparsecore.coordination.differences import canonical_json
from grain_sparsecore.coordination.frames import Kind, Tag, hash31
from grain_sparsecore.coordination.messages import describe_error
from grain_sparsecore.coordination.protocol import WindowOutcome, agree_on_window
from grain_sparsecore.errors import (
    CheckpointError,
    HostFailedError,
    LimitsExceededError,
    StageMisuseError,
)
from grain_sparsecore.limits import Limits, grow_limits
from grain_sparsecore.overflow import Excess, find_excess
from grain_sparsecore.pipeline.closing import close_for_a_while
from grain_sparsecore.pipeline.coordinate_options import CoordinateOptions
from grain_sparsecore.pipeline.excess import explain_excess
from grain_sparsecore.pipeline.placement import check_placement
from grain_sparsecore.pipeline.restoring import move, restore, state_of
from grain_sparsecore.pipeline.splitting import (
    SplitTotals,
    WindowSplits,
    agree_on_splits,
    fullest,
    needed_of_buckets,
    needs_split,
)
from grain_sparsecore.pipeline.state import (
    CoordinateState,
    check_elastic,
    read_state,
)
from grain_sparsecore.pipeline.window import Window

# How long close() waits for workers.
_CLOSE_SECONDS = 0.7


def _end_reading(iterator: "weakref.ref[CoordinateLimitsDatasetIterator]") -> None:
    """Before the process ends; the other hosts are told of that, not of a close."""
    alive = iterator()
    if alive is not None:
        alive._close_parent()
        # Grain's iterators close once more as they go, and complain if that is after
        # their modules.
        del alive._parents


class CoordinateLimitsDatasetIterator(grain.DatasetIterator[dict[str, Any]]):
    """Iterator of `CoordinateLimitsIterDataset`."""

    def __init__(
        self,
        make_parent: Callable[[], grain.DatasetIterator[dict[str, Any]]],
        *,
        options: CoordinateOptions,
        reducer: Reducer | None,
    ) -> None:
        super().__init__(make_parent())
        self._make_parent = make_parent
        self._options = options
        self._given_reducer = reducer
        self._coordinator: Coordinator | None = None
        self._configuration = options.configuration()
        self._configuration_json = canonical_json(self._configuration)
        self._thread: int | None = None
        self._failure: BaseException | None = None
        self._interrupted = False
        self._state_lock = threading.Lock()
        self._window = Window(options)
        self._limit_changes = 0
        self._split_totals = SplitTotals()
        self._agreements = 0
        # Nobody closes an iterator after a break, and Grain's workers and shared memory
        # complain where they are still there when the interpreter ends.
        multiprocessing.util.Finalize(
            self, _end_reading, args=(weakref.ref(self),), exitpriority=100
        )
        self._reset(
            CoordinateState(
                parent=None,
                start=0,
                position=0,
                limits=options.first_limits(),
                configuration=self._configuration_json,
                skipped=0,
                padded=False,
                needed=[[0] * 3] * len(options.layout.stacks),
            )
        )

    def _reset(self, state: CoordinateState) -> None:
        """Puts the iterator where ``state`` says; nothing is read yet."""
        self._at = state
        self._limits = state.limits
        self._window.clear()
        self._ready: collections.deque[dict[str, Any]] = collections.deque()
        self._outcome: WindowOutcome | None = None
        self._end_parent_state: Any = None
        # What get_state returns, from any thread. Unset until the parent can tell its
        # state, which for a new iterator is when somebody asks.
        self._snapshot: dict[str, Any] | None = None
        if state.parent is not None:
            self._snapshot = state.to_plain()

    # Reading.

    def __next__(self) -> dict[str, Any]:
        self._assert_not_closed()
        if self._failure is not None:
            raise self._failure
        self._check_thread()
        try:
            return self._next()
        except StopIteration:
            raise
        except (KeyboardInterrupt, SystemExit):
            # Behind the round nothing is lost: what was read waits to be handed on.
            self._interrupted = self._outcome is None
            raise
        except BaseException as error:
            # Final: the hosts are no longer in step.
            self._failure = error
            if self._coordinator is not None:
                self._coordinator.leave(f"failed ({describe_error(error)})")
            raise

    def _next(self) -> dict[str, Any]:
        while self._outcome is None or self._at.position >= self._outcome.count:
            if self._outcome is not None:
                self._end(self._outcome)
            self._open_window()
        element = self._ready.popleft()
        self._split_totals.add_batch(element[self._options.key])
        self._advance()
        return self._stats.record_output_spec(element)

    def _end(self, outcome: WindowOutcome) -> NoReturn:
        """What comes after the last batch of a window that is not full."""
        coordinator = self._coordinator
        assert coordinator is not None
        if outcome.failed_host is None:
            coordinator.release()
            raise StopIteration
        if outcome.failed_host == coordinator.host.index:
            error = self._window.error
            assert error is not None
            if isinstance(error, StopIteration):
                raise RuntimeError(
                    f"pipeline {self._options.name!r} step {self.step}: a map of the "
                    "input raised StopIteration, which ends nothing there. Look for "
                    "a next() without a default in it."
                ) from error
            raise error
        raise HostFailedError(
            f"pipeline {self._options.name!r}: the input pipeline of host "
            f"{outcome.failed_host} failed in step {self.step}: {outcome.failure}"
        )

    def _open_window(self) -> None:
        if self._interrupted:
            self._read_again()
        if self._at.parent is None:
            self.get_state()
        before = self._limits
        if self._at.shrink and self._at.position == 0:
            self._shrink_now()
        ceilings = self._options.ceilings(self._limits)
        self._window.read(self._parent, self._at.start, ceilings)
        if self._end_parent_state is None:
            self._end_parent_state = state_of(self._parent)
        # Another thread may have closed it while this one was reading.
        self._assert_not_closed()
        with self._stats.record_self_time():  # pyright: ignore[reportGeneralTypeIssues]
            outcome = self._agree()
            needed, splits = outcome.needed, None
            if self._options.overflow.minibatching and needs_split(needed, ceilings):
                splits = self._agree_on_splits(outcome, ceilings)
                self._split_totals.add_window(needed, splits)
                needed = needed_of_buckets(needed, splits, ceilings)
            excess = find_excess(needed, ceilings)
            if excess is not None:
                self._raise_excess(excess, self._window.worst(excess, outcome.count))
            limits = grow_limits(
                self._limits,
                needed,
                layout=self._options.layout,
                policy=self._options.policy,
                ceilings=ceilings,
                minibatches=self._options.minibatches,
            )
            needed = np.maximum(self._at.needed, needed).tolist()
            self._at = dataclasses.replace(self._at, needed=needed)
            if limits != before and self.step > 0:
                self._limit_changes += 1
            self._limits = limits
            if self._at.position > outcome.count:
                raise CheckpointError(
                    f"pipeline {self._options.name!r}: the state was saved after "
                    f"{self._at.position} batches of the window that starts at step "
                    f"{self._at.start}, but the hosts now have {outcome.count} batches "
                    "there; the data has changed."
                )
            self._ready = self._window.hand_over(
                outcome, self._at.position, limits, splits
            )
            self._outcome = outcome

    def _read_again(self) -> None:
        """Goes back to the start of the window.

        Readers in threads and workers lose the batch that they wait for when they are
        interrupted, and may be left with two streams when that happens while their
        state is set. So they are made anew.
        """
        if self._at.parent is not None:
            self._parent.close()
            self._parents = (self._make_parent(),)
            restore(self._parent, copy.deepcopy(self._at.parent), self._options)
        self._window.restart()
        self._end_parent_state = None
        self._interrupted = False

    def _tag(self, kind: Kind) -> Tag:
        return Tag(
            name=self._options.name,
            kind=kind,
            start=self._at.start,
            position=self._at.position,
            limits=hash31(self._limits.to_array().tobytes()),
        )

    def _agree(self) -> WindowOutcome:
        coordinator = self._connect()
        exchange = agree_on_window(
            report=self._window.report(),
            window=self._options.window,
            on_exhausted=self._options.on_exhausted,
            tag=self._tag(Kind.WINDOW),
            host=coordinator.host,
        )
        coordinator.step = self.step
        outcome = coordinator.run(exchange)
        self._agreements += 1
        return outcome

    def _agree_on_splits(
        self, outcome: WindowOutcome, ceilings: np.ndarray
    ) -> WindowSplits:
        """Splits what is above the ceilings, on all hosts alike."""
        batches = self._window.first_batches(outcome.count)
        splits = self._connect().run(
            agree_on_splits(
                batches,
                ceilings,
                count=outcome.count,
                tag=self._tag(Kind.SPLIT),
                options=self._options,
            )
        )
        excess = find_excess(splits.needs, ceilings)
        if excess is not None:
            worst = fullest(splits, batches, excess, self._options)
            self._raise_excess(excess, worst)
        return splits

    def _raise_excess(
        self, excess: Excess, worst: tuple[int, int, int, float] | None
    ) -> NoReturn:
        """Stops all hosts: each knows from the same numbers that a cap is exceeded.

        Args:
            excess: Equal on all hosts.
            worst: Where this host needs most of it, as `Window.worst` says.
        """
        coordinator = self._connect()
        tag, host = self._tag(Kind.OVERFLOW), coordinator.host
        message = coordinator.run(
            explain_excess(excess, worst, tag=tag, host=host, options=self._options)
        )
        raise LimitsExceededError(f"pipeline {self._options.name!r}: {message}")

    def shrink(self) -> None:
        """Lets limits fall to what all hosts needed since the last call.

        They fall before the next window is read, through the growth policy, and not
        below where the tables start them. Call it on all hosts in the same step, such
        as the end of an epoch; otherwise they stop with a HostMismatchError.

        Raises:
            StageMisuseError: The limits are frozen.
        """
        if self._options.overflow.frozen:
            raise StageMisuseError("frozen limits do not shrink; load other limits.")
        self._at = dataclasses.replace(self._at, shrink=True)
        self._snapshot = None if self._at.parent is None else self._at.to_plain()

    def _shrink_now(self) -> None:
        limits = self._options.shrunk(self._at.needed)
        self._limits = limits
        none = np.zeros_like(self._at.needed).tolist()
        self._at = dataclasses.replace(
            self._at, limits=limits, needed=none, shrink=False
        )

    def _advance(self) -> None:
        """One batch was handed on: the state that continues behind it."""
        outcome = self._outcome
        assert outcome is not None
        at = dataclasses.replace(
            self._at, position=self._at.position + 1, limits=self._limits
        )
        if self._coordinator is not None:
            self._coordinator.step = at.start + at.position
        if at.position == outcome.count == self._options.window:
            at = dataclasses.replace(
                at,
                parent=self._end_parent_state,
                start=at.start + at.position,
                position=0,
                skipped=at.skipped + self._window.skipped,
                padded=at.padded or outcome.some_ended,
            )
            self._reset(at)
        else:
            self._at = at
            self._snapshot = at.to_plain()

    def _connect(self) -> Coordinator:
        if self._coordinator is None:
            options = self._options
            # A caller who passes a reducer says who the hosts are.
            reducer, expected = self._given_reducer, None
            if reducer is None:
                reducer = process_reducer()
                expected = options.layout.topology.num_hosts
            self._coordinator = Coordinator(
                reducer=reducer,
                name=options.name,
                configuration=self._configuration,
                timeout_seconds=options.timeout_seconds,
                expected_hosts=expected,
            )
        return self._coordinator

    def _check_thread(self) -> None:
        thread = threading.get_ident()
        if self._thread is None:
            check_placement()
            self._thread = thread
        elif self._thread != thread:
            raise StageMisuseError(
                f"pipeline {self._options.name!r}: next() was called from a second "
                "thread. The order of the rounds follows the order of the calls, so "
                "one thread must make them all."
            )

    # Checkpoints. No collective runs here.

    def get_state(self) -> dict[str, Any]:
        """The state behind the last batch, already built; safe from any thread."""
        with self._state_lock:
            if self._snapshot is None:
                # Kept: soon the parent is ahead of what was handed on.
                self._at = dataclasses.replace(self._at, parent=state_of(self._parent))
                self._snapshot = self._at.to_plain()
            return dict(self._snapshot)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken; the window is read again when needed.

        All hosts must restore states of one step. A failure stays.

        Raises:
            CheckpointError: The state does not belong to this pipeline.
        """
        options = self._options
        at, other_hosts = read_state(
            state,
            configuration=self._configuration,
            start_limits=options.first_limits(),
            layout=options.layout,
        )
        at = dataclasses.replace(at, configuration=self._configuration_json)
        if other_hosts:
            saved = json.loads(state["configuration"])
            check_elastic(at, saved, options.layout, options.elastic)
            at = move(self._parent, at, options)
        else:
            restore(self._parent, at.parent, options)
        self._reset(at)

    def _get_next_index(self) -> int:
        return self.step

    def _set_next_index(self, index: int) -> None:
        grain.experimental.set_next_index(self._parent, index)
        parent = state_of(self._parent)
        at = dataclasses.replace(
            self._at, parent=parent, start=index, position=0, limits=self._limits
        )
        self._reset(at)

    def close(self) -> None:
        """Closes this iterator and its parents; ends a waiting ``next`` elsewhere.

        Returns within a second. Workers that are busy with a batch end after it.
        """
        if self._closed:
            return
        if self._coordinator is not None:
            self._coordinator.close()
        close_for_a_while(self._close_parent, _CLOSE_SECONDS)

    def _close_parent(self) -> None:
        """Ends reading, and lets go of batches that were read and not handed on."""
        super().close()
        self._ready.clear()
        self._window.clear()

    # For summaries.

    @property
    def limits(self) -> Limits:
        """The limits of the batch handed on last; before any, where they start."""
        return self._limits

    @property
    def step(self) -> int:
        """Batches handed on so far, counted from the start of the data."""
        return self._at.start + self._at.position

    @property
    def limit_changes(self) -> int:
        """How often the limits of a batch differed from those of the batch before."""
        return self._limit_changes

    @property
    def splits(self) -> SplitTotals:
        """How many minibatches the batches handed on by this iterator have."""
        return self._split_totals

    @property
    def agreements(self) -> int:
        """Windows that were agreed on by this iterator."""
        return self._agreements

    @property
    def coordination_seconds(self) -> float:
        """Time spent waiting for the other hosts, and for the exchange itself."""
        return 0.0 if self._coordinator is None else self._coordinator.seconds

    @property
    def input_seconds(self) -> float:
        """Time spent waiting for the parent."""
        return self._window.seconds

    @property
    def empty_batches(self) -> int:
        """Batches made up because this host had run out of data."""
        return self._window.total_empty

    @property
    def skipped_batches(self) -> int:
        """Partial batches dropped on this host."""
        return self._window.total_skipped

    def __str__(self) -> str:
        return f"CoordinateLimits(window={self._options.window})"
