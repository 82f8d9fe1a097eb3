"""The training job of the command line: a pipeline, a small model, a summary."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.columns import DENSE_KEY, LABEL_KEY, TakeColumns
from grain_sparsecore.config import Config
from grain_sparsecore.errors import GrainSparseCoreError, InputError
from grain_sparsecore.limits import Limits
from grain_sparsecore.lookup import to_global_arrays, without_counts
from grain_sparsecore.model import State, init_state, make_train_step
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.pipeline.coordinate import CoordinateLimitsDatasetIterator
from grain_sparsecore.pipeline.repartition import RepartitionDatasetIterator
from grain_sparsecore.pipeline.splitting import SplitTotals
from grain_sparsecore.same_program import SameProgram
from grain_sparsecore.sources import make_batches
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.summary import (
    HostOutcome,
    MinibatchSummary,
    Progress,
    TrainSummary,
    add_tallies,
    check_outcomes,
    digest_of_limits,
    gather_outcomes,
)
from grain_sparsecore.tally import Tally
from grain_sparsecore.watching import RunWatcher

# The one mesh axis: batch and tables are sharded over all devices of the job.
AXIS = "device"


def train(
    config: Config,
    *,
    steps: int | None = None,
    on_step: Callable[[Progress], None] | None = None,
    watcher: RunWatcher | None = None,
) -> TrainSummary:
    """Trains the model of ``config`` on the devices of the running JAX job.

    Every process of the job calls it. The next batch is fetched while the devices
    work on the current one, except in a job of several hosts on CPU devices.

    Args:
        config: The job.
        steps: Steps to train; None for ``config.train.steps``. It ends earlier when
            the input does.
        on_step: Called after every step, on every host.
        watcher: Shown every batch and step of this host.

    Raises:
        ConfigError: The configuration does not fit the job's devices.
        InputError: A batch is wrong, or there is not a single one.
        CoordinationError: The hosts could not agree, or would run different TPU
            programs: compared in every step in which limits change, the first one
            included, where jax-tpu-embedding is installed.
        GrainSparseCoreError: The loss is not finite.
    """
    layout = config.layout(
        config.topology.on_devices(
            global_count=jax.device_count(), local_count=jax.local_device_count()
        )
    )
    batches = make_batches(
        config,
        layout,
        host_index=jax.process_index(),
        host_count=jax.process_count(),
    ).map(
        TakeColumns(
            layout,
            config.train.label,
            config.train.dense,
            dump_failing=config.pipeline.dump_failing,
        )
    )
    pipeline = sparsecore_pipeline(batches, config, layout=layout)
    trainer = _Trainer(
        config,
        layout,
        config.train.steps if steps is None else steps,
        on_step,
        watcher,
    )
    with contextlib.closing(iter(pipeline)) as iterator:
        trainer.run(iterator)
    return trainer.summary()


def make_mesh() -> Mesh:
    """All devices of the job on one axis, those of a host next to one another."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    return Mesh(np.array(devices), (AXIS,))


def update_digest(digest: Any, buffers: SparseCoreInput) -> None:
    """Feeds the buffers of one batch of one host to a ``hashlib`` object."""
    for leaf in jax.tree.leaves(without_counts(buffers)):
        digest.update(np.ascontiguousarray(leaf))


def _steps_in_flight(mesh: Mesh) -> int:
    """Steps that may still run when the next batch is fetched: 1, or 0.

    It is 0 in a job of several hosts whose devices are CPUs. XLA runs the collectives
    of all CPU devices of a process, those of the step and the one by which the hosts
    agree on limits, on one pool of threads, as many as there are cores or devices. A
    step that waits in it for another host can keep that host's agreement waiting for
    this one's, for ever: seen with 4 devices a process on 2 cores.
    """
    several_hosts = jax.process_count() > 1
    return 0 if several_hosts and mesh.devices.flat[0].platform == "cpu" else 1


@dataclasses.dataclass(frozen=True)
class _Running:
    """A step that was handed to the devices."""

    loss: jax.Array
    ended: concurrent.futures.Future[float]
    samples: int
    messages: tuple[str, ...]
    wait: float


