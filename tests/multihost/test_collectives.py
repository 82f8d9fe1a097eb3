"""Our rounds beside the collectives of a training step on the same CPU devices."""

import pytest

from grain_sparsecore.testing import run_hosts
from tests.multihost import scenarios

TIMES = 10


def test_crossed_collectives_do_not_mix():
    results = run_hosts(
        scenarios.crossed_collectives,
        hosts=2,
        arguments={"rotate": True, "times": TIMES},
    )
    assert [r.value for r in results] == [0, 0]


def test_without_the_rotation_they_mix_silently():
    """Why the mesh is rotated. If this fails, XLA tells collectives apart by itself."""
    results = run_hosts(
        scenarios.crossed_collectives,
        hosts=2,
        arguments={"rotate": False, "times": TIMES},
    )
    for result in results:
        # Both results of every turn.
        assert result.value == 2 * TIMES


@pytest.mark.parametrize("hosts", [2, 4])
def test_windows_with_random_pauses_beside_training(hosts):
    results = run_hosts(
        scenarios.training_beside_windows,
        hosts=hosts,
        arguments={"windows": 200},
        devices_per_host=2,
        timeout_seconds=180,
    )
    assert [r.value for r in results] == [[200, []]] * hosts
