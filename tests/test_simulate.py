"""A simulated job of many hosts is the job that its hosts would run."""

import collections
import dataclasses
import json

import pytest

from grain_sparsecore import cli
from grain_sparsecore.config import LimitsConfig, load_config
from grain_sparsecore.errors import ConfigError, InputError, LimitsExceededError
from grain_sparsecore.limits_file import load_limits
from grain_sparsecore.overflow import StackCaps
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.simulate import round_seconds, simulate
from grain_sparsecore.sources import make_batches
from grain_sparsecore.specs import Topology
from tests.coordination_helpers import run_hosts
from tests.test_plan import CONFIG

HOSTS = 4


@pytest.fixture
def path(tmp_path):
    (tmp_path / "job.toml").write_text(CONFIG)
    return tmp_path / "job.toml"


def topology_of(hosts=HOSTS):
    return Topology(
        global_device_count=hosts, local_device_count=1, num_sc_per_device=2
    )


def job(config, topology):
    """Runs all hosts to the end of the data."""
    layout = config.layout(topology)

    def make(host, reducer):
        batches = make_batches(
            config, layout, host_index=host, host_count=topology.num_hosts
        )
        return sparsecore_pipeline(batches, config, layout=layout, reducer=reducer)

    return run_hosts(make, topology.num_hosts)


def changes_of(limits):
    changed = [(0, limits[0])]
    for step, one in enumerate(limits):
        if one != changed[-1][1]:
            changed.append((step, one))
    return changed


@pytest.mark.parametrize("policy", ["stop", "pad"])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_limits_change_where_those_of_the_job_do(path, window, policy):
    # 1,002 records: 16 steps of 16 samples on two hosts, 15 on the others.
    config = load_config(
        path,
        overrides=[
            "source.num_records=1002",
            "source.epochs=1",
            f"pipeline.window={window}",
            f"pipeline.on_exhausted={policy}",
            "pipeline.on_partial_batch=drop",
        ],
    )
    runs = job(config, topology_of())
    assert [run.error for run in runs] == [None] * HOSTS
    done = simulate(config, topology_of(), steps=100)
    for run in runs:
        batches = [e["sparsecore"] for e in run.elements]
        assert len(batches) == done.steps
        assert changes_of([b.limits for b in batches]) == list(done.limits)
    assert done.stopped
    for name, share in done.waste.items():
        ids = [e["sparsecore"].embedding_ids[name] for r in runs for e in r.elements]
        padding = sum(int((one == 2**31 - 1).sum()) for one in ids)
        assert share == pytest.approx(padding / sum(one.size for one in ids))


def test_a_cap_stops_the_simulation_with_the_words_of_the_job(path):
    config = load_config(path)
    caps = LimitsConfig(stack={"small": StackCaps(max_ids_cap=12)})
    config = dataclasses.replace(config, limits=caps)
    runs = job(config, topology_of())
    with pytest.raises(LimitsExceededError) as error:
        simulate(config, topology_of(), steps=100)
    assert {str(run.error) for run in runs} == {str(error.value)}


def test_drops_are_counted_over_all_hosts(path):
    overrides = ["source.num_records=1024", "source.epochs=1"]
    config = load_config(path, overrides=overrides)
    limits = LimitsConfig(
        on_overflow="drop",
        drop_order="balanced",
        stack={"small": StackCaps(max_ids_cap=12)},
    )
    config = dataclasses.replace(config, limits=limits)
    runs = job(config, topology_of())
    lost = sum(
        int(e["sparsecore"].drops.per_feature[:, 1].sum())
        for run in runs
        for e in run.elements
    )
    done = simulate(config, topology_of(), steps=100)
    assert done.dropped == lost > 0


def test_the_cost_is_that_of_the_model(path):
    # The figures of a ring with hops of 100 us.
    assert round_seconds(64, 100e-6) == pytest.approx(0.0126)
    assert round_seconds(1024, 100e-6) == pytest.approx(0.2046)
    assert round_seconds(1, 100e-6) == 0
    done = simulate(load_config(path), topology_of(), steps=4)
    assert done.round_seconds == pytest.approx(600e-6)
    assert done.cost_per_batch[1] == pytest.approx(600e-6)
    assert done.cost_per_batch[64] == pytest.approx(600e-6 / 64)
    # The handshake and one window.
    assert done.rounds == 2
    assert not done.stopped


def test_without_a_whole_batch_there_is_nothing_to_simulate(path):
    config = load_config(path, overrides=["source.num_records=20", "source.epochs=1"])
    with pytest.raises(InputError, match="there is no step to simulate"):
        simulate(config, topology_of(), steps=4)


def test_the_command(path, tmp_path, capsys):
    arguments = [
        "simulate",
        str(path),
        "--hosts=8",
        "--devices-per-host=2",
        "--steps=8",
        f"--json={tmp_path / 's.json'}",
        f"--limits={tmp_path / 'l.json'}",
        f"--report={tmp_path / 'r.html'}",
    ]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    for text in (
        "8 hosts * 2 devices * 2 SparseCores = 32 partitions",
        "8 steps on every host",
        "all-reduce of 4 KiB over 8 hosts",
        "2 * (hosts - 1) hops of 100 us one after another",
        "1.4 ms a round",
        "    64  21.9 µs",
    ):
        assert text in out
    plain = json.loads((tmp_path / "s.json").read_text())
    topology = Topology(
        global_device_count=16, local_device_count=2, num_sc_per_device=2
    )
    limits = load_limits(tmp_path / "l.json", layout=load_config(path).layout(topology))
    assert limits.to_plain() == plain["limits"]
    assert plain["recompiles"] == plain["limit_changes"]
    text = (tmp_path / "r.html").read_text()
    assert 'id="agreement-cost"' in text
    assert 'id="simulated-waste"' in text


def test_hosts_must_make_a_power_of_two(path):
    with pytest.raises(ConfigError, match="is not a power of two"):
        topology_of(3)
    assert cli.main(["simulate", str(path), "--hosts=3"]) == 2


@pytest.mark.parametrize("cap", [2, 9])
def test_batches_are_split_as_in_the_job(path, cap):
    config = load_config(
        path,
        overrides=[
            "limits.on_overflow=minibatch",
            f"limits.stack.small.max_ids_cap={cap}",
            "source.num_records=1002",
            "source.epochs=1",
        ],
    )
    runs = job(config, topology_of())
    if cap == 2:
        with pytest.raises(LimitsExceededError) as error:
            simulate(config, topology_of(), steps=100)
        assert "single one of the 64 buckets" in str(error.value)
        assert {str(run.error) for run in runs} == {str(error.value)}
        return
    done = simulate(config, topology_of(), steps=100)
    assert len(done.minibatches) > 1
    for run in runs:
        batches = [e["sparsecore"] for e in run.elements]
        counts = [int(b.num_minibatches[0]) for b in batches]
        assert collections.Counter(counts) == done.minibatches
        assert changes_of([b.limits for b in batches]) == list(done.limits)
    assert json.loads(done.to_json())["minibatches"] == {
        str(k): n for k, n in done.minibatches.items()
    }
