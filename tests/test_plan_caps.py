"""Plans that meet what a chip can hold."""

import contextlib
import html
import json
import types

import pytest

from grain_sparsecore import cli, rehearse
from grain_sparsecore.config import load_config
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits_file import LimitsFile
from grain_sparsecore.rehearse import installation, topology_by_name
from tests.caps_helpers import JOB, TPU7X, V6E, write_caps


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_a_plan_says_what_the_caps_of_a_file_do_not_allow(job, tmp_path, capsys):
    path = tmp_path / "limits.json"
    write_caps(path, load_config(job).layout(), 3, 500)
    result = tmp_path / "plan.json"
    plan = ["plan", str(job), "--batches", "2", "--json", str(result)]
    assert cli.main([*plan, "--set", f"limits.file={path}"]) == 0
    output = capsys.readouterr().out
    assert "TOO LARGE  stack 'item': the data needs max_ids_per_partition=" in output
    assert f"but its cap is 3, by limits file {str(path)!r}, found for v6e" in output
    (found,) = json.loads(result.read_text())["topologies"]
    assert list(found["too_large"]) == ["item"]
    assert cli.main(plan) == 0
    assert "TOO LARGE" not in capsys.readouterr().out
    (found,) = json.loads(result.read_text())["topologies"]
    assert found["too_large"] == {}


@pytest.mark.parametrize("name", ["limits.json", "limits-4x2-b64.json"])
def test_a_plan_reads_the_caps_of_the_file_that_it_writes(job, tmp_path, capsys, name):
    path, page = tmp_path / name, tmp_path / "plan.html"
    write_caps(path, load_config(job).layout(), 3, 500)
    command = ["plan", str(job), "--batches", "2", "--batch-size", "32,64"]
    command += ["--limits", str(tmp_path / "limits.json"), "--report", str(page)]
    assert cli.main(command) == 0
    # Only one of the two plans is for the batch size that the caps were made for.
    assert capsys.readouterr().out.count("TOO LARGE  stack 'item'") == 1
    assert html.unescape(page.read_text()).count("TOO LARGE: stack 'item'") == 1
    written = LimitsFile.load(tmp_path / "limits-4x2-b64.json")
    assert written.limits["item"].max_ids_per_partition > 3