class _StepClock:
    """Tells when a step ended: a thread of its own waits for the loss."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A daemon: an interpreter that ends must not wait for a stuck collective.
        threading.Thread(target=self._watch, name="step-clock", daemon=True).start()

    def watch(self, loss: jax.Array) -> concurrent.futures.Future[float]:
        """A future of the time at which ``loss`` was there, or had failed."""
        ended: concurrent.futures.Future[float] = concurrent.futures.Future()
        self._waiting.put((loss, ended))
        return ended

    def close(self) -> None:
        """Ends the thread when it has seen what it was given."""
        self._waiting.put(None)

    def _watch(self) -> None:
        while (item := self._waiting.get()) is not None:
            loss, ended = item
            # The error of a failed step is raised where its loss is read.
            with contextlib.suppress(Exception):
                loss.block_until_ready()
            ended.set_result(time.perf_counter())


class _Trainer:
    """Runs the steps, and counts on the way."""

    def __init__(
        self,
        config: Config,
        layout: StackedLayout,
        steps: int,
        on_step: Callable[[Progress], None] | None,
        watcher: RunWatcher | None,
    ) -> None:
        self._config = config
        self._layout = layout
        self._steps = steps
        self._on_step = on_step
        self._watcher = watcher
        self._mesh = make_mesh()
        self._steps_in_flight = _steps_in_flight(self._mesh)
        self._compilations = 0
        self._train_step = make_train_step(
            layout,
            learning_rate=config.train.learning_rate,
            mesh=self._mesh,
            axis=AXIS,
            on_trace=self._count_compilation,
        )
        self._digest = hashlib.sha256()
        self._tally = Tally(layout)
        self._program = SameProgram(
            layout,
            minibatching=config.limits.overflow.minibatching,
            mesh=self._mesh,
            axis=AXIS,
        )
        self._limits: Limits | None = None
        self._limit_changes = 0
        self._losses: list[float] = []
        self._samples = 0
        self._first_end = 0.0
        self._seconds = 0.0
        self._input_wait = 0.0
        self._agreed = (0, 0.0)
        self._splits = SplitTotals()

    def _count_compilation(self) -> None:
        self._compilations += 1

    @property
    def _recompiles(self) -> int:
        return self._compilations - 1

    def run(self, batches: RepartitionDatasetIterator) -> None:
        """Trains until the steps or the batches end."""
        state: State | None = None
        running: _Running | None = None
        unfinished: collections.deque[_Running] = collections.deque()
        self._splits = batches.coordinator.splits
        with contextlib.closing(_StepClock()) as clock:
            for step in range(1, self._steps + 1):
                asked = time.perf_counter()
                try:
                    element = next(batches)
                except StopIteration:
                    break
                self._watch(step, element, batches.coordinator)
                batch, samples, messages = self._prepare(step, element)
                if state is None:
                    state = self._init_state(batch["dense"].shape[1])
                wait = 0.0
                if running is not None and running.ended.done():
                    # The devices have been idle since the later of the two.
                    idle_since = max(asked, running.ended.result())
                    wait = time.perf_counter() - idle_since
                    self._input_wait += wait
                state, loss = self._train_step(state, batch)
                running = _Running(loss, clock.watch(loss), samples, messages, wait)
                unfinished.append(running)
                # One step is always queued while the one before it is waited for.
                while len(unfinished) > self._steps_in_flight:
                    self._finish(unfinished.popleft())
            while unfinished:
                self._finish(unfinished.popleft())

    def _watch(
        self,
        step: int,
        element: Mapping[str, Any],
        coordinator: CoordinateLimitsDatasetIterator,
    ) -> None:
        if self._watcher is None:
            return
        before, self._agreed = (
            self._agreed,
            (
                coordinator.agreements,
                coordinator.coordination_seconds,
            ),
        )
        rounds, seconds = (b - a for a, b in zip(before, self._agreed, strict=True))
        self._watcher.add_batch(
            step,
            element[self._config.pipeline.key],
            coordination_seconds=seconds if rounds else None,
        )

    def _prepare(
        self, step: int, element: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int, tuple[str, ...]]:
        """Counts a batch; returns it on the devices, its samples and its messages."""
        buffers = element[self._config.pipeline.key]
        update_digest(self._digest, buffers)
        if self._limits is not None and buffers.limits != self._limits:
            self._limit_changes += 1
        if buffers.limits != self._limits:
            self._limits = buffers.limits
            self._program.compare(buffers.limits, step=step)
        columns = {"dense": element[DENSE_KEY], "label": element[LABEL_KEY]}
        if len(columns["label"]) != self._layout.batch_size:
            raise InputError(
                f"train.label {self._config.train.label!r} has "
                f"{len(columns['label'])} samples, unlike the features of the batch."
            )
        batch = to_global_arrays({"sparsecore": buffers, **columns}, self._mesh, AXIS)
        messages = self._tally.add(buffers)
        return batch, int(np.sum(buffers.num_valid_samples)), tuple(messages)

    def _init_state(self, dense_size: int) -> State:
        return init_state(
            self._layout,
            dense_size=dense_size,
            hidden=self._config.train.hidden,
            seed=self._config.train.seed,
            mesh=self._mesh,
            axis=AXIS,
        )

    def _finish(self, step: _Running) -> None:
        """Waits for a step and notes what came of it."""
        # On all devices of this host; reading the value waits for one of them only.
        loss = float(step.loss.block_until_ready())
        self._losses.append(loss)
        done = len(self._losses)
        if not math.isfinite(loss):
            raise GrainSparseCoreError(
                f"the loss is {loss} in step {done}; lower train.learning_rate "
                f"({self._config.train.learning_rate:g}) or scale the dense features."
            )
        ended = step.ended.result()
        seconds = None
        if done == 1:
            self._first_end = ended
        else:
            self._samples += step.samples
            before, self._seconds = self._seconds, ended - self._first_end
            seconds = self._seconds - before
        if self._watcher is not None:
            self._watcher.add_step(
                done, loss=loss, seconds=seconds, wait_seconds=step.wait
            )
        if self._on_step is not None:
            hosts = self._layout.topology.num_hosts
            self._on_step(
                Progress(
                    step=done,
                    steps=self._steps,
                    loss=loss,
                    examples_per_second=self._per_second(self._samples * hosts),
                    recompiles=self._recompiles,
                    messages=step.messages,
                )
            )

    def _per_second(self, samples: int) -> float:
        return samples / self._seconds if self._seconds > 0 else 0.0

    def summary(self) -> TrainSummary:
        """The summary of all hosts; a collective, which every host must call."""
        if self._limits is None:
            raise InputError(
                "there is no batch to train on: the input of a host holds less than "
                f"one batch of {self._layout.batch_size} samples; lower "
                "pipeline.batch_size or set pipeline.on_partial_batch to 'pad'."
            )
        wait = self._input_wait / self._seconds if self._seconds > 0 else 0.0
        outcomes = gather_outcomes(
            HostOutcome(
                recompiles=self._recompiles,
                limit_changes=self._limit_changes,
                samples=self._samples,
                input_wait_fraction=wait,
                limits_digest=digest_of_limits(self._limits),
                batch_digest=self._digest.digest(),
            ),
            self._mesh,
            AXIS,
        )
        check_outcomes(outcomes)
        tally = add_tallies(self._tally, self._layout, self._mesh, AXIS)
        return TrainSummary(
            steps=len(self._losses),
            hosts=len(outcomes),
            examples_per_second=self._per_second(sum(o.samples for o in outcomes)),
            loss_first=self._losses[0],
            loss_last=self._losses[-1],
            limits=self._limits,
            limit_changes=self._limit_changes,
            recompiles=self._recompiles,
            dropped_ids=tally.dropped_ids,
            input_wait_fraction=max(o.input_wait_fraction for o in outcomes),
            batch_digest=tuple(o.batch_digest.hex() for o in outcomes),
            minibatches=MinibatchSummary.of(
                self._splits,
                self._layout,
                minibatching=self._config.limits.overflow.minibatching,
            ),
            program_fingerprint=self._program.fingerprint,
            counters=tally.counters,
            given_ids=tally.given_ids,
            drops=tally.drops,
            dropped_example_share=tally.dropped_example_share,
        )
