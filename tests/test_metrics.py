import builtins
import dataclasses
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from grain_sparsecore.dropping import DropCounts
from grain_sparsecore.errors import ConfigError, InputTypeError, MissingExtraError
from grain_sparsecore.features import COUNTERS
from grain_sparsecore.limits import GrowthPolicy, Limits, grow_limits
from grain_sparsecore.metrics import (
    JsonLinesWriter,
    MultiWriter,
    TensorBoardWriter,
    batch_scalars,
    entry_counts,
    padding_waste,
)
from grain_sparsecore.partition import partition_batch, partition_counts
from grain_sparsecore.repartition import repartition
from tests.strategies import random_case


def input_of(seed):
    case = random_case(np.random.default_rng(seed), max_partitions=32)
    layout = case.layout
    counters = case.counters
    counters[:, 0] = np.arange(len(layout.features))
    batch = partition_batch(
        case.features, layout, counters=counters, num_samples=layout.batch_size
    )
    limits = grow_limits(
        Limits.start(layout), batch.stats, layout=layout, policy=GrowthPolicy()
    )
    return batch, repartition(batch, limits, layout), layout


@pytest.mark.parametrize("seed", range(10))
def test_counts_and_waste_are_those_of_the_buffers(seed):
    batch, result, layout = input_of(seed)
    counts = entry_counts(result, layout=layout)
    waste = padding_waste(result, layout=layout)
    for stack, (expected, _) in zip(
        layout.stacks, partition_counts(batch, layout), strict=True
    ):
        np.testing.assert_array_equal(counts[stack.name], expected)
        padding = (result.embedding_ids[stack.name] == 2**31 - 1).mean()
        assert waste[stack.name] == pytest.approx(padding)


def test_scalars_have_one_name_each():
    _, result, layout = input_of(1)
    scalars = batch_scalars(result, layout=layout)
    stack, feature = layout.stacks[0].name, layout.features[-1]
    limits = result.limits[stack]
    assert scalars[f"limits/{stack}/max_ids_per_partition"] == (
        limits.max_ids_per_partition
    )
    assert scalars[f"limits/{stack}/buffer_size"] == limits.buffer_size_per_device
    assert 0 <= scalars[f"padding_waste/{stack}"] <= 1
    assert scalars[f"counters/{feature.name}/{COUNTERS[0]}"] == feature.index
    assert not any(name.startswith("drops/") for name in scalars)
    assert scalars["minibatches"] == 1
    counters = len(layout.features) * len(COUNTERS)
    assert len(scalars) == 1 + 4 * len(layout.stacks) + counters


def test_the_whole_batch_is_refused_with_the_key_to_pass():
    _, result, layout = input_of(1)
    batch: Any = {"label": np.zeros(1), "sparsecore": result}
    with pytest.raises(
        InputTypeError, match=r"^batch_scalars takes .*; pass batch\['sparsecore'\]\.$"
    ):
        batch_scalars(batch, layout=layout)


def test_drops_are_among_the_scalars():
    _, result, layout = input_of(1)
    drops = DropCounts.zeros(len(layout.features))
    drops.per_feature[0] = 5, 4, 3
    drops.lost_weight[0] = 2.5
    result = dataclasses.replace(
        result, drops=dataclasses.replace(drops, examples=np.int32(3)), counters=None
    )
    scalars = batch_scalars(result, layout=layout)
    name = layout.features[0].name
    assert scalars[f"drops/{name}/dropped_ids"] == 5
    assert scalars[f"drops/{name}/dropped_entries"] == 4
    assert scalars[f"drops/{name}/dropped_examples"] == 3
    assert scalars[f"drops/{name}/lost_weight"] == 2.5
    assert scalars["drops/examples"] == 3
    assert not any(key.startswith("counters/") for key in scalars)


def test_json_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer.write_scalars(1, {"a": 1.5, "b": np.int32(2), "c": math.inf})
    # What is written is there, whatever becomes of this process.
    assert json.loads(path.read_text()) == {"step": 1, "a": 1.5, "b": 2, "c": None}
    writer.close()
    again = JsonLinesWriter(path)
    again.write_scalars(np.int64(2), {"a": math.nan})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [
        1,
        2,
    ]
    with pytest.raises(ConfigError, match=r"nowhere/x' cannot be written"):
        JsonLinesWriter(tmp_path / "nowhere" / "x")


def test_event_files_hold_what_is_written(tmp_path):
    writer = TensorBoardWriter(tmp_path / "run")
    writer.write_scalars(3, {"limits/t/buffer_size": 4096, "wait": 0.25})
    writer.flush()
    writer.close()
    (path,) = (tmp_path / "run").iterdir()
    values = {
        value.tag: (event.step, value.simple_value)
        for event in events_of(path.read_bytes())
        for value in event.summary.value
    }
    assert values == {"limits/t/buffer_size": (3, 4096), "wait": (3, 0.25)}


def events_of(data):
    """The records of an event file: length, checksum, event, checksum."""
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"grain_sparsecore\[tensorboard\]"):
        TensorBoardWriter(tmp_path)


def test_several_writers_get_the_same(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    writer = MultiWriter(JsonLinesWriter(path) for path in paths)
    writer.write_scalars(1, {"x": 1})
    writer.flush()
    assert [p.read_text() for p in paths] == ['{"step": 1, "x": 1}\n'] * 2
    writer.close()
