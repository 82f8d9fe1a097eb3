import argparse
import importlib
import importlib.util
import json
import os
import re
import tomllib
from pathlib import Path

import pytest

import grain_sparsecore
from grain_sparsecore import cli
from grain_sparsecore.cli.output import (
    counted,
    format_bytes,
    format_summary,
    format_table,
)
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.summary import TrainSummary

ROOT = Path(__file__).parents[1]

CONFIG = """
[topology]
num_sc_per_device = 2

[pipeline]
batch_size = 64
window = 2

[source]
kind = "python"
function = "tests.training_sources:records"
epochs = 0

[train]
steps = 6
learning_rate = 0.2
hidden = [8]

[[table]]
name = "item"
vocabulary_size = 16
embedding_dim = 4

[[table]]
name = "user"
vocabulary_size = 5
embedding_dim = 3

[[feature]]
name = "item"
table = "item"

[[feature]]
name = "user"
table = "user"
"""

SUMMARY_KEYS = {
    "minibatches",
    "steps",
    "hosts",
    "examples_per_second",
    "loss_first",
    "loss_last",
    "limits",
    "limit_changes",
    "recompiles",
    "dropped_ids",
    "input_wait_fraction",
    "batch_digest",
    "program_fingerprint",
    "counters",
    "given_ids",
    "drops",
    "dropped_example_share",
}


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def test_train_prints_progress_and_summary_and_writes_json(
    config_path, tmp_path, capsys
):
    result = tmp_path / "result.json"
    code = cli.main(
        ["train", str(config_path), "--steps", "5", "--json", str(result)]
        + ["--set", "train.seed=3", "pipeline.batch_size=32"]
    )
    output = capsys.readouterr()
    assert (code, output.err) == (0, "")
    assert output.out.startswith("step 1/5  loss 0.")
    assert "step 5/5  loss 0." in output.out
    assert "\nsteps              5 on 1 host\nloss               0." in output.out
    data = json.loads(result.read_text())
    assert set(data) == SUMMARY_KEYS
    assert (data["steps"], data["hosts"], data["dropped_ids"]) == (5, 1, 0)
    assert set(data["limits"]["item"]) == {
        "max_ids_per_partition",
        "max_unique_ids_per_partition",
        "buffer_size_per_device",
    }
    assert [len(digest) for digest in data["batch_digest"]] == [64]


def test_check_shows_tables_stacks_and_bytes(config_path, capsys):
    code = cli.main(
        ["check", str(config_path), "--set", "topology.global_device_count=4"]
        + ["--set", "topology.local_device_count=2"]
    )
    output = capsys.readouterr().out.splitlines()
    assert code == 0
    assert output[0] == f"{config_path}: valid"
    assert output[1] == (
        "2 hosts * 2 devices * 2 SparseCores = 8 partitions; a batch has 64 samples "
        "per host, 128 in all"
    )
    assert "item   item     16    4  sum       item" in output
    # 16 slots of 12 bytes and 2 * 8 row pointers of 4; 64 padded rows of 8 floats.
    assert "item               1       1            16  256 B           512 B" in output
    assert output[-1] == (
        "per device: 512 B of buffers a batch where limits start, 1.0 KiB of table rows"
    )


def test_stats_shows_what_batches_needed_and_what_to_set(config_path, tmp_path, capsys):
    result = tmp_path / "stats.json"
    code = cli.main(
        ["stats", str(config_path), "--batches", "3", "--json", str(result)]
        + ["--set", "topology.global_device_count=1", "source.shuffle=false"]
        + ["--set", "topology.local_device_count=1", "limits.growth={kind='exact'}"]
    )
    output = capsys.readouterr().out
    assert code == 0
    assert "measured 3 batches of the first host" in output
    data = json.loads(result.read_text())
    assert data["batches"] == 3
    assert data["counters"]["user"]["ids"] == 3 * 64
    user = data["stacks"]["user"]
    # One id below 5 in each of 32 samples: even ones in partition 0, odd ones in 1.
    assert user["largest"]["max_ids_per_partition"] in (19, 20)
    assert user["largest"]["max_unique_ids_per_partition"] == 3
    assert user["mean"]["max_unique_ids_per_partition"] == 3.0
    assert (
        user["suggested"]["max_ids_per_partition"]
        == user["largest"]["max_ids_per_partition"]
    )
    assert f"user   {user['largest']['max_ids_per_partition']:>13}" in output


