"""Caps, frozen limits and shrinking in stage 2; hosts are threads of one process."""

import json
from typing import Any

import grain
import numpy as np
import pytest

from grain_sparsecore.errors import (
    ConfigError,
    HostMismatchError,
    LimitsExceededError,
    StageMisuseError,
)
from grain_sparsecore.limits import GrowthPolicy, Limits, StackLimits
from grain_sparsecore.overflow import OverflowPolicy, StackCaps
from grain_sparsecore.pipeline import (
    ComputeInputStats,
    CoordinateLimitsIterDataset,
    RepartitionIterDataset,
)
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout
from tests.coordination_helpers import run_hosts

BATCH = 8


def layout_of(hosts: int = 1) -> StackedLayout:
    return make_layout(
        [
            TableSpec(name="item", vocabulary_size=512, embedding_dim=8),
            TableSpec(name="user", vocabulary_size=64, embedding_dim=8),
        ],
        [
            FeatureSpec(name="clicks", table="item"),
            FeatureSpec(name="views", table="item"),
            FeatureSpec(name="user", table="user"),
        ],
        topology=Topology(
            global_device_count=hosts, local_device_count=1, num_sc_per_device=2
        ),
        batch_size=BATCH,
    )


def rows_with(most: int, rng: np.random.Generator) -> dict[str, Any]:
    """A batch whose first sample clicks on ``most`` items of partition 0."""
    clicks = [np.array([1])] * BATCH
    clicks[0] = 16 * rng.permutation(32)[:most]
    return {
        "clicks": ragged(clicks),
        "views": ragged([np.array([0])] * BATCH),
        "user": np.arange(BATCH),
    }


def ragged(rows: list[np.ndarray]) -> np.ndarray:
    result = np.empty(len(rows), object)
    result[:] = rows
    return result


def pipeline(
    needs: list[int],
    reducer: Any = None,
    *,
    layout: StackedLayout | None = None,
    cut_above: Limits | None = None,
    **options: Any,
) -> RepartitionIterDataset:
    layout = layout or layout_of()
    rng = np.random.default_rng(0)
    options.setdefault("policy", GrowthPolicy(kind="exact"))
    options.setdefault("window", 2)
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return (
        grain.MapDataset.source([rows_with(n, rng) for n in needs])
        .map(ComputeInputStats(layout, cut_above=cut_above))
        .to_iter_dataset(read_options=read)
        .pipe(CoordinateLimitsIterDataset, layout=layout, reducer=reducer, **options)
        .pipe(RepartitionIterDataset, layout=layout)
    )


CAP = {"item": StackCaps(max_ids_cap=10)}


def limits_of(run: Any) -> list[int]:
    return [e["sparsecore"].limits["item"].max_ids_per_partition for e in run]


def test_growth_stops_at_the_cap():
    # One view of item 0 is in partition 0 as well, on each sample: 4 on a SparseCore.
    overflow = OverflowPolicy(caps={"item": StackCaps(max_ids_cap=15)})
    policy = GrowthPolicy(kind="geometric")
    run = list(pipeline([3, 9, 11], overflow=overflow, policy=policy, window=1))
    assert limits_of(run) == [8, 15, 15]


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_above_the_cap_all_hosts_raise_the_same_text_in_the_same_step(hosts):
    layout = layout_of(hosts)
    bad = hosts - 1
    needs = [[1, 2, 3, 4, 5, 6]] * hosts
    needs[bad] = [1, 2, 3, 9, 5, 6]
    runs = run_hosts(
        lambda host, reducer: pipeline(
            needs[host],
            reducer,
            layout=layout,
            overflow=OverflowPolicy(caps=CAP),
        ),
        hosts,
    )
    for run in runs:
        assert len(run.elements) == 2
        assert isinstance(run.error, LimitsExceededError)
        assert str(run.error) == (
            f"pipeline 'train': stack 'item': host {bad} needs "
            "max_ids_per_partition=13 in step 3, but max_ids_cap allows 10. Feature "
            "'clicks' (table 'item') makes 69% of its fullest partition. To go on, "
            "raise limits.stack.item.max_ids_cap to 13 or more (the command plan tells "
            "what all batches need), lower the batch size, or set limits.on_overflow = "
            '"minibatch" or "drop".'
        )


def test_the_error_of_an_excess_is_final():
    it = iter(pipeline([9, 1, 1, 1], overflow=OverflowPolicy(caps=CAP)))
    for _ in range(3):
        with pytest.raises(LimitsExceededError, match=r"host 0 needs .* in step 0"):
            next(it)


