import numpy as np
import pytest

from grain_sparsecore.errors import ConfigError
from grain_sparsecore.features import COUNTERS, FeatureIds
from grain_sparsecore.limits import Limits
from grain_sparsecore.overflow import (
    Excess,
    OverflowPolicy,
    StackCaps,
    cap_ceilings,
    excess_message,
    find_excess,
    main_contributor,
)
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout

NO_CAP = 2**31 - 1


def layout_of(*, sc=2, features="ab", batch_size=4, **options):
    return make_layout(
        [TableSpec(name="t", vocabulary_size=64, embedding_dim=8, **options)],
        [FeatureSpec(name=n, table="t") for n in features],
        topology=Topology(
            global_device_count=1, local_device_count=1, num_sc_per_device=sc
        ),
        batch_size=batch_size,
    )


def test_caps_beyond_int32_are_none():
    huge = StackCaps(
        max_ids_cap=10**30, max_unique_ids_cap=2**31, buffer_cap_bytes=10**30
    )
    layout = layout_of()
    name = layout.stack_names[0]
    unit = 8 * layout.topology.num_sc_per_device
    found = cap_ceilings({name: huge}, layout=layout)[0]
    assert found.tolist() == [2**31 - 1, 2**31 - 1, (2**31 - 1) // unit * unit]


def test_ceilings_come_from_the_caps():
    layout = layout_of()
    caps = StackCaps(max_ids_cap=20, max_unique_ids_cap=10, buffer_cap_bytes=1000)
    # 1000 bytes are 83 slots; on two SparseCores that is 80.
    np.testing.assert_array_equal(
        cap_ceilings({"t": caps}, layout=layout), [[20, 10, 80]]
    )
    some = cap_ceilings({"t": StackCaps(max_ids_cap=20)}, layout=layout)
    np.testing.assert_array_equal(some, [[20, NO_CAP, NO_CAP]])
    np.testing.assert_array_equal(cap_ceilings({}, layout=layout), [[NO_CAP] * 3])


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        (
            {"u": StackCaps()},
            "limits.stack.u: there is no such stack; the stacks are t",
        ),
        (
            {"t": StackCaps(max_ids_cap=8)},
            "limits.stack.t.max_ids_cap=8 is below 9, which the stack starts with",
        ),
        (
            {"t": StackCaps(max_unique_ids_cap=4)},
            "max_unique_ids_cap=4 is below 5",
        ),
        # 16 slots are 192 bytes.
        ({"t": StackCaps(buffer_cap_bytes=191)}, "buffer_cap_bytes=191 is below 192"),
    ],
)
def test_caps_that_cannot_hold(caps, message):
    layout = layout_of(max_ids_per_partition=9, max_unique_ids_per_partition=5)
    with pytest.raises(ConfigError) as error:
        cap_ceilings(caps, layout=layout)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_caps_are_positive_integers(value):
    with pytest.raises(
        ConfigError, match="max_ids_cap must be an integer of 1 or more"
    ):
        StackCaps(max_ids_cap=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_overflow": "ignore"}, "on_overflow='ignore' is not one of error, drop"),
        (
            {"drop_order": "random"},
            "drop_order='random' is not one of prefix, balanced",
        ),
    ],
)
def test_policies_that_there_are_not(options, message):
    with pytest.raises(ConfigError, match=message):
        OverflowPolicy(**options)


def test_only_caps_and_frozen_limits_can_lead_to_drops():
    caps = {"t": StackCaps(max_ids_cap=8)}
    assert not OverflowPolicy(on_overflow="drop").may_drop
    assert OverflowPolicy(on_overflow="drop", caps=caps).may_drop
    assert OverflowPolicy(on_overflow="drop", frozen=True).may_drop
    assert not OverflowPolicy(frozen=True, caps=caps).may_drop


def test_the_worst_excess_is_found():
    ceilings = np.array([[10, 10, 160], [10, 10, 160]])
    fits = np.array([[10, 10, 160], [1, 1, 16]], np.int32)
    assert find_excess(fits, ceilings) is None
    needed = np.array([[11, 10, 160], [9, 30, 320]], np.int32)
    assert find_excess(needed, ceilings) == Excess(1, 1, 30, 10)


def batch_of(layout, rows):
    features = [
        FeatureIds(
            ids=np.array([i for row in rows[f.name] for i in row], np.int32),
            row_splits=np.cumsum([0] + [len(row) for row in rows[f.name]]),
            width=0,
            weights=None,
        )
        for f in layout.features
    ]
    counters = np.zeros((len(features), len(COUNTERS)), np.int32)
    return partition_batch(features, layout, counters=counters, num_samples=4)


