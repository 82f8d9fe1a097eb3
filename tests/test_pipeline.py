"""The three stages together, in one process."""

import dataclasses
import pickle

import grain
import jax
import numpy as np
import pytest
from absl import flags

from grain_sparsecore.batching import batch_ragged
from grain_sparsecore.buffers import PartitionedBatch, SparseCoreInput
from grain_sparsecore.config import (
    Config,
    LimitsConfig,
    PipelineConfig,
    SourceConfig,
    TopologyConfig,
    TrainConfig,
)
from grain_sparsecore.coordination import SingleProcessReducer
from grain_sparsecore.errors import (
    CheckpointError,
    ConfigError,
    GrainSparseCoreError,
    InputError,
    StageMisuseError,
)
from grain_sparsecore.features import read_features
from grain_sparsecore.limits import GrowthPolicy, Limits, grow_limits
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.pipeline import (
    ComputeInputStats,
    CoordinateLimitsIterDataset,
    RepartitionIterDataset,
    sparsecore_pipeline,
)
from grain_sparsecore.repartition import repartition
from grain_sparsecore.specs import FeatureSpec, TableSpec

BATCH = 8
EXACT = GrowthPolicy(kind="exact")


def make_config(**pipeline):
    pipeline = {"batch_size": BATCH, "window": 4, **pipeline}
    return Config(
        topology=TopologyConfig(
            num_sc_per_device=2, global_device_count=2, local_device_count=2
        ),
        tables=(
            TableSpec(name="item", vocabulary_size=500, embedding_dim=8),
            TableSpec(
                name="word", vocabulary_size=90, embedding_dim=16, combiner="mean"
            ),
        ),
        features=(
            FeatureSpec(name="clicked", table="item"),
            FeatureSpec(name="shown", table="item", ids="page/shown"),
            FeatureSpec(name="words", table="word", weights="importance"),
        ),
        pipeline=PipelineConfig(**pipeline),
        limits=LimitsConfig(growth=EXACT),
        source=SourceConfig(kind="synthetic"),
        train=TrainConfig(),
    )


