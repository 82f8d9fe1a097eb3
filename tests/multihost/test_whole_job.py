"""What hosts agree on while all of them are there: ends, differences, restarts.

One start of processes runs all scenarios of `scenarios.WHOLE`, for 2, 3 and 4 hosts.
"""

import pytest

from grain_sparsecore.testing import HostsError, run_hosts
from tests.multihost import scenarios


@pytest.fixture(scope="module", params=[2, 3, 4])
def job(request):
    """The results of every scenario, by its name, then by host."""
    results = run_hosts(scenarios.all_whole, hosts=request.param, timeout_seconds=120)
    return {
        scenario.__name__: [r.value[scenario.__name__] for r in results]
        for scenario in scenarios.WHOLE
    }


def samples(hosts, policies):
    return [host[policies]["samples"] for host in hosts]


def test_partial_batches_are_dropped_and_all_stop(job):
    hosts = job["records"]
    assert samples(hosts, "drop-stop") == [[4]] * len(hosts)


def test_partial_batches_are_dropped_and_hosts_pad(job):
    hosts = job["records"]
    expected = [[4, 4], [4, 0], [4, 4], [4, 0]]
    assert samples(hosts, "drop-pad") == expected[: len(hosts)]


def test_partial_batches_are_padded_and_all_stop(job):
    hosts = job["records"]
    expected = [[4, 4], [4, 3], [4, 4], [4, 3]]
    assert samples(hosts, "pad-stop") == expected[: len(hosts)]


def test_partial_batches_are_padded_and_hosts_pad(job):
    hosts = job["records"]
    expected = [[4, 4, 2], [4, 3, 0], [4, 4, 2], [4, 3, 0]]
    assert samples(hosts, "pad-pad") == expected[: len(hosts)]


@pytest.mark.parametrize("policies", ["error-stop", "error-pad"])
def test_a_partial_batch_is_an_error_on_all_hosts_in_the_same_step(job, policies):
    hosts = [host[policies] for host in job["records"]]
    # Host 1 is the first with a partial batch; with 4 hosts so is host 3, and the
    # highest of those is the one that is named.
    first = 3 if len(hosts) == 4 else 1
    for index, host in enumerate(hosts):
        assert host["samples"] == [4]
        assert "step 1: the batch has 3 samples, not 4" in host["text"]
        if index == first:
            assert host["error"] == "InputError"
        else:
            assert host["error"] == "HostFailedError"
            assert f"host {first} failed in step 1: InputError" in host["text"]


def test_hosts_with_unequal_batches_end_in_the_same_step(job):
    hosts = job["unequal_batches"]
    for host in hosts:
        assert host["stop"]["error"] is None
        assert host["stop"]["indices"] == [0, 1, 2]
    longest = max(scenarios.BATCHES[: len(hosts)])
    for index, host in enumerate(hosts):
        own = scenarios.BATCHES[index]
        assert host["pad"]["error"] is None
        assert host["pad"]["indices"] == [*range(own), *[None] * (longest - own)]


def test_a_host_without_any_data_stops_all_or_pads(job):
    hosts = job["no_data"]
    for host in hosts:
        assert host["stop"] == {
            "indices": [],
            "samples": [],
            "max_ids": [],
            "error": None,
            "text": "None",
        }
        assert host["pad"]["max_ids"] == [2, 2, 3]
    assert hosts[0]["pad"]["indices"] == [0, 1, 2]
    assert hosts[-1]["pad"]["indices"] == [None] * 3


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("vocabulary", "tables.t0.vocabulary_size is 100 on {others} and 200 on host"),
        ("batch", "batch_size is 4 on {others} and 8 on host 1"),
        ("tables", "tables.t2 is absent on {others} and present on host 1"),
        ("window", "window is 2 on {others} and 3 on host 1"),
    ],
)
def test_every_host_names_the_host_that_differs_and_how(job, kind, text):
    hosts = [host[kind] for host in job["mismatch"]]
    others = {2: "host 0", 3: "hosts 0 and 2", 4: "hosts 0, 2 and 3"}[len(hosts)]
    for index, host in enumerate(hosts):
        assert host["error"] == "HostMismatchError"
        assert "host 1 differs: " in host["text"]
        assert text.format(others=others) in host["text"]
        assert f"(this is host {index})" in host["text"]


def test_the_order_of_declaration_is_no_difference(job):
    for host in job["mismatch"]:
        assert host["order"]["error"] is None
        assert host["order"]["indices"] == [0, 1]


def test_a_failing_source_stops_all_hosts_in_its_step(job):
    for index, host in enumerate(job["failing_source"]):
        assert host["indices"] == [0, 1, 2, 3, 4]
        if index == 1:
            assert (host["error"], host["text"]) == ("ValueError", "record 5 is broken")
        else:
            assert host["error"] == "HostFailedError"
            assert (
                "the input pipeline of host 1 failed in step 5: ValueError: record 5 "
                "is broken" in host["text"]
            )
        assert host["text"] in host["again"]


def test_limits_grow_on_all_hosts_at_the_batch_where_one_needs_it(job):
    for host in job["growth_on_one_host"]:
        assert host["max_ids"] == [3] * 4 + [40] * 8
        assert host["changes"] == 1
        assert host["traces"] == 2


def test_a_job_restored_at_any_step_continues_with_the_same_bytes(job):
    hosts = job["restored"]
    for host in hosts:
        # From before the first batch to after the last.
        assert host["stop"] == [True] * (7 + 1)
        assert host["pad"] == [True] * (7 + len(hosts))


def test_a_host_that_is_slow_but_in_time_changes_nothing(job):
    for host in job["slow_host"]:
        assert host["error"] is None
        assert host["indices"] == [2, 3]
        assert host["max_ids"] == [len(job["slow_host"])] * 2


def test_evaluation_runs_beside_training_with_limits_of_its_own(job):
    hosts = job["train_and_eval"]
    for host in hosts:
        assert host["train"] == 2
        assert host["steps"] == 6
        assert host["eval"] == [[8 + len(hosts)]] * 3


def test_a_second_iterator_waits_for_the_end_of_the_first(job):
    for second, rest, third in job["two_live_iterators"]:
        assert second["error"] == "StageMisuseError"
        assert "another iterator of it is live" in second["text"]
        assert 'name="eval"' in second["text"]
        assert rest["indices"] == [1, 2, 3]
        assert third["indices"] == [0, 1, 2, 3]


def test_hosts_that_restore_different_steps_are_told(job):
    for host in job["other_steps"]:
        assert host["error"] == "HostMismatchError"
        assert "hosts are in different steps, from 3 to 4" in host["text"]
        assert "restore all hosts from the same checkpoint" in host["text"]


def test_hosts_that_advance_their_pipelines_in_another_order_are_told(job):
    for host in job["crossed_pipelines"]:
        assert host["error"] == "HostMismatchError"
        assert "another host advanced another pipeline" in host["text"]


def test_failures_show_the_logs_of_all_hosts():
    with pytest.raises(HostsError) as caught:
        run_hosts(scenarios.fails_on_host_1, hosts=2, initialize=False)
    text = str(caught.value)
    assert "hosts [1] failed." in text
    assert "host 0: exit status 0" in text
    assert "said by host 0" in text
    assert "host 1: exit status 1" in text
    assert "ValueError: said by host 1" in text


def test_hosts_that_pass_the_time_limit_are_ended():
    with pytest.raises(HostsError, match=r"hosts \[1\] did not end within 10 seconds"):
        run_hosts(
            scenarios.hangs_on_host_1, hosts=2, initialize=False, timeout_seconds=10
        )
