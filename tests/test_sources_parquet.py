"""Parquet: rows of any type and nesting, by row group, exactly as they were written."""

import pickle
import sys
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grain_sparsecore.batching import RaggedValues, batch_ragged
from grain_sparsecore.config import (
    Config,
    ParquetOptions,
    PipelineConfig,
    SourceConfig,
    TopologyConfig,
    TrainConfig,
)
from grain_sparsecore.errors import ConfigError, InputError, MissingExtraError
from grain_sparsecore.sources import make_batches, make_source
from grain_sparsecore.sources.parquet import ParquetSource
from grain_sparsecore.specs import FeatureSpec, TableSpec

ROWS = 60


def table(rows: int = ROWS, first: int = 0) -> pa.Table:
    """Row i has i % 4 ids i, i + 1, ... and the id i."""
    numbers = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(list(numbers), pa.int32()),
            "seen": pa.array([list(range(i, i + i % 4)) for i in numbers]),
            "age": pa.array([[j / 2 for j in range(i % 4)] for i in numbers]),
            "name": pa.array([f"n{i}" for i in numbers]).dictionary_encode(),
            "user": pa.array([{"home": {"city": i % 7}, "x": 1} for i in numbers]),
            "click": pa.array([float(i % 2) for i in numbers]),
            "unread": pa.array(list(numbers)),
        }
    )


def job(path: Any, features: Any = None, **changes: Any) -> Config:
    options = {
        k: changes.pop(k) for k in ("cache_mib", "shuffle_row_groups") if k in changes
    }
    features = features or (
        FeatureSpec(name="id", table="t"),
        FeatureSpec(name="seen", table="t", weights="age"),
        FeatureSpec(name="name", table="t", hash=True),
        FeatureSpec(name="city", table="t", ids="user/home/city"),
    )
    return Config(
        topology=TopologyConfig(num_sc_per_device=2),
        pipeline=PipelineConfig(batch_size=16, seed=3, on_partial_batch="pad"),
        source=SourceConfig(
            kind="parquet", options=ParquetOptions(path=path, **options), **changes
        ),
        train=TrainConfig(label="click"),
        tables=(TableSpec(name="t", vocabulary_size=100, embedding_dim=8),),
        features=features,
    )


def write(path: Path, data: pa.Table, group: int = 10) -> str:
    pq.write_table(data, path, row_group_size=group)
    return str(path)


def samples(config: Config, host: int = 0, hosts: int = 1) -> list[Any]:
    return list(make_source(config, host_index=host, host_count=hosts))


def expect_row(sample: Any, i: int) -> None:
    """The sample is row i of ``table``."""
    assert sample["id"] == i
    assert sample["id"].dtype == np.int32
    assert sample["seen"].tolist() == list(range(i, i + i % 4))
    assert sample["age"].tolist() == [j / 2 for j in range(i % 4)]
    assert sample["name"] == f"n{i}"
    assert sample["user"] == {"home": {"city": i % 7}}
    assert sample["click"] == i % 2
    assert "unread" not in sample


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    config = job(write(tmp_path / "a.parquet", table()), shuffle=False)
    rows = samples(config)
    assert len(rows) == ROWS
    for i, sample in enumerate(rows):
        expect_row(sample, i)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("cache_mib", [1, 1024])
def test_batches_are_those_of_the_samples(
    tmp_path: Path, shuffle: bool, cache_mib: int
) -> None:
    path = write(tmp_path / "a.parquet", table())
    config = job(path, shuffle=shuffle, cache_mib=cache_mib, epochs=2)
    for host in range(2):
        rows = samples(config, host, 2)
        ds = make_batches(config, config.layout(), host_index=host, host_count=2)
        assert len(ds) == 4
        for i, batch in enumerate(ds):
            expected = batch_ragged(rows[16 * i : 16 * (i + 1)])
            np.testing.assert_equal(batch, expected)
            assert isinstance(batch["seen"], RaggedValues)
            assert batch["id"].dtype == np.int32


