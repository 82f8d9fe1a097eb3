"""Samples with lists that were batched position by position."""

import grain
import numpy as np
import pytest

from grain_sparsecore.batching import batch_ragged
from grain_sparsecore.features import forms, read_features
from grain_sparsecore.specs import FeatureSpec
from tests.feature_forms import layout_of

SIZE = 4


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(forms, "_warned_of", set())


def layout():
    return layout_of(FeatureSpec(name="f", table="t"), batch_size=SIZE)


def batch(length, **options):
    samples = [{"f": [i] * length} for i in range(SIZE)]
    element = grain.MapDataset.source(samples).batch(SIZE, **options)[0]
    assert element is not None
    return element


def test_rows_that_may_be_positions_are_warned_of_once(caplog):
    element = batch(SIZE)
    # What Grain makes of lists, and why nobody could tell.
    assert [row.tolist() for row in element["f"]] == [[0, 1, 2, 3]] * SIZE
    for _ in range(2):
        read_features(element, layout())
    (record,) = caplog.records
    assert "feature 'f' (table 't'), ids 'f': a list of 4 arrays of 4 values" in (
        record.getMessage()
    )
    assert "ds.batch(4, batch_fn=grain_sparsecore.batch_ragged)" in record.getMessage()


@pytest.mark.parametrize(
    "element",
    [
        {"f": [np.arange(3)] * SIZE},
        {"f": [np.arange(SIZE)] * (SIZE - 1)},
        {"f": [list(range(SIZE))] * SIZE},
        {"f": np.tile(np.arange(SIZE), (SIZE, 1))},
        {"f": [np.arange(n) for n in (4, 3, 5, 4)]},
    ],
)
def test_other_rows_are_not(element, caplog):
    read_features(element, layout())
    assert not caplog.records


def test_batch_ragged_keeps_rows(caplog):
    features, _, _ = read_features(batch(SIZE, batch_fn=batch_ragged), layout())
    assert features[0].ids.reshape(SIZE, SIZE)[:, 0].tolist() == [0, 1, 2, 3]
    assert not caplog.records