def make_samples(count):
    rng = np.random.default_rng(count)
    samples = []
    for i in range(count):
        # Later samples are longer, so that limits grow along the way.
        words = rng.integers(0, 90, rng.integers(0, 3 + i // 5))
        samples.append(
            {
                "clicked": rng.integers(0, 500),
                "page": {"shown": rng.integers(0, 500, 3), "position": np.float32(i)},
                "words": words,
                "importance": rng.random(len(words), np.float32),
                "label": np.int32(i % 2),
            }
        )
    return samples


def make_batches(count, size=BATCH):
    return grain.MapDataset.source(make_samples(count)).batch(
        size, batch_fn=batch_ragged
    )


def flat_bytes(element):
    leaves, tree = jax.tree.flatten(element)
    return str(tree), [(np.asarray(x).dtype, np.asarray(x).tobytes()) for x in leaves]


def assert_same(elements, others):
    elements, others = list(elements), list(others)
    assert len(elements) == len(others) > 0
    for one, two in zip(elements, others, strict=True):
        assert flat_bytes(one) == flat_bytes(two)


def by_hand(batches, layout, window, policy=EXACT):
    """What the pipeline promises, step by step and without Grain."""
    partitioned = []
    for batch in batches:
        features, counters, num_samples = read_features(batch, layout)
        partitioned.append(
            partition_batch(
                features, layout, counters=counters, num_samples=num_samples
            )
        )
    limits = Limits.start(layout)
    for first in range(0, len(partitioned), window):
        group = partitioned[first : first + window]
        needed = np.maximum.reduce([p.stats for p in group])
        limits = grow_limits(limits, needed, layout=layout, policy=policy)
        for p in group:
            yield repartition(p, limits, layout)


def test_the_pipeline_is_the_stages_in_order():
    config = make_config()
    layout = config.layout()
    batches = make_batches(88)
    got = list(sparsecore_pipeline(batches, config))
    assert len(got) == 11
    expected = list(by_hand(batches, layout, window=4))
    assert_same([e["sparsecore"] for e in got], expected)
    # Limits hold for a whole window and grow between windows.
    limits = [e["sparsecore"].limits for e in got]
    assert all(a == b for i, a in enumerate(limits) for b in limits[i // 4 * 4 : i])
    assert len(set(limits)) == 3
    # Everything else passes through; ids and weights are gone.
    for element, batch in zip(got, batches, strict=True):
        assert set(element) == {"page", "label", "sparsecore"}
        assert set(element["page"]) == {"position"}
        np.testing.assert_array_equal(element["label"], batch["label"])
        np.testing.assert_array_equal(
            element["page"]["position"], batch["page"]["position"]
        )


def test_the_stages_one_by_one_equal_the_one_call():
    config = make_config()
    layout = config.layout()
    ds = make_batches(40).map(ComputeInputStats(layout)).to_iter_dataset()
    ds = ds.pipe(CoordinateLimitsIterDataset, layout=layout, policy=EXACT, window=4)
    ds = ds.pipe(RepartitionIterDataset, layout=layout)
    assert_same(ds, sparsecore_pipeline(make_batches(40), config))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers):
    batches = make_batches(48)
    assert_same(
        sparsecore_pipeline(batches, make_config(workers=workers)),
        sparsecore_pipeline(batches, make_config()),
    )


def test_an_iter_dataset_of_batches_is_as_good():
    batches = make_batches(40)
    assert_same(
        sparsecore_pipeline(batches.to_iter_dataset(), make_config()),
        sparsecore_pipeline(batches, make_config()),
    )


def test_two_iterators_one_after_the_other_give_the_same():
    ds = sparsecore_pipeline(make_batches(40), make_config())
    assert_same(list(ds), list(ds))


def test_the_key_can_be_chosen():
    ds = sparsecore_pipeline(make_batches(16), make_config(key="train/sc"))
    assert all(isinstance(e["train/sc"], SparseCoreInput) for e in ds)


def test_checkpoints_of_every_stage():
    config = make_config()
    layout = config.layout()
    one = make_batches(80).map(ComputeInputStats(layout)).to_iter_dataset()
    two = one.pipe(CoordinateLimitsIterDataset, layout=layout, policy=EXACT, window=4)
    three = two.pipe(RepartitionIterDataset, layout=layout)
    for ds in (one, two, three, sparsecore_pipeline(make_batches(80), config)):
        grain.experimental.assert_equal_output_after_checkpoint(ds)


def test_checkpoints_with_workers():
    ds = sparsecore_pipeline(make_batches(80), make_config(workers=2))
    expected = list(ds)
    first = iter(ds)
    for _ in range(6):
        next(first)
    state = first.get_state()
    first.close()
    second = iter(ds)
    second.set_state(state)
    assert_same(second, expected[6:])
    second.close()


def test_a_state_of_two_hosts_continues_on_one_if_records_are_dealt_in_turn():
    samples = make_samples(80)

    def pipeline(hosts, **options):
        config = dataclasses.replace(
            make_config(batch_size=BATCH // hosts),
            topology=TopologyConfig(
                num_sc_per_device=2,
                global_device_count=2,
                local_device_count=2 // hosts,
            ),
        )
        ds = grain.MapDataset.source(samples)[0::hosts]
        ds = ds.batch(BATCH // hosts, batch_fn=batch_ragged)
        return sparsecore_pipeline(
            ds, config, reducer=SingleProcessReducer(), **options
        )

    first_of_two = iter(pipeline(2, elastic=True))
    for _ in range(5):
        next(first_of_two)
    state = first_of_two.get_state()
    alone = iter(pipeline(1, elastic=True))
    alone.set_state(state)
    rest = [element["label"] for element in alone]
    expected = [element["label"] for element in pipeline(1)][5:]
    np.testing.assert_array_equal(rest, expected)
    with pytest.raises(CheckpointError, match="elastic"):
        iter(pipeline(1)).set_state(state)


def test_start_limits_hold_from_the_first_batch():
    config = make_config()
    last = list(sparsecore_pipeline(make_batches(88), config))[-1]["sparsecore"].limits
    warm = sparsecore_pipeline(make_batches(88), config, start_limits=last)
    assert {e["sparsecore"].limits for e in warm} == {last}


def test_limits_can_be_read_from_the_iterator():
    iterator = iter(sparsecore_pipeline(make_batches(16), make_config()))
    element = next(iterator)
    assert iterator.limits == element["sparsecore"].limits
    assert iterator.coordinator.limits == iterator.limits


def test_a_short_batch_is_padded_with_empty_samples():
    config = make_config(on_partial_batch="pad")
    got = list(sparsecore_pipeline(make_batches(20), config))
    assert [e["sparsecore"].num_valid_samples.tolist() for e in got] == [
        [4, 4],
        [4, 4],
        [4, 0],
    ]
    assert got[2]["label"].shape == (BATCH,)
    np.testing.assert_array_equal(got[2]["label"][4:], 0)


def test_a_jitted_step_recompiles_exactly_when_the_limits_change():
    traces = []

    @jax.jit
    def step(batch):
        traces.append(batch.limits)
        return sum(x.size for x in jax.tree.leaves(batch))

    seen = []
    for element in sparsecore_pipeline(make_batches(88), make_config()):
        step(element["sparsecore"])
        seen.append(element["sparsecore"].limits)
    assert traces == list(dict.fromkeys(seen))
    assert len(traces) == 3


def test_bytes_do_not_depend_on_the_run():
    # Alignment gaps and tails are filled, not left as the memory was.
    ds = sparsecore_pipeline(make_batches(40), make_config())
    assert_same(list(ds), list(ds))
    for element in ds:
        batch = element["sparsecore"]
        for name, size in (
            (n, s.buffer_size_per_device) for n, s in batch.limits.items()
        ):
            assert batch.embedding_ids[name].shape == (2, size)
            padding = batch.embedding_ids[name] == 2**31 - 1
            assert (batch.sample_ids[name][padding] == 2**31 - 1).all()
            assert np.isnan(batch.gains[name][padding]).all()
            assert not np.isnan(batch.gains[name][~padding]).any()


def test_batches_kept_by_the_consumer_stay_as_they_were():
    kept, copies = [], []
    for element in sparsecore_pipeline(make_batches(160), make_config()):
        kept.append(element)
        copies.append(flat_bytes(element))
    assert [flat_bytes(e) for e in kept] == copies


def test_next_after_close_is_refused():
    iterator = iter(sparsecore_pipeline(make_batches(40), make_config()))
    next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


def test_a_bad_id_names_feature_table_sample_and_value():
    samples = make_samples(16)
    samples[13]["clicked"] = np.int64(500)
    ds = grain.MapDataset.source(samples).batch(BATCH, batch_fn=batch_ragged)
    with pytest.raises(InputError) as error:
        list(sparsecore_pipeline(ds, make_config(window=1)))
    for part in ("feature 'clicked'", "table 'item'", "sample 5", "500"):
        assert part in str(error.value)


def test_a_batch_that_holds_the_key_of_the_buffers_is_refused():
    samples = [{**sample, "sparsecore": 1} for sample in make_samples(8)]
    ds = grain.MapDataset.source(samples).batch(BATCH, batch_fn=batch_ragged)
    with pytest.raises(InputError, match="already has a key 'sparsecore'"):
        list(sparsecore_pipeline(ds, make_config()))


def test_a_bad_id_in_a_worker_keeps_its_type_and_text():
    samples = make_samples(16)
    samples[13]["clicked"] = np.int64(500)
    ds = grain.MapDataset.source(samples).batch(BATCH, batch_fn=batch_ragged)
    iterator = iter(sparsecore_pipeline(ds, make_config(workers=1)))
    with pytest.raises(GrainSparseCoreError, match="feature 'clicked'"):
        list(iterator)
    iterator.close()


def test_stage_one_is_picklable_and_works_in_a_data_loader():
    config = make_config()
    stage = ComputeInputStats(config.layout())
    assert pickle.loads(pickle.dumps(stage)) == stage
    samples = make_samples(24)
    loader = grain.DataLoader(
        data_source=samples,
        sampler=grain.samplers.SequentialSampler(
            num_records=len(samples), shard_options=grain.sharding.NoSharding()
        ),
        operations=[
            grain.transforms.Batch(BATCH, batch_fn=batch_ragged),
            stage,
        ],
    )
    expected = list(make_batches(24).map(stage))
    assert_same(loader, expected)
    assert all(isinstance(e["sparsecore"], PartitionedBatch) for e in expected)


def test_stage_three_wants_agreed_batches():
    layout = make_config().layout()
    measured = make_batches(16).map(ComputeInputStats(layout)).to_iter_dataset()
    with pytest.raises(StageMisuseError, match="without agreed limits"):
        next(iter(measured.pipe(RepartitionIterDataset, layout=layout)))
    raw = make_batches(16).to_iter_dataset()
    with pytest.raises(StageMisuseError, match=r"element\['sparsecore'\] is missing"):
        next(iter(raw.pipe(RepartitionIterDataset, layout=layout)))


def test_other_things_than_datasets_are_refused():
    with pytest.raises(
        StageMisuseError, match="takes a Grain dataset of batches, not list"
    ):
        sparsecore_pipeline([{"clicked": [1]}], make_config())


def test_a_state_of_another_batch_size_is_refused():
    first = iter(sparsecore_pipeline(make_batches(80), make_config()))
    for _ in range(5):
        next(first)
    state = first.get_state()
    other = sparsecore_pipeline(make_batches(80, 4), make_config(batch_size=4))
    text = "batch_size is 8 in the checkpoint and 4 in this pipeline"
    with pytest.raises(CheckpointError, match=text):
        iter(other).set_state(state)


def test_batches_that_are_all_too_small_are_an_error_and_not_an_empty_loop():
    ds = sparsecore_pipeline(make_batches(80, 4), make_config())
    with pytest.raises(
        InputError,
        match=r"first 3 batches .* fewer than batch_size=8 .*batch_fn=grain_sparsecore",
    ):
        next(iter(ds))
    # One short batch is what is left of an epoch; data may be shorter than a batch.
    assert list(sparsecore_pipeline(make_batches(4), make_config())) == []


@pytest.mark.parametrize("config", ["job.toml", {}, make_config().layout()])
def test_other_things_than_a_config_are_refused(config):
    with pytest.raises(ConfigError, match="config must be a Config, not"):
        sparsecore_pipeline(make_batches(16), config)


def test_workers_want_parsed_flags(monkeypatch):
    monkeypatch.setattr(flags.FlagValues, "is_parsed", lambda self: False)
    with pytest.raises(StageMisuseError, match="mark_as_parsed"):
        sparsecore_pipeline(make_batches(16), make_config(workers=1))
    sparsecore_pipeline(make_batches(16), make_config())


def test_stages_show_themselves_briefly():
    ds = sparsecore_pipeline(make_batches(16), make_config())
    assert "RepartitionIterDataset" in str(ds)
    assert len(str(ds)) <= 30