def test_files_follow_one_another(tmp_path: Path) -> None:
    first = write(tmp_path / "part-0.parquet", table(13))
    second = write(tmp_path / "part-1.parquet", table(20, first=13))
    (tmp_path / "notes.txt").write_text("no data")
    for path in (
        str(tmp_path),
        str(tmp_path / "part-*.parquet"),
        [first, second],
    ):
        rows = samples(job(path, shuffle=False))
        assert [int(row["id"]) for row in rows] == list(range(33))
    turned = samples(job([second, first], shuffle=False))
    assert [int(row["id"]) for row in turned[:20]] == list(range(13, 33))


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.large_list(pa.uint64()),
        pa.list_(pa.int16(), 2),
        pa.list_(pa.dictionary(pa.int8(), pa.int64())),
    ],
    ids=str,
)
def test_every_type_of_list(tmp_path: Path, kind: pa.DataType) -> None:
    data = table(3).set_column(0, "id", pa.array([[1, 2], [3, 4], [5, 6]], kind))
    config = job(
        write(tmp_path / "a.parquet", data),
        (FeatureSpec(name="id", table="t"),),
        shuffle=False,
    )
    assert [row["id"].tolist() for row in samples(config)] == [[1, 2], [3, 4], [5, 6]]


def test_missing_ids_are_rows_without_ids(tmp_path: Path) -> None:
    data = pa.table(
        {
            "id": pa.array([1, None, 3, 4]),
            "seen": pa.array([[1], None, [], [2, 3]]),
            "click": [0.0, 1.0, 0.0, 1.0],
        }
    )
    features = (
        FeatureSpec(name="id", table="t"),
        FeatureSpec(name="seen", table="t"),
    )
    # Only the first of two row groups has a missing id.
    path = write(tmp_path / "a.parquet", data, group=2)
    config = job(path, features, shuffle=False)
    rows = samples(config)
    assert [np.atleast_1d(row["id"]).tolist() for row in rows] == [[1], [], [3], [4]]
    assert [row["seen"].tolist() for row in rows] == [[1], [], [], [2, 3]]
    (batch,) = make_batches(config, config.layout(), host_index=0, host_count=1)
    assert batch["id"].values.tolist() == [1, 3, 4]
    assert batch["id"].row_splits.tolist() == [0, 1, 1, 2, 3]
    assert batch["seen"].row_splits.tolist() == [0, 1, 1, 1, 3]


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("click", [0.0, None, 1.0], "row group 0, column 'click': the value of row 1"),
        ("seen", [[1], [], [2, None]], "column 'seen': the list of row 2 holds a null"),
    ],
)
def test_missing_values_that_nobody_can_stand_in_for(
    tmp_path: Path, column: str, values: list, expected: str
) -> None:
    data = table(3)
    data = data.set_column(data.schema.names.index(column), column, pa.array(values))
    path = write(tmp_path / "a.parquet", data)
    with pytest.raises(InputError) as caught:
        samples(job(path))
    assert path in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("feature", "expected"),
    [
        (
            FeatureSpec(name="sean", table="t"),
            "ids of feature 'sean': {path} has no column 'sean'; did you mean 'seen'?",
        ),
        (
            FeatureSpec(name="seen", table="t", weights="agee"),
            "weights of feature 'seen': {path} has no column 'agee'; did you mean "
            "'age'?",
        ),
        (
            FeatureSpec(name="city", table="t", ids="user/home/town"),
            "column 'user' of {path} has no field 'town'; known: city.",
        ),
        (
            FeatureSpec(name="city", table="t", ids="seen/city"),
            "column 'seen' of {path} has no field 'city'",
        ),
        (
            FeatureSpec(name="user", table="t"),
            "column 'user' has type struct<home: struct<city: int64>, x: int64>; it "
            "must hold numbers, text or bytes, or flat lists of them.",
        ),
    ],
)
def test_columns_that_do_not_fit(
    tmp_path: Path, feature: FeatureSpec, expected: str
) -> None:
    path = write(tmp_path / "a.parquet", table())
    with pytest.raises(ConfigError) as caught:
        samples(job(path, (feature,)))
    assert expected.format(path=path) in str(caught.value)


def test_a_missing_label_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table().drop_columns(["click"]))
    with pytest.raises(ConfigError, match=r"^train\.label: .* has no column 'click'"):
        samples(job(path))


