"""Caps and shrinking on real hosts."""

import pytest

from grain_sparsecore.testing import run_hosts
from tests.multihost import limits_scenarios


@pytest.mark.parametrize("count", [2, 4])
def test_a_cap_ends_or_cuts_all_hosts_in_the_same_step(count):
    results = run_hosts(limits_scenarios.capped, hosts=count, timeout_seconds=120)
    last = count - 1
    for host, result in enumerate(results):
        error = result.value["error"]
        # Windows of two: the second one is never handed on.
        assert error["limits"] == [6, 6]
        assert error["error"].startswith(
            f"LimitsExceededError: pipeline 'error': stack 'item': host {last} needs "
            "max_ids_per_partition=24 in step 2, but max_ids_cap allows 10. Feature "
            "'clicks'"
        )
        drop = result.value["drop"]
        assert drop["error"] == ""
        assert drop["limits"] == [6, 6, 10, 10]
        assert drop["dropped"] == ([0, 0, 14, 0] if host == last else [0, 0, 0, 0])


def test_all_hosts_shrink_at_the_same_batch():
    results = run_hosts(limits_scenarios.shrinking, hosts=2, timeout_seconds=120)
    assert [r.value for r in results] == [[34, 34, 34, 34, 7, 7]] * 2
