"""The three stages in one call, with Grain's readers and workers between them."""

from typing import TYPE_CHECKING, Any

import grain
from absl import flags

from grain_sparsecore.chip_caps import overflow_with_file_caps
from grain_sparsecore.coordination import Reducer
from grain_sparsecore.errors import ConfigError, StageMisuseError
from grain_sparsecore.limits import Limits
from grain_sparsecore.overflow import largest_limits
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.pipeline.coordinate import CoordinateLimitsIterDataset
from grain_sparsecore.pipeline.delivery import DeliverIterDataset, DeliverMapDataset
from grain_sparsecore.pipeline.repartition import RepartitionIterDataset
from grain_sparsecore.pipeline.transport import SendBatch
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.warm_start import start_limits_of

if TYPE_CHECKING:
    from grain_sparsecore.config import Config

# Arrays from here on go from a worker to the main process in shared memory.
_LEAST_SHARED_BYTES = 1 << 16


def sparsecore_pipeline(
    ds: grain.MapDataset[Any] | grain.IterDataset[Any],
    config: "Config",
    *,
    layout: StackedLayout | None = None,
    start_limits: Limits | None = None,
    reducer: Reducer | None = None,
    elastic: bool = False,
) -> RepartitionIterDataset:
    """From batches of raw ids to batches in SparseCore buffers of agreed sizes.

    Args:
        ds: This host's batches: dicts of arrays with ``config.pipeline.batch_size``
            samples each. A MapDataset is read by threads, and by worker processes if
            ``config.pipeline.workers`` is above 0. Batch *before* this call.
        config: Tables, features, window, growth policy and time-out.
        layout: The stacks. None: those of ``config`` on the running JAX job.
        start_limits: Where the limits start. None: at those of ``limits.file``, or of
            the tables.
        reducer: How the hosts agree. None: alone in a job of one process, by a
            collective of ``jax.distributed`` otherwise.
        elastic: Whether checkpoints may be restored on another number of hosts: true
            where host h of n reads records h::n.

    Returns:
        A dataset of dicts: ids and weights are replaced by one `SparseCoreInput`
        under ``config.pipeline.key``, everything else is as it was. Its iterator's
        ``coordinator`` tells limits, their changes and waiting times.

    Raises:
        ConfigError: The configuration does not fit the running job, a file of limits
            does not fit the configuration, or its caps were found for another TPU
            than the one of this job.
        StageMisuseError: ``ds`` is no Grain dataset, or there are workers and absl
            flags are not parsed.
    """
    _check_config(config)
    options = config.pipeline
    layout = config.layout() if layout is None else layout
    if start_limits is None:
        start_limits = start_limits_of(config, layout)
    overflow = overflow_with_file_caps(config, layout)
    cut_above = None
    if overflow.may_drop:
        cut_above = largest_limits(overflow, start_limits, layout=layout)
    stats = ComputeInputStats(
        layout,
        key=options.key,
        cut_above=cut_above,
        dump_failing=options.dump_failing,
    )
    # Then all up to here runs in workers, and only there.
    sends = options.workers > 0
    if isinstance(ds, grain.MapDataset):
        batches = DeliverMapDataset(ds.map(stats), sends=sends).to_iter_dataset(
            grain.ReadOptions(
                num_threads=options.reader_threads,
                prefetch_buffer_size=options.read_ahead,
            )
        )
    elif isinstance(ds, grain.IterDataset):
        batches = DeliverIterDataset(ds.map(stats), sends=sends)
    else:
        raise StageMisuseError(
            f"sparsecore_pipeline takes a Grain dataset of batches, not "
            f"{type(ds).__name__}; wrap other sources with "
            "grain_sparsecore.interop.from_iterable or from_data_loader."
        )
    if options.workers:
        _check_flags(options.workers)
        # Shared memory for a small array costs more than a copy, and complains where
        # the program ends before it does.
        batches = grain.experimental.WithOptionsIterDataset(
            batches.map(SendBatch(key=options.key)),
            grain.experimental.DatasetOptions(min_shm_size=_LEAST_SHARED_BYTES),
        ).mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=options.workers, per_worker_buffer_size=2
            )
        )
    agreed = CoordinateLimitsIterDataset(
        batches,
        layout=layout,
        policy=config.limits.growth,
        window=options.window,
        timeout_seconds=options.timeout_seconds,
        start_limits=start_limits,
        name=options.name,
        key=options.key,
        on_partial_batch=options.on_partial_batch,
        on_exhausted=options.on_exhausted,
        overflow=overflow,
        elastic=elastic,
        reducer=reducer,
    )
    return RepartitionIterDataset(agreed, layout=layout, key=options.key)


def _check_config(config: object) -> None:
    from grain_sparsecore.config import Config

    if not isinstance(config, Config):
        raise ConfigError(
            f"sparsecore_pipeline: config must be a Config, not "
            f"{type(config).__name__}; load_config(path) reads a file, and "
            "grain_sparsecore.config.Config is made in Python."
        )


def _check_flags(workers: int) -> None:
    """Grain reads absl flags when it starts workers; unparsed ones fail there."""
    if not flags.FLAGS.is_parsed():
        raise StageMisuseError(
            f"pipeline.workers={workers} starts processes, and Grain needs parsed absl "
            "flags for that: call absl.flags.FLAGS.mark_as_parsed() first, or run the "
            "program with absl.app.run."
        )
