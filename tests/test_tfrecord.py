import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grain_sparsecore.batching import batch_ragged
from grain_sparsecore.config import (
    Config,
    PipelineConfig,
    SourceConfig,
    TopologyConfig,
    TrainConfig,
    load_config,
)
from grain_sparsecore.errors import ConfigError, InputError
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.sources import make_batches, make_source
from grain_sparsecore.specs import FeatureSpec, TableSpec
from grain_sparsecore.tfrecord import (
    TFRecordFile,
    crc32c,
    index_records,
    masked_crc32c,
    parse_example,
)
from tests.tfrecord_writer import encode_example, write_records


def crc_by_bits(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc_has_the_published_values() -> None:
    # RFC 3720, section B.4.
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 4096, 5001])
def test_crc_of_blocks_equals_that_of_bits(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert crc32c(data) == crc_by_bits(data)


def test_records_come_back(tmp_path: Path) -> None:
    payloads = [b"", b"a", bytes(5000), np.random.default_rng(0).bytes(3000)]
    file = TFRecordFile(write_records(tmp_path / "a.tfrecord", payloads))
    assert [file[i] for i in (3, 0, 1, 2)] == [payloads[i] for i in (3, 0, 1, 2)]
    again = pickle.loads(pickle.dumps(file))
    assert (len(again), again[1]) == (4, b"a")


def test_an_empty_file_has_no_record(tmp_path: Path) -> None:
    assert index_records(write_records(tmp_path / "a.tfrecord", [])).shape == (0, 2)


def test_damage_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.tfrecord", [b"first", b"second"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"a.tfrecord: record 1 needs 1 more bytes"):
        index_records(path)
    path.write_bytes(whole[:23])
    with pytest.raises(InputError, match=r"record 1 at byte 21 has no valid header"):
        index_records(path)
    path.write_bytes(whole.replace(b"second", b"secund"))
    with pytest.raises(InputError, match=r"record 1 at byte 33 .* its checksum"):
        TFRecordFile(path)[1]
    path.write_bytes(gzip.compress(whole))
    with pytest.raises(InputError, match=r"is gzip-compressed.*decompress it first"):
        index_records(path)
    path.write_bytes(b"label\tI1\tI2\n" * 9)
    with pytest.raises(InputError, match="this is no TFRecord file"):
        index_records(path)


def test_examples_hold_three_kinds_of_lists() -> None:
    integers = np.array([0, 1, 127, 128, 2**63 - 1, -1, -(2**63)])
    payload = encode_example(
        {
            "integers": integers,
            "floats": np.array([1.5, -2], np.float32),
            "bytes": [b"one", b""],
            "none": np.zeros(0, np.int64),
        }
    )
    example = parse_example(payload)
    np.testing.assert_array_equal(example["integers"], integers)
    np.testing.assert_array_equal(example["floats"], [1.5, -2])
    assert example["bytes"] == [b"one", b""]
    assert len(example["none"]) == 0
    assert list(parse_example(payload, {"bytes"})) == ["bytes"]


def test_numbers_that_are_not_packed_are_read_too() -> None:
    def message(field: int, body: bytes) -> bytes:
        return bytes([field << 3 | 2, len(body)]) + body

    def example(kind: int, body: bytes) -> bytes:
        feature = message(2, message(kind, body))
        return message(1, message(1, message(1, b"f") + feature))

    integers = example(3, b"\x08\x05\x08\xac\x02")
    np.testing.assert_array_equal(parse_example(integers)["f"], [5, 300])
    floats = example(2, b"\x0d" + struct.pack("<f", 2.5) + b"\x0d" + bytes(4))
    np.testing.assert_array_equal(parse_example(floats)["f"], [2.5, 0])


@pytest.mark.parametrize(
    "payload", [b"\x0a", b"\x0a\x05ab", b"\xff\xff", b"\x0f", b"\x0a\x03\x0a\x01"]
)
def test_a_damaged_example_is_an_error(payload: bytes) -> None:
    with pytest.raises(InputError, match=r"no valid tf\.train\.Example"):
        parse_example(payload)


def test_no_example_makes_the_parser_fail_otherwise() -> None:
    rng = np.random.default_rng(0)
    whole = encode_example({"a": np.arange(9), "b": np.ones(3), "c": b"xyz"})
    refused = 0
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        try:
            parse_example(bytes(damaged[: rng.integers(1, len(damaged) + 1)]))
        except InputError:
            refused += 1
    assert refused > 500


ROWS = 6


def dlrm_record(index: int, rows: int = ROWS) -> dict[str, Any]:
    """One record as the MLPerf DLRM data has them."""
    row = np.arange(rows) + index * ROWS
    return {
        "clicked": row % 2,
        "int-feature-1": row.astype(np.float32),
        "int-feature-2": -row.astype(np.float32),
        "cat_1": np.stack([row, row + 1, row + 2], 1).astype("<i8").tobytes(),
        "cat_2": (row % 7).astype("<i8").tobytes(),
        "unused": b"odd",
    }


def dlrm_files(folder: Path, records: int = 5) -> list[str]:
    """Two files; the last record of the first is short."""
    all_records = [encode_example(dlrm_record(i)) for i in range(records)]
    all_records[1] = encode_example(dlrm_record(1, rows=4))
    return [
        str(write_records(folder / "day_0.tfrecord", all_records[:2])),
        str(write_records(folder / "day_1.tfrecord", all_records[2:])),
    ]


def config(path: Any, *, shuffle: bool = False, **options: Any) -> Config:
    return Config(
        topology=TopologyConfig(
            num_sc_per_device=2, global_device_count=1, local_device_count=1
        ),
        tables=(
            TableSpec(name="one", vocabulary_size=100, embedding_dim=8),
            TableSpec(name="two", vocabulary_size=10, embedding_dim=8),
        ),
        features=(
            FeatureSpec(name="one", table="one", ids="cat_1"),
            FeatureSpec(name="two", table="two", ids="cat_2"),
        ),
        pipeline=PipelineConfig(batch_size=4),
        source=SourceConfig(
            kind="tfrecord", shuffle=shuffle, options={"path": path, **options}
        ),
        train=TrainConfig(label="clicked", dense=("int-feature-1", "int-feature-2")),
    )


def test_rows_of_records_are_samples(tmp_path: Path) -> None:
    source = make_source(config(dlrm_files(tmp_path)), host_index=0, host_count=1)
    kept = [*range(10), *range(12, 30)]
    assert len(source) == len(kept)
    for i, row in enumerate(kept):
        sample = source[i]
        assert sample["clicked"] == row % 2
        assert sample["int-feature-1"] == row
        assert sample["cat_1"].tolist() == [row, row + 1, row + 2]
        assert sample["cat_2"] == row % 7
        assert "unused" not in sample


def test_hosts_share_the_shuffled_rows(tmp_path: Path) -> None:
    job = config(dlrm_files(tmp_path), shuffle=True, shuffle_records=2)
    hosts = [
        [int(s["int-feature-1"]) for s in make_source(job, host_index=i, host_count=2)]
        for i in range(2)
    ]
    assert sorted(hosts[0] + hosts[1]) == [*range(10), *range(12, 30)]
    assert hosts[0] != sorted(hosts[0])


def test_batches_go_through_the_stages(tmp_path: Path) -> None:
    job = config(dlrm_files(tmp_path))
    layout = job.layout()
    batches = make_batches(job, layout, host_index=0, host_count=1)
    assert len(batches) == 7
    assert batches[0]["cat_1"].tolist() == [[i, i + 1, i + 2] for i in range(4)]
    assert batches[0]["int-feature-2"].tolist() == [0, -1, -2, -3]


def test_batches_read_at_once_are_those_of_the_samples(tmp_path: Path) -> None:
    job = config(dlrm_files(tmp_path), shuffle=True, shuffle_records=2)
    source = make_source(job, host_index=1, host_count=2)
    batches = make_batches(job, job.layout(), host_index=1, host_count=2)
    assert len(batches) == 3
    for i, batch in enumerate(batches):
        expected = batch_ragged([source[4 * i + j] for j in range(4)])
        assert batch.keys() == expected.keys()
        for key, values in expected.items():
            assert batch[key].dtype == values.dtype
            np.testing.assert_array_equal(batch[key], values)


def test_the_mlperf_configuration_reads_its_layout(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = Path(__file__).parents[1] / "configs" / "dlrm_tfrecord.toml"
    data = tmp_path / "train-00000-of-00001tfrecord"
    job = load_config(path, overrides=[f"source.path={data}"])
    rows = 256
    record = {
        **{key: rng.random(rows).astype(np.float32) for key in job.train.dense},
        **{
            feature.ids: rng.integers(0, 3, (rows, i % 4 + 1)).astype("<i8").tobytes()
            for i, feature in enumerate(job.features)
        },
        "clicked": rng.integers(0, 2, rows),
    }
    write_records(data, [encode_example(record), encode_example(record)])
    layout = job.layout()
    batches = make_batches(job, layout, host_index=0, host_count=1)
    (first, *_) = sparsecore_pipeline(batches[:8], job)
    assert len(layout.features) == 26
    assert sorted(first) == sorted(["sparsecore", "clicked", *job.train.dense])
    assert first["sparsecore"].num_valid_samples.sum() == rows


def test_records_of_one_row_may_be_ragged(tmp_path: Path) -> None:
    lists = [[1, 2, 3], [], [4], [5, 6]]
    records = [
        encode_example(
            {
                "clicked": np.array([i % 2]),
                "int-feature-1": np.array([0.5]),
                "int-feature-2": np.array([0.5]),
                "cat_1": np.array(ids, np.int64),
                "cat_2": np.array([i]),
            }
        )
        for i, ids in enumerate(lists)
    ]
    path = write_records(tmp_path / "a.tfrecord", records)
    job = config(str(path))
    source = make_source(job, host_index=0, host_count=1)
    assert [np.atleast_1d(s["cat_1"]).tolist() for s in source] == lists
    (batch,) = make_batches(job, job.layout(), host_index=0, host_count=1)
    assert batch["cat_1"].values.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch["cat_1"].row_splits.tolist() == [0, 3, 3, 4, 6]


def test_a_source_can_be_pickled_and_forgets_old_records(tmp_path: Path) -> None:
    from grain_sparsecore.sources.tfrecord import TFRecordSource

    files = [Path(path) for path in dlrm_files(tmp_path)]
    source = TFRecordSource(
        files, label="clicked", keys={"clicked": "x", "cat_1": "y"}, cache_bytes=300
    )
    again = pickle.loads(pickle.dumps(source))
    for index in (0, 27, 3, 14, 0):
        assert again[index]["cat_1"].tolist() == source[index]["cat_1"].tolist()
    assert repr(source).endswith("day_0.tfrecord and 1 more)")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"cat_1": None}, ConfigError, r"ids of feature 'one': .*no feature 'cat_1'"),
        (
            {"cat_1": b"123"},
            InputError,
            r"feature 'cat_1': 3 bytes are no whole number",
        ),
        (
            {"cat_1": bytes(16)},
            InputError,
            r"feature 'cat_1' has 2 values.* the 6 rows",
        ),
        ({"clicked": np.zeros(0, int)}, InputError, "label 'clicked' has no value"),
        ({"clicked": None}, ConfigError, "train.label: .*no feature 'clicked'"),
    ],
)
def test_wrong_records_are_named(
    tmp_path: Path, change: dict, error: type, text: str
) -> None:
    record = dlrm_record(0) | change
    record = {key: value for key, value in record.items() if value is not None}
    path = write_records(tmp_path / "a.tfrecord", [encode_example(record)])
    with pytest.raises(error, match=text) as info:
        make_source(config(str(path)), host_index=0, host_count=1)
    assert "a.tfrecord, record 0" in str(info.value)


def test_another_number_of_rows_in_the_middle_is_an_error(tmp_path: Path) -> None:
    records = [encode_example(dlrm_record(i, rows=6 - i % 2)) for i in range(3)]
    path = write_records(tmp_path / "a.tfrecord", records)
    source = make_source(config(str(path)), host_index=0, host_count=1)
    with pytest.raises(InputError, match=r"record 1: 5 rows, but 6 in the first"):
        source[7]


def test_a_cache_too_small_to_shuffle_is_an_error(tmp_path: Path) -> None:
    rows = 40_000
    path = write_records(
        tmp_path / "a.tfrecord", [encode_example(dlrm_record(0, rows))]
    )
    with pytest.raises(ConfigError, match=r"set cache_mib=2 or more, or a smaller"):
        make_source(
            config(str(path), shuffle=True, cache_mib=1, shuffle_records=1),
            host_index=0,
            host_count=1,
        )


def test_the_mask_rotates_and_adds() -> None:
    crc = crc32c(b"123456789")
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    assert masked_crc32c(b"123456789") == (rotated + 0xA282EAD8) & 0xFFFFFFFF
