"""SparseCore input preprocessing as a Grain data-pipeline transform."""

import importlib.metadata

from grain_sparsecore.batching import batch_ragged
from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.config import (
    Config,
    LimitsConfig,
    PipelineConfig,
    SourceConfig,
    TopologyConfig,
    TrainConfig,
    load_config,
)
from grain_sparsecore.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    GrainSparseCoreError,
    HostFailedError,
    HostMismatchError,
    HostTimeoutError,
    InputError,
    InputTypeError,
    LimitsExceededError,
    MissingExtraError,
    StageMisuseError,
)
from grain_sparsecore.limits import GrowthPolicy, InputStatsPerTable, Limits
from grain_sparsecore.pipeline import (
    ComputeInputStats,
    CoordinateLimitsIterDataset,
    RepartitionIterDataset,
    sparsecore_pipeline,
)
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology

try:
    __version__ = importlib.metadata.version("grain_sparsecore")
except importlib.metadata.PackageNotFoundError:  # a source tree on the path
    __version__ = "0+unknown"

__all__ = [
    "CheckpointError",
    "ComputeInputStats",
    "Config",
    "ConfigError",
    "CoordinateLimitsIterDataset",
    "CoordinationError",
    "FeatureSpec",
    "GrainSparseCoreError",
    "GrowthPolicy",
    "HostFailedError",
    "HostMismatchError",
    "HostTimeoutError",
    "InputError",
    "InputStatsPerTable",
    "InputTypeError",
    "Limits",
    "LimitsConfig",
    "LimitsExceededError",
    "MissingExtraError",
    "PipelineConfig",
    "RepartitionIterDataset",
    "SourceConfig",
    "SparseCoreInput",
    "StageMisuseError",
    "TableSpec",
    "Topology",
    "TopologyConfig",
    "TrainConfig",
    "batch_ragged",
    "load_config",
    "sparsecore_pipeline",
]