def test_files_of_different_types_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table())
    other = table()
    other = other.set_column(0, "id", other["id"].cast(pa.int64()))
    second = write(tmp_path / "b.parquet", other)
    with pytest.raises(ConfigError) as caught:
        samples(job(str(tmp_path)))
    assert (
        f"column 'id' of {second} has type int64, but int32 in the first file"
        in str(caught.value)
    )


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    write(tmp_path / "day.parquet", table(1))
    for path, expected in (
        ("dey.parquet", "there is no {path}; did you mean 'day.parquet'?"),
        ("no/day.parquet", "there is no {path}, nor the folder"),
        ("day_*.parquet", "no file matches {path}"),
    ):
        full = str(tmp_path / path)
        with pytest.raises(ConfigError) as caught:
            samples(job(full))
        assert expected.format(path=full) in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"holds no file that ends in \.parquet"):
        samples(job(str(tmp_path / "empty")))


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"")
    with pytest.raises(InputError, match=f"{path} is no readable Parquet file"):
        samples(job(str(path)))
    whole = Path(write(tmp_path / "b.parquet", table())).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=f"{path} is no readable Parquet file"):
        samples(job(str(path)))


def test_a_file_without_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(3).slice(0, 0))
    with pytest.raises(InputError, match=f"{path} has no record"):
        samples(job(path))


def test_without_pyarrow_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", table())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"grain_sparsecore\[parquet\]"):
        samples(job(path))


def big_table(rows: int) -> pa.Table:
    """8 KiB a row."""
    return pa.table(
        {
            "seen": pa.array([np.full(1024, i) for i in range(rows)]),
            "click": np.arange(rows) % 2.0,
        }
    )


SEEN = (FeatureSpec(name="seen", table="t"),)


def test_a_cache_too_small_to_shuffle_all_rows_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", big_table(512), group=64)
    with pytest.raises(ConfigError) as caught:
        samples(job(path, SEEN, cache_mib=2))
    assert "source.cache_mib=2: the columns that are read take about 5 MiB" in str(
        caught.value
    )
    assert "Set cache_mib=5 or more, or shuffle_row_groups=4" in str(caught.value)


def test_row_groups_are_shuffled_and_rows_inside_runs_of_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", big_table(500), group=64)  # 8 groups
    config = job(path, SEEN, cache_mib=2, shuffle_row_groups=2, epochs=2)
    order = [int(row["seen"][0]) for row in samples(config)]
    epochs = order[:500], order[500:]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(epoch) == list(range(500))
        groups = [i // 64 for i in epoch]
        # 7 full groups and one of 52: runs end at 128 or 116 rows.
        start = 0
        while start < 500:
            run = set(groups[start : start + 116])
            assert len(run) == 2
            size = sum(min(64, 500 - 64 * group) for group in run)
            assert set(groups[start : start + size]) == run
            assert groups[start : start + size] != sorted(groups[start : start + size])
            start += size
    shares = [
        [int(row["seen"][0]) for row in samples(config, host, 2)] for host in range(2)
    ]
    assert shares == [order[0::2], order[1::2]]


def parquet_source(path: str, cache_bytes: int) -> ParquetSource:
    return ParquetSource(
        [Path(path)],
        feature_keys={"seen": "test"},
        training_keys={"click": "test"},
        cache_bytes=cache_bytes,
    )


def test_the_cache_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", big_table(512), group=64)
    source = parquet_source(path, cache_bytes=3 * 64 * 8 * 1024)
    wanted = (511, 0, 300, 64, 511, 128, 0)
    assert [int(source[i]["seen"][0]) for i in wanted] == list(wanted)
    assert len(source._decoded) == 2  # a group has a little more than 64 * 8 KiB


def test_a_source_travels_without_its_cache(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", big_table(128), group=64)
    source = parquet_source(path, cache_bytes=2**30)
    first = source[0]
    data = pickle.dumps(source)
    assert len(data) < 10_000
    np.testing.assert_equal(pickle.loads(data)[0], first)


def test_threads_share_a_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(500), group=7)
    config = job(path, epochs=2, cache_mib=1)
    ds = make_batches(config, config.layout(), host_index=0, host_count=1)
    alone = [ds[i] for i in range(len(ds))]
    read = ds.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8))
    np.testing.assert_equal(list(read), alone)
