"""What is planned is what a job reaches; its hosts are threads of one process."""

import contextlib
import dataclasses
import html.parser
import io
import itertools
import json

import grain
import numpy as np
import pytest

from grain_sparsecore.cli import main
from grain_sparsecore.cli.reporting import save_limits
from grain_sparsecore.config import LimitsConfig, load_config
from grain_sparsecore.errors import ConfigError, InputError
from grain_sparsecore.limits import GrowthPolicy
from grain_sparsecore.limits_file import load_limits
from grain_sparsecore.overflow import StackCaps
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.plan import plan, topologies_to_plan
from grain_sparsecore.report import report_html
from grain_sparsecore.report.plan_page import plan_record
from grain_sparsecore.simulate import simulate
from grain_sparsecore.sources import make_batches
from grain_sparsecore.specs import Topology
from tests.planned_jobs import CONFIG, job


@pytest.fixture
def path(tmp_path):
    (tmp_path / "job.toml").write_text(CONFIG)
    return tmp_path / "job.toml"


@pytest.mark.parametrize("kind", ["exact", "headroom", "geometric"])
@pytest.mark.parametrize(("devices", "hosts", "sc"), [(1, 1, 2), (4, 2, 2), (4, 4, 4)])
def test_the_plan_is_what_the_job_reaches(path, tmp_path, devices, hosts, sc, kind):
    config = load_config(path, overrides=[f"limits.growth.kind={kind}"])
    topology = Topology(
        global_device_count=devices,
        local_device_count=devices // hosts,
        num_sc_per_device=sc,
    )
    (planned,) = plan(config, [topology], batches=22)
    assert planned.steps == 24
    reached = job(config, topology, 24)
    assert planned.limits == reached[-1]
    changes = sum(a != b for a, b in itertools.pairwise(reached))
    assert planned.changes[kind] == changes
    # Started from the plan, the job has nothing to change.

    save_limits(tmp_path / "l.json", planned.limits, layout=planned.layout)
    warm = job(config, topology, 24, file=(str(tmp_path / "l.json"),))
    assert set(warm) == {planned.limits}


def test_the_numbers_of_a_plan(path):
    config = load_config(path)
    topology = Topology(
        global_device_count=4, local_device_count=2, num_sc_per_device=2
    )
    done = []
    (planned,) = plan(
        config, [topology], batches=8, on_progress=lambda *now: done.append(now)
    )
    assert done == [(2 * i, 16) for i in range(1, 9)]
    assert planned.hosts_seen == 2
    for name, stack in planned.stacks.items():
        quantiles = list(stack.quantiles.values())
        for low, high in itertools.pairwise(quantiles):
            assert all(a <= b for a, b in zip(low, high, strict=True))
        most = stack.quantiles["max"]
        limits = planned.limits[name]
        assert stack.limits == limits
        assert most[0] <= limits.max_ids_per_partition
        assert most[2] <= limits.buffer_size_per_device
        # 12 bytes a slot, 4 a row pointer, 8 of those for each SparseCore.
        assert stack.buffer_bytes == limits.buffer_size_per_device * 12 + 2 * 8 * 4
        assert 0 < stack.waste < 1
        rates = [stack.drop_rates[q] for q in ("p50", "p99", "p99.9")]
        assert rates == sorted(rates, reverse=True)
        assert stack.skew >= 1
        assert stack.top_ids[0].share >= stack.top_ids[-1].share
    # 900 rows are padded to 960, 8 columns, 4 devices.
    assert planned.stacks["item"].table_bytes == 960 * 8 * 4 // 4
    json.dumps(planned.to_plain())


