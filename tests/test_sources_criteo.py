"""Criteo's text format: blanks, line ends, cut off files, and gzip."""

import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from grain_sparsecore.batching import batch_ragged
from grain_sparsecore.config import (
    Config,
    CriteoOptions,
    PipelineConfig,
    SourceConfig,
    TopologyConfig,
    TrainConfig,
)
from grain_sparsecore.errors import ConfigError, InputError
from grain_sparsecore.hashing import hash_ids
from grain_sparsecore.sources import gzipped, make_batches, make_source, text_lines
from grain_sparsecore.sources.text_lines import LINES_PER_BLOCK, TextLines
from grain_sparsecore.specs import FeatureSpec, TableSpec


def line(i: int, **columns: str) -> str:
    """Line i; ``columns`` such as ``I3`` or ``C26`` replace single values."""
    values = {"label": str(i % 2)}
    values |= {f"I{j}": str(i * j) for j in range(1, 14)}
    values |= {f"C{j}": f"{i * 100 + j:08x}" for j in range(1, 27)}
    return "\t".join({**values, **columns}.values())


def job(
    path: Any,
    *,
    features: tuple[FeatureSpec, ...] = (),
    hash_seed: int = 0,
    cache_dir: Path | None = None,
    **changes: Any,
) -> Config:
    return Config(
        topology=TopologyConfig(num_sc_per_device=2),
        pipeline=PipelineConfig(batch_size=16, on_partial_batch="pad"),
        source=SourceConfig(
            kind="criteo_tsv",
            options=CriteoOptions(
                path=path,
                hash_seed=hash_seed,
                cache_dir=None if cache_dir is None else str(cache_dir),
            ),
            **{"shuffle": False, **changes},
        ),
        train=TrainConfig(dense=("dense",)),
        tables=(
            TableSpec(name="small", vocabulary_size=10, embedding_dim=8),
            TableSpec(name="large", vocabulary_size=1000, embedding_dim=8),
        ),
        features=features
        or (
            FeatureSpec(name="C1", table="small"),
            FeatureSpec(name="last", table="large", ids="C26"),
            FeatureSpec(name="C3", table="large", hash=True),
        ),
    )


def write(tmp_path: Path, text: str | bytes, name: str = "train.txt") -> str:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def samples(config: Config, host: int = 0, hosts: int = 1) -> list[Any]:
    return list(make_source(config, host_index=host, host_count=hosts))


def error_of(config: Config) -> str:
    with pytest.raises(InputError) as caught:
        samples(config)
    return str(caught.value)


def test_a_line_becomes_a_sample(tmp_path: Path) -> None:
    (sample,) = samples(job(write(tmp_path, line(7) + "\n"), hash_seed=5))
    assert list(sample) == ["dense", "C1", "C26", "C3", "label"]
    np.testing.assert_allclose(
        sample["dense"], np.log1p([7 * j for j in range(1, 14)]), rtol=1e-6
    )
    assert sample["dense"].dtype == np.float32
    assert sample["label"] == 1
    assert sample["label"].dtype == np.float32

    def hashed(value: int, size: int) -> int:
        values = np.array([value])
        return int(hash_ids(values, vocabulary_size=size, seed=5)[0])

    assert sample["C1"] == hashed(701, 10)
    assert sample["C26"] == hashed(726, 1000)
    assert sample["C3"] == 703  # left to hash = true of the feature
    assert sample["C1"].dtype == np.int64


def test_blanks_and_negative_integers(tmp_path: Path) -> None:
    text = line(0, I1="", I2="-3", I3="5", C1="", C3="", C26="FFFFFFFF")
    (sample,) = samples(job(write(tmp_path, text)))
    np.testing.assert_allclose(sample["dense"], [0, 0, np.log(6)] + [0] * 10, rtol=1e-6)
    # A blank category is like one more category.
    assert sample["C3"] == 2**32
    blank = hash_ids(np.array([2**32]), vocabulary_size=10)
    assert sample["C1"] == blank[0]
    largest = hash_ids(np.array([2**32 - 1]), vocabulary_size=1000)
    assert sample["C26"] == largest[0]


