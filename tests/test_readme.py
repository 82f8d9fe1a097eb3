"""The README's commands and its example are those that work."""

import argparse
import importlib
import pathlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

import grain_sparsecore
from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.cli import COMMANDS
from grain_sparsecore.config import load_config
from grain_sparsecore.lookup import unshard_tables
from grain_sparsecore.sources import make_source

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# A backslash at the end of a line continues the command; in running text it ends at
# its backquote.
COMMAND_LINES = sorted(
    {
        line.split("`")[0].strip()
        for line in re.findall(
            r"python -m grain_sparsecore (.*)", README.replace("\\\n", " ")
        )
    }
)


def test_the_example_runs(monkeypatch):
    (code,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(ROOT)
    source = make_source(
        load_config("configs/quickstart.toml"), host_index=0, host_count=1
    )
    seen = []

    def train_step(state, batch):
        seen.append(batch)
        return state, 0.0

    names = {
        "records": [source[i] for i in range(1024)],
        "train_step": train_step,
        "state": None,
    }
    exec(compile(code, "README", "exec"), names)
    assert len(seen) == 4
    assert all(isinstance(batch["sparsecore"], SparseCoreInput) for batch in seen)


def test_the_example_without_a_file_runs():
    (code,) = re.findall(
        r"<!-- example without a file -->\n```python\n(.*?)```", README, re.DOTALL
    )
    rng = np.random.default_rng(0)
    names = {
        "samples": [
            {
                "history": rng.integers(0, 1000, 1 + i % 3),
                "dwell": np.ones(1 + i % 3, np.float32),
                "label": np.float32(i % 2),
            }
            for i in range(512)
        ],
        "movie_table": rng.normal(size=(1000, 16)).astype(np.float32),
        "loss_of": lambda x, label: ((x.sum(axis=1) - label) ** 2).mean(),
    }
    before = names["movie_table"].copy()
    exec(compile(code, "README", "exec"), names)
    assert np.isfinite(float(names["loss"]))
    after = unshard_tables(names["tables"], names["layout"])["movie"]
    assert not np.allclose(after, before)
    assert names["state"]["start"] + names["state"]["position"] == 4


def test_the_names_at_the_top_level_are_those_it_lists():
    (listed,) = re.findall(r"<!-- the top level -->\n(.*)\n", README)
    names = re.findall(r"`(\w+)`", listed)
    assert sorted(names) == sorted(grain_sparsecore.__all__)
    assert all(hasattr(grain_sparsecore, name) for name in names)
    errors = vars(grain_sparsecore.errors).values()
    assert {e.__name__ for e in errors if isinstance(e, type)} <= set(names)


def test_importing_the_top_level_needs_no_extra():
    """Extras are imported where they are used: they cost seconds, or are missing."""
    extras = "tensorflow keras keras_rs numba pyarrow matplotlib jax_tpu_embedding"
    code = (
        "import sys; from grain_sparsecore import *; "
        f"print(SparseCoreInput.__name__, *set(sys.modules) & {set(extras.split())})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["SparseCoreInput"], done.stderr


def test_the_plan_looks_at_as_many_steps_as_are_trained():
    """Else the job that starts from its limits may recompile after all."""
    (path, batches) = re.findall(r"plan (\S+) --batches (\d+) --limits", README)[0]
    assert f"train {path} --set limits.file=limits.json" in README
    assert int(batches) == load_config(ROOT / path).train.steps
    assert f"`--batches {batches}`, the `train.steps` of this file" in README


def test_the_first_command_installs_little():
    (extra,) = re.findall(r'pip install -e "\.\[(\w+)\]" && .*train configs', README)
    assert extra == "fast"


@pytest.mark.parametrize("line", [c for c in COMMAND_LINES if "COMMAND" not in c])
def test_commands_parse_and_their_configurations_exist(line):
    words = [w for w in shlex.split(re.sub(r"[][]", "", line)) if w != "..."]
    parser = argparse.ArgumentParser(exit_on_error=False)
    subparsers = parser.add_subparsers(required=True)
    for name in COMMANDS:
        importlib.import_module(f"grain_sparsecore.cli.{name}").add_parser(subparsers)
    parser.parse_args(words)
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file()


def test_commands_over_two_lines_are_seen_whole():
    assert any(
        "--reader-threads" in line and "--cases" in line for line in COMMAND_LINES
    )
