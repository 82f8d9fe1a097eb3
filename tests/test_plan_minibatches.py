"""Plans of jobs that split batches; their hosts are threads of one process."""

import dataclasses

import pytest

from grain_sparsecore.cli import main
from grain_sparsecore.cli.plan import describe_plan
from grain_sparsecore.cli.reporting import save_limits
from grain_sparsecore.config import load_config
from grain_sparsecore.errors import ConfigError, LimitsExceededError
from grain_sparsecore.limits_file import load_limits
from grain_sparsecore.plan import plan
from grain_sparsecore.simulate import simulate
from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import theoretical_buffer_size
from tests.planned_jobs import CONFIG, job


@pytest.fixture
def path(tmp_path):
    (tmp_path / "job.toml").write_text(CONFIG)
    return tmp_path / "job.toml"


@pytest.mark.parametrize("hosts", [1, 4])
def test_the_minibatches_of_a_plan_are_those_of_the_job(path, hosts):
    overrides = ["limits.on_overflow=minibatch", "limits.stack.small.max_ids_cap=9"]
    config = load_config(path, overrides=overrides)
    topology = Topology(
        global_device_count=hosts, local_device_count=1, num_sc_per_device=2
    )
    (planned,) = plan(config, [topology], batches=8)
    assert planned.limits == job(config, topology, 8)[-1]
    done = simulate(config, topology, steps=8)
    assert planned.minibatches == done.minibatches
    assert max(planned.minibatches) > 1
    assert planned.unsplittable == 0
    plain = planned.to_plain()
    assert plain["minibatches"] == done.minibatches
    assert plain["unsplittable_steps"] == 0
    # The row pointers of 64 minibatches are part of the buffers.
    assert planned.stacks["small"].buffer_bytes > 64 * 2 * 8 * 4
    assert f"split into up to {max(planned.minibatches)} minibatches" in (
        describe_plan(planned)
    )
    # What is split loses nothing.
    assert "cap" not in planned.stacks["small"].drop_rates


def test_a_capped_buffer_is_planned_as_it_would_have_to_be(path):
    overrides = ["limits.on_overflow=minibatch", "limits.stack.small.max_ids_cap=9"]
    topology = Topology(
        global_device_count=1, local_device_count=1, num_sc_per_device=2
    )
    (free,) = plan(load_config(path, overrides=overrides), [topology], batches=4)
    overrides.append("limits.stack.small.buffer_cap_bytes=384")
    (capped,) = plan(load_config(path, overrides=overrides), [topology], batches=4)
    # As much as is needed, and nothing to grow into.
    size = capped.limits["small"].buffer_size_per_device
    assert 384 // 12 < size < free.limits["small"].buffer_size_per_device
    assert f"needs buffer_size={size}, but" in capped.too_large["small"]
    assert '"minibatch"' not in capped.too_large["small"]


def test_a_buffer_cap_above_the_need_is_no_reason_to_refuse(path):
    overrides = [
        "limits.on_overflow=minibatch",
        "limits.stack.small.max_ids_cap=9",
        "limits.stack.small.buffer_cap_bytes=2400",
        "limits.growth.kind=headroom",
        "limits.growth.factor=3.0",
    ]
    config = load_config(path, overrides=overrides)
    topology = Topology(
        global_device_count=1, local_device_count=1, num_sc_per_device=2
    )
    (planned,) = plan(config, [topology], batches=8)
    assert planned.too_large == {}
    assert planned.limits == job(config, topology, 8)[-1]
    # Without the cap, growth would go further.
    (free,) = plan(
        load_config(path, overrides=[o for o in overrides if "bytes" not in o]),
        [topology],
        batches=8,
    )
    assert planned.limits != free.limits


@pytest.mark.parametrize("adapt", [False, True])
def test_a_job_that_splits_starts_from_its_plan(path, tmp_path, adapt):
    overrides = ["limits.on_overflow=minibatch", "limits.stack.small.max_ids_cap=2"]
    config = load_config(path, overrides=overrides)
    topology = Topology(
        global_device_count=1, local_device_count=1, num_sc_per_device=2
    )
    layout = config.layout(topology)
    limits = dataclasses.replace(config.limits, on_full_bucket="drop")
    config = dataclasses.replace(config, limits=limits)
    (planned,) = plan(config, [topology], batches=8)
    size = planned.limits["small"].buffer_size_per_device
    ids = planned.limits["small"].max_ids_per_partition
    assert size > theoretical_buffer_size(ids, topology)
    file = tmp_path / "l.json"
    save_limits(file, planned.limits, layout=layout)
    warm = job(config, topology, 8, file=(str(file),), adapt=adapt)
    assert set(warm) == {planned.limits}
    # The command that merges files reads it, too; a job that does not split refuses.
    options = [f"--set={o}" for o in overrides]
    assert main(["limits", str(path), str(file), "--chips", "1", *options]) == 0
    with pytest.raises(ConfigError, match=r'unless limits\.on_overflow is "minibatch"'):
        load_limits(file, layout=layout)
    # Made for other devices, it is a bound that has the room of its minibatches.
    other = Topology(global_device_count=2, local_device_count=2, num_sc_per_device=2)
    adapted = load_limits(file, layout=config.layout(other), adapt=True, minibatches=64)
    assert adapted["small"].buffer_size_per_device > theoretical_buffer_size(
        adapted["small"].max_ids_per_partition, other
    )


def test_a_plan_names_steps_that_no_split_can_hold(path):
    config = load_config(
        path,
        overrides=["limits.on_overflow=minibatch", "limits.stack.small.max_ids_cap=2"],
    )
    topology = Topology(
        global_device_count=1, local_device_count=1, num_sc_per_device=2
    )
    (planned,) = plan(config, [topology], batches=4)
    assert planned.unsplittable == planned.steps == 4
    assert "4 steps too full for any split; raise caps" in describe_plan(planned)
    with pytest.raises(LimitsExceededError, match="single one of the 64 buckets"):
        simulate(config, topology, steps=4)
