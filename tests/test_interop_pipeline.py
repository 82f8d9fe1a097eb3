"""The adapters in front of the stages, checkpoints included."""

from typing import Any

import grain
import jax
import numpy as np
import pytest

from grain_sparsecore.interop import from_data_loader, from_iterable
from grain_sparsecore.pipeline import (
    ComputeInputStats,
    CoordinateLimitsIterDataset,
    RepartitionIterDataset,
)
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout


class Records:
    """48 records: six batches, three for each of two workers.

    Importable, so that workers can unpickle it.
    """

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        # Ids that meet in one partition more and more, so that limits grow.
        step = 2 ** (int(index) // 8)
        ids = np.arange(4) * step % 100
        return {"ids": ids, "index": np.array(index)}

    def __repr__(self) -> str:
        return "Records"


def layout() -> StackedLayout:
    return make_layout(
        [TableSpec(name="t", vocabulary_size=100, embedding_dim=8)],
        [FeatureSpec(name="f", table="t", ids="ids")],
        topology=Topology(
            global_device_count=2, local_device_count=2, num_sc_per_device=4
        ),
        batch_size=8,
    )


def later_stages(stats: grain.IterDataset[Any]) -> grain.IterDataset[Any]:
    agreed = stats.pipe(CoordinateLimitsIterDataset, layout=layout(), window=2)
    return agreed.pipe(RepartitionIterDataset, layout=layout())


def from_loader(workers: int) -> grain.IterDataset[Any]:
    # The sort runs in the DataLoader's workers; what must be agreed on, behind them.
    loader = grain.DataLoader(
        data_source=Records(),
        sampler=grain.samplers.IndexSampler(
            num_records=48,
            shuffle=True,
            seed=5,
            num_epochs=1,
            shard_options=grain.sharding.NoSharding(),
        ),
        operations=[
            grain.transforms.Batch(8, drop_remainder=True),
            ComputeInputStats(layout()),
        ],
        worker_count=workers,
    )
    return later_stages(from_data_loader(loader))


def from_list() -> grain.IterDataset[Any]:
    records = Records()
    batches = [
        {
            key: np.stack([records[i][key] for i in range(first, first + 8)])
            for key in ("ids", "index")
        }
        for first in range(0, 48, 8)
    ]
    return later_stages(from_iterable(batches).map(ComputeInputStats(layout())))


@pytest.mark.parametrize(
    "dataset", [from_list(), from_loader(0), from_loader(2)], ids=["list", "0", "2"]
)
def test_every_batch_arrives_and_a_restored_pipeline_goes_on(dataset: Any) -> None:
    iterator = iter(dataset)
    before = [next(iterator) for _ in range(3)]
    state = iterator.get_state()
    rest = list(iterator)
    seen = np.concatenate([batch["index"] for batch in before + rest])
    assert sorted(seen.tolist()) == list(range(48))
    restored = iter(dataset)
    restored.set_state(state)
    for one, two in zip(rest, restored, strict=True):
        assert one["sparsecore"].limits == two["sparsecore"].limits
        jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize("dataset", [from_list(), from_loader(0)], ids=["list", "0"])
def test_state_passes_grains_own_check(dataset: Any) -> None:
    grain.experimental.assert_equal_output_after_checkpoint(dataset)
