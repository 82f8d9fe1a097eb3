"""Checkpoints of stage 2: exact positions, other jobs, and what carries over."""

import json

import grain
import numpy as np
import pytest

from grain_sparsecore.coordination import SingleProcessReducer
from grain_sparsecore.errors import CheckpointError
from grain_sparsecore.limits import GrowthPolicy
from grain_sparsecore.pipeline.coordinate import CoordinateLimitsIterDataset
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout
from tests.coordination_helpers import (
    BATCH,
    EXACT,
    MakeBatch,
    coordinated,
    layout_of,
    plain,
    run_hosts,
)

# One host of a larger job, by itself.
ALONE = SingleProcessReducer()


def layout_on(hosts, *, devices=4, batch_size=BATCH):
    """Four devices in all, over one, two or four hosts."""
    return make_layout(
        [TableSpec(name="t0", vocabulary_size=100, embedding_dim=8)],
        [FeatureSpec(name="f0", table="t0")],
        topology=Topology(
            global_device_count=devices,
            local_device_count=devices // hosts,
            num_sc_per_device=1,
        ),
        batch_size=batch_size,
    )


def sharded(needs, host, hosts, layout, reducer=None, **options):
    """Host h of n reads batch h::n, as after ds[h::n].batch."""
    return coordinated(layout, needs[host::hosts], reducer, **options)


def state_after(ds, count):
    it = iter(ds)
    for _ in range(count):
        next(it)
    return it.get_state()


@pytest.mark.parametrize("policy", ["drop", "pad"])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_partial_batches_do_not_move_positions(policy, window):
    needs = [(1, 4), (2, 3), (3, 4), (4, 4), (5, 1), (6, 4)]
    ds = coordinated(layout_of(1), needs, window=window, on_partial_batch=policy)
    grain.experimental.assert_equal_output_after_checkpoint(ds.map(plain))


def test_a_stopped_host_keeps_the_batches_that_were_read_but_not_handed_on():
    layout = layout_of(2)
    needs = [[1, 2, 3, 4, 5], [1, 2, 3]]
    runs = run_hosts(
        lambda host, reducer: coordinated(layout, needs[host], reducer, window=4), 2
    )
    state = runs[0].iterator.get_state()
    assert (state["start"], state["position"]) == (0, 3)
    # With more data on the other host, the job goes on with batch 3.
    more = [needs[0], [1, 2, 3, 4, 5]]

    def restored(host, reducer):
        it = iter(coordinated(layout, more[host], reducer, window=4))
        it.set_state(runs[host].iterator.get_state())
        return it

    assert [run.indices for run in run_hosts(restored, 2)] == [[3, 4]] * 2


def test_restoring_resets_the_end_of_the_data():
    it = iter(coordinated(layout_of(1), [1, 2, 3], window=2))
    start = it.get_state()
    assert len(list(it)) == 3
    with pytest.raises(StopIteration):
        next(it)
    it.set_state(start)
    assert len(list(it)) == 3


def test_restoring_does_not_reset_a_failure():
    it = iter(coordinated(layout_of(1), [1, "broken"], window=2))
    start = it.get_state()
    next(it)
    with pytest.raises(ValueError, match="broken"):
        next(it)
    it.set_state(start)
    with pytest.raises(ValueError, match="broken"):
        next(it)


def test_a_repeat_behind_the_stage_starts_it_again():
    ds = coordinated(layout_of(1), [1, 2, 3], window=2)
    repeated = grain.experimental.RepeatIterDataset(ds, num_epochs=2)
    assert len(list(repeated)) == 6


def test_grain_saves_and_sets_positions_by_index():
    it = iter(coordinated(layout_of(1), [1, 2, 3, 4], window=3))
    assert grain.experimental.get_next_index(it) == 0
    grain.experimental.set_next_index(it, 2)
    assert [int(e["index"][0]) for e in it] == [2, 3]
    assert grain.experimental.get_next_index(it) == 4


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"next_index": 3}, "it has no version, but ['next_index']"),
        ([1], "it has no version, but list"),
    ],
)
def test_a_state_of_something_else_is_refused(state, text):
    it = iter(coordinated(layout_of(1), [1]))
    with pytest.raises(CheckpointError) as caught:
        it.set_state(state)
    assert text in str(caught.value)


def test_a_state_of_an_older_version_is_refused():
    it = iter(coordinated(layout_of(1), [1]))
    state = {**it.get_state(), "version": 0}
    with pytest.raises(CheckpointError, match="the state has format version 0; this"):
        it.set_state(state)


