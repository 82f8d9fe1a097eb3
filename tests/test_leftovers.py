"""What the pipeline says of ragged arrays that stay in the batch."""

import logging

import grain
import numpy as np
import pytest

from grain_sparsecore.batching import batch_ragged
from grain_sparsecore.config import Config, PipelineConfig, TopologyConfig
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.pipeline.leftovers import LeftoverWatch
from grain_sparsecore.specs import FeatureSpec, TableSpec

BATCH = 4


def make_pipeline(samples, batch_fn=batch_ragged, **pipeline):
    config = Config(
        topology=TopologyConfig(
            num_sc_per_device=2, global_device_count=1, local_device_count=1
        ),
        pipeline=PipelineConfig(batch_size=BATCH, window=2, **pipeline),
        tables=(TableSpec(name="item", vocabulary_size=50, embedding_dim=8),),
        features=(FeatureSpec(name="seen", table="item"),),
    )
    ds = grain.MapDataset.source(samples).batch(BATCH, batch_fn=batch_fn)
    return sparsecore_pipeline(ds, config)


def samples(count=4 * BATCH, **extra):
    return [
        {"seen": [i % 50] * (i % 3), "label": np.float32(i)}
        | {key: make(i) for key, make in extra.items()}
        for i in range(count)
    ]


def warnings_of(caplog) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "grain_sparsecore.pipeline.leftovers"
    ]


def test_a_ragged_key_is_named_once_per_pipeline(caplog):
    ds = make_pipeline(
        samples(tags=lambda i: [1] * (i // 2), page=lambda i: {"at": [2] * (i + 1)})
    )
    assert len(list(ds)) == len(list(ds)) == 4
    (text,) = warnings_of(caplog)
    assert "no feature reads 'tags/values' (int64[2], then int64[10])" in text
    assert "'page/at/values' (int64[10], then int64[26])" in text
    assert "traced and compiled again" in text
    assert "Drop them before the step, pad them to one shape" in text
    assert "row_splits" not in text
    # Another pipeline says it again.
    list(make_pipeline(samples(tags=lambda i: [1] * i)))
    assert len(warnings_of(caplog)) == 2


def test_regular_keys_and_what_features_read_are_no_matter(caplog):
    extra = {
        "name": str,
        "dense": lambda i: np.zeros(3, np.float32),
        "pair": lambda i: np.array([1, 2]),
    }
    # The last batch is short, and padded.
    ds = make_pipeline(samples(4 * BATCH - 1, **extra), on_partial_batch="pad")
    assert len(list(ds)) == 4
    assert warnings_of(caplog) == []


def test_object_arrays_of_rows_are_named_at_once(caplog):
    def batch(rows):
        tags = np.empty(len(rows), object)
        tags[:] = [[1] * i for i in range(len(rows))]
        return {
            "seen": np.array([1] * len(rows)),
            "tags": tags,
            "texts": np.array(["a"] * len(rows), object),
        }

    iterator = iter(make_pipeline(samples(), batch_fn=batch))
    next(iterator)
    (text,) = warnings_of(caplog)
    assert "no feature reads 'tags' (an object array of rows) of the batch" in text


@pytest.mark.parametrize(
    ("one", "two", "text"),
    [
        ([1, 2], [1], "'x' (2 values, then 1 values)"),
        ([[1, 2], [1]], [[1], [1]], "'x/0' (2 values, then 1 values)"),
        ((np.zeros(2), 1), (np.zeros(3), 1), "'x/0' (float64[2], then float64[3])"),
        (np.zeros(2), None, "'x' (float64[2], then absent)"),
        (np.zeros(2), np.zeros(2, int), "'x' (float64[2], then int64[2])"),
    ],
)
def test_lists_and_types(caplog, one, two, text):
    watch = LeftoverWatch("sparsecore")
    watch.see({"x": one, "sparsecore": np.zeros(1)})
    watch.see({"x": one, "sparsecore": np.zeros(2)})
    assert warnings_of(caplog) == []
    watch.see({"x": two, "sparsecore": np.zeros(3)})
    assert text in warnings_of(caplog)[0]


def test_many_keys_are_counted(caplog):
    watch = LeftoverWatch("sparsecore")
    for size in (1, 2):
        watch.see({f"k{i}": np.zeros(size) for i in range(11)})
    (text,) = warnings_of(caplog)
    assert "'k7' (float64[1], then float64[2]) and 3 more of the batch" in text
    assert "'k8'" not in text


def test_it_stops_looking(caplog):
    caplog.set_level(logging.WARNING)
    watch = LeftoverWatch("sparsecore")
    for _ in range(64):
        watch.see({"x": np.zeros(1)})
    watch.see({"x": np.zeros(2)})
    assert warnings_of(caplog) == []
