import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from grain_sparsecore.batching import RaggedValues
from grain_sparsecore.columns import DENSE_KEY, LABEL_KEY, TakeColumns
from grain_sparsecore.config import Config
from grain_sparsecore.config.sections import (
    PipelineConfig,
    TopologyConfig,
    TrainConfig,
)
from grain_sparsecore.config.source import SourceConfig
from grain_sparsecore.dropping import DROP_FIELDS, DropCounts
from grain_sparsecore.errors import (
    ConfigError,
    GrainSparseCoreError,
    HostMismatchError,
    InputError,
    InputTypeError,
)
from grain_sparsecore.limits import Limits
from grain_sparsecore.lookup import to_global_arrays, unshard_tables
from grain_sparsecore.model import (
    init_network,
    init_state,
    init_table,
    make_train_step,
    mean_loss,
    predict,
)
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.repartition import repartition
from grain_sparsecore.sources import make_batches
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.summary import (
    HostOutcome,
    Progress,
    TrainSummary,
    check_outcomes,
    digest_of_limits,
)
from grain_sparsecore.train import AXIS, train


def make_config(
    *,
    batch_size: int = 64,
    train_options: dict[str, Any] | None = None,
    pipeline_options: dict[str, Any] | None = None,
    topology_options: dict[str, Any] | None = None,
    feature_options: dict[str, Any] | None = None,
    epochs: int = 0,
    **source: Any,
) -> Config:
    """Two tables of a few rows; samples of `tests.training_sources`."""
    return Config(
        topology=TopologyConfig(num_sc_per_device=2, **topology_options or {}),
        tables=(
            TableSpec(name="item", vocabulary_size=16, embedding_dim=4),
            TableSpec(name="user", vocabulary_size=5, embedding_dim=3),
        ),
        features=(
            FeatureSpec(name="item", table="item", **feature_options or {}),
            FeatureSpec(name="user", table="user"),
        ),
        pipeline=PipelineConfig(
            batch_size=batch_size, window=2, **pipeline_options or {}
        ),
        source=SourceConfig(
            kind="python",
            options={"function": "tests.training_sources:records", "args": source},
            epochs=epochs,
        ),
        train=TrainConfig(
            **{"hidden": (8,), "learning_rate": 0.2, **(train_options or {})}
        ),
    )


def test_a_job_learns_and_sums_up_what_it_did():
    reports: list[Progress] = []
    summary = train(make_config(), steps=16, on_step=reports.append)
    assert summary.steps == 16
    assert summary.hosts == 1
    assert summary.loss_last < 0.9 * summary.loss_first
    assert summary.recompiles == summary.limit_changes
    assert summary.dropped_ids == 0
    assert summary.examples_per_second > 0
    assert 0 <= summary.input_wait_fraction <= 1
    assert set(summary.limits) == {"item", "user"}
    assert [r.step for r in reports] == list(range(1, 17))
    assert [r.loss for r in (reports[0], reports[-1])] == [
        summary.loss_first,
        summary.loss_last,
    ]
    assert reports[-1].recompiles == summary.recompiles
    again = train(make_config(), steps=16)
    assert again.batch_digest == summary.batch_digest
    assert again.loss_last == summary.loss_last


def test_a_summary_is_written_with_these_keys():
    summary = TrainSummary(
        steps=3,
        hosts=2,
        examples_per_second=10.0,
        loss_first=0.7,
        loss_last=0.5,
        limits=Limits.start(make_config().layout()),
        limit_changes=1,
        recompiles=1,
        dropped_ids=0,
        input_wait_fraction=0.25,
        batch_digest=("ab", "cd"),
    )
    assert json.loads(summary.to_json()) == {
        "steps": 3,
        "hosts": 2,
        "examples_per_second": 10.0,
        "loss_first": 0.7,
        "loss_last": 0.5,
        "limits": {
            name: {
                "max_ids_per_partition": 1,
                "max_unique_ids_per_partition": 1,
                "buffer_size_per_device": 16,
            }
            for name in ("item", "user")
        },
        "minibatches": {"batches": {}, "share_split": 0.0, "extra_buffer_bytes": 0},
        "limit_changes": 1,
        "recompiles": 1,
        "dropped_ids": 0,
        "input_wait_fraction": 0.25,
        "batch_digest": ["ab", "cd"],
        "program_fingerprint": None,
        "counters": {},
        "given_ids": {},
        "drops": {},
        "dropped_example_share": 0.0,
    }