def without(state, key):
    return {k: v for k, v in state.items() if k != key}


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda s: without(s, "limits"), "it lacks limits"),
        (lambda s: {"version": 1}, "it lacks configuration, limits, needed, padded"),
        (lambda s: {**s, "position": -1}, "position=-1 is not from 0 to 7"),
        (lambda s: {**s, "position": 8}, "position=8 is not from 0 to 7"),
        (lambda s: {**s, "position": "1"}, "position is '1', no whole number"),
        (lambda s: {**s, "start": None}, "start is None, no whole number"),
        (lambda s: {**s, "start": 1.5}, "start is 1.5, no whole number"),
        (lambda s: {**s, "skipped": -3}, "skipped=-3 is not from 0"),
        (lambda s: {**s, "padded": float("nan")}, "padded is nan, no whole number"),
        (lambda s: {**s, "limits": s["limits"][:1]}, "not three whole numbers for eac"),
        (lambda s: {**s, "limits": None}, "limits is None, not three whole numbers"),
        (lambda s: {**s, "limits": [[1, 2], [3]]}, "no rows of numbers"),
        (lambda s: {**s, "limits": [[0, 1, 1]] * 2}, "number outside 1 to 2147483647"),
        (lambda s: {**s, "limits": [[2**31, 1, 1]] * 2}, "number outside 1 to 2147"),
        (lambda s: {**s, "needed": [[-1, 0, 0]] * 2}, "number outside 0 to 2147483647"),
        (lambda s: {**s, "needed": [[0.5, 0, 0]] * 2}, "not three whole numbers"),
        (
            lambda s: {**s, "configuration": s["configuration"][:40]},
            "its configuration cannot be read (JSONDecodeError",
        ),
        (lambda s: {**s, "configuration": 7}, "its configuration cannot be read (Typ"),
        (lambda s: {**s, "configuration": "{}"}, "its configuration cannot be read (K"),
        (lambda s: {**s, "parent": None}, "does not take its part of the state"),
        (lambda s: {**s, "parent": {}}, "does not take its part of the state (KeyErr"),
    ],
)
def test_a_damaged_state_is_refused_with_what_is_wrong(damage, text):
    ds = coordinated(layout_of(1), [1, 2, 3])
    it = iter(ds)
    state = damage(state_after(ds, 1))
    with pytest.raises(CheckpointError) as caught:
        it.set_state(state)
    assert text in str(caught.value)
    assert "start the data anew" in str(caught.value)
    if "its part" in text:
        assert "with as many pipeline.workers" in str(caught.value)


def test_a_state_may_hold_numbers_of_numpy():
    ds = coordinated(layout_of(1), [1, 2, 3])
    state = state_after(ds, 1)
    arrays = {
        key: np.asarray(value)
        for key, value in state.items()
        if key not in ("configuration", "parent")
    }
    it = iter(ds)
    it.set_state({**state, **arrays})
    assert [int(e["index"][0]) for e in it] == [1, 2]
    assert json.loads(json.dumps(it.get_state()))["position"] == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 3}, "window is 8 in the checkpoint and 3 in this pipeline"),
        ({"name": "eval"}, 'name is "train" in the checkpoint and "eval" in this pip'),
        (
            {"policy": GrowthPolicy(kind="headroom")},
            'growth.kind is "exact" in the checkpoint and "headroom" in this pipeline',
        ),
        (
            {"layout": layout_of(1, vocabulary_size=50)},
            "tables.t0.vocabulary_size is 100 in the checkpoint and 50 in this",
        ),
        (
            {"layout": layout_of(1, tables=1)},
            "tables.t1 is present in the checkpoint and absent in this pipeline",
        ),
    ],
)
def test_a_state_of_another_configuration_names_the_difference(options, text):
    state = state_after(coordinated(layout_of(1), [1, 2, 3]), 1)
    layout = options.pop("layout", layout_of(1))
    it = iter(coordinated(layout, [1, 2, 3], **options))
    with pytest.raises(CheckpointError) as caught:
        it.set_state(state)
    assert text in str(caught.value)
    assert "start a new pipeline with start_limits" in str(caught.value)


def test_data_that_shrank_is_an_error_not_a_jump():
    state = state_after(coordinated(layout_of(1), [1, 2, 3, 4], window=4), 3)
    it = iter(coordinated(layout_of(1), [1, 2], window=4))
    it.set_state(state)
    with pytest.raises(CheckpointError, match="after 3 batches of the window that sta"):
        next(it)


# Another number of hosts.

