"""A record with everything in it, from a short made-up run."""

import dataclasses

import numpy as np

from grain_sparsecore.dropping import cut_batch
from grain_sparsecore.features import COUNTERS, FeatureIds
from grain_sparsecore.limits import GrowthPolicy, Limits, grow_limits
from grain_sparsecore.overflow import StackCaps, cap_ceilings
from grain_sparsecore.partition import partition_batch
from grain_sparsecore.repartition import repartition
from grain_sparsecore.report import RunRecord
from grain_sparsecore.report.recorder import RunRecorder
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout

_SAMPLES = 256


def example_layout():
    return make_layout(
        [
            TableSpec(name="item", vocabulary_size=100_000, embedding_dim=16),
            TableSpec(
                name="category", vocabulary_size=300, embedding_dim=16, stack="small"
            ),
            TableSpec(
                name="user_country_and_region_code",
                vocabulary_size=50,
                embedding_dim=16,
                stack="small",
            ),
        ],
        [
            FeatureSpec(name="clicked_item", table="item"),
            FeatureSpec(name="history", table="item"),
            FeatureSpec(name="category", table="category"),
            FeatureSpec(name="country", table="user_country_and_region_code"),
        ],
        topology=Topology(
            global_device_count=8, local_device_count=4, num_sc_per_device=4
        ),
        batch_size=_SAMPLES,
    )


def example_record(*, steps=120):
    """Skewed ids that drift, a cap on one stack, all timings."""
    layout = example_layout()
    rng = np.random.default_rng(0)
    record = RunRecord(
        command="train",
        title="configs/an_example_with_a_rather_long_name_for_a_phone.toml",
        facts=[
            ("steps", f"{steps}"),
            ("hosts", "2"),
            ("examples per second", "1,234,567"),
            ("limit changes", "4"),
            ("recompiles", "4"),
            ("input wait", "3.1%"),
        ],
        config={"pipeline": {"batch_size": _SAMPLES}, "limits": {"kind": "geometric"}},
        notes=["Numbers of host 0."],
    )
    recorder = RunRecorder(record, layout=layout)
    limits = Limits.start(layout)
    caps = {"item": StackCaps(max_ids_cap=24)}
    ceilings = cap_ceilings(caps, layout=layout)
    for step in range(steps):
        features = []
        for feature in layout.features:
            width = 8 if feature.name == "history" else 1
            ids = rng.zipf(1.8 - 0.4 * step / steps, _SAMPLES * width) * 2654435761
            features.append(
                FeatureIds(
                    ids=(ids % feature.table.vocabulary_size).astype(np.int32),
                    row_splits=np.arange(_SAMPLES + 1) * width,
                    width=0,
                    weights=None,
                )
            )
        counters = np.zeros((len(features), len(COUNTERS)), np.int32)
        counters[:, 0] = [f.ids.size for f in features]
        counters[1, 3] = step % 3
        batch = partition_batch(features, layout, counters=counters, num_samples=256)
        batch, drops = cut_batch(batch, ceilings, layout=layout, step=step)
        limits = grow_limits(
            limits, batch.stats, layout=layout, policy=GrowthPolicy(), ceilings=ceilings
        )
        result = repartition(batch, limits, layout)
        recorder.add_batch(step, dataclasses.replace(result, drops=drops))
        wait = 0.001 + 0.02 * rng.random() * (step % 37 == 0)
        record.step_seconds.add(step, (0.02 + wait, wait))
        if step % 8 == 0:
            record.coordination_seconds.add(step, 0.001 + 0.001 * rng.random())
        record.loss.add(step, 0.3 + 0.4 * np.exp(-step / 50))
    return recorder.finish()
