"""All hosts run the same program in every step, also when one host's data changes."""

import pytest

from grain_sparsecore.testing import run_hosts
from tests.multihost.fingerprints import programs, train_in_parts

HARD_FROM = 6


@pytest.mark.parametrize("hard_on", [0, 1])
def test_hosts_have_the_same_program_before_and_after_limits_grow(hard_on):
    arguments = {"hard_on": hard_on, "hard_from": HARD_FROM, "steps": 12}
    first, second = run_hosts(programs, hosts=2, arguments=arguments)
    assert first.value == second.value
    assert len(first.value) == 12
    limits, fingerprints = zip(*first.value, strict=True)
    # Ids spread over 4 partitions at first, then 8 samples of a SparseCore in one.
    assert limits[0]["item"]["max_ids_per_partition"] == 2
    assert limits[-1]["item"]["max_ids_per_partition"] == 8
    changed = [limits[i] != limits[i - 1] for i in range(1, 12)]
    assert changed.index(True) == HARD_FROM - 1
    assert sum(changed) == 1
    before, after = fingerprints[:HARD_FROM], fingerprints[HARD_FROM:]
    assert len(set(before)) == len(set(after)) == 1
    assert before[0] != after[0]


def test_training_stops_at_the_first_step_whose_programs_differ():
    results = [host.value for host in run_hosts(train_in_parts, hosts=2)]
    assert results[0] == results[1]
    (result, _) = results
    assert result["same"] == [4, ""]
    # Limits change in step 3, and the program of host 1 is another.
    steps, text = result["another"]
    assert steps == 2
    assert text.startswith(
        "HostMismatchError: in step 3 host 1 would run another TPU program than host 0"
    )
    assert result["missing"] == [
        0,
        "HostMismatchError: host 1 of 2 lacks jax-tpu-embedding, which the others "
        "have, so it cannot be told whether all would run the same TPU program. "
        "Install it on every host, pip install 'grain_sparsecore[sparsecore]', or on "
        "none.",
    ]
