"""A host goes away: the others name it, in time, and end with a normal exit status."""

import pytest

from grain_sparsecore.testing import run_hosts, show_logs
from tests.multihost import scenarios

TIMEOUT = 3.0

# How the victim goes, what it is called by the others, and its exit status.
WAYS = {
    "kill": ("the connection to host {} broke", -9),
    "stop": ("host {} did not arrive within 3 seconds", None),
    "exit": ("host {} closed its iterator after 3 batches", 0),
    "close": ("host {} closed its iterator after 3 batches", 0),
    "raise": ("host {} ended its process after 3 batches", 1),
}


@pytest.mark.parametrize(
    ("hosts", "victim", "how"),
    [
        (2, 1, "kill"),
        (2, 1, "stop"),
        (2, 0, "stop"),
        (2, 1, "exit"),
        (2, 1, "close"),
        (2, 1, "raise"),
        (3, 1, "kill"),
        (3, 2, "stop"),
        (3, 1, "exit"),
        (3, 2, "close"),
        (4, 3, "kill"),
        (4, 1, "stop"),
        (4, 2, "exit"),
        (4, 3, "close"),
    ],
)
def test_the_others_name_it_and_end_normally(hosts, victim, how):
    results = run_hosts(
        scenarios.leave,
        hosts=hosts,
        arguments={"victim": victim, "how": how, "timeout_seconds": TIMEOUT},
        check=False,
        not_awaited=[victim] if how == "stop" else [],
        timeout_seconds=180,
    )
    text, status = WAYS[how]
    logs = show_logs(results)
    if status is not None:
        assert results[victim].returncode == status, logs
    others = [r for r in results if r.index != victim]
    for result in others:
        assert result.returncode == 0, logs
        value = result.value
        # 3 were read before it went; the window of 2 had one more.
        assert value["indices"] == [3], logs
        assert value["error"] in ("HostFailedError", "HostTimeoutError"), logs
        assert "step 4" in value["text"], logs
        assert f"host {victim}" in value["text"], logs
        assert value["seconds"] < TIMEOUT + 2, logs
        assert value["again"] == value["text"], logs
        assert "restart the job to coordinate again" in value["fresh"], logs
    # Those who learn it from another host say who told them.
    assert any(text.format(victim) in r.value["text"] for r in others), logs


def test_an_error_that_nobody_catches_is_the_exit_status():
    results = run_hosts(
        scenarios.leave,
        hosts=2,
        arguments={
            "victim": 1,
            "how": "kill",
            "timeout_seconds": TIMEOUT,
            "catch": False,
        },
        check=False,
        timeout_seconds=120,
    )
    assert [r.returncode for r in results] == [1, -9], show_logs(results)
    assert "HostFailedError: pipeline 'train' step 4" in results[0].log


@pytest.mark.parametrize(
    ("processes", "hosts", "initialize", "text"),
    [
        (
            2,
            4,
            True,
            "HostMismatchError: pipeline 'train': the configuration is for 4 hosts "
            "(global_device_count / local_device_count), but the job has 2 processes; "
            "start as many processes as the configuration has hosts",
        ),
        (
            1,
            2,
            False,
            "HostMismatchError: pipeline 'train': the configuration is for 2 hosts "
            "(global_device_count / local_device_count), but the job has 1 process; "
            "call jax.distributed.initialize() before anything else uses JAX",
        ),
    ],
)
def test_a_job_of_another_number_of_processes_is_refused(
    processes, hosts, initialize, text
):
    results = run_hosts(
        scenarios.first_error,
        hosts=processes,
        arguments={"hosts": hosts},
        initialize=initialize,
    )
    for result in results:
        assert text in result.value


def test_a_platform_that_cannot_start_is_named():
    (result,) = run_hosts(
        scenarios.first_error,
        hosts=1,
        arguments={"hosts": 1},
        initialize=False,
        environment={"JAX_PLATFORMS": "cuda"},
    )
    assert "CoordinationError: JAX cannot start" in result.value
    assert "JAX_PLATFORMS is 'cuda'" in result.value
