"""Stage 2: windows, ends, checkpoints; hosts are threads of one process."""

import json

import grain
import numpy as np
import pytest

from grain_sparsecore.errors import ConfigError, StageMisuseError
from grain_sparsecore.limits import GrowthPolicy, Limits
from grain_sparsecore.pipeline.coordinate import CoordinateLimitsIterDataset
from tests.coordination_helpers import coordinated, layout_of, plain, run_hosts


@pytest.mark.parametrize("window", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("policy", ["stop", "pad"])
def test_restoring_at_every_step_continues_identically(window, policy):
    ds = coordinated(
        layout_of(1), [1, 2, 3, 9, 5, 6, 7], window=window, on_exhausted=policy
    )
    grain.experimental.assert_equal_output_after_checkpoint(ds.map(plain))


def test_limits_are_those_of_the_window_and_never_fall():
    it = iter(coordinated(layout_of(1), [1, 3, 2, 9, 5, 6, 7], window=3))
    limits = [e["sparsecore"].limits["t0"].max_ids_per_partition for e in it]
    assert limits == [3, 3, 3, 9, 9, 9, 9]
    assert it.limit_changes == 1
    assert it.agreements == 3
    assert it.step == 7


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_all_hosts_stop_after_the_last_batch_that_every_host_had(window):
    needs = [[1, 2, 3, 4, 5], [3, 3, 3], [1, 9, 1, 99, 1, 1, 1]]
    layout = layout_of(3)
    runs = run_hosts(
        lambda host, reducer: coordinated(layout, needs[host], reducer, window=window),
        3,
    )
    for run in runs:
        assert run.error is None
        assert run.indices == [0, 1, 2]
        # Not 99: a batch that nobody hands on does not raise the limits.
        assert run.max_ids[-1] == 9
    assert runs[0].max_ids == runs[1].max_ids == runs[2].max_ids


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_hosts_that_ran_out_pad_until_the_last_host_ends(window):
    needs = [[1, 2, 3, 4, 5], [], [1, 9, 1, 1, 1, 1, 1]]
    layout = layout_of(3)
    runs = run_hosts(
        lambda host, reducer: coordinated(
            layout, needs[host], reducer, window=window, on_exhausted="pad"
        ),
        3,
    )
    assert [run.error for run in runs] == [None] * 3
    assert runs[0].indices == [0, 1, 2, 3, 4, None, None]
    assert runs[1].indices == [None] * 7
    assert runs[2].indices == [0, 1, 2, 3, 4, 5, 6]
    assert [run.iterator.empty_batches for run in runs] == [2, 7, 0]
    empty = runs[1].elements[0]
    assert empty["index"].dtype == np.int64
    assert empty["index"].tolist() == [0] * 4
    assert empty["nested"]["text"].tolist() == [""]
    assert empty["nested"]["scale"] == 0.0
    assert empty["sparsecore"].embedding_ids.size == 0
    assert runs[0].max_ids == runs[1].max_ids == runs[2].max_ids


def test_a_state_is_json_and_a_snapshot():
    it = iter(coordinated(layout_of(1), [1, 2, 3], window=2))
    next(it)
    state = it.get_state()
    text = json.dumps(state)
    next(it)
    assert json.dumps(state) == text


def test_limits_start_where_told_and_not_below_the_floor():
    layout = layout_of(1)
    start = Limits.from_array(("t0", "t1"), np.array([[5, 1, 64], [1, 1, 16]]))
    (element,) = coordinated(layout, [2], start_limits=start)
    assert element["sparsecore"].limits["t0"].max_ids_per_partition == 5
    assert element["sparsecore"].limits["t0"].max_unique_ids_per_partition == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 0}, "window=0 batches is out of range; it must be from 1 to"),
        ({"window": 2.0}, "window must be an integer, not 2.0"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 must be above 0"),
        ({"name": "a/b"}, "name='a/b' must be a non-empty string without a slash"),
        ({"on_exhausted": "wait"}, "on_exhausted='wait' is not one of stop, pad"),
        (
            {"on_partial_batch": "keep"},
            "on_partial_batch='keep' is not one of drop, pad, error",
        ),
        (
            {"start_limits": Limits({})},
            "start_limits are of stacks [], but the layout has ['t0', 't1']",
        ),
    ],
)
def test_wrong_options_are_named(options, text):
    with pytest.raises(ConfigError) as caught:
        coordinated(layout_of(1), [1], **options)
    assert text in str(caught.value)


def test_the_parent_must_be_an_iter_dataset():
    with pytest.raises(StageMisuseError, match=r"cannot follow a .*MapDataset; it"):
        CoordinateLimitsIterDataset(
            grain.MapDataset.source([1]), layout=layout_of(1), policy=GrowthPolicy()
        )