@pytest.mark.parametrize(
    "cap",
    [
        StackCaps(max_ids_cap=12),
        StackCaps(max_unique_ids_cap=6),
        StackCaps(buffer_cap_bytes=768),
    ],
)
@pytest.mark.parametrize("order", ["prefix", "balanced"])
def test_drop_rates_are_those_of_a_job_that_drops(path, cap, order):
    config = load_config(path)
    topology = Topology(
        global_device_count=1, local_device_count=1, num_sc_per_device=2
    )
    layout = config.layout(topology)
    caps = {"small": cap}
    limits = LimitsConfig(on_overflow="drop", drop_order=order, stack=caps)
    config = dataclasses.replace(config, limits=limits)
    (planned,) = plan(config, [topology], batches=8)
    batches = make_batches(config, layout, host_index=0, host_count=1)
    it = iter(sparsecore_pipeline(batches, config, layout=layout))
    lost = kept = 0
    for _ in range(8):
        batch = next(it)["sparsecore"]
        lost += int(batch.drops.per_feature[:, 1].sum())
        kept += int((batch.embedding_ids["small"] != 2**31 - 1).sum())
    assert lost > 0
    stack = planned.stacks["small"]
    assert stack.drop_rates["cap"] == lost / (lost + kept)
    assert planned.limits == it.coordinator.limits
    slots = planned.limits["small"].buffer_size_per_device
    assert stack.waste == pytest.approx(1 - kept / (8 * slots))


def test_a_plan_does_not_fail_where_the_job_would(path):
    config = load_config(path)
    caps = {"small": StackCaps(max_ids_cap=12)}
    config = dataclasses.replace(config, limits=LimitsConfig(stack=caps))
    topology = Topology(
        global_device_count=1, local_device_count=1, num_sc_per_device=2
    )
    (planned,) = plan(config, [topology], batches=4)
    assert planned.stacks["small"].limits.max_ids_per_partition > 12
    assert planned.stacks["small"].drop_rates["cap"] > 0


def test_fewer_hosts_give_a_lower_bound(path):
    config = load_config(path, overrides=["limits.growth.kind=exact"])
    topology = Topology(
        global_device_count=4, local_device_count=1, num_sc_per_device=2
    )
    (whole,) = plan(config, [topology], batches=8)
    (part,) = plan(config, [topology], batches=8, max_hosts=2)
    assert part.hosts_seen == 2
    assert (part.limits.to_array() <= whole.limits.to_array()).all()


def test_topologies_with_the_same_hosts_share_the_reading(path, monkeypatch):
    config = load_config(path)
    read = []
    import grain_sparsecore.plan as module

    real = module.make_batches
    monkeypatch.setattr(
        module, "make_batches", lambda *a, **k: read.append(k) or real(*a, **k)
    )
    shapes = [
        Topology(global_device_count=g, local_device_count=g // 2, num_sc_per_device=s)
        for g, s in ((2, 2), (2, 4), (4, 2))
    ]
    together = plan(config, shapes, batches=4)
    assert len(read) == 2
    for shape, one in zip(shapes, together, strict=True):
        (alone,) = plan(config, [shape], batches=4)
        assert alone.limits == one.limits
        assert alone.layout.topology == shape


def hot_samples():
    """Every table is hottest at its low ids, as after sorting by frequency."""
    rng = np.random.default_rng(0)
    ids = rng.geometric(0.5, (800, 3)) - 1
    return grain.MapDataset.source(
        [{"item": i, "words": w, "place": p} for i, w, p in (ids % 64).tolist()]
    )


def test_a_rotation_is_suggested_where_it_helps(path):
    source = 'source={kind="python",function="tests.test_plan:hot_samples"}'
    topology = Topology(
        global_device_count=8, local_device_count=8, num_sc_per_device=2
    )
    # Unrotated, the hot ids of the two small tables meet in partition 0.
    config = load_config(path, overrides=[source, "topology.rotation=0"])
    (planned,) = plan(config, [topology], batches=8)
    assert planned.rotation is not None
    better = load_config(
        path, overrides=[source, f"topology.rotation={planned.rotation}"]
    )
    (rotated,) = plan(better, [topology], batches=8)
    assert rotated.stacks["small"].skew < 0.8 * planned.stacks["small"].skew
    assert rotated.rotation is None


@pytest.mark.parametrize(("on_exhausted", "steps"), [("stop", 3), ("pad", 4)])
def test_hosts_of_unequal_length_end_as_in_a_job(path, on_exhausted, steps):
    overrides = [
        "source.num_records=127",
        f"pipeline.on_exhausted={on_exhausted}",
        "limits.growth.kind=exact",
    ]
    config = load_config(path, overrides=overrides)
    topology = Topology(
        global_device_count=2, local_device_count=1, num_sc_per_device=2
    )
    (planned,) = plan(config, [topology], batches=8)
    done = simulate(config, topology, steps=8)
    assert planned.steps == done.steps == steps
    assert planned.limits == done.limits[-1][1]


def test_topologies_to_plan(path):
    config = load_config(path)

    def shapes(**options):
        options = {"chips": None, "num_sc": None, "devices_per_host": None, **options}
        return [
            (t.global_device_count, t.local_device_count, t.num_sc_per_device)
            for t in topologies_to_plan(config, **options)
        ]

    assert shapes(chips=[2, 8], num_sc=[2, 4]) == [
        (2, 2, 2),
        (2, 2, 4),
        (8, 4, 2),
        (8, 4, 4),
    ]
    assert shapes(chips=[8], devices_per_host=2) == [(8, 2, 2)]
    # This process has eight devices.
    assert shapes() == [(8, 8, 2)]
    with pytest.raises(ConfigError, match="is not a power of two"):
        shapes(chips=[3])


def test_without_a_whole_batch_there_is_no_plan(path):
    config = load_config(path, overrides=["source.num_records=20"])
    topology = Topology(
        global_device_count=2, local_device_count=1, num_sc_per_device=2
    )
    with pytest.raises(InputError, match="a host of 2 has less than one batch of 16"):
        plan(config, [topology])


def run(*args):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["plan", *map(str, args)])
    return code, out.getvalue()


