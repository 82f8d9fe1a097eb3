"""Limits that start where an earlier job, a plan or another system left them."""

import dataclasses
import json

import grain
import numpy as np
import pytest

from grain_sparsecore.config import (
    Config,
    LimitsConfig,
    PipelineConfig,
    TopologyConfig,
    read_config,
)
from grain_sparsecore.errors import ConfigError, LimitsExceededError
from grain_sparsecore.fdo import export_fdo
from grain_sparsecore.limits_file import LimitsFile
from grain_sparsecore.overflow import OverflowPolicy, StackCaps
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.specs import FeatureSpec, TableSpec
from grain_sparsecore.warm_start import load_start_limits

BATCH = 16
BATCHES = 12


def config_of(devices=2, **limits):
    return Config(
        topology=TopologyConfig(
            num_sc_per_device=2,
            global_device_count=devices,
            local_device_count=devices,
        ),
        tables=(
            TableSpec(name="item", vocabulary_size=300, embedding_dim=8),
            TableSpec(name="word", vocabulary_size=90, embedding_dim=8),
        ),
        features=(
            FeatureSpec(name="clicked", table="item"),
            FeatureSpec(name="words", table="word"),
        ),
        pipeline=PipelineConfig(batch_size=BATCH, window=4),
        limits=LimitsConfig(**limits),
    )


def batches():
    rng = np.random.default_rng(0)
    return grain.MapDataset.source(
        [
            {
                # More and more ids, so that limits grow.
                "clicked": rng.integers(0, 300, (BATCH, 1 + 2 * i)),
                "words": rng.integers(0, 90, (BATCH, 2)),
            }
            for i in range(BATCHES)
        ]
    )


def run(config):
    it = iter(sparsecore_pipeline(batches(), config))
    return it, [element["sparsecore"] for element in it]


@pytest.fixture(scope="module")
def cold():
    """A run from nothing: its last limits, and a state in the middle."""
    it = iter(sparsecore_pipeline(batches(), config_of()))
    for _ in range(6):
        next(it)
    state = it.get_state()
    last = [element["sparsecore"] for element in it][-1]
    assert it.coordinator.limit_changes == 2
    return last.limits, state


def test_a_file_of_what_is_reached_leaves_no_change(cold, tmp_path):
    limits, _ = cold
    path = tmp_path / "limits.json"
    LimitsFile.of(limits, layout=config_of().layout()).save(path)
    it, seen = run(config_of(file=str(path)))
    assert {batch.limits for batch in seen} == {limits}
    assert it.coordinator.limit_changes == 0
    # Frozen, the same limits still hold everything.
    _, seen = run(config_of(file=str(path), frozen=True))
    assert {batch.limits for batch in seen} == {limits}


def test_a_checkpoint_is_a_source_of_limits(cold, tmp_path):
    _, state = cold
    middle = load_state_limits(state)
    single = tmp_path / "state.json"
    single.write_text(json.dumps({"outer": {"inner": state}}))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "process_0-of-1.json").write_text(json.dumps(state, indent=4))
    for path in (single, folder):
        _, seen = run(config_of(file=str(path)))
        assert np.array_equal(seen[0].limits.to_array(), middle)
    # It is known what the state was for.
    with pytest.raises(ConfigError, match="num_partitions: 4 in the file, 8 here"):
        load_start_limits([single], layout=config_of(devices=4).layout())
    adapted = load_start_limits(
        [single], layout=config_of(devices=4).layout(), adapt=True
    )
    assert (adapted.to_array()[:, 0] >= middle[:, 0]).all()


def damages(state):
    """States as they may be after somebody has edited them."""
    inner = state
    while "limits" not in inner:
        inner = inner["parent"]
    rows = inner["limits"]
    for limits in (
        [[10**30, 1, 8]] * len(rows),
        [[2**40, 1, 8]] * len(rows),
        [[-1, 1, 8]] * len(rows),
        [[1.9, 1, 8]] * len(rows),
        [row[:2] for row in rows],
        rows[:-1],
        None,
    ):
        yield {**inner, "limits": limits}
    saved = json.loads(inner["configuration"])
    for change in (
        {"tables": []},
        {"topology": {**saved["topology"], "local_device_count": 0}},
        {"topology": None},
        {"batch_size": "many"},
    ):
        yield {**inner, "configuration": json.dumps({**saved, **change})}


def test_damaged_states_are_no_source_of_limits(cold, tmp_path):
    _, state = cold
    layout = config_of().layout()
    path = tmp_path / "state.json"
    for damaged in damages(state):
        path.write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match="is damaged, or of another release"):
            load_start_limits([path], layout=layout)


def load_state_limits(state):
    while "limits" not in state:
        state = state["parent"]
    return np.array(state["limits"])


def test_fdo_files_are_a_source_of_limits(cold, tmp_path):
    limits, _ = cold
    export_fdo(tmp_path / "fdo", limits, layout=config_of().layout())
    it, seen = run(config_of(file=str(tmp_path / "fdo")))
    assert {batch.limits for batch in seen} == {limits}
    assert it.coordinator.limit_changes == 0


