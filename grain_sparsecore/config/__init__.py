"""The configuration of a job: a TOML file as frozen, checked dataclasses."""

from grain_sparsecore.config.agreement import (
    CRITEO_CATEGORIES as CRITEO_CATEGORIES,
)
from grain_sparsecore.config.agreement import DENSE_KEY as DENSE_KEY
from grain_sparsecore.config.job import Config as Config
from grain_sparsecore.config.reader import load_config as load_config
from grain_sparsecore.config.reader import read_config as read_config
from grain_sparsecore.config.sections import LimitsConfig as LimitsConfig
from grain_sparsecore.config.sections import PipelineConfig as PipelineConfig
from grain_sparsecore.config.sections import TopologyConfig as TopologyConfig
from grain_sparsecore.config.sections import TrainConfig as TrainConfig
from grain_sparsecore.config.source import CriteoOptions as CriteoOptions
from grain_sparsecore.config.source import ParquetOptions as ParquetOptions
from grain_sparsecore.config.source import PythonOptions as PythonOptions
from grain_sparsecore.config.source import SkewOptions as SkewOptions
from grain_sparsecore.config.source import SourceConfig as SourceConfig
from grain_sparsecore.config.source import SyntheticOptions as SyntheticOptions
from grain_sparsecore.config.source import TFRecordOptions as TFRecordOptions