NEEDS = [3, 5, 4, 9, 2, 2, 2, 2, 1, 1, 12, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("step", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("now", [1, 4])
def test_a_job_continues_on_another_number_of_hosts(step, now):
    """Two hosts of batch 4 become one of 8 or four of 2: one global batch."""
    before = layout_on(2, batch_size=4)
    states = []

    def first(host, reducer):
        it = iter(sharded(NEEDS, host, 2, before, reducer, window=3, elastic=True))
        return _Until(it, step, states)

    run_hosts(first, 2)
    after = layout_on(now, batch_size=8 // now)

    def second(host, reducer):
        # Each step of the old job is one of the new: batches stand for records here.
        it = iter(sharded(NEEDS, host % 2, 2, after, reducer, window=3, elastic=True))
        it.set_state(states[host % 2])
        return it

    runs = run_hosts(second, now)
    for run in runs:
        assert run.error is None
        assert run.indices == list(range(step, 8))
    # N and the samples per SparseCore are as they were, so the limits carry over.
    kept = np.array(states[0]["limits"])[0, 0]
    assert runs[0].max_ids[0] >= kept


class _Until:
    """Reads some steps, and keeps the state behind them."""

    def __init__(self, it, steps, states):
        self._it, self._steps, self._states = it, steps, states

    def __iter__(self):
        for _ in range(self._steps):
            yield next(self._it)
        self._states.append(self._it.get_state())
        self._it.close()


def other_hosts_error(*, elastic=True, batch_size=8, edit=None, **options):
    ds = coordinated(
        layout_on(2, batch_size=4), NEEDS, ALONE, window=3, elastic=elastic
    )
    state = {**state_after(ds, 2), **(edit or {})}
    it = iter(
        coordinated(
            layout_on(1, batch_size=batch_size),
            NEEDS,
            ALONE,
            window=3,
            elastic=elastic,
            **options,
        )
    )
    with pytest.raises(CheckpointError) as caught:
        it.set_state(state)
    return str(caught.value)


def test_another_number_of_hosts_must_be_allowed():
    text = other_hosts_error(elastic=False)
    assert "saved on 2 hosts and is restored on 1" in text
    assert "pass elastic=True" in text


def test_another_number_of_hosts_keeps_the_global_batch():
    text = other_hosts_error(batch_size=4)
    assert "the global batch changes from 8 to 4 samples" in text
    assert "use batch_size=8 per host" in text


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        ({"padded": 1}, "because one had run out of data"),
        ({"skipped": 2}, "because one dropped a batch"),
    ],
)
def test_another_number_of_hosts_needs_equal_positions(edit, text):
    assert text in other_hosts_error(edit=edit)


def test_a_source_without_positions_is_refused_on_another_number_of_hosts():
    def make(layout):
        ds = grain.MapDataset.source(list(enumerate(NEEDS))).to_iter_dataset()
        # A filter cannot jump to an index.
        ds = ds.filter(lambda element: True).map(MakeBatch(layout))
        return ds.pipe(
            CoordinateLimitsIterDataset, layout=layout, elastic=True, reducer=ALONE
        )

    state = state_after(make(layout_on(2, batch_size=4)), 2)
    with pytest.raises(CheckpointError, match="cannot be put to step 2; restore on as"):
        iter(make(layout_on(1, batch_size=8))).set_state(state)


def test_an_elastic_iterator_moves_by_itself():
    records = list(enumerate([1] * 64))

    def make(layout, host, hosts):
        def to_batch(batch):
            return MakeBatch(layout).map((int(batch[0][0]), 1))

        ds = grain.experimental.ElasticIterator(
            grain.MapDataset.source(records),
            global_batch_size=8,
            shard_options=grain.sharding.ShardOptions(
                shard_index=host, shard_count=hosts
            ),
        ).map(to_batch)
        return ds.pipe(
            CoordinateLimitsIterDataset,
            layout=layout,
            window=3,
            policy=EXACT,
            reducer=ALONE,
        )

    state = state_after(make(layout_on(2, batch_size=4), 0, 2), 4)
    assert json.loads(json.dumps(state)) == state
    it = iter(make(layout_on(1, batch_size=8), 0, 1))
    it.set_state(state)
    # Four steps of 8 records were read; the next starts at record 32.
    assert int(next(it)["index"][0]) == 32


def test_limits_start_anew_where_the_partitions_are_others():
    ds = coordinated(layout_on(1, devices=4, batch_size=8), NEEDS, window=2)
    state = state_after(ds, 4)
    assert state["limits"][0][0] == 9
    it = iter(coordinated(layout_on(1, devices=2, batch_size=8), NEEDS, window=2))
    it.set_state(state)
    assert it.limits["t0"].max_ids_per_partition == 1
    # The position is kept: batch 4, which needs 2.
    assert int(next(it)["index"][0]) == 4
    assert it.limits["t0"].max_ids_per_partition == 2