def test_a_job_ends_with_its_input_and_counts_real_samples_alone():
    config = make_config(
        epochs=1, count=150, pipeline_options={"on_partial_batch": "pad"}
    )
    reports: list[Progress] = []
    summary = train(config, steps=50, on_step=reports.append)
    # 64 + 64 + 22 samples, of which those after the end of the first step are timed.
    assert summary.steps == 3
    seconds_to_second = 64 / reports[1].examples_per_second
    seconds_to_third = (64 + 22) / summary.examples_per_second
    assert seconds_to_second < seconds_to_third


def test_dropped_ids_are_counted_and_said_once():
    config = make_config(count=16, feature_options={"on_invalid_id": "drop"})
    tables = (
        dataclasses.replace(config.tables[0], vocabulary_size=15),
        config.tables[1],
    )
    reports: list[Progress] = []
    config = dataclasses.replace(config, tables=tables)
    summary = train(config, steps=3, on_step=reports.append)
    assert summary.dropped_ids == 3 * 64 // 16
    assert summary.counters["item"]["large_ids"] == 3 * 64 // 16
    # Every sample has two items; those that are left are fewer.
    assert summary.given_ids == {"item": 3 * 64 * 2, "user": 3 * 64}
    assert summary.counters["item"]["ids"] == 3 * (64 * 2 - 64 // 16)
    messages = [m for r in reports for m in r.messages]
    assert len(messages) == 1
    assert "feature 'item' (table 'item'): 4 ids at or above the" in messages[0]


def test_a_job_without_a_batch_says_so():
    with pytest.raises(InputError, match=r"less than one batch of 64 samples; lower"):
        train(make_config(count=63, epochs=1))


def test_a_loss_that_is_not_finite_ends_the_job():
    config = make_config(dense=3e38, train_options={"dense": ("dense",)})
    with pytest.raises(
        GrainSparseCoreError, match=r"the loss is (nan|inf) in step 1; lower train.lea"
    ):
        train(config, steps=3)


def test_an_error_of_the_input_is_raised_as_itself():
    with pytest.raises(ValueError, match="record 70 is broken"):
        train(make_config(fail_at=70, count=100), steps=9)


def test_devices_that_are_not_there_are_named():
    config = make_config(
        topology_options={"global_device_count": 16, "local_device_count": 8}
    )
    with pytest.raises(
        ConfigError, match=r"global_device_count=16, but this job has 8"
    ):
        train(config)


def parameters_after_three_steps(devices: int) -> tuple[dict, list, list[float]]:
    """Plain tables, the network and the losses, on a mesh of so many devices."""
    config = make_config(train_options={"dense": ("dense",)}, dense=0.5)
    layout = config.layout(
        Topology(
            global_device_count=devices, local_device_count=devices, num_sc_per_device=2
        )
    )
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    batches = make_batches(config, layout, host_index=0, host_count=1)
    batches = batches.map(TakeColumns(layout, "label", ("dense",)))
    iterator = iter(sparsecore_pipeline(batches, config, layout=layout))
    traces = []
    step = make_train_step(
        layout,
        learning_rate=0.1,
        mesh=mesh,
        axis=AXIS,
        on_trace=lambda: traces.append(1),
    )
    state = init_state(layout, dense_size=1, hidden=(8,), seed=3, mesh=mesh, axis=AXIS)
    losses = []
    for _ in range(3):
        element = next(iterator)
        batch = {
            "sparsecore": element["sparsecore"],
            "dense": element[DENSE_KEY],
            "label": element[LABEL_KEY],
        }
        state, loss = step(state, to_global_arrays(batch, mesh, AXIS))
        losses.append(float(loss))
    # What counts compilations must agree with what jit did.
    assert len(traces) == step._cache_size()  # type: ignore[attr-defined]
    iterator.close()
    return (
        unshard_tables(state["params"]["tables"], layout),
        state["params"]["network"],
        losses,
    )


def test_training_does_not_depend_on_the_number_of_devices():
    tables, network, losses = parameters_after_three_steps(1)
    tables8, network8, losses8 = parameters_after_three_steps(8)
    np.testing.assert_allclose(losses8, losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5),
        (tables, network),
        (tables8, network8),
    )
    assert not np.allclose(tables["item"], init_table("item", 16, 4, seed=3))


