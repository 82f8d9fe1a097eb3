import itertools
import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from grain_sparsecore.errors import ConfigError, LimitsExceededError
from grain_sparsecore.limits import (
    GrowthPolicy,
    Limits,
    StackLimits,
    grow_limits,
    stats_by_stack,
)
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout, theoretical_buffer_size

EXACT = GrowthPolicy(kind="exact")
POLICIES = [
    EXACT,
    GrowthPolicy(kind="headroom"),
    GrowthPolicy(kind="headroom", factor=1.0, step=3),
    GrowthPolicy(kind="geometric"),
    GrowthPolicy(kind="geometric", steps_per_octave=1),
    GrowthPolicy(kind="geometric", steps_per_octave=7),
]


def layout_of(names="UV", *, devices=1, sc=2, **kwargs):
    return make_layout(
        [
            TableSpec(name=n, vocabulary_size=64, embedding_dim=8, **kwargs)
            for n in names
        ],
        [FeatureSpec(name=n, table=n) for n in names],
        topology=Topology(
            global_device_count=devices,
            local_device_count=1,
            num_sc_per_device=sc,
        ),
        batch_size=4,
    )


def limits_of(ids, unique, size):
    return StackLimits(
        max_ids_per_partition=ids,
        max_unique_ids_per_partition=unique,
        buffer_size_per_device=size,
    )


def test_limits_are_a_hashable_mapping_in_sorted_order():
    one = Limits({"b": limits_of(1, 1, 16), "a": limits_of(2, 1, 32)})
    two = Limits({"a": limits_of(2, 1, 32), "b": limits_of(1, 1, 16)})
    assert one == two
    assert hash(one) == hash(two)
    assert list(one) == ["a", "b"]
    assert one["a"].buffer_size_per_device == 32
    assert one != Limits({"a": limits_of(2, 1, 32)})
    np.testing.assert_array_equal(one.to_array(), [[2, 1, 32], [1, 1, 16]])
    assert Limits.from_array(("a", "b"), one.to_array()) == one
    assert Limits.from_plain(json.loads(json.dumps(one.to_plain()))) == one
    assert repr(one) == (
        "Limits(a: ids 2, unique 1, buffer 32; b: ids 1, unique 1, buffer 16)"
    )


def test_unpickled_limits_hash_like_those_made_there():
    # String hashes are randomised by process; a pickled hash would be a stale one.
    limits = Limits({"a": limits_of(2, 1, 32)})
    code = (
        "import pickle, sys; from grain_sparsecore.limits import *;"
        "got = pickle.loads(sys.stdin.buffer.read());"
        "made = Limits({'a': StackLimits(max_ids_per_partition=2,"
        " max_unique_ids_per_partition=1, buffer_size_per_device=32)});"
        "assert got == made and hash(got) == hash(made)"
    )
    subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(limits), check=True, timeout=60
    )


def test_start_comes_from_the_tables():
    layout = layout_of("t", max_ids_per_partition=9, max_unique_ids_per_partition=4)
    assert Limits.start(layout)["t"] == limits_of(9, 4, 16)


