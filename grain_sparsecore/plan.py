"""What a job will need on devices that are not there yet, from a sample of its data.

The batches of every host are made exactly as the job makes them, and limits follow
them as they do in the job: by windows, with the growth policy. So what is predicted
for a number of steps is what the job reaches in them, as long as all hosts are looked
at.
"""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from grain_sparsecore.config import Config
from grain_sparsecore.features import read_features
from grain_sparsecore.planner import Planner, TopologyPlan
from grain_sparsecore.sources import make_batches
from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import StackedLayout

# Hosts whose batches are made; more than these give hardly other maxima.
DEFAULT_HOSTS = 16


def topologies_to_plan(
    config: Config,
    *,
    chips: Sequence[int] | None,
    num_sc: Sequence[int] | None,
    devices_per_host: int | None,
) -> list[Topology]:
    """Every combination asked for, in that order.

    Args:
        config: The job; what is not asked for is as it says, or as JAX counts.
        chips: Global device counts.
        num_sc: SparseCores per device.
        devices_per_host: Of each host; None: as configured, else 4 or fewer.

    Raises:
        ConfigError: The numbers do not go together.
    """
    own = config.topology
    if chips is None:
        here = own.resolve()
        chips = [here.global_device_count]
        devices_per_host = devices_per_host or here.local_device_count
    return [
        Topology(
            global_device_count=count,
            # TPU hosts have 4 chips unless they are told to have more.
            local_device_count=min(
                count, devices_per_host or own.local_device_count or 4
            ),
            num_sc_per_device=cores,
        )
        for count in chips
        for cores in num_sc or [own.num_sc_per_device]
    ]


def plan(
    config: Config,
    topologies: Sequence[Topology],
    *,
    batch_sizes: Sequence[int] | None = None,
    batches: int = 32,
    max_hosts: int = DEFAULT_HOSTS,
    cap_files: Sequence[str | os.PathLike[str]] = (),
    topology_name: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> list[TopologyPlan]:
    """Plans a job on several topologies.

    Batches are read and checked once for all topologies with the same hosts; each then
    sorts them its own way, since other SparseCores see other samples.

    Args:
        config: The job.
        topologies: Where it might run.
        batch_sizes: Samples per host; None for that of ``config``.
        batches: Steps to look at, rounded up to whole windows.
        max_hosts: Hosts to look at; with fewer than there are, limits are estimates.
        cap_files: Limits files whose caps count besides those of ``limits.file``,
            where they were made for the same stacks, devices and batch size.
        topology_name: The TPU topology that ``topologies`` are, such as ``"v6e:4x4"``;
            caps found for another kind of chip are then refused.
        on_progress: Called with the host batches that are done, and all of them.

    Raises:
        ConfigError: The job does not fit a topology, its source is wrong, or caps were
            found for another kind of chip.
        InputError: A batch is wrong, or there is none.
    """
    window = config.pipeline.window
    steps = -(-batches // window) * window
    planners: list[Planner] = []
    for size in batch_sizes or [config.pipeline.batch_size]:
        pipeline = dataclasses.replace(config.pipeline, batch_size=size)
        sized = dataclasses.replace(config, pipeline=pipeline)
        for topology in topologies:
            layout = sized.layout(topology)
            hosts = min(max_hosts, topology.num_hosts)
            planners.append(
                Planner(
                    sized,
                    layout,
                    hosts,
                    cap_files=cap_files,
                    topology_name=topology_name,
                )
            )
    groups: dict[tuple[int, int], list[Planner]] = {}
    for planner in planners:
        layout = planner.layout
        key = (layout.batch_size, layout.topology.num_hosts)
        groups.setdefault(key, []).append(planner)
    total = steps * sum(group[0].hosts for group in groups.values())
    done = 0
    for group in groups.values():
        for read in _host_features(group[0], steps):
            for planner in group:
                planner.add(read)
            done += len(read)
            if on_progress is not None:
                on_progress(done, total)
    return [planner.result() for planner in planners]


@dataclasses.dataclass(frozen=True)
class _ReadByName(grain.transforms.Map):
    """Reads and checks the features of a batch, whatever it is partitioned for."""

    layout: StackedLayout

    def map(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, element: Mapping[str, Any]
    ) -> dict[str, Any]:
        features, counters, num_samples = read_features(element, self.layout)
        names = [feature.name for feature in self.layout.features]
        return {
            "features": dict(zip(names, features, strict=True)),
            "counters": dict(zip(names, counters, strict=True)),
            "num_samples": num_samples,
        }


def _host_features(planner: Planner, steps: int) -> Iterator[list[dict[str, Any]]]:
    """The features of each step, of each host looked at."""
    config, layout = planner.config, planner.layout
    count = layout.topology.num_hosts
    options = grain.ReadOptions(
        num_threads=config.pipeline.reader_threads,
        prefetch_buffer_size=config.pipeline.reader_threads,
    )
    streams = []
    # Spread over the hosts, which may have data of their own.
    for host in np.linspace(0, count - 1, planner.hosts).round().astype(int).tolist():
        ds = make_batches(config, layout, host_index=host, host_count=count)
        streams.append(iter(ds.map(_ReadByName(layout)).to_iter_dataset(options)))
    # Hosts end together, as they do in a job: at the first end, or at the last one,
    # until when those that ran out have empty batches, which need nothing.
    if config.pipeline.on_exhausted == "pad":
        rows = itertools.zip_longest(*streams)
    else:
        rows = zip(*streams, strict=False)
    for row in itertools.islice(rows, steps):
        yield [read for read in row if read is not None]


def plans_to_json(plans: Sequence[TopologyPlan]) -> str:
    """All plans as JSON text."""
    return json.dumps({"topologies": [p.to_plain() for p in plans]}, indent=2)
