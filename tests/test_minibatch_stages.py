"""Minibatches in the stages: growth, agreement, checkpoints, full buckets."""

import numpy as np
import pytest

from grain_sparsecore.errors import ConfigError, LimitsExceededError
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.minibatch import (
    LEFT_OUT,
    bucketed,
    leave_out,
    slot_buckets,
)
from grain_sparsecore.overflow import OverflowPolicy, StackCaps
from grain_sparsecore.stacking import INT32_MAX
from tests.coordination_helpers import run_hosts
from tests.minibatch_helpers import (
    CAP,
    DROP,
    MINIBATCH,
    batch_of,
    check_lookup,
    layout_of,
    pipeline,
    rows_with,
)
from tests.strategies import Case, random_features


def test_growth_comes_first_and_minibatches_above_the_cap():
    raw = [rows_with(n) for n in (3, CAP, 40, 2)]
    layout = layout_of()
    iterator = iter(pipeline(raw, window=1))
    found = [e["sparsecore"] for e in iterator]
    assert [b.limits["item"].max_ids_per_partition for b in found] == [8, 10, 10, 10]
    counts = [b.num_minibatches.tolist() for b in found]
    assert counts[0] == counts[1] == counts[3] == [1]
    assert counts[2][0] >= 4
    for batch, ids in zip(found, raw, strict=True):
        assert batch.drops is None
        check_lookup(batch, ids, layout)
    totals = iterator.coordinator.splits
    assert totals.batches == {1: 3, counts[2][0]: 1}
    assert totals.extra_slots > 0


@pytest.mark.parametrize("hosts", [1, 2, 3, 4])
def test_one_batch_of_one_host_splits_it_on_all_hosts(hosts):
    layout = layout_of(hosts)
    bad = hosts - 1
    raw = [
        [rows_with(60 if (h, i) == (bad, 1) else 5, seed=h) for i in range(4)]
        for h in range(hosts)
    ]
    runs = run_hosts(
        lambda host, reducer: pipeline(raw[host], reducer, layout=layout), hosts
    )
    seen = []
    for host, run in enumerate(runs):
        assert run.error is None
        batches = [e["sparsecore"] for e in run.elements]
        seen.append([(b.num_minibatches.tolist(), b.limits) for b in batches])
        assert [b.num_minibatches[0] > 1 for b in batches] == [
            False,
            True,
            False,
            False,
        ]
        for batch, ids in zip(batches, raw[host], strict=True):
            check_lookup(batch, ids, layout)
    assert all(one == seen[0] for one in seen)


def test_the_lookup_trusts_only_the_row_pointers_of_its_minibatches():
    raw = rows_with(60)
    layout = layout_of()
    (batch,) = [e["sparsecore"] for e in pipeline([raw])]
    used = 2 * int(batch.num_minibatches[0]) * layout.row_pointers_per_sc
    rng = np.random.default_rng(2)
    for name, pointers in batch.row_pointers.items():
        # What jax-tpu-embedding leaves there is not defined.
        pointers[:, used:] = rng.integers(0, 200, pointers[:, used:].shape)
        batch.embedding_ids[name][:] = np.where(
            batch.embedding_ids[name] == INT32_MAX, 3, batch.embedding_ids[name]
        )
    check_lookup(batch, raw, layout)


def test_a_host_without_batches_follows():
    layout = layout_of(2)
    raw = [[rows_with(5), rows_with(50)], []]
    runs = run_hosts(
        lambda host, reducer: pipeline(
            raw[host], reducer, layout=layout, on_exhausted="pad"
        ),
        2,
    )
    minibatches = []
    for run in runs:
        assert run.error is None
        batches = [e["sparsecore"] for e in run.elements]
        minibatches.append([int(b.num_minibatches[0]) for b in batches])
    assert minibatches[0] == minibatches[1]
    assert minibatches[0][0] == 1
    assert minibatches[0][1] > 1
    assert not runs[1].elements[1]["sparsecore"].row_pointers["item"].any()


