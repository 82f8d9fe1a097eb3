"""A host is late for the first round, or ends before it."""

import pytest

from grain_sparsecore.testing import run_hosts, show_logs
from tests.multihost import starts


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_ends_before_its_first_round_is_named_at_once(victim):
    results = run_hosts(
        starts.first_round,
        hosts=2,
        arguments={"victim": victim, "how": "raise", "timeout_seconds": 100},
        check=False,
    )
    logs = show_logs(results)
    other = results[1 - victim]
    assert "FileNotFoundError: the data of this host" in results[victim].log
    assert [results[victim].returncode, other.returncode] == [1, 0], logs
    assert other.value["error"] == "HostFailedError", logs
    assert f"step 0: host {victim} ended its process" in other.value["text"]
    assert other.value["seconds"] < 15, logs


def test_hosts_may_start_further_apart_than_xla_waits():
    # XLA gives the hosts 30 seconds to connect.
    results = run_hosts(
        starts.first_round,
        hosts=2,
        arguments={"victim": 1, "how": "33", "timeout_seconds": 100},
    )
    assert [r.value["indices"] for r in results] == [[0, 1, 2, 3]] * 2
    assert results[0].value["seconds"] > 30


@pytest.mark.parametrize("timeout_seconds", [0.001, 0.05])
def test_a_time_out_while_the_round_is_compiled_ends_normally(timeout_seconds):
    results = run_hosts(
        starts.first_round,
        hosts=2,
        arguments={"victim": 1, "how": "0.2", "timeout_seconds": timeout_seconds},
    )
    for result in results:
        errors = ("HostTimeoutError", "HostFailedError")
        assert result.value["error"] in errors, show_logs(results)
        assert result.value["seconds"] < timeout_seconds + 2