def test_without_a_compiler_a_named_topology_has_its_caps_checked(
    job, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "limits.json"
    write_caps(path, load_config(job).layout(), 3, 500)
    monkeypatch.setattr(installation, "_version", lambda name: None)
    command = ["plan", str(job), "--batches", "2", "--topology", "v6e:2x2"]
    assert cli.main([*command, "--set", f"limits.file={path}"]) == 0
    captured = capsys.readouterr()
    assert "1 host * 4 devices * 2 SparseCores" in captured.out
    assert "TOO LARGE  stack 'item'" in captured.out
    assert "no compiler, so only caps are checked: rehearsing needs" in captured.err


def test_a_plan_refuses_the_caps_of_another_chip(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(installation, "_version", lambda name: None)
    path = tmp_path / "limits.json"
    write_caps(path, load_config(job).layout(), 3, 500, TPU7X)
    command = ["plan", str(job), "--batches", "2", "--topology", "v6e:2x2"]
    for more in (["--set", f"limits.file={path}"], ["--limits", str(path)]):
        assert cli.main([*command, *more]) == 2
        captured = capsys.readouterr()
        assert "found for tpu7x:2x1x1" in captured.err
        assert "are not for v6e:2x2" in captured.err
        assert captured.out == ""
    # By its counts alone a job can be for either.
    assert cli.main([*command[:-2], "--set", f"limits.file={path}"]) == 0
    assert "by limits file" in capsys.readouterr().out


def test_plans_for_two_kinds_of_chips_keep_a_file_each(
    job, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(installation, "_version", lambda name: None)
    layout = load_config(job).layout()
    names = {"v6e:2x2": "limits-v6e-2x2-b64", "tpu7x:2x1x1": "limits-tpu7x-2x1x1-b64"}
    for file, found_for in zip(names.values(), (V6E, TPU7X), strict=True):
        write_caps(tmp_path / f"{file}.json", layout, 500, 500, found_for)
    result = tmp_path / "plan.json"
    command = ["plan", str(job), "--batches", "2", "--json", str(result)]
    for name in names:
        command += ["--topology", name]
    assert cli.main([*command, "--limits", str(tmp_path / "limits.json")]) == 0
    output = capsys.readouterr().out
    plans = json.loads(result.read_text())["topologies"]
    assert [plan["topology_name"] for plan in plans] == list(names)
    for name, file in names.items():
        assert f"\n{name}: 1 host * 4 devices" in f"\n{output}"
        path = tmp_path / f"{file}.json"
        assert f"limits written to {path}" in output
        found_for = LimitsFile.load(path).caps_found_for
        assert found_for is not None
        assert found_for.topology == name


def test_a_topology_without_chips_is_refused():
    with pytest.raises(ConfigError, match="'v6e:0x2' has no chips"):
        topology_by_name("v6e:0x2")


def test_what_is_too_large_is_red_on_a_terminal(job, tmp_path, capsys, monkeypatch):
    path = tmp_path / "limits.json"
    write_caps(path, load_config(job).layout(), 3, 500)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    command = ["plan", str(job), "--batches", "2", "--set", f"limits.file={path}"]
    assert cli.main(command) == 0
    assert "\x1b[1;31mTOO LARGE\x1b[0m  stack 'item'" in capsys.readouterr().out


def test_a_plan_asks_the_real_compiler_of_a_named_topology(job, capsys):
    code = cli.main(["plan", str(job), "--batches", "2", "--topology", "v6e:2x2"])
    output = capsys.readouterr().out
    assert code == 0
    assert "1 host * 4 devices * 2 SparseCores" in output
    assert "TOO LARGE" not in output


def test_what_the_compiler_refuses_is_too_large(job, capsys, monkeypatch):
    class FakeCompiler(contextlib.AbstractContextManager):
        def __init__(self, **options):
            pass

        def __exit__(self, *error):
            return None

        def topology(self, name):
            topology = load_config(job).layout().topology
            return types.SimpleNamespace(topology=topology)

    def refuse(config, name, *, compiler, limits):
        assert config.pipeline.batch_size == 128
        refused = types.SimpleNamespace(name="item", fits=False, reason="no room.")
        return types.SimpleNamespace(stacks=[refused])

    monkeypatch.setattr(rehearse, "Compiler", FakeCompiler)
    monkeypatch.setattr(rehearse, "rehearse", refuse)
    command = ["plan", str(job), "--batches", "2", "--topology", "v6e:2x2"]
    assert cli.main([*command, "--batch-size", "128"]) == 0
    assert "TOO LARGE  no room." in capsys.readouterr().out


def test_a_named_topology_says_how_many_chips_there_are(job, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", str(job), "--topology", "v6e:2x2", "--chips", "8"])
    assert "leave out --chips, --num-sc" in capsys.readouterr().err


def test_a_cap_between_the_need_and_the_next_growth_is_enough(job, tmp_path, capsys):
    # A job that needs no more than its cap runs: its limit stops growing there.
    result = tmp_path / "plan.json"
    plan = ["plan", str(job), "--batches", "2", "--json", str(result)]
    assert cli.main([*plan, "--set", "limits.growth.kind=exact"]) == 0
    (exact,) = json.loads(result.read_text())["topologies"]
    need = exact["stacks"]["item"]["limits"]["max_ids_per_partition"]
    assert cli.main(plan) == 0
    (free,) = json.loads(result.read_text())["topologies"]
    assert free["stacks"]["item"]["limits"]["max_ids_per_partition"] > need
    path = tmp_path / "limits.json"
    capsys.readouterr()
    for cap, too_large in ((need, False), (need - 1, True)):
        write_caps(path, load_config(job).layout(), cap, 500)
        assert cli.main([*plan, "--set", f"limits.file={path}"]) == 0
        output = capsys.readouterr().out
        assert ("TOO LARGE" in output) == too_large
        (found,) = json.loads(result.read_text())["topologies"]
        # What is too large is the need itself, not what growth makes of it.
        limits = found["stacks"]["item"]["limits"]
        assert limits["max_ids_per_partition"] == need
        assert (f"max_ids_per_partition={need}, but its cap" in output) == too_large