def test_a_host_without_batches_hears_of_the_excess_too():
    layout = layout_of(2)
    runs = run_hosts(
        lambda host, reducer: pipeline(
            [[], [20]][host],
            reducer,
            layout=layout,
            on_exhausted="pad",
            overflow=OverflowPolicy(caps=CAP),
        ),
        2,
    )
    assert "host 1 needs max_ids_per_partition=24 in step 0" in str(runs[0].error)
    assert str(runs[0].error) == str(runs[1].error)


def test_batches_that_nobody_hands_on_exceed_nothing():
    layout = layout_of(2)
    runs = run_hosts(
        lambda host, reducer: pipeline(
            [[1, 2, 20], [1, 2]][host],
            reducer,
            layout=layout,
            window=4,
            overflow=OverflowPolicy(caps=CAP),
        ),
        2,
    )
    assert [run.error for run in runs] == [None, None]
    assert [len(run.elements) for run in runs] == [2, 2]


@pytest.mark.parametrize("order", ["prefix", "balanced"])
def test_drops_keep_to_the_cap_and_are_counted(order):
    overflow = OverflowPolicy(on_overflow="drop", drop_order=order, caps=CAP)
    layout = layout_of()
    above = np.full((2, 3), 2**31 - 1)
    above[0, 0] = 10
    ds = pipeline(
        [3, 20, 4],
        overflow=overflow,
        cut_above=Limits.from_array(layout.stack_names, above),
    )
    run = [e["sparsecore"] for e in ds]
    # The cut batch needs no more than the cap, and the buffer that is agreed on is
    # that of the cut batch.
    assert [b.limits["item"].max_ids_per_partition for b in run] == [10, 10, 10]
    assert [b.limits["item"].buffer_size_per_device for b in run] == [48] * 3
    lost = [b.drops.per_feature[:, 0].tolist() for b in run]
    assert lost[0] == lost[2] == [0, 0, 0]
    assert sum(lost[1]) == 14
    assert [int(b.drops.examples) > 0 for b in run] == [False, True, False]
    assert [b.limits for b in run] == [run[0].limits] * 3


def test_padded_hosts_have_drop_counts_of_zero():
    layout = layout_of(2)
    runs = run_hosts(
        lambda host, reducer: pipeline(
            [[1], [1, 20]][host],
            reducer,
            layout=layout,
            on_exhausted="pad",
            overflow=OverflowPolicy(on_overflow="drop", caps=CAP),
        ),
        2,
    )
    drops = [[e["sparsecore"].drops for e in run.elements] for run in runs]
    assert [len(d) for d in drops] == [2, 2]
    assert not drops[0][1].per_feature.any()
    assert drops[1][1].per_feature.any()


def test_without_caps_there_are_no_drop_counts():
    (element,) = pipeline([3], overflow=OverflowPolicy(on_overflow="drop"))
    assert element["sparsecore"].drops is None


def frozen_at(ids: int, **options: Any) -> dict[str, Any]:
    start = Limits(
        {
            name: StackLimits(
                max_ids_per_partition=ids,
                max_unique_ids_per_partition=ids,
                buffer_size_per_device=64,
            )
            for name in ("item", "user")
        }
    )
    return {
        "start_limits": start,
        "overflow": OverflowPolicy(frozen=True, **options),
    }


def test_frozen_limits_do_not_grow():
    run = list(pipeline([1, 2, 3], **frozen_at(12)))
    assert limits_of(run) == [12, 12, 12]
    with pytest.raises(LimitsExceededError, match="the frozen limit is 12"):
        list(pipeline([1, 2, 9], **frozen_at(12)))
    run = list(pipeline([1, 2, 20], **frozen_at(12, on_overflow="drop")))
    assert limits_of(run) == [12, 12, 12]
    assert run[2]["sparsecore"].drops.per_feature[:, 1].sum() == 12


@pytest.mark.parametrize("order", ["prefix", "balanced"])
def test_restoring_drops_the_same_entries(order):
    overflow = OverflowPolicy(on_overflow="drop", drop_order=order, caps=CAP)
    ds = pipeline([3, 20, 4, 25, 30], overflow=overflow, window=3)
    grain.experimental.assert_equal_output_after_checkpoint(ds.map(plain))


def plain(element: dict[str, Any]) -> dict[str, Any]:
    batch = element["sparsecore"]
    return {
        "ids": batch.embedding_ids,
        "pointers": batch.row_pointers,
        "limits": batch.limits.to_plain(),
        "drops": batch.drops and vars(batch.drops),
    }


def test_caps_lower_what_is_loaded_but_refuse_a_start_above_them():
    options = frozen_at(12)
    options["overflow"] = OverflowPolicy(caps=CAP)
    (element,) = pipeline([1], **options)
    assert limits_of([element]) == [10]
    with pytest.raises(ConfigError, match=r"limits\.stack\.nope: there is no such"):
        pipeline([1], overflow=OverflowPolicy(caps={"nope": StackCaps()}))