def test_only_windows_with_a_split_take_more_rounds():
    rounds = []
    for most in (CAP - 1, CAP + 1):
        iterator = iter(pipeline([rows_with(most)] * 4, window=2))
        next(iterator)
        rounds.append(iterator.coordinator._connect().rounds)
    # The handshake and the window; then the bits and what the split batches need.
    assert rounds == [2, 4]


def test_the_window_does_not_change_how_batches_are_split():
    raw = [rows_with(n) for n in (3, 50, 4, 20, 60)]
    counts = [
        [int(e["sparsecore"].num_minibatches[0]) for e in pipeline(raw, window=w)]
        for w in (1, 2, 5)
    ]
    assert counts[0] == counts[1] == counts[2]
    assert min(counts[0]) == 1
    assert max(counts[0]) > 4


def test_a_restored_pipeline_splits_as_before():
    raw = [rows_with(n) for n in (3, 50, 4, 20)]
    iterator = iter(pipeline(raw, window=4))
    batches, states = [], []
    for element in iterator:
        batches.append(element["sparsecore"])
        states.append(iterator.get_state())
    for done, state in enumerate(states, start=1):
        again = iter(pipeline(raw, window=4))
        again.set_state(state)
        assert [e["sparsecore"] for e in again] == batches[done:]


def full_bucket_rows():
    """A sample with one item often clicked by all: one bucket, whatever the split."""
    rows = rows_with(2)
    for i in range(8):
        rows["clicks"][i] = np.array([16])
        rows["views"][i] = np.array([16, 32])
    return rows


TIGHT = {"item": StackCaps(max_ids_cap=6)}


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_bucket_above_the_cap_stops_all_hosts_with_one_text(hosts):
    layout = layout_of(hosts)
    raw = [[rows_with(1), rows_with(2)] for _ in range(hosts - 1)]
    raw.append([rows_with(1), full_bucket_rows()])
    overflow = OverflowPolicy(on_overflow="minibatch", caps=TIGHT)
    runs = run_hosts(
        lambda host, reducer: pipeline(
            raw[host], reducer, layout=layout, overflow=overflow
        ),
        hosts,
    )
    for run in runs:
        assert run.elements == []
        assert isinstance(run.error, LimitsExceededError)
        assert str(run.error) == (
            f"pipeline 'train': stack 'item': host {hosts - 1} needs "
            "max_ids_per_partition=8 in step 1, but max_ids_cap allows 6 even for a "
            "single one of the 64 buckets that a batch is split into. Feature "
            "'clicks' (table 'item') makes 50% of its fullest bucket. To go on, raise "
            "limits.stack.item.max_ids_cap to 8 or more (the command plan tells what "
            "all batches need), lower the batch size, or set limits.on_full_bucket = "
            '"drop".'
        )


def test_a_bucket_above_the_cap_loses_what_is_behind_its_prefix():
    overflow = OverflowPolicy(
        on_overflow="minibatch", on_full_bucket="drop", caps=TIGHT
    )
    layout = layout_of()
    raw = [rows_with(1), full_bucket_rows()]
    one, two = [e["sparsecore"] for e in pipeline(raw, overflow=overflow)]
    assert not one.drops.per_feature.any()
    check_lookup(one, raw[0], layout)
    # On each SparseCore 4 clicks and 4 views of item 16; the last 2 views go.
    clicks, views, user = two.drops.per_feature.tolist()
    assert (clicks, user) == ([0, 0, 0], [0, 0, 0])
    assert views == [4, 4, 4]
    assert two.drops.lost_weight.tolist() == [0, 4, 0]
    assert two.drops.examples == 4
    kept = {name: list(rows) for name, rows in raw[1].items()}
    for sample in (2, 3, 6, 7):
        kept["views"][sample] = np.array([32])
    check_lookup(two, kept, layout)


def test_all_batches_of_a_pipeline_have_one_structure():
    found = [
        e["sparsecore"] for e in pipeline([rows_with(3), rows_with(50)], overflow=DROP)
    ]
    assert [b.drops.examples for b in found] == [0, 0]
    shapes = [b.row_pointers["item"].shape for b in found]
    assert shapes[0] == shapes[1] == (1, 2 * 64 * 8)