def test_the_command_writes_everything(path, tmp_path):
    code, out = run(
        path,
        "--chips=2,4",
        "--devices-per-host=2",
        "--batch-size=16",
        "--batches=4",
        "--max-hosts=1",
        f"--json={tmp_path / 'plan.json'}",
        f"--limits={tmp_path / 'limits.json'}",
        f"--report={tmp_path / 'plan.html'}",
        f"--plot={tmp_path / 'plots'}",
    )
    assert code == 0
    for text in (
        "1 host * 2 devices * 2 SparseCores = 4 partitions",
        "4 steps of 1 of its hosts",
        "other hosts may need more: the limits are an estimate",
        "recompiles after the first step, by growth policy: exact",
        "limits written to",
    ):
        assert text in out
    plain = json.loads((tmp_path / "plan.json").read_text())
    assert [t["topology"]["global_device_count"] for t in plain["topologies"]] == [2, 4]
    config = load_config(path)
    for count in (2, 4):
        topology = Topology(
            global_device_count=count, local_device_count=2, num_sc_per_device=2
        )
        limits = load_limits(
            tmp_path / f"limits-{count}x2-b16.json", layout=config.layout(topology)
        )
        (stack,) = (
            t["stacks"]["item"]["limits"]
            for t in plain["topologies"]
            if t["topology"]["global_device_count"] == count
        )
        assert limits["item"].max_ids_per_partition == stack["max_ids_per_partition"]
    text = (tmp_path / "plan.html").read_text()
    assert "Plan for 4 devices * 2 SparseCores, 16 samples per host" in text
    assert (tmp_path / "plots" / "plan-buffers.png").exists()


def test_one_device_has_no_plural(path, tmp_path):
    report = tmp_path / "plan.html"
    options = ["--chips=1", "--devices-per-host=1", "--num-sc=1", "--batches=2"]
    assert main(["plan", str(path), *options, f"--report={report}"]) == 0
    assert "Plan for 1 device * 1 SparseCore, 16 samples per host" in report.read_text()


def test_wrong_files_are_refused_before_any_work(path, tmp_path, capsys):
    for option in ("--report", "--limits", "--json"):
        assert main(["plan", str(path), option, str(tmp_path)]) == 2
        assert "is a folder" in capsys.readouterr().err
    assert main(["plan", str(path), "--plot", str(path)]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", str(path), "--chips", "8,none"])
    assert "'none' is no whole number from 1 up" in capsys.readouterr().err


def test_the_page_of_a_plan(path):
    config = load_config(path)
    shapes = topologies_to_plan(config, chips=[2, 4], num_sc=None, devices_per_host=2)
    plans = plan(config, shapes, batches=4)
    text = report_html(plan_record(plans, title="job.toml", config=config))
    html.parser.HTMLParser().feed(text)
    assert 'id="plan-buffers"' in text
    assert "lost at p99.9" in text
    assert GrowthPolicy().kind in text