def test_shrinking_goes_back_to_what_was_needed_since():
    it = iter(pipeline([30, 1, 5, 1, 1, 1, 2, 1], window=2))
    stage = it.coordinator
    seen = []
    for step, element in enumerate(it):
        seen += limits_of([element])
        if step in (3, 5):
            stage.shrink()
    # 4 views of item 0 come on top of the clicks on each batch. The first call keeps
    # the 30 of its own epoch, the second forgets them.
    assert seen == [34, 34, 34, 34, 34, 34, 6, 6]
    assert stage.limit_changes == 1


def test_shrinking_never_goes_below_the_start_of_the_tables():
    it = iter(pipeline([30, 1, 1], window=1))
    next(it)
    it.coordinator.shrink()
    next(it)
    it.coordinator.shrink()
    assert limits_of([next(it)]) == [5]
    floor = Limits.start(layout_of()).to_array()
    assert (it.coordinator.limits.to_array() >= floor).all()


@pytest.mark.parametrize("callers", [{0, 1}, {1}])
def test_all_hosts_shrink_or_all_are_stopped(callers):
    layout = layout_of(2)

    def make(host, reducer):
        # Twice: only the second call forgets the 30.
        ds = pipeline([30, 1, 2, 1, 3, 1], reducer, layout=layout, window=2)
        return _ShrinkAfter(ds, {2, 4} if host in callers else set())

    runs = run_hosts(make, 2)
    if callers == {0, 1}:
        assert [run.error for run in runs] == [None, None]
        assert [limits_of(run.elements) for run in runs] == [[34, 34, 34, 34, 7, 7]] * 2
    else:
        for run in runs:
            assert len(run.elements) == 4
            assert isinstance(run.error, HostMismatchError)
            assert "call shrink() on all of them or none" in str(run.error)


class _ShrinkAfter:
    """A dataset whose iterator shrinks after some steps."""

    def __init__(self, ds: Any, steps: set[int]) -> None:
        self._ds, self._steps = ds, steps

    def __iter__(self) -> Any:
        return _ShrinkIterator(iter(self._ds), self._steps)


class _ShrinkIterator:
    def __init__(self, it: Any, steps: set[int]) -> None:
        self._it, self._steps, self._count = it, steps, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._count in self._steps:
            self._it.coordinator.shrink()
        self._count += 1
        return next(self._it)


@pytest.mark.parametrize("taken", range(1, 11))
@pytest.mark.parametrize("shrink_at", [1, 2, 3, 4])
def test_a_pending_shrink_survives_a_checkpoint(taken, shrink_at):
    needs = [30, 1, 5, 1, 1, 3, 2, 1, 1, 4, 1]
    whole, again = [], []

    def read(it: Any, step: int) -> list[int]:
        result = limits_of([next(it)])
        if step in (shrink_at, shrink_at + 3):
            it.coordinator.shrink()
        return result

    it = iter(pipeline(needs, window=3))
    for step in range(len(needs)):
        whole += read(it, step)
    it = iter(pipeline(needs, window=3))
    for step in range(taken):
        again += read(it, step)
    state = json.loads(json.dumps(it.get_state()))
    it = iter(pipeline(needs, window=3))
    it.set_state(state)
    for step in range(taken, len(needs)):
        again += read(it, step)
    assert again == whole
    assert whole[0] == 34
    assert whole[-1] < 34


def test_frozen_limits_do_not_shrink():
    it = iter(pipeline([1], **frozen_at(12)))
    with pytest.raises(StageMisuseError, match="frozen limits do not shrink"):
        it.coordinator.shrink()


def test_hosts_with_other_caps_are_told_apart():
    layout = layout_of(2)
    runs = run_hosts(
        lambda host, reducer: pipeline(
            [1],
            reducer,
            layout=layout,
            overflow=OverflowPolicy(caps={"item": StackCaps(max_ids_cap=10 + host)}),
        ),
        2,
    )
    for run in runs:
        assert "overflow.caps.item.max_ids_cap is 10 on host 0 and 11" in str(run.error)


def test_raw_counts_come_with_batches_above_only():
    layout = layout_of()
    above = np.full((2, 3), 10)
    stage = ComputeInputStats(
        layout, cut_above=Limits.from_array(layout.stack_names, above * [1, 1, 100])
    )
    rng = np.random.default_rng(0)
    assert stage.map(rows_with(3, rng))["sparsecore"].raw_counts is None
    raw = stage.map(rows_with(20, rng))["sparsecore"].raw_counts
    assert raw.sum() == 20 + 7 + BATCH + BATCH