def test_the_feature_that_contributes_most_is_named():
    layout = layout_of()
    # Samples 0 and 1 are on SparseCore 0. Even ids are in partition 0.
    batch = batch_of(
        layout,
        {
            "a": [[0, 2, 4], [], [1], []],
            "b": [[0], [], [1, 3, 5], [1, 3, 5, 7]],
        },
    )
    np.testing.assert_array_equal(batch.stats, [[8, 4, 16]])
    fullest = Excess(0, 0, 8, 4)
    assert main_contributor(batch, fullest, layout) == (1, 7 / 8)
    distinct = Excess(0, 1, 4, 2)
    assert main_contributor(batch, distinct, layout) == (1, 7 / 8)
    buffer = Excess(0, 2, 16, 8)
    feature, share = main_contributor(batch, buffer, layout)
    assert (layout.features[feature].name, share) == ("a", 3 / 4)


def test_an_empty_batch_contributes_nothing():
    layout = layout_of()
    batch = batch_of(layout, {"a": [[]] * 4, "b": [[]] * 4})
    assert main_contributor(batch, Excess(0, 0, 8, 4), layout) == (0, 0.0)


def message_of(excess, **options):
    options = {"host": 3, "step": 17, "feature": 1, "share": 0.875, **options}
    return excess_message(excess, layout=layout_of(), **options)


def test_messages_name_everything():
    assert message_of(Excess(0, 0, 812, 512), frozen=False) == (
        "stack 't': host 3 needs max_ids_per_partition=812 in step 17, but max_ids_cap "
        "allows 512. Feature 'b' (table 't') makes 88% of its fullest partition. To go "
        "on, raise limits.stack.t.max_ids_cap to 812 or more (the command plan tells "
        "what all batches need), lower the batch size, or set limits.on_overflow = "
        '"minibatch" or "drop".'
    )
    assert message_of(Excess(0, 2, 1600, 80), frozen=False) == (
        "stack 't': host 3 needs buffer_size=1600 in step 17, but buffer_cap_bytes "
        "allows 80 slots (1600 slots are 19200 bytes). Feature 'b' (table 't') makes "
        "88% of its fullest SparseCore. To go on, raise "
        "limits.stack.t.buffer_cap_bytes to 19200 or more (the command plan tells what "
        'all batches need), lower the batch size, or set limits.on_overflow = "drop".'
    )
    assert message_of(Excess(0, 1, 9, 8), frozen=True) == (
        "stack 't': host 3 needs max_unique_ids_per_partition=9 in step 17, but the "
        "frozen limit is 8. Feature 'b' (table 't') makes 88% of its fullest "
        "partition. To go on, set limits.frozen = false, load limits that suffice, "
        'or set limits.on_overflow = "minibatch" or "drop".'
    )


def test_a_cap_of_a_file_names_the_file_and_what_helps():
    where = "limits file 'caps.json', found for v6e:4x4 (TPU v6 lite, libtpu 0.0.42)"
    assert message_of(Excess(0, 0, 812, 512), frozen=False, origin=where) == (
        "stack 't': host 3 needs max_ids_per_partition=812 in step 17, but max_ids_cap "
        "allows 512, by limits file 'caps.json', found for v6e:4x4 (TPU v6 lite, "
        "libtpu 0.0.42). Feature 'b' (table 't') makes 88% of its fullest partition. "
        'To go on, set limits.on_overflow = "minibatch" or "drop", or find caps again '
        "with rehearse --find-caps: for the limits that the data needs now, a smaller "
        "batch, or more devices. Raising limits.stack.t.max_ids_cap is no help: the "
        "lower cap counts."
    )
    split = message_of(
        Excess(0, 1, 9, 8), frozen=False, minibatching=True, origin=where
    )
    assert "allows 8, by limits file 'caps.json', found for v6e:4x4" in split
    assert 'To go on, set limits.on_full_bucket = "drop", or find caps again' in split
    # Frozen limits are not a cap of anybody.
    assert "caps.json" not in message_of(Excess(0, 1, 9, 8), frozen=True, origin=where)


def test_where_caps_come_from_is_nothing_that_hosts_compare():
    caps = {"t": StackCaps(max_ids_cap=8)}
    origins = {"t": {"max_ids_cap": "a file"}}
    policy = OverflowPolicy(caps=caps, cap_origins=origins)
    assert (policy.cap_origin("t", 0), policy.cap_origin("t", 1)) == ("a file", "")
    assert policy.cap_origin("u", 0) == ""
    assert policy.plain() == OverflowPolicy(caps=caps).plain()
    assert policy.plain()["caps"] == {
        "t": {
            "max_ids_cap": 8,
            "max_unique_ids_cap": None,
            "buffer_cap_bytes": None,
        }
    }


def test_start_limits_are_within_their_own_caps():
    layout = layout_of(max_ids_per_partition=9)
    start = Limits.start(layout).to_array()
    caps = {"t": StackCaps(max_ids_cap=9, max_unique_ids_cap=1, buffer_cap_bytes=192)}
    assert find_excess(start, cap_ceilings(caps, layout=layout)) is None
