"""Training from a file with caps, as a user does: the command, in its own process."""

import json
import os
import subprocess
import sys

import pytest

from grain_sparsecore.chips import FoundFor
from grain_sparsecore.config import load_config
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import LimitsFile
from grain_sparsecore.overflow import StackCaps
from grain_sparsecore.specs import Topology
from tests.test_cli import CONFIG

V6E = FoundFor(topology="v6e:1x1", device_kind="TPU v6 lite", libtpu="0.0.42.1")
CAP = 8


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.toml").write_text(CONFIG)
    return tmp_path / "job.toml"


@pytest.fixture
def caps(job, tmp_path):
    """A file as ``rehearse --find-caps`` leaves one, for one device."""
    topology = Topology(
        global_device_count=1, local_device_count=1, num_sc_per_device=2
    )
    layout = load_config(job).layout(topology)
    path = tmp_path / "caps.json"
    LimitsFile.of(
        Limits.start(layout),
        layout=layout,
        caps={"item": StackCaps(max_ids_cap=CAP, max_unique_ids_cap=CAP)},
        caps_found_for=V6E,
    ).save(path)
    return path


def train(job, *arguments):
    command = [sys.executable, "-m", "grain_sparsecore", "train", str(job)]
    # One device, not those of the tests.
    environment = {**os.environ, "XLA_FLAGS": ""}
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


def test_above_a_cap_of_its_file_a_job_ends_and_names_both(job, caps):
    ended = train(job, "--set", f"limits.file={caps}")
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "grain-sparsecore: pipeline 'train': stack 'item': host 0 needs max_ids_per_"
    )
    assert (
        f"but max_ids_cap allows {CAP}, by limits file {str(caps)!r}, found for {V6E}. "
        in line
    )
    assert "find caps again with rehearse --find-caps" in line
    assert "Raising limits.stack.item.max_ids_cap is no help" in line


def test_a_job_that_drops_keeps_to_the_cap_of_its_file(job, caps, tmp_path):
    result = tmp_path / "result.json"
    ended = train(
        job,
        *("--json", str(result), "--limits", str(caps), "--set"),
        *(f"limits.file={caps}", "limits.on_overflow=drop"),
    )
    assert ended.returncode == 0, ended.stderr
    assert "examples cut " in ended.stdout
    assert "cut, stack item: " in ended.stdout
    summary = json.loads(result.read_text())
    assert summary["steps"] == 6
    assert summary["limits"]["item"]["max_ids_per_partition"] == CAP
    lost = summary["drops"]["item"]["dropped_ids"]
    assert 0 < lost == summary["dropped_ids"]
    assert summary["dropped_example_share"] > 0
    # What is written over the caps leaves them, and the chip that they are for.
    written = LimitsFile.load(caps)
    assert written.limits["item"].max_ids_per_partition == CAP
    assert written.caps["item"].max_ids_cap == CAP
    assert written.caps_found_for == V6E


def test_a_job_of_local_hosts_says_which_caps_do_not_count(job, caps):
    ended = train(
        job,
        *("--processes", "2", "--steps", "2", "--set"),
        *(f"limits.file={caps}", "limits.adapt=true"),
    )
    assert ended.returncode == 0, ended.stderr
    first = ended.stdout.splitlines()[0]
    assert first.startswith(
        f"warning: limits file {str(caps)!r}: its caps (stack item) do not count, they "
        "were found for something else: topology.num_partitions: 2 in the file, 4 here"
    )
    assert ended.stdout.count("do not count") == 1
