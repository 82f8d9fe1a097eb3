import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grain_sparsecore import launch
from grain_sparsecore.errors import ConfigError

# Longest a process may take until it has done what a test waits for; generous, since
# the machine may be busy with other tests.
PATIENCE_SECONDS = 120

ROOT = Path(__file__).parent.parent

# Two hosts and one host with the same global batch; the second half of a batch is
# that of the second host.
CONFIG = """
[topology]
num_sc_per_device = 2

[pipeline]
batch_size = 32
window = 2
timeout_seconds = 60

[source]
kind = "python"
function = "tests.training_sources:records"
epochs = 0

[train]
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


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


@contextlib.contextmanager
def started(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The command line as a process of its own, gone at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "grain_sparsecore", *arguments],
        cwd=ROOT,
        # One device a process, unless a test asks for more.
        env={**os.environ, "XLA_FLAGS": "", **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
    with started(*arguments, **variables) as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return process.returncode, out, err


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended and that nobody has waited for does not count.
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    pids = [int(path.name) for path in folder.iterdir()]
    assert pids
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)


def test_two_processes_train_as_one_does(config_path, tmp_path):
    # Four devices a process and an agreement before every step: where a step still
    # ran during the agreement, XLA had no thread left for the latter.
    results = []
    for processes, batch in (("1", 64), ("2", 32)):
        path = tmp_path / f"{processes}.json"
        code, out, err = run(
            *("train", str(config_path), "--processes", processes, "--steps", "20"),
            *("--devices-per-process", "4", "--json", str(path)),
            *("--set", f"pipeline.batch_size={batch}", "pipeline.window=1"),
        )
        assert (code, err) == (0, "")
        # Nothing but the progress and the summary, and from one host.
        lines = out.splitlines()
        assert lines[0].startswith("step 1/20  loss ")
        assert sum(line.startswith("steps  ") for line in lines) == 1
        assert not any("Gloo" in line for line in lines)
        results.append(json.loads(path.read_text()))
    one, two = results
    assert (one["hosts"], two["hosts"]) == (1, 2)
    assert len(two["batch_digest"]) == 2
    assert two["recompiles"] == two["limit_changes"]
    for key in ("loss_first", "loss_last"):
        assert two[key] == pytest.approx(one[key], rel=1e-4)
    assert two["loss_last"] < two["loss_first"]


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """A folder in which every process that reads data leaves its number."""
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


def test_a_host_that_fails_ends_the_job_and_is_heard(config_path, pids):
    # Records are dealt in turn, so an odd one is read by host 1.
    code, out, err = run(
        *("train", str(config_path), "--processes", "2", "--steps", "50", "--set"),
        f"source.args={{fail_at = 201, pid_folder = '{pids}'}}",
        "source.shuffle=false",
    )
    assert code == 1
    assert "host 1 failed with exit code 1:" in err
    assert "ValueError: record 201 is broken" in err
    assert "steps  " not in out
    wait_until_gone(pids)


def test_a_configuration_that_no_host_can_use_ends_with_2(config_path):
    # Each process has a device: the parent knows, and starts none of them.
    arguments = (
        *("train", str(config_path), "--processes", "2", "--set"),
        "topology.global_device_count=4",
        "topology.local_device_count=2",
    )
    expected = (
        "topology: global_device_count=4, but this job has 2; leave it out to train on "
        "the devices there are.\n"
    )
    assert run(*arguments) == (2, "", f"grain-sparsecore: {expected}")
    # Only JAX knows how many it has: every process says it, and nothing else.
    code, out, err = run(*arguments, JAX_NUM_CPU_DEVICES="1")
    assert (code, out) == (2, "")
    assert err == "".join(
        f"host {host} failed with exit code 2:\n  grain-sparsecore: {expected}"
        for host in (0, 1)
    )


@pytest.mark.parametrize(
    ("processes", "batch_size", "reason"),
    [
        ("3", 32, "* num_sc_per_device=2 = 12 partitions is not a power of two"),
        ("4", 30, "batch_size=30"),
    ],
)
def test_what_the_job_cannot_divide_is_refused_before_it_starts(
    processes, batch_size, reason, config_path
):
    code, out, err = run(
        *("train", str(config_path), "--processes", processes),
        *("--devices-per-process", "2", f"--set=pipeline.batch_size={batch_size}"),
    )
    assert (code, out) == (2, "")
    # Said once, and by nobody but the parent.
    assert err.startswith("grain-sparsecore: ")
    assert err.count("\n") == 1
    assert reason in err


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_fails_before_the_first_agreement_is_not_waited_for(
    host, config_path
):
    start = time.monotonic()
    code, _, err = run(
        *("train", str(config_path), "--processes", "2", "--set"),
        f"source.args={{absent_on_host = {host}}}",
        "pipeline.timeout_seconds=600",
    )
    assert code == 2
    assert time.monotonic() - start < PATIENCE_SECONDS
    assert f"host {host} failed with exit code 2:" in err
    assert "raised FileNotFoundError: records are missing here" in err
    assert (
        f"pipeline 'train' step 0: host {host} ended its process with exit status 2, "
        f"while this host ({1 - host}) waited."
    ) in err


@pytest.mark.parametrize("processes", [(), ("--processes", "2")])
@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGINT, 130, "grain-sparsecore: interrupted\n"),
        (signal.SIGTERM, 143, "grain-sparsecore: terminated\n"),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_no_process_outlives_its_parent(
    number, code, text, processes, config_path, pids
):
    with started(
        *("train", str(config_path), *processes, "--steps", "1000000"),
        *("--set", f"source.args={{pid_folder = '{pids}'}}", "pipeline.workers=1"),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 1/1000000")
        # A worker of each host; only workers read.
        assert len(list(pids.iterdir())) >= (2 if processes else 1)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code
    if processes or number != signal.SIGKILL:
        assert err == text
    wait_until_gone(pids)


def test_a_process_that_hangs_after_the_others_ended_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_END_SECONDS", 0.2)
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 1.0)
    running = [
        launch._Process(
            rank,
            subprocess.Popen([sys.executable, "-c", code], start_new_session=True),
            tmp_path / f"{rank}.log",
        )
        for rank, code in enumerate(("pass", "import time; time.sleep(600)"))
    ]
    failed = launch._wait(running)
    assert [p.rank for p in failed] == [1]
    assert failed[0].describe_exit() == "was ended by SIGTERM"
    assert launch._exit_code(failed) == 1
    launch._stop(running)


def test_a_process_that_does_not_listen_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.5)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", deaf], start_new_session=True, stdout=subprocess.PIPE
    ) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        process = launch._Process(0, popen, tmp_path / "0.log")
        launch._stop([process])
        assert process.describe_exit() == "was ended by SIGKILL"


def test_only_the_end_of_a_long_log_is_shown(tmp_path, capsys):
    log = tmp_path / "3.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as popen:
        popen.wait()
        launch._show_log(launch._Process(3, popen, log))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "host 3 failed with exit code 7:"
    assert lines[1] == "  line 60"
    assert lines[-1] == "  line 99"


def test_each_process_learns_its_place_and_its_devices():
    base = {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=8", "HOME": "h"}
    environment = launch._environment(base, 2, 4, 1234, 3)
    assert environment["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:1234"
    assert environment["JAX_NUM_PROCESSES"] == "4"
    assert environment["JAX_PROCESS_ID"] == "2"
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["HOME"] == "h"
    assert environment["XLA_FLAGS"].split() == [
        "--a=1",
        "--xla_force_host_platform_device_count=3",
    ]
    # One process is no job, and what the user set is left as it is.
    alone = launch._environment({"JAX_PLATFORMS": "cuda"}, 0, 1, 1234, None)
    assert not [name for name in alone if name in (launch.ADDRESS, launch.PROCESS_ID)]
    assert alone["JAX_PLATFORMS"] == "cuda"
    assert "XLA_FLAGS" not in alone


NAMES = (launch.ADDRESS, launch.NUM_PROCESSES, launch.PROCESS_ID)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("a:1", "", "0"), "names a job without JAX_NUM_PROCESSES; set all of"),
        (("", "2", "0"), "names a job without JAX_COORDINATOR_ADDRESS; set all of"),
        (("a:1", "two", "0"), "JAX_NUM_PROCESSES='two' must be a whole number"),
        (("a:1", "2", "-1"), "JAX_PROCESS_ID='-1' must be a whole number"),
        (("a:1", "2", "2"), "JAX_PROCESS_ID=2 must be below JAX_NUM_PROCESSES=2"),
    ],
)
def test_a_job_that_is_named_wrongly_is_an_error(values, message):
    with pytest.raises(ConfigError, match=message):
        launch._job_from_environment(dict(zip(NAMES, values, strict=True)))


def test_without_a_job_in_the_environment_nothing_is_joined(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    launch.join_job(detect=False, timeout_seconds=1)
    assert not launch.has_joined()
    job = launch._job_from_environment(dict(zip(NAMES, ("a:1", "4", "3"), strict=True)))
    assert str(job) == "a:1 as process 3 of 4"


def test_a_port_is_given_out_once():
    with launch._free_port() as one, launch._free_port() as two:
        assert one != two
        assert 1024 <= one <= 65535
