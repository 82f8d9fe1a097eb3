"""Outputs that cannot be written: said before the work, or one by one after it."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from grain_sparsecore import atomic, cli, train
from grain_sparsecore.cli.files import Outputs, check_file
from grain_sparsecore.errors import ConfigError, InputError
from grain_sparsecore.metrics import JsonLinesWriter
from tests.test_reporting import CONFIG

FILES = ("json", "report", "limits", "metrics")
FOLDERS = ("plot", "tensorboard")


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("option", FILES + FOLDERS)
def test_a_path_below_a_file_is_refused_before_training(
    option, config_path, monkeypatch, capsys
):
    monkeypatch.setattr(train, "train", full)
    below = config_path / "output"
    assert cli.main(["train", str(config_path), f"--{option}", str(below)]) == 2
    assert capsys.readouterr().err.startswith(
        f"grain-sparsecore: --{option} {below}: cannot be written: Not a directory; "
    )


@pytest.mark.parametrize("option", FILES + FOLDERS)
def test_a_full_disk_is_found_before_training(
    option, config_path, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(train, "train", full)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    path = tmp_path / "output"
    assert cli.main(["train", str(config_path), f"--{option}", str(path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"grain-sparsecore: --{option} {path}: cannot be written: No space left on "
    )


@pytest.mark.parametrize(
    "command",
    [
        ["stats"],
        ["plan", "--chips=4"],
        ["simulate", "--hosts=2"],
        ["rehearse", "--topology=v6e:1x1"],
        ["bench"],
    ],
)
def test_every_command_checks_its_file_first(command, config_path, capsys):
    name, *options = command
    arguments = [name, *([] if name == "bench" else [str(config_path)]), *options]
    below = config_path / "output.json"
    assert cli.main([*arguments, f"--json={below}"]) == 2
    assert f"--json {below}: cannot be written: Not a" in capsys.readouterr().err


def test_other_options_that_write_are_checked_as_well(config_path, tmp_path, capsys):
    below, config = config_path / "output", str(config_path)
    arguments = ["limits", config, str(tmp_path / "none.json"), f"--fdo={below}"]
    assert cli.main(arguments) == 2
    assert f"--fdo {below}: cannot be written: Not a" in capsys.readouterr().err
    arguments = ["rehearse", config, "--topology=v6e:1x1", "--find-caps"]
    assert cli.main([*arguments, f"--limits={below}"]) == 2
    assert f"--limits {below}: cannot be written: Not a" in capsys.readouterr().err


def test_checking_leaves_no_file_and_changes_none(tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text("kept")
    for in_place in (False, True):
        check_file("json", kept, in_place=in_place)
        check_file("json", tmp_path / "new.json", in_place=in_place)
    check_file("json", None)
    assert kept.read_text() == "kept"
    assert os.listdir(tmp_path) == ["kept.json"]


def test_what_fails_after_training_loses_nothing_else(
    config_path, tmp_path, monkeypatch, capsys
):
    # Of all outputs only these two are put in place by renaming.
    monkeypatch.setattr(atomic.os, "replace", full)
    given = {name: tmp_path / name for name in FILES + FOLDERS}
    options = [f"--{name}={path}" for name, path in given.items()]
    assert cli.main(["train", str(config_path), *options]) == 1
    out, err = capsys.readouterr()
    assert "waiting for input" in out
    assert err.splitlines() == [
        f"grain-sparsecore: --{name} {given[name]}: cannot be written: No space left "
        "on device."
        for name in ("limits", "report")
    ]
    assert given["json"].read_text().startswith("{")
    assert len(given["metrics"].read_text().splitlines()) == 6
    assert (given["plot"] / "loss.png").exists()
    assert list(given["tensorboard"].iterdir())
    assert not given["limits"].exists()


def test_the_summary_comes_before_the_first_failure(config_path, tmp_path):
    script = (
        "import errno, os, sys\n"
        "from grain_sparsecore import cli\n"
        "def full(*_):\n"
        "    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "os.replace = full\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    arguments = ["train", str(config_path), f"--limits={tmp_path / 'l.json'}"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert done.stdout.index("waiting for input") < done.stdout.index("--limits")


@pytest.mark.parametrize(
    "command", [["stats", "--batches=2"], ["plan", "--chips=4"], ["simulate"]]
)
def test_every_command_writes_what_it_can(
    command, config_path, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(atomic.os, "replace", full)
    name, *options = command
    if name == "simulate":
        options = ["--hosts=2", "--steps=2"]
    given = {name: tmp_path / name for name in ("json", "limits", "report", "plot")}
    options += [f"--{name}={path}" for name, path in given.items()]
    assert cli.main([name, str(config_path), *options]) == 1
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == [
        "--limits",
        "--report",
    ]
    assert given["json"].read_text().startswith(("{", "["))
    assert list(given["plot"].iterdir())


def test_scalars_that_cannot_be_written_do_not_end_the_run(
    config_path, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(JsonLinesWriter, "write_scalars", full)
    path, summary = tmp_path / "m.jsonl", tmp_path / "s.json"
    arguments = ["train", str(config_path), f"--metrics={path}", f"--json={summary}"]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert "waiting for input" in out
    assert err.count("\n") == 1
    assert f"--metrics {path}: cannot be written: No space left on device." in err
    assert summary.exists()


def test_text_goes_into_a_pipe_and_nothing_replaces_it(config_path, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    arguments = ["stats", str(config_path), "--batches=2"]
    assert cli.main([*arguments, f"--json={pipe}"]) == 0
    reader.join(60)
    assert found[0].startswith("{")
    for option in ("limits", "report"):
        assert cli.main([*arguments, f"--{option}={pipe}"]) == 2
        assert (
            f"--{option} {pipe}: cannot be written: it is a pipe, not a regular file"
            in capsys.readouterr().err
        )
    assert pipe.is_fifo()


def test_a_link_is_checked_where_it_leads(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "no" / "file.json")
    with pytest.raises(ConfigError, match="its folder does not exist"):
        check_file("limits", link)
    (tmp_path / "no").mkdir()
    check_file("limits", link)
    assert not os.listdir(tmp_path / "no")


def test_an_output_that_is_refused_is_one_that_failed(tmp_path, capsys):
    outputs = Outputs()
    done: list[Path] = []

    def refused(error):
        def write(path):
            raise error

        return write

    assert not outputs.write("a", tmp_path, refused(InputError("no input")))
    assert outputs.code == 1
    assert not outputs.write("b", tmp_path, refused(ConfigError("no such")))
    assert outputs.write("c", tmp_path, done.append)
    assert outputs.write("d", None, refused(ConfigError("not called")))
    assert (outputs.code, done) == (2, [tmp_path])
    assert capsys.readouterr().err == (
        "grain-sparsecore: no input\ngrain-sparsecore: no such\n"
    )


@pytest.mark.parametrize("hosts", [1, 2])
def test_files_are_written_for_a_reader_that_has_gone(tmp_path, hosts) -> None:
    """As ``| head`` leaves a command: what is printed is lost, and nothing else."""
    config = Path(__file__).parents[1] / "configs" / "quickstart.toml"
    found = tmp_path / "x.json"
    options = ["--steps=3", f"--processes={hosts}", f"--json={found}"]
    command = ["train", str(config), *options, "--set=train.hidden=[]"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "grain_sparsecore", *command],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=180,
        )
    finally:
        os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(found.read_text())["steps"] == 3