@pytest.mark.parametrize("command", ["train", "check", "stats"])
def test_a_wrong_configuration_ends_with_2_and_one_paragraph(
    command, config_path, capsys
):
    code = cli.main([command, str(config_path), "--set", "pipeline.windw=4"])
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert output.err.startswith("grain-sparsecore: ")
    assert "pipeline.windw" in output.err
    assert "did you mean 'window'?" in output.err
    assert "Traceback" not in output.err


def test_a_missing_file_ends_with_2(tmp_path, capsys):
    code = cli.main(["train", str(tmp_path / "none.toml")])
    assert code == 2
    assert "none.toml: there is no such file" in capsys.readouterr().err


def test_a_json_file_that_cannot_be_written_is_said_before_the_work(
    config_path, tmp_path, capsys
):
    nowhere = tmp_path / "no" / "result.json"
    assert cli.main(["train", str(config_path), "--json", str(nowhere)]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
    assert cli.main(["stats", str(config_path), "--json", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_an_error_of_ours_ends_with_1_and_without_a_traceback(config_path, capsys):
    code = cli.main(
        ["train", str(config_path), "--set", "source.epochs=1"]
        + ["--set", "source.args={count = 10}"]
    )
    error = capsys.readouterr().err
    assert code == 1
    assert error.startswith("grain-sparsecore: there is no batch to train on")
    assert "Traceback" not in error


def test_a_defect_ends_with_1_and_keeps_its_traceback(config_path, capsys):
    code = cli.main(
        ["train", str(config_path), "--set", "source.args={fail_at = 5, count = 64}"]
    )
    error = capsys.readouterr().err
    assert code == 1
    assert "Traceback" in error
    assert "record 5 is broken" in error


def test_ctrl_c_ends_with_130(config_path, capsys, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("grain_sparsecore.cli.check.run", interrupt)
    assert cli.main(["check", str(config_path)]) == 130
    assert capsys.readouterr().err == "grain-sparsecore: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "'0' is no whole number from 1 up"),
        (["--steps", "many"], "'many' is no whole number from 1 up"),
        (["--join", "--processes", "2"], "--join does not go with --processes"),
    ],
)
def test_wrong_usage_ends_with_2(arguments, message, config_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(config_path), *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("stats", ["--processes", "2"], "--processes 2; --processes is an option of "),
        (
            "stats",
            ["--processes=2"],
            "--processes=2; --processes is an option of train",
        ),
        ("check", ["--batches=3"], "--batches is an option of stats, plan, rehearse"),
        ("check", ["--nonsense", "-x"], "unrecognized arguments: --nonsense -x\n"),
        ("train", ["other.toml"], "unrecognized arguments: other.toml\n"),
    ],
)
def test_unknown_options_show_the_usage_of_the_command_and_whose_they_are(
    command, arguments, message, config_path, capsys
):
    with pytest.raises(SystemExit) as end:
        cli.main([command, str(config_path), *arguments])
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith(f"usage: grain-sparsecore {command} CONFIG [options]\n")
    assert f"grain-sparsecore {command}: error: unrecognized arguments: " in text
    assert message in text


@pytest.mark.parametrize(
    ("command", "required"),
    [
        ("train", ()),
        ("check", ()),
        ("stats", ()),
        ("plan", ()),
        ("simulate", ("--hosts", "H")),
        ("limits", ("FILE", "[FILE", "...]")),
        ("rehearse", ("--topology", "NAME")),
    ],
)
def test_the_usage_has_the_file_before_the_settings(command, required, capsys):
    """``--set`` would take a file behind it for a setting."""
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--set", "pipeline.window=4", "job.toml"])
    assert end.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    words = ("usage: grain-sparsecore", command, "CONFIG", *required, "[options]")
    assert usage == " ".join(words)
    assert "arguments are required: CONFIG" in error


def test_half_a_job_in_the_environment_ends_with_2(config_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    assert cli.main(["train", str(config_path)]) == 2
    assert (
        "the environment names a job without JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        in capsys.readouterr().err
    )


def test_every_command_has_a_help_text_and_a_run(capsys):
    for name in cli.COMMANDS:
        module = importlib.import_module(f"grain_sparsecore.cli.{name}")
        subparsers = argparse.ArgumentParser().add_subparsers()
        module.add_parser(subparsers)
        assert subparsers.choices[name].get_default("run") is module.run
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    output = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n    {name} " in output


def test_the_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert grain_sparsecore.__version__ == project["version"]
    assert capsys.readouterr().out == f"grain-sparsecore {project['version']}\n"


def lost(ids, entries, weight):
    return {"dropped_ids": ids, "dropped_entries": entries, "lost_weight": weight}


def test_the_summary_says_all_of_it():
    text = format_summary(
        TrainSummary(
            steps=100,
            hosts=2,
            examples_per_second=12345.6,
            loss_first=0.69,
            loss_last=0.5,
            limits=Limits(
                {
                    "item": StackLimits(
                        max_ids_per_partition=1024,
                        max_unique_ids_per_partition=8,
                        buffer_size_per_device=4096,
                    )
                }
            ),
            limit_changes=1,
            recompiles=1,
            dropped_ids=1100,
            input_wait_fraction=0.034,
            batch_digest=("a", "b"),
            counters={
                "history": {"ids": 1000, "large_ids": 12, "padding_ids": 3},
                "user": {"ids": 500, "large_ids": 0, "padding_ids": 0},
            },
            given_ids={"history": 1015, "user": 500},
            program_fingerprint="0123456789abcdef" * 4,
            drops={
                "item": {
                    **lost(1100, 701, 5.25),
                    "features": {
                        "history": {**lost(1100, 701, 5.25), "dropped_examples": 1},
                        "candidate": {**lost(0, 0, 0.0), "dropped_examples": 0},
                    },
                },
                "user": {**lost(0, 0, 0.0), "features": {}},
            },
            dropped_example_share=0.015,
        )
    )
    assert text.splitlines() == [
        "steps              100 on 2 hosts",
        "loss               0.6900 -> 0.5000",
        "examples/s         12,346",
        "recompiles         1 on every host (limits changed 1 time)",
        "ids dropped        1,100",
        "examples cut       1.5% lost an entry at a limit",
        "cut, stack item: 1,100 ids, 701 entries, weight 5.2",
        "  feature history: 1,100 ids, 701 entries, weight 5.2, in 1 example",
        "history            12 large_ids, 3 padding_ids of 1,015 ids",
        "waiting for input  3.4%",
        "TPU program        0123456789abcdef on every host",
        "",
        "stack  ids/partition  unique  slots/device",
        "item           1,024       8         4,096",
    ]


def test_one_minibatch_has_no_plural(config_path, capsys):
    code = cli.main(
        ["train", str(config_path), "--steps=1"]
        + ["--set", "limits.on_overflow=minibatch"]
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "batches split      0.0% (up to 1 minibatch; " in captured.out
    # The only step is not timed.
    assert re.match(r"step 1/1  loss \S+  recompiles 0\n", captured.out)


def test_a_run_without_jax_tpu_embedding_says_that_no_program_was_compared(
    config_path, capsys, monkeypatch
):
    find = importlib.util.find_spec

    def without_it(name, package=None):
        return None if name == "jax_tpu_embedding" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_it)
    code = cli.main(["train", str(config_path), "--steps", "1"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "TPU program        not compared: needs jax-tpu-embedding" in captured.out
    assert "examples cut" not in captured.out


def test_numbers_and_tables_read_well():
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 2**31, 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "2.0 GiB",
        "1024.0 TiB",
    ]
    assert counted(1, "batch", "batches") == "1 batch"
    assert counted(2000, "batch", "batches") == "2,000 batches"
    assert counted(2, "host") == "2 hosts"
    assert format_table(("name", "n"), [("a", 1000), ("bcdef", 2.5)]) == (
        "name       n\na      1,000\nbcdef    2.5"
    )


@pytest.mark.parametrize(
    ("found", "given", "expected"),
    [
        ({"libtpu"}, None, "cpu"),
        (set(), None, None),
        ({"libtpu"}, "tpu", "tpu"),
        ({"libtpu", "jax_plugins"}, None, None),
        ({"libtpu", "/dev/accel*"}, None, None),
        ({"libtpu", "/dev/vfio/[0-9]*"}, None, None),
    ],
)
def test_a_tpu_that_is_not_there_is_not_looked_for(
    monkeypatch, capsys, found, given, expected
):
    monkeypatch.delenv("JAX_PLATFORMS")
    if given is not None:
        monkeypatch.setenv("JAX_PLATFORMS", given)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in found else None
    )
    monkeypatch.setattr("glob.glob", lambda name: [name] if name in found else [])
    # A command that ends before it needs a backend.
    assert cli.main(["check", "no_such_file.toml"]) == 2
    assert "no_such_file.toml" in capsys.readouterr().err
    assert os.environ.get("JAX_PLATFORMS") == expected


def test_train_says_that_the_input_ended(config_path, capsys):
    command = ["train", str(config_path), "--steps", "50"]
    assert (
        cli.main([*command, "--set", "source.epochs=1", "pipeline.batch_size=512"]) == 0
    )
    found = re.search(
        r"the input ended after (\d+) of 50 steps", capsys.readouterr().out
    )
    assert found is not None
    assert 0 < int(found[1]) < 50
