"""What the hosts of test_fingerprint.py do."""

from typing import Any

import grain
import numpy as np

from grain_sparsecore import same_program
from grain_sparsecore.config import (
    Config,
    LimitsConfig,
    PipelineConfig,
    SourceConfig,
    TopologyConfig,
    TrainConfig,
)
from grain_sparsecore.errors import MissingExtraError
from grain_sparsecore.limits import GrowthPolicy, Limits
from grain_sparsecore.pipeline import sparsecore_pipeline
from grain_sparsecore.program import program_fingerprint
from grain_sparsecore.specs import FeatureSpec, TableSpec
from grain_sparsecore.testing import TestHost
from grain_sparsecore.train import train

ROWS, BATCH = 256, 16


def programs(host: TestHost, *, hard_on: int, hard_from: int, steps: int) -> list[Any]:
    """Limits and fingerprint of every step.

    From step ``hard_from`` on, all ids of host ``hard_on`` lie in one partition.
    """
    config = Config(
        topology=TopologyConfig(num_sc_per_device=2),
        tables=(TableSpec(name="item", vocabulary_size=ROWS, embedding_dim=8),),
        features=(FeatureSpec(name="item", table="item"),),
        pipeline=PipelineConfig(batch_size=BATCH, window=2, timeout_seconds=30),
        limits=LimitsConfig(growth=GrowthPolicy(kind="exact")),
    )
    layout = config.layout()
    batches = []
    for step in range(steps):
        hard = host.index == hard_on and step >= hard_from
        ids = np.arange(BATCH) * (layout.topology.num_partitions if hard else 1)
        batches.append({"item": (ids % ROWS).astype(np.int32)})
    ds = sparsecore_pipeline(grain.MapDataset.source(batches), config)
    seen = []
    for batch in ds:
        limits = batch["sparsecore"].limits
        seen.append([limits.to_plain(), program_fingerprint(limits, layout)])
    return seen


def train_in_parts(host: TestHost) -> dict[str, Any]:
    """Training with the same program, with another from a step on, and without one."""
    config = Config(
        topology=TopologyConfig(num_sc_per_device=2),
        tables=(TableSpec(name="item", vocabulary_size=16, embedding_dim=8),),
        features=(FeatureSpec(name="item", table="item"),),
        pipeline=PipelineConfig(batch_size=BATCH, window=1, timeout_seconds=30),
        limits=LimitsConfig(growth=GrowthPolicy(kind="exact")),
        source=SourceConfig(
            kind="python",
            options={"function": "tests.multihost.fingerprints:growing"},
            shuffle=False,
        ),
        train=TrainConfig(hidden=(4,), steps=4),
    )
    fingerprint = same_program.program_fingerprint
    results: dict[str, Any] = {}

    def attempt(name: str, replacement: Any) -> None:
        steps: list[int] = []
        same_program.program_fingerprint = replacement
        try:
            train(config, on_step=lambda progress: steps.append(progress.step))
            results[name] = [len(steps), ""]
        except Exception as error:
            results[name] = [len(steps), f"{type(error).__name__}: {error}"]

    calls: list[Limits] = []

    def counted(limits: Limits, *arguments: Any, **options: Any) -> str:
        calls.append(limits)
        found = fingerprint(limits, *arguments, **options)
        # As another version of jax-tpu-embedding would have it.
        return found[::-1] if host.index == 1 and len(calls) == 2 else found

    def missing(*arguments: Any, **options: Any) -> str:
        if host.index == 1:
            raise MissingExtraError("jax-tpu-embedding is not installed")
        return fingerprint(*arguments, **options)

    attempt("same", fingerprint)
    attempt("another", counted)
    attempt("missing", missing)
    return results


def growing() -> grain.MapDataset:
    """For 2 hosts 2 batches of ids that are spread, then 4 of ids of one partition."""
    samples = [
        {
            "item": np.array([i % 16 if i < 4 * BATCH else i % 4 * 4], np.int32),
            "label": np.float32(i % 2),
        }
        for i in range(12 * BATCH)
    ]
    return grain.MapDataset.source(samples)
