"""Sources: every record once an epoch, the same batches on any number of hosts."""

import collections
import dataclasses
import math
import pickle
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from grain_sparsecore.batching import RaggedValues, batch_ragged
from grain_sparsecore.config import (
    Config,
    PipelineConfig,
    PythonOptions,
    SkewOptions,
    SourceConfig,
    SyntheticOptions,
    TopologyConfig,
    TrainConfig,
)
from grain_sparsecore.errors import ConfigError, InputError
from grain_sparsecore.sources import make_batches, make_source
from grain_sparsecore.specs import FeatureSpec, TableSpec

ITEMS = 100
USERS = 40


def job(options: Any = None, *, kind: str = "synthetic", **changes: Any) -> Config:
    """A small job; ``changes`` are fields of the source, the pipeline, or the whole."""
    source_keys = {"shuffle", "epochs"}
    whole_keys = {"tables", "features", "train"}
    pipeline = {k: v for k, v in changes.items() if k not in source_keys | whole_keys}
    return Config(
        topology=TopologyConfig(num_sc_per_device=2),
        pipeline=PipelineConfig(**{"batch_size": 16, **pipeline}),
        source=SourceConfig(
            kind=kind,
            options=options or SyntheticOptions(num_records=100),
            **{k: v for k, v in changes.items() if k in source_keys},
        ),
        **{
            "tables": (
                TableSpec(name="item", vocabulary_size=ITEMS, embedding_dim=8),
                TableSpec(name="user", vocabulary_size=USERS, embedding_dim=8),
            ),
            "features": (
                FeatureSpec(
                    name="history",
                    table="item",
                    ids="seen/ids",
                    weights="seen/weights",
                ),
                FeatureSpec(name="tags", table="item"),
                FeatureSpec(name="user", table="user"),
            ),
            **{k: v for k, v in changes.items() if k in whole_keys},
        },
    )


def samples(config: Config, host: int = 0, hosts: int = 1) -> list[Any]:
    return list(make_source(config, host_index=host, host_count=hosts))


def assert_same(one: Any, two: Any) -> None:
    """Equal in structure, type, dtype and value."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, tuple):
        for part, other in zip(one, two, strict=True):
            assert_same(part, other)
    else:
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)


def module_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


# A number per record, so that records can be told apart.
NUMBERED = """
import grain
import numpy as np

def make(count, batched=False):
    if batched:
        return grain.MapDataset.range(count).map(
            lambda i: {"id": np.full(4, i), "label": np.zeros(4)}
        )
    return grain.MapDataset.range(count).map(lambda i: {"id": i, "label": i % 2})

def boom():
    raise ValueError("no data today")

def endless():
    return grain.MapDataset.range(5).map(lambda i: {"id": i}).repeat()

def holes():
    return make(4).filter(lambda sample: sample["id"] % 2 == 1)

def iterable():
    return grain.MapDataset.range(5).to_iter_dataset()

def numbers():
    return [1, 2, 3]

