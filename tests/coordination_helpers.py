"""Small batches made by hand, and hosts that are threads of one process."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.coordination import LocalGroup, Reducer
from grain_sparsecore.features import COUNTERS
from grain_sparsecore.limits import GrowthPolicy
from grain_sparsecore.pipeline.coordinate import CoordinateLimitsIterDataset
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout

EXACT = GrowthPolicy(kind="exact")
BATCH = 4


def layout_of(
    hosts: int,
    *,
    tables: int = 2,
    batch_size: int = BATCH,
    vocabulary_size: int = 100,
    backwards: bool = False,
) -> StackedLayout:
    """Tables t0, t1, ... with one feature each, on hosts of one device each."""
    specs = [
        TableSpec(name=f"t{i}", vocabulary_size=vocabulary_size, embedding_dim=8)
        for i in range(tables)
    ]
    features = [FeatureSpec(name=f"f{i}", table=f"t{i}") for i in range(tables)]
    step = -1 if backwards else 1
    return make_layout(
        specs[::step],
        features[::step],
        topology=Topology(
            # Their number must be a power of two, also for three hosts.
            global_device_count=1 << (hosts - 1).bit_length(),
            local_device_count=1,
            num_sc_per_device=2,
        ),
        batch_size=batch_size,
    )


def batch_of(layout: StackedLayout, need: int, *, samples: int | None = None) -> Any:
    """A batch that needs ``need`` ids of the first stack and 1 of the others."""
    topology = layout.topology
    stacks = len(layout.stacks)
    stats = np.tile(np.array([1, 1, 8], np.int32), (stacks, 1))
    stats[0] = need, need, min(16 * need, 2**31 - 8)
    valid = layout.batch_size if samples is None else samples
    per_device = layout.batch_size // topology.local_device_count
    rest = np.clip(valid - per_device * np.arange(topology.local_device_count), 0, None)
    return PartitionedBatch(
        embedding_ids=np.full(8, need, np.int32),
        sample_ids=np.zeros(8, np.int32),
        gains=np.ones(8, np.float32),
        row_pointers=np.ones(
            (stacks, topology.local_sc_count, layout.row_pointers_per_sc), np.int32
        ),
        stats=stats,
        counters=np.zeros((len(layout.features), len(COUNTERS)), np.int32),
        num_valid_samples=np.minimum(rest, per_device).astype(np.int32),
    )


class MakeBatch(grain.transforms.Map):
    """From (need, samples) to an element of stage 1; a string is an error."""

    def __init__(self, layout: StackedLayout) -> None:
        self._layout = layout

    def map(self, element: Any) -> Any:
        index, record = element
        if isinstance(record, str):
            raise ValueError(record)
        need, samples = record if isinstance(record, tuple) else (record, None)
        return {
            "index": np.full((self._layout.batch_size,), index, np.int64),
            "nested": {"text": np.array(["label"]), "scale": 1.5},
            "sparsecore": batch_of(self._layout, need, samples=samples),
        }


def coordinated(
    layout: StackedLayout,
    needs: Sequence[Any],
    reducer: Reducer | None = None,
    **options: Any,
) -> CoordinateLimitsIterDataset:
    """A pipeline of stage 2 over batches with the given needs."""
    options.setdefault("policy", EXACT)
    ds = grain.MapDataset.source(list(enumerate(needs))).map(MakeBatch(layout))
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return ds.to_iter_dataset(read_options=read).pipe(
        CoordinateLimitsIterDataset, layout=layout, reducer=reducer, **options
    )


def plain(element: dict[str, Any]) -> dict[str, Any]:
    """An element as a dict that numpy.testing can compare."""
    batch = element["sparsecore"]
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    fields["limits"] = None if batch.limits is None else batch.limits.to_plain()
    return {**element, "sparsecore": fields}


@dataclasses.dataclass
class HostRun:
    """What one host saw: its batches, and the error that ended it, if any."""

    elements: list[dict[str, Any]]
    error: BaseException | None
    iterator: Any

    @property
    def indices(self) -> list[int | None]:
        """Index of each batch in its source, None for an empty one."""
        return [
            int(e["index"][0]) if e["sparsecore"].num_valid_samples.sum() else None
            for e in self.elements
        ]

    @property
    def max_ids(self) -> list[int]:
        """The limit on ids of the first stack, batch by batch."""
        return [
            e["sparsecore"].limits["t0"].max_ids_per_partition for e in self.elements
        ]


def run_hosts(make: Callable[[int, Reducer], Any], hosts: int) -> list[HostRun]:
    """Reads ``make(host, reducer)``, a dataset or an iterator, on hosts in threads."""
    group = LocalGroup(hosts)
    runs: list[HostRun | None] = [None] * hosts

    def run(host: int) -> None:
        iterator = iter(make(host, group.reducer(host)))
        elements: list[dict[str, Any]] = []
        error: BaseException | None = None
        try:
            for element in iterator:
                elements.append(element)
        except Exception as caught:
            error = caught
        runs[host] = HostRun(elements, error, iterator)

    threads = [threading.Thread(target=run, args=(h,)) for h in range(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a host hangs"
    return [run for run in runs if run is not None]
