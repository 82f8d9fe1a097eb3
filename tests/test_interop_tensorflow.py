"""The real tf.data and TensorFlow's own TFRecord files, beside our reader of them."""

from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
import tensorflow as tf

from grain_sparsecore.interop import from_iterable
from grain_sparsecore.pipeline import (
    ComputeInputStats,
    CoordinateLimitsIterDataset,
    RepartitionIterDataset,
)
from grain_sparsecore.sources import make_batches
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout
from grain_sparsecore.tfrecord import TFRecordFile, parse_example
from tests.test_tfrecord import config, dlrm_record
from tests.tfrecord_writer import encode_example, write_records

BATCH = 8


def layout() -> StackedLayout:
    return make_layout(
        [TableSpec(name="t", vocabulary_size=100, embedding_dim=8)],
        [
            FeatureSpec(name="dense", table="t"),
            FeatureSpec(name="ragged", table="t", weights="weights"),
            FeatureSpec(name="sparse", table="t"),
        ],
        topology=Topology(
            global_device_count=1, local_device_count=1, num_sc_per_device=2
        ),
        batch_size=BATCH,
    )


def rows() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 100, rng.integers(0, 5)).tolist() for _ in range(40)]


def tf_dataset(lists: list[list[int]]) -> tf.data.Dataset:
    ragged = tf.ragged.constant(lists, dtype=tf.int64)
    return tf.data.Dataset.from_tensor_slices(
        {
            "dense": np.arange(80).reshape(40, 2),
            "ragged": ragged,
            "weights": tf.cast(ragged + 1, tf.float32),
            "sparse": ragged.to_sparse(),
        }
    ).batch(BATCH)


def stages(batches: grain.IterDataset[Any]) -> grain.IterDataset[Any]:
    return (
        batches.map(ComputeInputStats(layout()))
        .pipe(CoordinateLimitsIterDataset, layout=layout(), window=2)
        .pipe(RepartitionIterDataset, layout=layout())
    )


def assert_equal(one: Any, two: Any) -> None:
    for field in ("row_pointers", "embedding_ids", "sample_ids", "gains"):
        mine, other = getattr(one, field)["t"], getattr(two, field)["t"]
        assert mine.tobytes() == other.tobytes()


def plain_batches(lists: list[list[int]]) -> Any:
    for first in range(0, 40, BATCH):
        part = lists[first : first + BATCH]
        yield {
            "dense": np.arange(80).reshape(40, 2)[first : first + BATCH],
            "ragged": part,
            "weights": [[float(x + 1) for x in row] for row in part],
            "sparse": part,
        }


def test_tensors_of_every_form_go_through_the_stages() -> None:
    lists = rows()
    ours = list(stages(from_iterable(lambda: plain_batches(lists))))
    theirs = list(stages(from_iterable(tf_dataset(lists))))
    assert len(ours) == len(theirs) == 5
    for one, two in zip(ours, theirs, strict=True):
        assert_equal(one["sparsecore"], two["sparsecore"])


def test_as_numpy_iterator_goes_through_the_stages_but_fills_sparse_tensors() -> None:
    # TensorFlow turns a SparseTensor into an array with 0 in the gaps, which nobody
    # can tell from id 0; from_iterable(dataset) takes the tensor itself.
    lists = rows()
    longest = max(map(len, lists))
    filled = [row + [0] * (longest - len(row)) for row in lists]

    def with_zeros() -> Any:
        for i, batch in enumerate(plain_batches(lists)):
            yield batch | {"sparse": filled[i * BATCH : (i + 1) * BATCH]}

    ours = list(stages(from_iterable(with_zeros)))
    theirs = list(stages(from_iterable(tf_dataset(lists).as_numpy_iterator)))
    assert len(ours) == len(theirs) == 5
    for one, two in zip(ours, theirs, strict=True):
        assert_equal(one["sparsecore"], two["sparsecore"])


def test_tf_data_is_restored_in_the_middle_of_a_window() -> None:
    dataset = tf_dataset(rows()).shuffle(5, seed=3, reshuffle_each_iteration=False)
    pipeline = stages(from_iterable(dataset.as_numpy_iterator))
    iterator = iter(pipeline)
    for _ in range(3):
        next(iterator)
    state = iterator.get_state()
    rest = [batch["sparsecore"] for batch in iterator]
    other = iter(pipeline)
    other.set_state(state)
    again = [batch["sparsecore"] for batch in other]
    assert len(rest) == len(again) == 2
    for one, two in zip(rest, again, strict=True):
        assert_equal(one, two)
        assert one.limits == two.limits


def as_example(record: dict[str, Any]) -> bytes:
    """A record of the MLPerf DLRM layout, written by TensorFlow."""

    def feature(value: Any) -> tf.train.Feature:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        if value.dtype.kind == "f":
            return tf.train.Feature(float_list=tf.train.FloatList(value=value))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))

    features = {name: feature(value) for name, value in record.items()}
    return tf.train.Example(
        features=tf.train.Features(feature=features)
    ).SerializeToString()


def test_records_of_tensorflow_are_read(tmp_path: Path) -> None:
    path = str(tmp_path / "a.tfrecord")
    records = [dlrm_record(i) | {"negative": np.array([-1, 2**40])} for i in range(3)]
    with tf.io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(as_example(record))
    file = TFRecordFile(path)
    assert len(file) == 3
    for i, record in enumerate(records):
        example = parse_example(file[i])
        assert example.keys() == record.keys()
        for name, value in record.items():
            if isinstance(value, bytes):
                assert example[name] == [value]
            else:
                np.testing.assert_array_equal(example[name], value)


def test_records_of_ours_are_read_by_tensorflow(tmp_path: Path) -> None:
    payloads = [encode_example(dlrm_record(i)) for i in range(3)] + [bytes(5000)]
    path = write_records(tmp_path / "a.tfrecord", payloads)
    read = [x.numpy() for x in tf.data.TFRecordDataset(str(path))]
    assert read == payloads
    example = tf.train.Example.FromString(read[0])
    assert example == tf.train.Example.FromString(as_example(dlrm_record(0)))


@pytest.mark.parametrize("batch", [4])
def test_the_tfrecord_source_gives_the_batches_of_tf_data(
    tmp_path: Path, batch: int
) -> None:
    path = str(tmp_path / "a.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for i in range(6):
            writer.write(as_example(dlrm_record(i)))

    def parse(serialized: tf.Tensor) -> dict[str, tf.Tensor]:
        many = {"cat_1": 3, "cat_2": 1}
        spec = {name: tf.io.FixedLenFeature([], tf.string) for name in many}
        spec["clicked"] = tf.io.FixedLenFeature([6], tf.int64)
        example = tf.io.parse_single_example(serialized, spec)
        return {
            name: tf.reshape(tf.io.decode_raw(example[name], tf.int64), [6, k])
            for name, k in many.items()
        } | {"clicked": example["clicked"]}

    theirs = (
        tf.data.TFRecordDataset(path)
        .map(parse)
        .unbatch()
        .batch(batch)
        .as_numpy_iterator()
    )
    job = config(path)
    ours = make_batches(job, job.layout(), host_index=0, host_count=1)
    count = 0
    for one, two in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one["cat_1"], two["cat_1"])
        np.testing.assert_array_equal(one["cat_2"], two["cat_2"][:, 0])
        np.testing.assert_array_equal(one["clicked"], two["clicked"])
        count += 1
    assert count == 9
