"""Limits from a few batches of the data."""

import dataclasses
import itertools

import grain
import numpy as np

from grain_sparsecore.chip_caps import overflow_with_file_caps
from grain_sparsecore.chips import Chip
from grain_sparsecore.config import Config
from grain_sparsecore.limits import Limits, grow_limits
from grain_sparsecore.overflow import cap_ceilings
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.sources import make_batches
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.stats import observe


def sample_limits(
    config: Config, layout: StackedLayout, batches: int, *, topology: str
) -> Limits:
    """What the growth policy makes of the first batches of the first host.

    Nowhere above the caps: no step of a job is compiled for more.

    Args:
        config: The job, with a source.
        layout: Its stacks.
        batches: How many batches to read, or as many as there are.
        topology: Name of the topology that the layout is for.

    Raises:
        ConfigError: There is no source, or caps were found for another chip.
        InputError: A batch is wrong, or there is none.
    """
    key = config.pipeline.key
    source = make_batches(
        config, layout, host_index=0, host_count=layout.topology.num_hosts
    ).map(ComputeInputStats(layout, key=key))
    options = grain.ReadOptions(
        num_threads=config.pipeline.reader_threads,
        prefetch_buffer_size=config.pipeline.read_ahead,
    )
    stream = itertools.islice(source.to_iter_dataset(options), batches)
    observed = observe(
        (element[key] for element in stream), layout, config.limits.growth
    )
    overflow = overflow_with_file_caps(config, layout, chip=Chip(topology=topology))
    caps = cap_ceilings(overflow.caps, layout=layout)
    if config.limits.overflow.minibatching:
        # Of split batches the minibatches are capped; their buffer holds all of them.
        capped = np.minimum(observed.suggested.to_array(), caps)
        return Limits.from_array(layout.stack_names, capped)
    needed = np.array([dataclasses.astuple(row) for row in observed.largest.values()])
    return grow_limits(
        Limits.start(layout),
        np.minimum(needed, caps),
        layout=layout,
        policy=config.limits.growth,
        ceilings=caps,
    )