def test_fdo_files_that_do_not_count_are_told(cold, tmp_path, caplog):
    limits, _ = cold
    layout = config_of().layout()
    path = export_fdo(tmp_path / "fdo", limits, layout=layout)
    assert load_start_limits([tmp_path / "fdo"], layout=layout) == limits
    assert not caplog.records
    name = path.name.replace("stats_0", "stats_9")
    (tmp_path / "fdo" / name).write_bytes(path.read_bytes())
    assert load_start_limits([tmp_path / "fdo"], layout=layout) == limits
    (record,) = caplog.records
    assert "1 of 2 files belong to another job" in record.getMessage()
    assert f"{name}: written by process 9, but the job has 1" in record.getMessage()


def test_several_files_are_merged(cold, tmp_path):
    limits, state = cold
    layout = config_of().layout()
    LimitsFile.of(limits, layout=layout).save(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(json.dumps(state))
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    assert load_start_limits(paths, layout=layout) == limits
    assert load_start_limits(paths[::-1], layout=layout) == limits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no limits file"),
        ("nothing", "is not JSON"),
        pytest.param("1" * 5000, "is not JSON", id="digits"),
        pytest.param("[" * 200_000, "is not JSON", id="depth"),
        (
            '{"version": 1, "parent": 0, "start": 0, "limits": [], '
            '"configuration": "{}"}',
            "is damaged, or of another release",
        ),
    ],
)
def test_files_without_limits(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_start_limits([tmp_path / "x.json"], layout=config_of().layout())
    with pytest.raises(ConfigError, match="has no statistics yet"):
        load_start_limits([tmp_path], layout=config_of().layout())
    with pytest.raises(ConfigError, match="does not exist"):
        load_start_limits([tmp_path / "y.json"], layout=config_of().layout())


CAPS = {"item": StackCaps(max_ids_cap=12)}


def test_caps_and_drops_from_the_configuration():
    with pytest.raises(LimitsExceededError, match=r"raise limits\.stack\.item"):
        run(config_of(stack=CAPS))
    _, seen = run(config_of(stack=CAPS, on_overflow="drop"))
    dropped = sum(int(batch.drops.per_feature[0, 0]) for batch in seen)
    entries = sum(int(batch.drops.per_feature[0, 1]) for batch in seen)
    # Raw ids with duplicates: stage 1 was told to count them.
    assert dropped > entries > 0
    assert seen[-1].limits["item"].max_ids_per_partition == 12


def test_the_configuration_of_limits_in_toml():
    data = {
        "topology": {
            "num_sc_per_device": 2,
            "global_device_count": 1,
            "local_device_count": 1,
        },
        "pipeline": {"batch_size": 4},
        "table": [{"name": "item", "vocabulary_size": 9, "embedding_dim": 8}],
        "feature": [{"name": "clicked", "table": "item"}],
        "limits": {
            "file": "limits.json",
            "frozen": True,
            "on_overflow": "drop",
            "drop_order": "balanced",
            "stack": {"item": {"max_ids_cap": 64, "buffer_cap_bytes": 4096}},
        },
    }
    config = read_config(data, origin="x.toml")
    assert config.limits.file == ("limits.json",)
    assert config.limits.overflow == OverflowPolicy(
        on_overflow="drop",
        drop_order="balanced",
        frozen=True,
        caps={"item": StackCaps(max_ids_cap=64, buffer_cap_bytes=4096)},
    )
    assert config.canonical()["limits"]["stack"]["item"]["max_ids_cap"] == 64
    json.dumps(config.canonical())
    override = read_config(
        data, origin="x.toml", overrides=["limits.stack.item.max_ids_cap=32"]
    )
    assert override.limits.stack["item"].max_ids_cap == 32
    assert override != config
    assert dataclasses.replace(config) == config


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"file": 3}, "limits.file: file must be a list of strings, not 3"),
        ({"file": ["a", "a"]}, "limits.file: file holds 'a' twice"),
        ({"frozen": "yes"}, "limits.frozen: frozen must be true or false"),
        ({"on_overflow": "cut"}, "on_overflow='cut' is not one of error, drop"),
        ({"drop_order": "x"}, "drop_order='x' is not one of prefix, balanced"),
        ({"stack": 3}, "limits.stack: write [limits.stack.NAME], not 3"),
        ({"stack": {"item": 3}}, "limits.stack.item: must be a section of keys"),
        (
            {"stack": {"item": {"max_ids_cap": 0}}},
            "limits.stack.item.max_ids_cap: max_ids_cap must be an integer of 1 or",
        ),
        (
            {"stack": {"item": {"max_id_cap": 1}}},
            "limits.stack.item.max_id_cap: there is no such key; did you mean "
            "'max_ids_cap'?",
        ),
        (
            {"stack": {"iten": {"max_ids_cap": 8}}},
            "limits.stack.iten: there is no such stack; the stacks are item",
        ),
    ],
)
def test_errors_of_the_limits_section(limits, message):
    data = {
        "topology": {
            "num_sc_per_device": 2,
            "global_device_count": 1,
            "local_device_count": 1,
        },
        "pipeline": {"batch_size": 4},
        "table": [{"name": "item", "vocabulary_size": 9, "embedding_dim": 8}],
        "feature": [{"name": "clicked", "table": "item"}],
        "limits": limits,
    }
    with pytest.raises(ConfigError) as error:
        read_config(data, origin="x.toml")
    assert message in str(error.value)
    assert "1 error:" in str(error.value)
