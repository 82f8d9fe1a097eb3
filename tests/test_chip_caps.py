"""Caps in limits files, and plans that say what a chip cannot hold."""

import dataclasses
import itertools
import json
import types

import pytest

from grain_sparsecore import cli
from grain_sparsecore.chip_caps import (
    FileCaps,
    lowest_caps,
    one_chip,
    overflow_with_file_caps,
    read_caps,
)
from grain_sparsecore.chips import Chip, running_chip
from grain_sparsecore.cli.reporting import save_limits
from grain_sparsecore.config import load_config
from grain_sparsecore.errors import ConfigError, LimitsExceededError
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import LimitsFile
from grain_sparsecore.overflow import StackCaps
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.sources import make_batches
from tests.caps_helpers import JOB, TPU7X, V6E, forget_the_chip, write_caps


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_caps_are_read_and_written_again(job, tmp_path):
    layout = load_config(job).layout()
    path = tmp_path / "limits.json"
    write_caps(path, layout, 3, 2)
    file = LimitsFile.load(path)
    assert file.caps == {"item": StackCaps(max_ids_cap=3, max_unique_ids_cap=2)}
    assert file.caps_found_for == V6E
    file.save(tmp_path / "again.json")
    assert LimitsFile.load(tmp_path / "again.json") == file


def test_limits_that_are_written_over_them_leave_caps_in_place(job, tmp_path, caplog):
    layout = load_config(job).layout()
    path = tmp_path / "limits.json"
    write_caps(path, layout, 3, 2)
    save_limits(path, Limits.start(layout), layout=layout, command="train")
    assert LimitsFile.load(path).caps["item"].max_ids_cap == 3
    assert LimitsFile.load(path).caps_found_for == V6E
    assert caplog.messages == []
    other = dataclasses.replace(layout, batch_size=128)
    save_limits(path, Limits.start(other), layout=other, command="train")
    assert LimitsFile.load(path).caps == {}
    assert LimitsFile.load(path).caps_found_for is None
    assert caplog.messages == [
        f"limits file {str(path)!r}: its caps (stack item) do not count, they were "
        "found for something else: topology.samples_per_sc: 8 in the file, 16 here. "
        "New ones: rehearse CONFIG --topology NAME --find-caps --limits FILE."
    ]


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        ({"itme": {}}, "'caps' must have only the stacks item"),
        ([], "'caps' must have only the stacks item"),
        ({"item": {"ids": 3}}, r"caps\['item'\] must have only the keys max_ids_per_"),
        ({"item": 3}, r"caps\['item'\] must have only the keys"),
        ({"item": {"max_ids_per_partition": 0}}, "max_ids_cap must be an integer of 1"),
    ],
)
def test_damaged_caps_are_refused(job, tmp_path, caps, message):
    layout = load_config(job).layout()
    path = tmp_path / "limits.json"
    LimitsFile.of(Limits.start(layout), layout=layout).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "caps": caps}))
    with pytest.raises(ConfigError, match=message):
        LimitsFile.load(path)


@pytest.mark.parametrize(
    "found_for", [[], {}, {"topology": "v6e:2x2"}, dict.fromkeys(V6E.__dict__, 1)]
)
def test_a_damaged_name_of_the_chip_is_refused(job, tmp_path, found_for):
    path = tmp_path / "limits.json"
    write_caps(path, load_config(job).layout(), 3, 2)
    contents = {**json.loads(path.read_text()), "caps_found_for": found_for}
    path.write_text(json.dumps(contents))
    with pytest.raises(
        ConfigError, match="'caps_found_for' must have the texts topology, device_kind"
    ):
        LimitsFile.load(path)


def test_the_lowest_cap_counts():
    one = {"a": StackCaps(max_ids_cap=5, buffer_cap_bytes=96)}
    two = {"a": StackCaps(max_ids_cap=4, max_unique_ids_cap=9), "b": StackCaps()}
    assert lowest_caps([one, two]) == {
        "a": StackCaps(max_ids_cap=4, max_unique_ids_cap=9, buffer_cap_bytes=96),
        "b": StackCaps(),
    }


def test_caps_found_for_something_else_are_left_out_aloud(job, tmp_path, caplog):
    path = tmp_path / "limits.json"
    config = load_config(job, overrides=[f"limits.file={path}", "limits.adapt=true"])
    layout = config.layout()
    write_caps(path, layout, 3, 2)
    (found,) = read_caps([path], layout=layout)
    assert found.caps["item"].max_ids_cap == 3
    assert overflow_with_file_caps(config, layout).caps["item"].max_ids_cap == 3
    assert caplog.messages == []
    other = dataclasses.replace(layout, batch_size=128)
    assert read_caps([path], layout=other) == []
    assert overflow_with_file_caps(config, other).caps == {}
    assert caplog.messages == [
        f"limits file {str(path)!r}: its caps (stack item) do not count, they were "
        "found for something else: topology.samples_per_sc: 8 in the file, 16 here. "
        "New ones: rehearse CONFIG --topology NAME --find-caps --limits FILE."
    ]


