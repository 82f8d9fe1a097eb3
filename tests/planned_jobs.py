"""A configuration to plan, and the job that follows; its hosts are threads."""

import dataclasses

from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.sources import make_batches
from tests.coordination_helpers import run_hosts

CONFIG = """
[topology]
num_sc_per_device = 2

[pipeline]
batch_size = 16
window = 4

[source]
kind = "synthetic"
num_records = 4000
ids_per_sample = { words = [0, 6] }
skew = { host = 1, after = 100, stride = 8 }

[[table]]
name = "item"
vocabulary_size = 900
embedding_dim = 8

[[table]]
name = "word"
vocabulary_size = 64
embedding_dim = 8
stack = "small"

[[table]]
name = "place"
vocabulary_size = 64
embedding_dim = 8
stack = "small"

[[feature]]
name = "item"
table = "item"

[[feature]]
name = "words"
table = "word"

[[feature]]
name = "place"
table = "place"
"""


def job(config, topology, steps, **limits):
    """The limits of every step of a job, the same on all its hosts."""
    layout = config.layout(topology)
    config = dataclasses.replace(
        config, limits=dataclasses.replace(config.limits, **limits)
    )

    def make(host, reducer):
        batches = make_batches(
            config, layout, host_index=host, host_count=topology.num_hosts
        )
        ds = sparsecore_pipeline(batches, config, layout=layout, reducer=reducer)
        return _First(ds, steps)

    runs = run_hosts(make, topology.num_hosts)
    assert [run.error for run in runs] == [None] * topology.num_hosts
    seen = [[e["sparsecore"].limits for e in run.elements] for run in runs]
    assert all(one == seen[0] for one in seen)
    return seen[0]


class _First:
    """The first batches of a dataset."""

    def __init__(self, ds, steps):
        self._ds, self._steps = ds, steps

    def __iter__(self):
        return _FirstIterator(iter(self._ds), self._steps)


class _FirstIterator:
    def __init__(self, it, steps):
        self._it, self._left = it, steps

    def __iter__(self):
        return self

    def __next__(self):
        if not self._left:
            raise StopIteration
        self._left -= 1
        return next(self._it)