def test_a_table_starts_from_its_name_and_the_seed_alone():
    table = init_table("item", 1000, 16, seed=0)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table.std(), 16**-0.5, rtol=0.05)
    # More rows leave those there were: padding and growing a table change nothing.
    np.testing.assert_array_equal(init_table("item", 2000, 16, seed=0)[:1000], table)
    assert not np.array_equal(init_table("user", 1000, 16, seed=0), table)
    assert not np.array_equal(init_table("item", 1000, 16, seed=1), table)


def test_the_network_is_layers_with_a_rectifier_between_them():
    network = init_network(3, (4,), seed=0)
    assert [layer["w"].shape for layer in network] == [(3, 4), (4, 1)]
    x = np.random.default_rng(0).standard_normal((5, 3), np.float32)
    one, two = network
    expected = np.maximum(x @ one["w"] + 1, 0) @ two["w"] + 2
    one["b"][:] = 1
    two["b"][:] = 2
    np.testing.assert_allclose(
        predict(jax.tree.map(jnp.asarray, network), jnp.asarray(x)),
        expected[:, 0],
        rtol=1e-5,
    )


def test_the_loss_is_the_mean_over_real_samples_of_all_devices():
    logits = jnp.array([0.0, 2.0, -1.0, 1e30, np.nan, -3.0, 5.0, np.inf])
    labels = jnp.array([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.5, 0.0])
    valid = [0, 1, 2]
    probability = 1 / (1 + np.exp(-np.asarray(logits, np.float64)[valid]))
    y = np.asarray(labels)[valid]
    expected = -np.mean(y * np.log(probability) + (1 - y) * np.log(1 - probability))
    num_valid = jnp.array([3, 0], jnp.int32)
    np.testing.assert_allclose(
        mean_loss(logits, labels, num_valid), expected, rtol=1e-6
    )
    none = jnp.zeros(2, jnp.int32)
    assert mean_loss(logits, labels, none) == 0


def outcome(**changes: Any) -> HostOutcome:
    limits = Limits.start(make_config().layout())
    return HostOutcome(
        **{
            "recompiles": 2,
            "limit_changes": 2,
            "samples": 2**40,
            "input_wait_fraction": 0.125,
            "limits_digest": digest_of_limits(limits),
            "batch_digest": bytes(range(32)),
            **changes,
        }
    )


def test_an_outcome_survives_its_bytes():
    packed = outcome().to_bytes()
    assert packed.dtype == np.uint8
    assert HostOutcome.from_bytes(packed) == outcome()
    assert len(outcome(samples=0).to_bytes()) == len(packed)


def test_hosts_that_went_different_ways_are_named():
    check_outcomes([outcome(), outcome(batch_digest=bytes(32), samples=0)])
    with pytest.raises(
        HostMismatchError, match="host 1 ended with recompiles 3, host 0 with 2; hosts"
    ):
        check_outcomes([outcome(), outcome(recompiles=3)])
    with pytest.raises(HostMismatchError, match="host 2 ended with limits_digest 0000"):
        check_outcomes([outcome(), outcome(), outcome(limits_digest=bytes(32))])


def take(element: dict[str, Any], dense: tuple[str, ...] = ()) -> dict[str, Any]:
    ids = {"item": np.zeros((3, 1), np.int32), "user": np.zeros((3, 1), np.int32)}
    layout = make_config().layout()
    return TakeColumns(layout, "label", dense).map({**ids, **element})