def test_the_error_of_distinct_ids_names_who_has_them():
    rows = rows_with(20)
    for i in range(8):
        # One id, so often that most entries of its bucket are views.
        rows["views"][i] = np.array([16])
    overflow = OverflowPolicy(
        on_overflow="minibatch", caps={"item": StackCaps(max_unique_ids_cap=1)}
    )
    with pytest.raises(
        LimitsExceededError,
        match=r"needs max_unique_ids_per_partition=\d+ .* max_unique_ids_cap allows 1 "
        r"even for .* Feature 'clicks' \(table 'item'\) makes 100% of its fullest",
    ):
        list(pipeline([rows], overflow=overflow))


def test_the_cost_of_the_worst_window_is_kept():
    seen = []
    for needs in ((60,), (60, CAP + 1), (CAP + 1,)):
        iterator = iter(pipeline([rows_with(n) for n in needs], window=1))
        assert len(list(iterator)) == len(needs)
        seen.append(iterator.coordinator.splits.extra_slots)
    assert seen[0] == seen[1] > seen[2] > 0


def test_a_capped_buffer_stays_an_error():
    caps = {"item": StackCaps(max_ids_cap=CAP, buffer_cap_bytes=12 * 64)}
    overflow = OverflowPolicy(on_overflow="minibatch", on_full_bucket="drop", caps=caps)
    with pytest.raises(LimitsExceededError) as caught:
        list(pipeline([rows_with(60)], overflow=overflow))
    text = str(caught.value)
    assert "needs buffer_size=" in text
    assert "but buffer_cap_bytes allows 64 slots" in text
    assert "lower the batch size, or spread the samples over more hosts." in text


def test_frozen_limits_are_caps():
    layout = layout_of()
    wide = Limits(
        {
            name: StackLimits(
                max_ids_per_partition=20,
                max_unique_ids_per_partition=20,
                buffer_size_per_device=1024,
            )
            for name in layout.stack_names
        }
    )
    overflow = OverflowPolicy(on_overflow="minibatch", frozen=True)
    raw = [rows_with(60), rows_with(5)]
    found = [
        e["sparsecore"] for e in pipeline(raw, overflow=overflow, start_limits=wide)
    ]
    assert [b.limits for b in found] == [wide, wide]
    assert [b.num_minibatches[0] > 1 for b in found] == [True, False]
    check_lookup(found[0], raw[0], layout)


def test_distinct_ids_alone_may_split_a_batch():
    caps = {"item": StackCaps(max_unique_ids_cap=CAP)}
    overflow = OverflowPolicy(on_overflow="minibatch", caps=caps)
    raw = [rows_with(60)]
    (found,) = [e["sparsecore"] for e in pipeline(raw, overflow=overflow)]
    assert found.num_minibatches[0] > 1
    assert found.limits["item"].max_unique_ids_per_partition == CAP
    assert found.limits["item"].max_ids_per_partition == 60
    check_lookup(found, raw[0], layout_of())


def test_an_unknown_choice_is_refused():
    with pytest.raises(
        ConfigError, match=r"limits: on_full_bucket='keep' is not one of error, drop\."
    ):
        OverflowPolicy(on_full_bucket="keep")  # pyright: ignore[reportArgumentType]


def test_leaving_out_keeps_the_batch_as_it_is():
    rng = np.random.default_rng(8)
    layout = layout_of()
    case = Case(layout, random_features(rng, layout, max_ids=80))
    batch = batch_of(case)
    buckets = slot_buckets(batch, layout)
    before = buckets.copy()
    ceilings = np.full((2, 3), 1)
    kept, lost = leave_out(batch, buckets, ceilings, layout)
    np.testing.assert_array_equal(buckets, before)
    gone = int(((kept == LEFT_OUT) & (buckets != LEFT_OUT)).sum())
    assert gone == lost.per_feature[:, 1].sum() > 0
    for stack in layout.stacks:
        found = bucketed(batch, kept, stack, layout)
        np.testing.assert_array_equal(found.counts <= 1, True)


def test_minibatching_is_a_setting_of_its_own():
    assert MINIBATCH.minibatching
    assert not MINIBATCH.may_drop
    assert not MINIBATCH.counts_drops
    assert DROP.counts_drops