value = 3
"""


@pytest.fixture
def numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module_of(tmp_path, monkeypatch, "numbered_source", NUMBERED)


def numbered_job(count: int, function: str = "make", **changes: Any) -> Config:
    args = {} if function != "make" else {"count": count}
    if changes.pop("batched", False):
        args["batched"] = True
    return job(
        PythonOptions(
            function=f"numbered_source:{function}",
            args=args,
            batched="batched" in args,
        ),
        kind="python",
        tables=(TableSpec(name="t", vocabulary_size=1000, embedding_dim=8),),
        features=(FeatureSpec(name="id", table="t"),),
        **changes,
    )


def ids(config: Config, host: int = 0, hosts: int = 1) -> list[int]:
    return [sample["id"] for sample in samples(config, host, hosts)]


@pytest.mark.usefixtures("numbered")
class TestOrder:
    def test_without_shuffle_records_come_in_order(self) -> None:
        assert ids(numbered_job(5, shuffle=False)) == [0, 1, 2, 3, 4]

    def test_a_shuffle_keeps_every_record_and_depends_on_the_seed(self) -> None:
        orders = [ids(numbered_job(50, seed=seed)) for seed in (0, 1, 0)]
        assert all(sorted(order) == list(range(50)) for order in orders)
        assert orders[0] == orders[2]
        assert orders[0] != orders[1]
        assert orders[0] != list(range(50))

    def test_each_epoch_has_an_order_of_its_own(self) -> None:
        order = ids(numbered_job(50, epochs=2))
        assert sorted(order[:50]) == sorted(order[50:]) == list(range(50))
        assert order[:50] != order[50:]

    def test_zero_epochs_never_end(self) -> None:
        ds = make_source(numbered_job(3, epochs=0), host_index=0, host_count=1)
        assert sorted(ds[3 * 10**9 + i]["id"] for i in range(3)) == [0, 1, 2]

    @pytest.mark.parametrize("hosts", [2, 3, 4])
    def test_hosts_share_the_order_of_one_host(self, hosts: int) -> None:
        config = numbered_job(50, epochs=3)
        alone = ids(config)
        shares = [ids(config, host, hosts) for host in range(hosts)]
        assert shares == [alone[host::hosts] for host in range(hosts)]

    def test_hosts_may_get_unequal_numbers_of_records(self) -> None:
        config = numbered_job(17)
        assert [len(ids(config, host, 3)) for host in range(3)] == [6, 6, 5]

    def test_more_hosts_than_records_leave_some_without(self) -> None:
        config = numbered_job(2)
        assert [len(ids(config, host, 3)) for host in range(3)] == [1, 1, 0]

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_an_endless_data_set_can_be_dealt_but_not_shuffled(
        self, shuffle: bool
    ) -> None:
        config = numbered_job(0, "endless", shuffle=shuffle)
        if shuffle:
            with pytest.raises(ConfigError, match="never ends, so it cannot be shuf"):
                make_source(config, host_index=0, host_count=2)
        else:
            ds = make_source(config, host_index=1, host_count=2)
            assert [ds[i]["id"] for i in range(3)] == [1, 3, 0]

    @pytest.mark.parametrize(("policy", "sizes"), [("drop", [16]), ("pad", [16, 4])])
    def test_the_last_batch(self, policy: Any, sizes: list[int]) -> None:
        config = numbered_job(20, on_partial_batch=policy)
        batches = make_batches(config, config.layout(), host_index=0, host_count=1)
        assert [len(batch["id"]) for batch in batches] == sizes

    def test_global_batches_are_the_same_on_one_host_and_two(self) -> None:
        one = numbered_job(64, batch_size=32, epochs=2)
        two = numbered_job(64, batch_size=16, epochs=2)
        alone = make_batches(one, one.layout(), host_index=0, host_count=1)
        shares = [
            make_batches(two, two.layout(), host_index=host, host_count=2)
            for host in range(2)
        ]
        assert len(alone) == len(shares[0]) == len(shares[1]) == 4
        for i in range(4):
            together = np.concatenate([share[i]["id"] for share in shares])
            assert sorted(together) == sorted(alone[i]["id"])

    def test_batches_from_a_function_stay_as_they_are(self) -> None:
        config = numbered_job(6, batched=True)
        ds = make_batches(config, config.layout(), host_index=0, host_count=2)
        assert [batch["id"].shape for batch in ds] == [(4,)] * 3


@pytest.mark.usefixtures("numbered")
class TestPython:
    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            ("no_such_module:make", "cannot import 'no_such_module'"),
            ("numbered_source:mike", "has no 'mike'; did you mean 'make'?"),
            ("numbered_source:value", "is int, not a function"),
            (
                "numbered_source:boom",
                "with args {} raised ValueError: no data today",
            ),
            ("numbered_source:make", "raised TypeError: "),
            ("numbered_source:iterable", "An IterDataset can be neither shuffled"),
            ("numbered_source:numbers", "returned list, not a grain.MapDataset. Wrap"),
        ],
    )
    def test_what_is_wrong_with_a_function(self, function: str, expected: str) -> None:
        config = job(PythonOptions(function=function), kind="python")
        with pytest.raises(ConfigError) as caught:
            make_source(config, host_index=0, host_count=1)
        assert f"source.function {function!r}" in str(caught.value)
        assert expected in str(caught.value)

    def test_no_record(self) -> None:
        with pytest.raises(InputError, match=r"numbered_source:make' has no record"):
            make_source(numbered_job(0), host_index=0, host_count=1)


def test_wrong_calls_are_refused() -> None:
    config = job()
    for host, hosts in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match=f"host_index={host} must be from 0"):
            make_source(config, host_index=host, host_count=hosts)
    with pytest.raises(ConfigError, match=r"has no \[source\] section"):
        make_source(
            dataclasses.replace(config, source=None), host_index=0, host_count=1
        )


SYNTHETIC = SyntheticOptions(
    num_records=400,
    ids_per_sample={"history": (0, 5), "tags": 3},
    dense=2,
)


def test_synthetic_samples_have_the_declared_forms() -> None:
    lengths = set()
    for sample in samples(job(SYNTHETIC)):
        history, weights = sample["seen"]["ids"], sample["seen"]["weights"]
        lengths.add(len(history))
        assert history.dtype == np.int64
        assert weights.dtype == np.float32
        assert weights.shape == history.shape
        assert ((weights >= 0.5) & (weights < 1.5)).all()
        assert sample["tags"].shape == (3,)
        assert sample["user"].shape == ()
        assert ((history >= 0) & (history < ITEMS)).all()
        assert ((sample["tags"] >= 0) & (sample["tags"] < ITEMS)).all()
        assert 0 <= sample["user"] < USERS
        assert sample["dense"].dtype == np.float32
        assert sample["dense"].shape == (2,)
        assert (np.abs(sample["dense"]) <= 1).all()
        assert sample["label"] in (0, 1)
        assert sample["label"].dtype == np.float32
    assert lengths == set(range(6))


def test_synthetic_batches() -> None:
    config = job(SYNTHETIC)
    ds = make_batches(config, config.layout(), host_index=0, host_count=1)
    batch = ds[0]
    assert isinstance(batch["seen"]["ids"], RaggedValues)
    assert batch["tags"].shape == (16, 3)
    assert batch["user"].shape == (16,)
    assert batch["dense"].shape == (16, 2)
    grain.experimental.assert_equal_output_after_checkpoint(ds.to_iter_dataset())


@pytest.mark.parametrize("host", [0, 1])
def test_synthetic_batches_are_those_of_the_samples(host: int) -> None:
    skew = SkewOptions(host=1, after=40, stride=16)
    config = job(dataclasses.replace(SYNTHETIC, num_records=100, skew=skew), epochs=2)
    ds = make_batches(config, config.layout(), host_index=host, host_count=2)
    rows = samples(config, host, 2)
    assert len(ds) == 6
    for i, batch in enumerate(ds):
        assert_same(batch, batch_ragged(rows[16 * i : 16 * (i + 1)]))


def test_a_synthetic_record_depends_on_its_index_and_the_seed_alone() -> None:
    def record(options: SyntheticOptions, index: int, **changes: Any) -> Any:
        config = job(options, shuffle=False, **changes)
        return make_source(config, host_index=0, host_count=1)[index]

    first = record(SYNTHETIC, 7)
    assert_same(first, record(SYNTHETIC, 7))
    # The order of the features, the number of records and the batch size are no part
    # of it; the keys of a dict may come in another order.
    config = job(SYNTHETIC)
    turned = record(SYNTHETIC, 7, features=config.features[::-1], batch_size=32)
    assert_same(first, turned)
    longer = dataclasses.replace(SYNTHETIC, num_records=10**6)
    assert_same(first, record(longer, 7))
    other = record(dataclasses.replace(SYNTHETIC, data_seed=1), 7)
    assert not np.array_equal(other["tags"], first["tags"])


@pytest.mark.parametrize("zipf", [0.0, 1.0, 1.2])
def test_popularity_follows_a_power_law(zipf: float) -> None:
    # Expected share of the most popular: the density x^-zipf over its cell [1, 2).
    def mass(low: float, high: float) -> float:
        if zipf == 1.0:
            return math.log(high / low)
        return (high ** (1 - zipf) - low ** (1 - zipf)) / (1 - zipf)

    options = SyntheticOptions(num_records=300, zipf=zipf, ids_per_sample={"tags": 100})
    seen = collections.Counter(
        int(tag) for sample in samples(job(options)) for tag in sample["tags"]
    )
    top = max(seen.values()) / sum(seen.values())
    expected = mass(1, 2) / mass(1, ITEMS + 1)
    # Scrambling by a hash lets ranks meet, so the top id may have a little more.
    assert 0.9 * expected < top < 1.0 * expected + 0.07
    assert all(0 <= tag < ITEMS for tag in seen)


def test_synthetic_labels_can_be_learnt_from_the_ids() -> None:
    options = SyntheticOptions(num_records=2000, zipf=0)
    config = job(
        options,
        tables=(TableSpec(name="user", vocabulary_size=USERS, embedding_dim=8),),
        features=(FeatureSpec(name="user", table="user"),),
    )
    data = samples(config)
    labels = np.array([sample["label"] for sample in data])
    users = np.array([sample["user"] for sample in data])
    # Guess by the majority of a user's samples in the first half, try on the second.
    half = len(data) // 2
    positive = np.bincount(users[:half], labels[:half], USERS)
    total = np.bincount(users[:half], minlength=USERS)
    guesses = positive > total / 2
    right = guesses[users[half:]] == labels[half:]
    assert 0.3 < labels.mean() < 0.7
    assert right.mean() > 0.8


def test_features_that_share_a_key_share_their_ids() -> None:
    features = (
        FeatureSpec(name="a", table="item", ids="x", weights="w1"),
        FeatureSpec(name="b", table="user", ids="x", weights="w2"),
    )
    for sample in samples(job(features=features)):
        assert list(sample) == ["x", "w1", "w2", "label"]
        assert 0 <= sample["x"] < USERS  # legal in both tables
        assert sample["w1"] == sample["w2"]


def test_skew_makes_the_data_of_one_host_harder_from_some_sample_on() -> None:
    plain = job(SYNTHETIC, epochs=2)
    options = dataclasses.replace(
        SYNTHETIC, skew=SkewOptions(host=1, after=30, stride=16)
    )
    skewed = job(options, epochs=2)
    for host in range(3):
        before = samples(plain, host, 3)
        after = samples(skewed, host, 3)
        for i, (one, two) in enumerate(zip(before, after, strict=True)):
            if host == 1 and i >= 30:
                np.testing.assert_array_equal(two["tags"], one["tags"] // 16 * 16)
                np.testing.assert_array_equal(two["user"], one["user"] // 16 * 16)
                np.testing.assert_array_equal(
                    two["seen"]["ids"], one["seen"]["ids"] // 16 * 16
                )
                assert two["label"] == one["label"]
            else:
                assert_same(one, two)


def test_a_label_under_a_nested_key() -> None:
    config = job(train=TrainConfig(label="target/click"))
    assert {sample["target"]["click"] for sample in samples(config)} == {0, 1}


def test_a_source_travels_to_worker_processes() -> None:
    config = job(SYNTHETIC)
    ds = make_batches(config, config.layout(), host_index=0, host_count=1)
    copy = pickle.loads(pickle.dumps(ds))
    assert_same(copy[1]["seen"]["ids"].values, ds[1]["seen"]["ids"].values)


@pytest.mark.usefixtures("numbered")
def test_holes_that_a_filter_leaves_are_named() -> None:
    config = numbered_job(0, "holes", shuffle=False)
    ds = make_source(config, host_index=0, host_count=1)
    assert ds[1]["id"] == 1
    with pytest.raises(InputError, match="record 0 of the source is None, as a filter"):
        ds[0]
