"""The real TPU compiler, in its child process."""

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from grain_sparsecore import cli
from grain_sparsecore.config import load_config
from grain_sparsecore.errors import ConfigError, GrainSparseCoreError
from grain_sparsecore.features import COUNTERS
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import LimitsFile, load_limits
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.program import Program
from grain_sparsecore.rehearse import (
    Compiler,
    installation,
    rehearse,
    topology_by_name,
)
from grain_sparsecore.rehearse import compiler as compiler_module
from grain_sparsecore.repartition import repartition
from grain_sparsecore.specs import Topology
from tests.rehearse_helpers import layout_of, limits_of
from tests.strategies import random_features

# libtpu's lock for the one owner of a TPU; a rehearsal must never take it.
LOCK = Path("/tmp/libtpu_lockfile")

CONFIG = """
[topology]
num_sc_per_device = 1

[pipeline]
batch_size = 64

[source]
kind = "synthetic"
num_records = 1000

[[table]]
name = "item"
vocabulary_size = {rows}
embedding_dim = 8
{table}

[[feature]]
name = "item"
table = "item"
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    cache = tmp_path_factory.mktemp("rehearse")
    with Compiler(timeout_seconds=120, cache=cache) as compiler:
        yield compiler


@pytest.mark.parametrize(
    ("name", "devices", "cores"),
    [
        ("v6e:2x2", 4, 2),
        ("v5p:2x2x1", 4, 4),
        ("v6e:4x4", 16, 2),
        ("tpu7x:2x2x1", 8, 2),
    ],
)
def test_the_compiled_program_takes_our_buffers(compiler, name, devices, cores):
    hosts_of_topology = compiler.topology(name).topology.num_hosts
    samples = 2 * devices * cores
    layout = layout_of(devices=devices, cores=cores, samples=samples, dim=16)
    limits = limits_of(layout, 40, 24, 128 * cores)
    outcome = compiler.compile(Program.of(layout, limits), name)
    assert outcome.fits, outcome.error
    assert outcome.temporary_bytes > 0
    # Table and slot of Adagrad, and the buffers.
    rows = layout.stacks[0].vocabulary_size // devices
    assert outcome.argument_bytes > 2 * 4 * 16 * rows + 3 * 4 * 128 * cores
    for hosts in {1, 2, devices, hosts_of_topology}:
        ours = layout_of(
            devices=devices, cores=cores, samples=samples, dim=16, hosts=hosts
        )
        features = random_features(np.random.default_rng(hosts), ours, max_ids=2)
        batch = partition_batch(
            features,
            ours,
            counters=np.zeros((1, len(COUNTERS)), np.int32),
            num_samples=ours.batch_size,
        )
        buffers = repartition(batch, limits, ours)
        for field, by_stack in outcome.inputs.items():
            for stack, (shape, dtype) in by_stack.items():
                array = getattr(buffers, field)[stack]
                assert array.shape == (devices // hosts, *shape)
                assert array.dtype == dtype


def test_a_second_time_is_read_from_the_cache(compiler):
    layout = layout_of()
    program = Program.of(layout, limits_of(layout, 16, 8, 64))
    first = compiler.compile(program, "v6e:2x2")
    again = compiler.compile(program, "v6e:2x2")
    assert (first.cached, again.cached) == (False, True)
    assert (first.program, first.temporary_bytes) == (
        again.program,
        again.temporary_bytes,
    )


def test_stacks_that_do_not_fit_say_why(compiler):
    layout = layout_of({"item": 1_000_000, "user": 1000})
    plain = limits_of(layout, 16, 8, 64).to_plain()
    plain["item"] |= {
        "max_ids_per_partition": 8192,
        "max_unique_ids_per_partition": 8192,
        "buffer_size_per_device": 16384,
    }
    told = []
    rehearsal = rehearse(
        layout,
        "v6e:2x2",
        compiler=compiler,
        limits=Limits.from_plain(plain),
        on_progress=told.append,
    )
    assert not rehearsal.fits
    # One of them is not worth the attempt to compile both together.
    item, user = rehearsal.stacks
    assert (item.fits, user.fits, user.reason) == (False, True, "")
    assert "stack 'item': max_unique_ids_per_partition=8192 needs" in item.reason
    assert "about 7,2" in item.reason
    assert told == [
        "v6e:2x2: compiling stack 'item'",
        "v6e:2x2: compiling stack 'user'",
    ]


def test_tables_beyond_the_memory_of_a_device_say_so(compiler):
    layout = layout_of({"item": 200_000_000}, dim=128)
    limits = limits_of(layout, 16, 8, 64)
    rehearsal = rehearse(layout, "v6e:2x2", compiler=compiler, limits=limits)
    (row,) = rehearsal.stacks
    assert "stack 'item': a device would need" in row.reason
    assert "and has 31.2" in row.reason


def test_unknown_topologies_are_refused_in_one_sentence(compiler):
    with pytest.raises(ConfigError) as caught:
        compiler.topology("v6e:3x3")
    text = str(caught.value)
    assert text.startswith("topology 'v6e:3x3' is unknown to the TPU compiler (")
    assert "\n" not in text
    with pytest.raises(ConfigError, match="has 4; make them with global_device_count"):
        rehearse(layout_of(devices=8), "v6e:2x2", compiler=compiler)


def test_a_topology_is_the_same_by_its_name_as_to_the_compiler(compiler):
    for name in ("v6e:2x2", "v6e:4x4", "v5p:2x2x1", "v5p:2x2x2", "tpu7x:2x2x2"):
        assert topology_by_name(name) == compiler.topology(name).topology


def test_a_compilation_over_the_time_limit_is_given_up():
    layout = layout_of()
    program = Program.of(layout, limits_of(layout, 16, 8, 64))
    with Compiler(timeout_seconds=0.05) as compiler:
        outcome = compiler.compile(program, "v6e:2x2")
        assert (outcome.fits, outcome.timed_out) == (False, True)
        assert outcome.seconds == 0.05
        # The next question goes to a new process.
        assert compiler.topology("v6e:2x2").device_kind == "TPU v6 lite"


def test_stacks_in_one_program_have_the_time_of_each_together():
    layout = layout_of({"item": 1024, "user": 1024})
    program = Program.of(layout, limits_of(layout, 16, 8, 64))
    assert len(program.stacks) == 2
    with Compiler(timeout_seconds=0.05) as compiler:
        row = compiler.compile(program, "v6e:2x2")
    assert (row.timed_out, row.seconds) == (True, 0.1)


def test_a_time_limit_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="timeout_seconds=0 must be above 0"):
        Compiler(timeout_seconds=0)


def test_a_compiler_that_dies_is_reported(monkeypatch, tmp_path):
    dying = tmp_path / "worker.py"
    dying.write_text(
        "import sys\n"
        "sys.stdin.readline()\n"
        'print(\'{"compiling": "key"}\', flush=True)\n'
        "sys.exit('F1130 check failed: 1 == 2')\n"
    )
    monkeypatch.setattr(compiler_module, "_COMMAND", [sys.executable, str(dying)])
    layout = layout_of()
    program = Program.of(layout, limits_of(layout, 16, 8, 64))
    with Compiler() as compiler:
        outcome = compiler.compile(program, "v6e:2x2")
        assert not outcome.fits
        assert "code 1; its last words: F1130 check failed: 1 == 2" in outcome.error
        dying.write_text("raise SystemExit(3)")
        with pytest.raises(
            GrainSparseCoreError, match="not answer: it ended with code 3"
        ):
            compiler.topology("v6e:2x2")


def test_without_the_extra_the_command_names_the_line_that_installs_it(
    tmp_path, capsys, monkeypatch
):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(rows=1000, table=""))
    arguments = ["rehearse", str(config), "--topology", "v6e:2x2"]
    monkeypatch.setattr(installation, "_version", lambda name: None)
    assert cli.main(arguments) == 1
    err = capsys.readouterr().err
    assert "rehearsing needs libtpu" in err
    assert "pip install 'grain_sparsecore[tpu]' 'jax[tpu]==" in err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(arguments) == 1
    err = capsys.readouterr().err
    assert "needs jax-tpu-embedding (Linux on x86-64): pip install" in err
    assert "'grain_sparsecore[tpu]'" in err


def test_the_command_prints_what_fits(tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(rows=1000, table=""))
    result = tmp_path / "result.json"
    arguments = ["rehearse", str(config), "--topology", "v6e:2x2", "--batches", "2"]
    arguments += ["--cache", str(tmp_path / "cache"), "--json", str(result)]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "v6e:2x2 (TPU v6 lite): 1 host * 4 devices * 2 SparseCores = 8" in out
    assert "item   yes" in out
    (rehearsal,) = json.loads(result.read_text())["rehearsals"]
    (row,) = rehearsal["stacks"]
    assert row["fits"]
    assert rehearsal["num_sc_per_device"] == 2
    # The limits are those that the data needs.
    assert 1 < row["limits"]["max_ids_per_partition"] < 64


def test_the_command_says_what_does_not_fit(tmp_path, capsys):
    config = tmp_path / "config.toml"
    table = "max_ids_per_partition = 9000\nmax_unique_ids_per_partition = 9000\n"
    table += "suggested_coo_buffer_size_per_device = 18432"
    text = CONFIG.format(rows=1_000_000, table=table)
    config.write_text(text)
    arguments = ["rehearse", str(config), "--topology", "v6e:2x2", "--batches", "2"]
    assert cli.main([*arguments, "--cache", str(tmp_path / "cache")]) == 1
    out = capsys.readouterr().out
    assert "item   NO" in out
    assert "stack 'item': max_unique_ids_per_partition=9000 needs" in out


def test_the_command_writes_caps_into_the_limits_file(tmp_path, capsys):
    config, limits = tmp_path / "config.toml", tmp_path / "limits.json"
    config.write_text(CONFIG.format(rows=1000, table=""))
    arguments = ["rehearse", str(config), "--topology", "v6e:2x2", "--batches", "2"]
    arguments += ["--cache", str(tmp_path), "--find-caps", "--limits", str(limits)]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert "caps for v6e:2x2 (TPU v6 lite, libtpu " in captured.out
    assert f"written to {limits}\n" in captured.out
    assert "item: ids 1,024, unique 128: compiles (" in captured.err
    caps = json.loads(limits.read_text())["caps"]
    assert caps == {
        "item": {"max_ids_per_partition": 1024, "max_unique_ids_per_partition": 128}
    }
    found_for = LimitsFile.load(limits).caps_found_for
    assert found_for is not None
    assert (found_for.topology, found_for.device_kind) == ("v6e:2x2", "TPU v6 lite")
    assert found_for.libtpu == importlib.metadata.version("libtpu")
    # It is a limits file as before; a second search finds everything in the cache.
    before = LimitsFile.load(limits).limits
    assert cli.main(arguments) == 0
    assert "(cached)" in capsys.readouterr().err
    layout = load_config(config).layout(
        Topology(global_device_count=4, local_device_count=4, num_sc_per_device=2)
    )
    assert load_limits(limits, layout=layout) == before
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--topology", "v5p:2x2x1"])


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_leaves_nothing_behind(tmp_path, how):
    """Neither a process, nor a lock, nor a file."""
    locked = LOCK.exists()
    config, temporary = tmp_path / "config.toml", tmp_path / "temporary"
    temporary.mkdir()
    # At such limits the compiler is busy for seconds.
    table = "max_ids_per_partition = 7000\nmax_unique_ids_per_partition = 7000\n"
    table += "suggested_coo_buffer_size_per_device = 16384"
    config.write_text(CONFIG.format(rows=1_000_000, table=table))
    # As users have it: without JAX_PLATFORMS, a JAX backend would look for a TPU.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    del environment["JAX_PLATFORMS"]
    command = [sys.executable, "-m", "grain_sparsecore", "rehearse", str(config)]
    command += ["--topology", "v6e:2x2", "--batches", "1"]
    command += ["--cache", str(tmp_path / "cache")]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stderr is not None
    watchdog = threading.Timer(240, process.kill)
    watchdog.daemon = True
    watchdog.start()
    with process.stderr:
        for line in process.stderr:
            if b"compiling stack" in line:
                break
        child = _wait_for(lambda: _children(process.pid))
        _wait_for(lambda: any(temporary.glob("*/tpu_logs/*")))
        os.kill(process.pid, how)
        process.stderr.read()
    assert process.wait() == (130 if how == signal.SIGINT else -signal.SIGKILL)
    watchdog.cancel()
    _wait_for(lambda: not any(Path("/proc", str(pid)).exists() for pid in child))
    _wait_for(lambda: not list(temporary.iterdir()))
    assert LOCK.exists() == locked


def _children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()]


def _wait_for(what, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found