def test_everything_but_the_label_may_be_blank(tmp_path: Path) -> None:
    (sample,) = samples(job(write(tmp_path, "1" + "\t" * 39)))
    assert sample["dense"].tolist() == [0] * 13
    assert sample["label"] == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "END", "END" + "END"])
def test_line_ends_and_blank_lines(tmp_path: Path, end: str, last: str) -> None:
    count = 3 * LINES_PER_BLOCK + 1
    lines: list[str] = []
    for i in range(count):
        lines += [line(i), *[""] * (i % 3 == 0)]
    text = end + end.join(lines) + last.replace("END", end)
    rows = samples(job(write(tmp_path, text)))
    assert [int(row["C3"]) for row in rows] == [i * 100 + 3 for i in range(count)]


def test_batches_are_those_of_the_samples(tmp_path: Path) -> None:
    text = "".join(line(i) + "\n" for i in range(200))
    config = job(write(tmp_path, text), shuffle=True, epochs=2)
    for host in range(2):
        rows = samples(config, host, 2)
        ds = make_batches(config, config.layout(), host_index=host, host_count=2)
        assert len(ds) == 13
        for i, batch in enumerate(ds):
            expected = batch_ragged(rows[16 * i : 16 * (i + 1)])
            np.testing.assert_equal(batch, expected)
            assert batch["C1"].dtype == np.int64
            assert batch["dense"].dtype == np.float32


def test_files_follow_one_another(tmp_path: Path) -> None:
    write(tmp_path, line(0) + "\n" + line(1), "day_0.txt")
    write(tmp_path, "\n", "day_1.txt")
    write(tmp_path, gzip.compress(line(2).encode()), "day_2.gz")
    config = job(str(tmp_path), cache_dir=tmp_path / "cache")
    assert [int(row["C3"]) for row in samples(config)] == [3, 103, 203]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"label": ""}, "column 1 (label) is b''; it must be 0 or 1."),
        ({"label": "2"}, "column 1 (label) is b'2'; it must be 0 or 1."),
        ({"I2": "1.5"}, "column 3 (I2) is b'1.5'; it must be blank or an integer."),
        ({"I13": "-"}, "column 14 (I13) is b'-'; it must be blank or an integer."),
        (
            {"C1": "xyz"},
            "column 15 (C1) is b'xyz'; it must be blank or up to 8 hexadecimal digits.",
        ),
        (
            {"C26": "123456789"},
            "column 40 (C26) is b'123456789'; it must be blank or up to 8 hexadecimal "
            "digits.",
        ),
    ],
)
def test_a_wrong_value_is_named_with_file_and_line(
    tmp_path: Path, columns: dict[str, str], expected: str
) -> None:
    lines = [line(0), "", line(1), line(2, **columns), line(3)]
    path = write(tmp_path, "\n".join(lines))
    assert error_of(job(path)) == f"{path}, line 4: {expected}"


@pytest.mark.parametrize(
    ("wrong", "count", "hint"),
    [
        (line(2) + "\t", 41, ""),
        (line(2).replace("\t", ","), 1, ""),
        (
            line(2).partition("\t")[2],
            39,
            " Lines without a label, as in a test set, cannot be used.",
        ),
        ("  ", 1, ""),
    ],
)
def test_wrong_numbers_of_columns(
    tmp_path: Path, wrong: str, count: int, hint: str
) -> None:
    path = write(tmp_path, "\n".join([line(0), line(1), wrong, line(3)]) + "\n")
    assert error_of(job(path)) == (
        f"{path}, line 3: {count} columns instead of 40 (label, 13 integers, 26 "
        f"categories, with tabs between them).{hint}"
    )