def test_a_file_without_caps_is_nothing_to_talk_about(job, tmp_path, caplog):
    path = tmp_path / "limits.json"
    config = load_config(job, overrides=[f"limits.file={path}", "limits.adapt=true"])
    layout = config.layout()
    LimitsFile.of(Limits.start(layout), layout=layout).save(path)
    other = dataclasses.replace(layout, batch_size=128)
    for one in (layout, other):
        assert overflow_with_file_caps(config, one) == config.limits.overflow
    assert caplog.messages == []


def test_caps_of_another_chip_are_refused(job, tmp_path):
    path = tmp_path / "limits.json"
    config = load_config(job, overrides=[f"limits.file={path}"])
    layout = config.layout()
    write_caps(path, layout, 3, 2, TPU7X)
    for chip in (Chip(topology="v6e:2x2"), Chip(device_kind="TPU v6 lite")):
        with pytest.raises(ConfigError) as error:
            overflow_with_file_caps(config, layout, chip=chip)
        assert str(error.value) == (
            f"the caps in limits file {str(path)!r}, found for tpu7x:2x1x1 (TPU7x, "
            f"libtpu 0.0.50), are not for {chip}: the chips have other memories. Find "
            "caps for it and keep them in a file of their own: rehearse CONFIG "
            "--topology NAME --find-caps --limits FILE."
        )
    for chip in (Chip(topology="tpu7x:2x1x1"), Chip(device_kind="TPU7x"), Chip()):
        policy = overflow_with_file_caps(config, layout, chip=chip)
        assert policy.caps["item"].max_ids_cap == 3


@pytest.mark.parametrize(
    ("chip", "found_for", "another"),
    [
        (Chip(topology="v6e:4x1"), V6E, False),
        (Chip(topology="v5p:2x2x1"), V6E, True),
        (Chip(device_kind="TPU v6e"), V6E, False),
        (Chip(device_kind="TPU v5"), V6E, True),
        (Chip(device_kind="TPU7x"), TPU7X, False),
        (Chip(), V6E, False),
    ],
    ids=str,
)
def test_kinds_of_chips_have_several_names(chip, found_for, another):
    assert chip.is_another(found_for) == another


def test_a_job_on_a_tpu_knows_its_chip(job, tmp_path, monkeypatch):
    assert running_chip() == Chip()
    path = tmp_path / "limits.json"
    config = load_config(job, overrides=[f"limits.file={path}"])
    layout = config.layout()
    batches = make_batches(config, layout, host_index=0, host_count=1)
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
    monkeypatch.setattr("jax.devices", lambda: [device])
    assert running_chip() == Chip(device_kind="TPU v6 lite")
    write_caps(path, layout, 30, 30, TPU7X)
    with pytest.raises(ConfigError, match=r"found for tpu7x.* are not for TPU v6 lite"):
        sparsecore_pipeline(batches, config, layout=layout)
    write_caps(path, layout, 30, 30, V6E)
    assert sparsecore_pipeline(batches, config, layout=layout) is not None


def test_caps_that_do_not_say_their_chip_count_with_a_warning(job, tmp_path, caplog):
    path = tmp_path / "limits.json"
    config = load_config(job, overrides=[f"limits.file={path}"])
    layout = config.layout()
    write_caps(path, layout, 3, 2)
    forget_the_chip(path)
    policy = overflow_with_file_caps(config, layout, chip=Chip(topology="v5p:2x2x1"))
    assert policy.caps["item"].max_ids_cap == 3
    assert policy.cap_origin("item", 0) == (
        f"limits file {str(path)!r}, found for an unknown chip"
    )
    assert caplog.messages == [
        f"limits file {str(path)!r} does not say which chip its caps were found for; "
        "they count all the same. New ones that say it: rehearse CONFIG --topology "
        "NAME --find-caps --limits FILE."
    ]


def file_caps(found_for):
    return FileCaps(path="a.json", caps={}, found_for=found_for)


def test_one_file_holds_the_caps_of_one_kind_of_chip():
    wider = dataclasses.replace(V6E, topology="v6e:4x1")
    assert one_chip([]) is None
    assert one_chip([file_caps(None)]) is None
    assert one_chip([file_caps(None), file_caps(V6E), file_caps(wider)]) == V6E
    with pytest.raises(ConfigError) as error:
        one_chip([file_caps(V6E), file_caps(TPU7X)])
    assert str(error.value) == (
        "caps of two kinds of chips do not go into one file: limits file 'a.json', "
        "found for v6e:2x2 (TPU v6 lite, libtpu 0.0.42.1); limits file 'a.json', found "
        "for tpu7x:2x1x1 (TPU7x, libtpu 0.0.50). Keep a file for each."
    )


