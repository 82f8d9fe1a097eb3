import argparse
import json
import pathlib

import numpy as np
import pytest

from grain_sparsecore import bench, bench_growth, bench_pipeline
from grain_sparsecore.bench import BenchOptions, main_share, measure
from grain_sparsecore.bench_cases import CASES, make_case, make_growth_case
from grain_sparsecore.bench_growth import growth_sizes, measure_growth
from grain_sparsecore.bench_hosts import measure_coordination
from grain_sparsecore.bench_peer import PEER
from grain_sparsecore.cli import bench as command
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.kernels import KERNEL_VARIABLE, KERNELS

IDS = {
    "criteo4096": 4096 * 26,
    "criteo16384": 16384 * 26,
    "mlperf": 2048 * 214,
    "huge": 16384 * 100,
}
RATIOS = (
    "once_cpu_ratio",
    "changed_cpu_ratio",
    "once_wall_ratio",
    "changed_wall_ratio",
    "busy_wall_ratio",
)


@pytest.mark.parametrize("name", CASES)
def test_cases_are_legal_skewed_and_reproducible(name: str) -> None:
    case = make_case(name, num_partitions=32)
    # Ragged cases vary; 20 ids a sample on average.
    assert case.ids == pytest.approx(IDS.get(name, 4096 * 10 * 20), rel=0.02)
    again = make_case(name, num_partitions=256)
    assert again.layout.topology.num_partitions == 256
    counted = 0
    for feature in case.layout.features:
        values = case.element[feature.spec.ids]
        other = again.element[feature.spec.ids]
        if isinstance(values, dict):
            lengths = np.diff(values["row_splits"])
            assert (lengths.min(), lengths.max()) == (1, 39)
            values, other = values["values"], other["values"]
        np.testing.assert_array_equal(values, other)
        assert values.dtype == np.int32
        assert 0 <= values.min() <= values.max() < feature.table.vocabulary_size
        most = np.unique(values, return_counts=True)[1].max()
        # Zipf with exponent 1.2: the first id is 18 % of all.
        assert most > 0.15 * values.size
        counted += values.size
    assert counted == case.ids


def test_growth_cases_have_the_sizes_asked_for() -> None:
    case = make_growth_case(
        tables=3, ids_per_sample=7, num_partitions=64, batch_size=64
    )
    assert len(case.layout.stacks) == 3
    assert case.ids == 3 * 7 * 64