def test_a_cut_off_file_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path, line(0) + "\n" + line(1)[:100])
    with pytest.raises(InputError) as caught:
        make_source(job(path), host_index=0, host_count=1)
    assert f"{path}, line 2: " in str(caught.value)
    assert "The line has no end: the file seems to be cut off." in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\r\n\n"])
def test_files_without_records(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert error_of(job(path)) == f"source 'criteo_tsv': {path} has no record."


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join(line(i) for i in range(200)))
    ds = make_source(job(path), host_index=0, host_count=1)
    os.truncate(path, 1000)
    with pytest.raises(InputError, match="has become shorter"):
        ds[150]


def test_gzip_is_decompressed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    text = "".join(line(i) + "\n" for i in range(3))
    path = write(tmp_path, gzip.compress(text.encode()), "train.txt.gz")
    assert len(samples(job(path))) == 3
    (copy,) = (cache / "grain_sparsecore").glob("train.txt-*")
    assert copy.read_text() == text
    copy.write_text(line(9) + "\n")  # to see that it is read again, not made again
    assert [int(row["C3"]) for row in samples(job(path))] == [903]
    # Another content has another copy.
    write(tmp_path, gzip.compress(line(4).encode() * 1), "train.txt.gz")
    os.utime(path, ns=(1, 1))
    assert [int(row["C3"]) for row in samples(job(path))] == [403]
    names = sorted(p.name for p in (cache / "grain_sparsecore").iterdir())
    assert sum(name.endswith(".lock") for name in names) == 2
    assert len(names) == 4  # and nothing temporary


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda data: data[: len(data) // 2], "is cut off: "),
        (lambda data: b"no gzip" + data, "is no valid gzip file: "),
        (lambda data: data[:20] + b"\xff" * 20 + data[40:], "is no valid gzip file: "),
    ],
)
def test_damaged_gzip_files(tmp_path: Path, damage: Any, expected: str) -> None:
    data = gzip.compress("".join(line(i) for i in range(100)).encode())
    path = write(tmp_path, damage(data), "train.txt.gz")
    cache = tmp_path / "cache"
    assert f"{path} {expected}" in error_of(job(path, cache_dir=cache))
    assert [p.suffix for p in cache.iterdir()] == [".lock"]


def test_decompression_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, gzip.compress(line(0).encode()), "train.txt.gz")
    monkeypatch.setattr(gzipped, "_KEEP_FREE", 2**62)
    with pytest.raises(ConfigError, match="MiB left, too few to decompress"):
        samples(job(path, cache_dir=tmp_path / "cache"))
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(line(0).encode()), "train.txt.gz")
    with pytest.raises(ConfigError, match=r"cache_dir: cannot decompress .*Not a dir"):
        samples(job(path, cache_dir=Path(path) / "cache"))


@hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    lines=st.lists(
        st.one_of(st.just(b""), st.binary(max_size=6).filter(lambda b: b"\n" not in b)),
        max_size=200,
    ),
    chunk=st.integers(1, 40),
    last=st.booleans(),
)
def test_lines_by_number_are_those_of_a_plain_reader(
    tmp_path: Path, lines: list[bytes], chunk: int, last: bool
) -> None:
    data = b"\n".join(lines) + b"\n" * last
    path = tmp_path / "lines"
    path.write_bytes(data)
    expected = [
        (number, text.removesuffix(b"\r"))
        for number, text in enumerate(data.split(b"\n"), 1)
        if text not in (b"", b"\r")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_lines, "_CHUNK", chunk)
        found = TextLines(path)
    assert len(found) == len(expected)
    for i, (number, text) in enumerate(expected):
        assert found[i] == text
        assert found.where(i) == f"{path}, line {number}"
    if expected:
        assert found.is_cut_off(len(found) - 1) == (not data.endswith(b"\n"))


def test_lines_travel_to_worker_processes(tmp_path: Path) -> None:
    path = write(tmp_path, "a\nb\n")
    lines = TextLines(Path(path))
    assert lines[0] == b"a"
    assert pickle.loads(pickle.dumps(lines))[1] == b"b"
