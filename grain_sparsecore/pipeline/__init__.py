"""The Grain stages, and the call that puts them together."""

from grain_sparsecore.pipeline.assemble import (
    sparsecore_pipeline as sparsecore_pipeline,
)
from grain_sparsecore.pipeline.compute import ComputeInputStats as ComputeInputStats
from grain_sparsecore.pipeline.coordinate import (
    CoordinateLimitsIterDataset as CoordinateLimitsIterDataset,
)
from grain_sparsecore.pipeline.repartition import (
    RepartitionIterDataset as RepartitionIterDataset,
)