def test_a_pipeline_stops_at_the_caps_of_its_file(job, tmp_path):
    path = tmp_path / "limits.json"
    config = load_config(job, overrides=[f"limits.file={path}"])
    layout = config.layout()
    write_caps(path, layout, 3, 3)
    batches = make_batches(config, layout, host_index=0, host_count=1)
    with pytest.raises(
        LimitsExceededError,
        match=r"stack 'item'.*max_ids_cap allows 3, by limits file '.*limits.json', "
        r"found for v6e:2x2 .*set limits.on_overflow = .* or find caps again with",
    ):
        next(iter(sparsecore_pipeline(batches, config)))
    dropping = load_config(
        job, overrides=[f"limits.file={path}", "limits.on_overflow=drop"]
    )
    for element in itertools.islice(sparsecore_pipeline(batches, dropping), 2):
        assert element["sparsecore"].limits["item"].max_ids_per_partition == 3
        assert element["sparsecore"].drops.per_feature.sum() > 0


def test_a_cap_of_a_file_below_the_start_of_a_stack_is_refused(job, tmp_path):
    path = tmp_path / "limits.json"
    job.write_text(
        job.read_text().replace("dim = 8", "dim = 8\nmax_ids_per_partition = 9")
    )
    config = load_config(job, overrides=[f"limits.file={path}"])
    layout = config.layout()
    write_caps(path, layout, 3, 3)
    with pytest.raises(
        ConfigError,
        match=r"caps in limits file '.*limits.json', found for.*max_ids_cap=3 is below",
    ):
        overflow_with_file_caps(config, layout)


def test_caps_join_those_of_the_configuration(job, tmp_path):
    path = tmp_path / "limits.json"
    own = ["limits.stack.item.max_ids_cap=2", "limits.stack.item.buffer_cap_bytes=9600"]
    config = load_config(job, overrides=[*own, f"limits.file={path}"])
    layout = config.layout()
    write_caps(path, layout, 3, 5)
    policy = overflow_with_file_caps(config, layout)
    assert policy.caps == {
        "item": StackCaps(max_ids_cap=2, max_unique_ids_cap=5, buffer_cap_bytes=9600)
    }
    where = f"limits file {str(path)!r}, found for {V6E}"
    assert [policy.cap_origin("item", i) for i in range(3)] == ["", where, ""]
    # Raising the configuration's is no help where the file has the same.
    write_caps(path, layout, 2, 5)
    assert overflow_with_file_caps(config, layout).cap_origin("item", 0) == where


def test_of_several_files_the_one_with_the_lowest_cap_is_named(job, tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    files = ", ".join(f'"{path}"' for path in paths)
    config = load_config(job, overrides=[f"limits.file=[{files}]"])
    layout = config.layout()
    for path, ids in zip(paths, (7, 5, 6), strict=True):
        write_caps(path, layout, ids, 500)
    policy = overflow_with_file_caps(config, layout)
    assert policy.caps["item"].max_ids_cap == 5
    assert "b.json" in policy.cap_origin("item", 0)


def test_the_limits_command_keeps_the_lowest_caps(job, tmp_path, capsys):
    layout = load_config(job).layout()
    for name, ids in (("a", 7), ("b", 5)):
        write_caps(tmp_path / f"{name}.json", layout, ids, 6)
    out = tmp_path / "out.json"
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    code = cli.main(["limits", str(job), *files, "--limits", str(out)])
    assert code == 0, capsys.readouterr().out
    assert LimitsFile.load(out).caps == {
        "item": StackCaps(max_ids_cap=5, max_unique_ids_cap=6)
    }
    assert LimitsFile.load(out).caps_found_for == V6E


def test_the_limits_command_says_what_caps_it_leaves_out(job, tmp_path, caplog):
    layout = load_config(job).layout()
    path, out = tmp_path / "limits.json", tmp_path / "out.json"
    write_caps(path, dataclasses.replace(layout, batch_size=128), 7, 6)
    command = ["limits", str(job), str(path), "--adapt", "--limits", str(out)]
    assert cli.main(command) == 0
    (message,) = caplog.messages
    assert "its caps (stack item) do not count" in message
    assert LimitsFile.load(out).caps == {}


def test_the_limits_command_keeps_chips_apart(job, tmp_path, capsys):
    layout = load_config(job).layout()
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, found_for in zip(files, (V6E, TPU7X), strict=True):
        write_caps(path, layout, 7, 6, found_for)
    out = tmp_path / "out.json"
    command = ["limits", str(job), *map(str, files), "--limits", str(out)]
    assert cli.main(command) == 2
    assert "two kinds of chips do not go into one file" in capsys.readouterr().err
    assert not out.exists()