@pytest.mark.parametrize("partitions", [16, 33])
def test_impossible_partitions_are_refused(partitions: int) -> None:
    with pytest.raises(ConfigError) as error:
        make_case("huge", num_partitions=partitions)
    assert f"num_partitions={partitions}" in str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cases": ("criteo",)}, "['criteo'] must be some of criteo4096"),
        ({"paths": ()}, "must be some of numpy, fast"),
        ({"against": "tensorflow"}, "against='tensorflow' must be 'jax-tpu-embedding'"),
        ({"rounds": 0}, "rounds=0 must be 1 or more"),
        ({"cases": ()}, "cases () must be some of criteo4096"),
        ({"cases": (), "workers": (1,)}, "cases () must be some of criteo4096"),
        ({"workers": (1, -2)}, "workers [-2] must be 0 or more"),
        ({"reader_threads": (1, 0)}, "reader_threads [0] must be 1 or more"),
        ({"hosts": (1, 2, 3)}, "hosts [1, 3] must be powers of two of at least 2"),
        ({"hosts": (2,), "windows": (0, 8)}, "windows [0] must be from 1 to 65536"),
        ({"hosts": (2,), "windows": (65537,)}, "windows [65537] must be from 1 to"),
        ({"windows": (8,)}, "windows [8] are what hosts agree on, and no hosts are"),
    ],
)
def test_wrong_options_are_named(options: dict, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        BenchOptions(**options)
    assert text in str(error.value)


def test_unknown_case_names_the_choices() -> None:
    with pytest.raises(ConfigError) as error:
        make_case("criteo", num_partitions=32)
    assert "'criteo' is not one of criteo4096, criteo16384" in str(error.value)


@pytest.mark.parametrize("path", ["numpy", "fast"])
def test_measuring_beside_the_peer_gives_every_ratio(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # measure sets it; so it is put back afterwards.
    monkeypatch.setenv(KERNEL_VARIABLE, "")
    row = measure("criteo4096", 32, path, PEER, 2)
    assert (row["case"], row["n_partitions"], row["path"]) == ("criteo4096", 32, path)
    for key in RATIOS:
        low, high = row["spread"][key]
        assert 0 < low <= row[key] <= high
    ns = row["ns_per_id"]
    assert ns["once_cpu"] >= ns["compute_cpu"] > 0
    assert ns["changed_wall"] > ns["once_wall"] > 0
    assert row["repartition_ns_per_slot"] > 0
    json.dumps(row)


def test_without_a_peer_figures_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_VARIABLE, "")
    row = measure("criteo4096", 32, "numpy", None, 1)
    assert not set(RATIOS) & set(row)
    assert row["ns_per_id"]["busy_wall"] > 0


@pytest.fixture
def run_command(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command in this process; returns what it wrote to its file."""
    # Fresh processes cost seconds each; what runs in them is tested above.
    monkeypatch.setattr(bench, "_in_fresh_process", lambda work, *a, **k: work(*a, **k))
    monkeypatch.setenv(KERNEL_VARIABLE, "")
    file = tmp_path / "bench.json"

    def run(given: str) -> dict:
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers())
        args = parser.parse_args(["bench", *given.split(), "--json", str(file)])
        assert args.run(args) == 0
        return json.loads(file.read_text())

    return run


def columns_of(printed: str, header: str) -> list[list[str]]:
    """The cells of the lines below the first line with ``header``."""
    lines = iter(printed.splitlines())
    assert any(header in line for line in lines), printed
    return [line.split() for line in lines]


def test_command_prints_a_table_and_writes_json(
    run_command, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    monkeypatch.setattr(
        bench,
        "measure_pipeline",
        lambda name, **k: bench_pipeline.measure_pipeline(name, batches=2, **k),
    )
    started = []
    monkeypatch.setattr(bench, "measure_coordination", started.append)
    given = "--cases criteo4096 --paths numpy fast --partitions 32 --rounds 1"
    result = run_command(f"{given} --against {PEER} --workers 0")
    printed = capsys.readouterr().out
    assert "busy wall" in printed
    assert "main cpu ms" in printed
    assert [row["path"] for row in result["rows"]] == ["numpy", "fast"]
    assert [row["workers"] for row in result["pipelines"]] == [0]
    assert result["pipelines"][0]["wall_ms"] > 0
    # Not asked for.
    assert result["coordination"] == result["growth"] == started == []
    assert "round ms" not in printed
    assert "ids/sample" not in printed


def test_one_command_measures_the_pipeline_with_several_numbers_of_workers(
    run_command, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    def measure_pipeline(name, *, num_partitions, workers, reader_threads):
        return {
            "case": name,
            "n_partitions": num_partitions,
            "workers": workers,
            "reader_threads": reader_threads,
            "wall_ms": 10.0,
            "main_cpu_ms": 2.0,
            "worker_cpu_ms": 6.0 * workers,
        }

    monkeypatch.setattr(bench, "measure_pipeline", measure_pipeline)
    monkeypatch.setattr(bench, "run_bench", lambda options: iter(()))
    rows = run_command("--cases huge --partitions 32 --workers 0 1 2")["pipelines"]
    assert [row["workers"] for row in rows] == [0, 1, 2]
    assert [row["main_share"] for row in rows] == [None, 0.25, 0.143]
    table = columns_of(capsys.readouterr().out, "main share")
    assert [line[-1] for line in table] == ["-", "25%", "14%"]
    command = "--cases huge --partitions 32 --workers 0 1 --reader-threads 1 3"
    rows = run_command(command)["pipelines"]
    pairs = [(row["workers"], row["reader_threads"]) for row in rows]
    assert pairs == [(0, 1), (0, 3), (1, 1), (1, 3)]
    table = columns_of(capsys.readouterr().out, "main share")
    assert [line[3] for line in table] == ["1", "3", "1", "3"]


def test_the_main_share_is_unknown_where_the_workers_are() -> None:
    row = {"workers": 1, "main_cpu_ms": 2.0, "worker_cpu_ms": None}
    assert main_share(row) is None
    assert main_share({**row, "worker_cpu_ms": 2.0}) == 0.5


def test_hosts_agree_in_processes_of_their_own() -> None:
    rows = measure_coordination(2, (1, 4), rounds=3)
    assert [(row["hosts"], row["window"]) for row in rows] == [(2, 1), (2, 4)]
    for row in rows:
        assert row["round_ms"] > 0
        # Per batch; rounded to four digits.
        assert row["batch_ms"] == pytest.approx(row["round_ms"] / row["window"], 0.01)
        assert row["cpu_ms"] > 0


@pytest.mark.parametrize(
    ("given", "windows"), [("--windows 1 16", (1, 16)), ("", (1, 8, 32))]
)
def test_hosts_can_be_measured_alone(
    given, windows, run_command, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    def measure_coordination(hosts, windows):
        figures = {"round_ms": 8.0, "batch_ms": 8 / hosts, "cpu_ms": 0.5}
        return [{"hosts": hosts, "window": k, **figures} for k in windows]

    monkeypatch.setattr(bench, "measure_coordination", measure_coordination)
    result = run_command(f"--cases --hosts 2 4 {given}")
    assert result["rows"] == result["pipelines"] == result["growth"] == []
    assert result["coordination"] == [
        *measure_coordination(2, windows),
        *measure_coordination(4, windows),
    ]
    table = columns_of(capsys.readouterr().out, "ms/batch")
    assert table[-1] == ["4", str(windows[-1]), "8.0", "2.0", "0.5"]


def test_growth_has_the_sizes_that_count_and_equally_many_ids() -> None:
    tables, partitions, ids = zip(*growth_sizes(), strict=True)
    assert {1, 10, 100, 1000} == set(tables) == set(ids)
    assert {8, 8192} == {min(partitions), max(partitions)}
    assert len(growth_sizes()) == len(set(growth_sizes()))
    for count, _, hotness in growth_sizes():
        assert bench_growth.GROWTH_IDS % (count * hotness * 32) == 0


def test_growth_is_measured_per_id(
    run_command, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    monkeypatch.setattr(bench_growth, "GROWTH_IDS", 6400)
    monkeypatch.setattr(bench, "growth_sizes", lambda: [(2, 64, 10)])
    result = run_command("--cases --paths numpy fast --growth --rounds 2")
    rows = result["growth"]
    assert [row["path"] for row in rows] == ["numpy", "fast"]
    for row in rows:
        assert (row["tables"], row["n_partitions"]) == (2, 64)
        assert (row["ids_per_sample"], row["ids"]) == (10, 6400)
        assert row["ns_per_id"] > 0
        assert row["slots"] > 0
        assert row["peak_bytes_per_id"] >= 0
    table = columns_of(capsys.readouterr().out, "peak B/id")
    assert [line[:4] for line in table] == [["2", "64", "10", p] for p in KERNELS]


def test_many_small_tables_take_more_slots_per_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KERNEL_VARIABLE, "")
    monkeypatch.setattr(bench_growth, "GROWTH_IDS", 6400)
    few = measure_growth(1, 32, 10, "numpy", 1)
    assert measure_growth(2, 8, 10, "numpy", 1)["ids"] == few["ids"]
    many = measure_growth(200, 32, 1, "numpy", 1)
    assert few["ids"] == many["ids"] == 6400
    # One id of each table and SparseCore, in slots of eight.
    assert many["slots"] > 4 * few["slots"]


def test_every_case_runs_in_a_process_of_its_own() -> None:
    options = BenchOptions(
        cases=("criteo4096",), partitions=(32,), paths=("numpy",), rounds=1
    )
    (row,) = bench.run_bench(options)
    assert row["ns_per_id"]["once_cpu"] > 0


def test_without_numba_the_numpy_kernel_alone_is_measured(monkeypatch):
    assert BenchOptions().paths == KERNELS
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert BenchOptions().paths == ("numpy",)
