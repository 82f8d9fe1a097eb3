import dataclasses

import numpy as np
import pytest

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.dropping import DropCounts
from grain_sparsecore.features import COUNTERS
from grain_sparsecore.limits import Limits
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout
from grain_sparsecore.tally import Tally


@pytest.fixture
def layout():
    return make_layout(
        [
            TableSpec(name="t", vocabulary_size=64, embedding_dim=8),
            TableSpec(name="u", vocabulary_size=64, embedding_dim=8),
        ],
        [
            FeatureSpec(name="a", table="t", on_invalid_id="drop"),
            FeatureSpec(name="b", table="t", on_invalid_id="clip"),
            FeatureSpec(name="c", table="u"),
        ],
        topology=Topology(
            global_device_count=1, local_device_count=1, num_sc_per_device=2
        ),
        batch_size=10,
    )


def make_batch(layout, *, invalid=(0, 0, 0), ids=0, padding=0, drops=None):
    counters = np.zeros((3, len(COUNTERS)), np.int32)
    counters[:, COUNTERS.index("ids")] = ids
    counters[:, COUNTERS.index("padding_ids")] = padding
    counters[:, COUNTERS.index("large_ids")] = invalid
    return SparseCoreInput(
        row_pointers={},
        embedding_ids={},
        sample_ids={},
        gains={},
        num_minibatches=np.ones(1, np.int32),
        num_valid_samples=np.array([10], np.int32),
        counters=counters,
        limits=Limits.start(layout),
        drops=drops,
    )


LOST = DropCounts(
    per_feature=np.array([[4, 3, 2], [1, 1, 1], [0, 0, 0]], np.int32),
    lost_weight=np.array([2.5, 1, 0], np.float32),
    examples=np.int32(2),
)


def test_a_run_is_added_up(layout):
    tally = Tally(layout)
    assert tally.dropped_example_share == 0
    (message, second) = tally.add(make_batch(layout, invalid=(5, 7, 0)))
    assert "feature 'a' (table 't'): 5 ids at or above" in message
    assert "feature 'b'" in second
    assert tally.add(make_batch(layout, invalid=(1, 0, 0), drops=LOST)) == []
    assert tally.counters["a"]["large_ids"] == 6
    assert tally.counters["b"]["large_ids"] == 7
    # Clipped ids are looked up, those dropped or cut are not.
    assert tally.dropped_ids == 6 + 5
    assert tally.dropped_example_share == 2 / 20
    assert tally.drops["t"] == {
        "dropped_ids": 5,
        "dropped_entries": 4,
        "lost_weight": 3.5,
        "features": {
            "a": {
                "dropped_ids": 4,
                "dropped_entries": 3,
                "dropped_examples": 2,
                "lost_weight": 2.5,
            },
            "b": {
                "dropped_ids": 1,
                "dropped_entries": 1,
                "dropped_examples": 1,
                "lost_weight": 1.0,
            },
        },
    }
    assert tally.drops["u"]["dropped_ids"] == 0


def test_no_more_ids_are_in_trouble_than_came_in(layout):
    tally = Tally(layout)
    # Of 100 ids 4 are padding and 60 too large: dropped by 'a', clipped by 'b'.
    dropping = make_batch(layout, ids=36, padding=4, invalid=(60, 0, 0))
    clipping = make_batch(layout, ids=96, padding=4, invalid=(0, 60, 0))
    tally.add(dropping)
    assert tally.given_ids["a"] == 100
    tally.add(clipping)
    assert tally.given_ids["a"] == 200
    other = Tally(layout)
    other.add(clipping)
    assert other.given_ids["b"] == 100


def test_hosts_are_added_as_vectors(layout):
    one, two = Tally(layout), Tally(layout)
    one.add(make_batch(layout, invalid=(5, 0, 0), drops=LOST))
    two.add(make_batch(layout, invalid=(0, 0, 1)))
    both = Tally(layout)
    both.add(make_batch(layout, invalid=(5, 0, 0), drops=LOST))
    both.add(make_batch(layout, invalid=(0, 0, 1)))
    total = Tally.of(layout, one.to_vector() + two.to_vector())
    assert total.counters == both.counters
    assert total.drops == both.drops
    assert total.dropped_example_share == both.dropped_example_share == 0.1


def test_totals_pass_int32(layout):
    tally = Tally(layout)
    batch = make_batch(layout, invalid=(2**31 - 1, 0, 0))
    for _ in range(3):
        tally.add(dataclasses.replace(batch))
    assert Tally.of(layout, tally.to_vector()).dropped_ids == 3 * (2**31 - 1)