def test_stats_by_stack_names_rows_and_columns():
    stats = stats_by_stack(("a", "b"), np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    assert stats["b"].max_ids_per_partition == 4
    assert stats["b"].max_unique_ids_per_partition == 5
    assert stats["b"].required_buffer_size_per_device == 6


def test_one_field_grows_and_the_others_stay():
    # The second batch needs more ids but fewer distinct ones, and less of table V.
    layout = layout_of("UV")
    first = grow_limits(
        Limits.start(layout),
        np.array([[5, 5, 16], [4, 4, 16]], np.int32),
        layout=layout,
        policy=EXACT,
    )
    assert first == Limits({"U": limits_of(5, 5, 16), "V": limits_of(4, 4, 16)})
    second = grow_limits(
        first,
        np.array([[6, 3, 16], [1, 1, 16]], np.int32),
        layout=layout,
        policy=EXACT,
    )
    assert second == Limits({"U": limits_of(6, 5, 16), "V": limits_of(4, 4, 16)})


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_an_empty_batch_changes_nothing(policy):
    layout = layout_of("UV")
    start = Limits.start(layout)
    empty = np.zeros((2, 3), np.int32)
    assert grow_limits(start, empty, layout=layout, policy=policy) is start


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_target_suffices_and_never_falls(policy):
    targets = [policy.target(n) for n in range(5000)]
    assert targets[0] == 0
    assert all(t >= n for n, t in enumerate(targets))
    assert all(a <= b for a, b in itertools.pairwise(targets))
    for n in (5, 77, 4096):
        assert policy.grow(n, n) == n
        assert policy.grow(n, n + 1) == policy.target(n + 1)


def test_targets_by_hand():
    assert [GrowthPolicy().target(n) for n in (1, 8, 9, 33, 65, 257, 4097)] == [
        8,
        8,
        16,
        40,
        80,
        312,
        4872,
    ]
    headroom = GrowthPolicy(kind="headroom", factor=1.0, step=8)
    assert [headroom.target(n) for n in (9, 10, 11, 12)] == [16] * 4
    assert GrowthPolicy(kind="headroom").target(100) == 128
    assert GrowthPolicy(kind="exact").target(9) == 9


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_the_geometric_grid(steps):
    policy = GrowthPolicy(steps_per_octave=steps)
    grid = sorted({policy.target(n) for n in range(1, 20_000)})
    assert all(value % 8 == 0 for value in grid)
    assert all(policy.target(value) == value for value in grid)
    assert {8 * 2**i for i in range(12)} <= set(grid)
    # At most steps_per_octave values an octave: that bounds the recompiles.
    for low in (8, 64, 1024, 8192):
        assert sum(low < value <= 2 * low for value in grid) <= steps


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_random_batches_keep_every_guarantee(policy):
    layout = layout_of("UV", devices=4, sc=4)
    topology = layout.topology
    rng = np.random.default_rng(7)
    limits = start = Limits.start(layout)
    changes = np.zeros((2, 3), int)
    largest = np.ones((2, 3))
    for _ in range(10_000):
        ids = rng.geometric(0.05, 2) * rng.integers(0, 3)
        unique = rng.integers(0, ids + 1)
        slots = np.minimum(
            (ids + 7) // 8 * 8 * rng.integers(0, 17, 2) * 4,
            (ids + 7) // 8 * 8 * 16 * 4,
        )
        needed = np.stack([ids, unique, slots], 1).astype(np.int32)
        grown = grow_limits(limits, needed, layout=layout, policy=policy)
        before, after = limits.to_array(), grown.to_array()
        assert (after >= before).all()
        assert (after >= start.to_array()).all()
        assert (after >= needed).all()
        assert (grown is limits) == (after == before).all()
        for stack in grown.values():
            assert stack.buffer_size_per_device % (8 * 4) == 0
            assert stack.buffer_size_per_device <= theoretical_buffer_size(
                stack.max_ids_per_partition, topology
            )
        changes += after != before
        largest = np.maximum(largest, needed)
        limits = grown
    if policy.kind == "geometric":
        # log(largest / start) / log(ratio), and one step to get onto the grid.
        ratio = 2 ** (1 / policy.steps_per_octave)
        bound = np.log(largest / start.to_array()).clip(0) / math.log(ratio) + 1
        assert (changes <= bound).all()


@pytest.mark.parametrize("steps", [1, 4])
def test_the_slowest_growth_makes_as_many_changes_as_the_bound_says(steps):
    # The worst case: every batch needs one id more than the one before.
    policy = GrowthPolicy(steps_per_octave=steps)
    current, changes = 64, 0
    for needed in range(65, 64 * 16 + 1):
        grown = policy.grow(current, needed)
        changes += grown != current
        current = grown
    assert changes == 4 * steps
    exact, start = GrowthPolicy(kind="exact"), 64
    assert sum(exact.grow(n - 1, n) != n - 1 for n in range(start + 1, 1025)) == 960


@pytest.mark.parametrize("sc", [1, 2, 4])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_sizes_per_device_and_per_sparsecore_go_round_unchanged(sc, policy):
    layout = layout_of("t", devices=64, sc=sc)
    for per_sc in range(8, 8 * 300, 8):
        needed = np.array([[1000, 1000, per_sc * sc]], np.int32)
        limits = grow_limits(Limits.start(layout), needed, layout=layout, policy=policy)
        size = limits["t"].buffer_size_per_device
        # What one SparseCore gets does not depend on how many there are.
        assert size % (8 * sc) == 0
        assert size // sc == -(-policy.grow(8, per_sc) // 8) * 8
        # Asked for what it has, it changes nothing.
        again = np.array([[1000, 1000, size]], np.int32)
        assert grow_limits(limits, again, layout=layout, policy=policy) is limits


def test_a_start_that_overflows_is_a_configuration_error():
    with pytest.raises(ConfigError) as error:
        layout_of("t", devices=512, sc=4, max_ids_per_partition=2**20)
    for number in ("1048576", "8589934592", "262136"):
        assert number in str(error.value)


def test_limits_stop_at_int32():
    layout = layout_of("t", devices=512, sc=4)
    grown = grow_limits(
        Limits.start(layout),
        np.array([[250_000, 250_000, 2**31 - 32]], np.int32),
        layout=layout,
        policy=GrowthPolicy(),
    )
    assert grown["t"].max_ids_per_partition == 262_136
    assert grown["t"].buffer_size_per_device <= 2**31 - 1
    with pytest.raises(LimitsExceededError, match=r"stack 't'.* 262137 .*above 262136"):
        grow_limits(
            Limits.start(layout),
            np.array([[262_137, 1, 8]], np.int32),
            layout=layout,
            policy=EXACT,
        )


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_growth_stops_at_ceilings(policy):
    layout = layout_of("UV")
    ceilings = np.array([[16, 2**31 - 1, 2**31 - 1], [2**31 - 1, 5, 48]])
    needed = np.array([[16, 9, 64], [9, 5, 48]], np.int32)
    options = {"layout": layout, "policy": policy, "ceilings": ceilings}
    capped = grow_limits(Limits.start(layout), needed, **options)
    free = grow_limits(Limits.start(layout), needed, layout=layout, policy=policy)
    # 16 ids cannot fill more than 64 slots, whatever the policy would like.
    assert capped["U"] == limits_of(16, free["U"].max_unique_ids_per_partition, 64)
    assert capped["V"] == limits_of(free["V"].max_ids_per_partition, 5, 48)
    # Caps that come later do not make limits fall.
    assert grow_limits(free, needed, **options) is free
    with pytest.raises(LimitsExceededError, match="above the caps"):
        grow_limits(capped, needed + 1, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "double"}, "kind='double' is not one of exact, headroom, geometric"),
        ({"factor": 0.5}, "factor=0.5 must be from 1 to 1024"),
        ({"factor": math.inf}, "factor=inf must be from 1 to 1024"),
        ({"factor": math.nan}, "factor=nan must be from 1 to 1024"),
        ({"factor": 1.7e308}, "factor=1.7e+308 must be from 1 to 1024"),
        ({"step": 2**40}, "step=1099511627776 must be 1048576 or less"),
        ({"step": 0}, "step=0 must be 1 or more"),
        ({"steps_per_octave": 1.5}, "steps_per_octave=1.5 must be 1 or more"),
    ],
)
def test_growth_policy_refuses(options, message):
    with pytest.raises(ConfigError) as error:
        GrowthPolicy(**options)
    assert message in str(error.value)