@pytest.mark.parametrize(
    ("element", "dense", "message"),
    [
        (
            {"label": np.zeros(3), "dense": np.zeros(3), "more": {"x": np.zeros(3)}},
            ("dens",),
            "train.dense 'dens': the batch has no such key; it has 'item', 'user', "
            "'label', 'dense', 'more/x'. Did you mean 'dense'? Set train.dense to what "
            "the batch has, or rename the key.",
        ),
        (
            {"click": np.zeros(3)},
            (),
            "train.label 'label': the batch has no such key; it has 'item', 'user', "
            "'click'. Set train.label to what the batch has, or rename the key.",
        ),
        (
            {f"key{i:02}": np.zeros(3) for i in range(25)},
            (),
            "'key17' and 7 more. Set train.label to what the batch has",
        ),
    ],
)
def test_a_missing_column_is_said_with_what_the_batch_has(element, dense, message):
    with pytest.raises(InputError) as found:
        take(element, dense)
    assert message in str(found.value)
    assert "feature" not in str(found.value)


def test_columns_are_taken_as_float32_and_the_rest_is_left_behind():
    taken = take(
        {
            "label": np.array([[True], [False], [True]]),
            "age": np.array([1, 2, 3]),
            "more": {"price": np.arange(6.0).reshape(3, 2)},
            "city": np.array(["a", "b", "c"]),
        },
        dense=("age", "more/price"),
    )
    assert set(taken) == {"item", "user", LABEL_KEY, DENSE_KEY}
    np.testing.assert_array_equal(taken[LABEL_KEY], [1, 0, 1])
    np.testing.assert_array_equal(taken[DENSE_KEY], [[1, 0, 1], [2, 2, 3], [3, 4, 5]])
    assert taken[LABEL_KEY].dtype == taken[DENSE_KEY].dtype == np.float32
    assert take({"label": np.zeros(3)})[DENSE_KEY].shape == (3, 0)


@pytest.mark.parametrize(
    ("element", "message"),
    [
        ({}, "train.label 'label': the batch has no such key; it has 'item', 'us"),
        ({"label": np.zeros((3, 2))}, r"'label' has shape \(3, 2\), not \[samples\]"),
        ({"label": np.array([0, 1, 2])}, r"'label': sample 2 has 2.0; labels are num"),
        ({"label": np.array([0, np.nan, 1])}, "'label': sample 1 has nan; labels are"),
        (
            {"label": np.zeros(3), "x": np.zeros(2)},
            r"train.dense 'x' has shape \(2, 1\), not \[3\] or \[3, n\] as the labels",
        ),
        (
            {"label": np.zeros(3), "x": np.array([[0, 1], [0, 1e39], [0, 1]])},
            "train.dense 'x': sample 1 has inf in column 1; dense values must be fin",
        ),
    ],
)
def test_wrong_columns_are_named(element, message):
    with pytest.raises(InputError, match=message):
        take(element, dense=("x",))


def test_columns_of_no_numbers_are_named():
    with pytest.raises(InputTypeError, match="'label' is an array of <U1, not of num"):
        take({"label": np.array(["a", "b", "c"])})


@pytest.mark.parametrize(
    "ragged",
    [
        RaggedValues(np.ones(4), np.array([0, 1, 1, 4])),
        [[1.0], [], [1.0, 2.0]],
        np.array([[1.0], [], [1.0, 2.0]], object),
    ],
    ids=["csr", "lists", "objects"],
)
def test_columns_of_lists_are_named(ragged):
    with pytest.raises(InputTypeError, match=r"'label' holds lists .* Name another"):
        take({"label": ragged})
    with pytest.raises(InputTypeError, match=r"train\.dense 'x' holds lists"):
        take({"label": np.zeros(3), "x": ragged}, dense=("x",))


def test_ids_that_limits_cut_off_are_counted_as_dropped(monkeypatch):
    lost = DropCounts.zeros(2)
    lost.per_feature[:, DROP_FIELDS.index("dropped_ids")] = (3, 4)

    def repartition_that_drops(*args, **kwargs):
        return dataclasses.replace(repartition(*args, **kwargs), drops=lost)

    monkeypatch.setattr(
        "grain_sparsecore.pipeline.repartition.repartition", repartition_that_drops
    )
    summary = train(make_config(), steps=2)
    assert summary.dropped_ids == 2 * 7
    assert {name: drop["dropped_ids"] for name, drop in summary.drops.items()} == {
        "item": 2 * 3,
        "user": 2 * 4,
    }
