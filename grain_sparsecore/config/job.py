"""`Config`: all sections of a job together, and what follows from them."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from grain_sparsecore.config.agreement import key_errors, name_errors, source_errors
from grain_sparsecore.config.sections import (
    LimitsConfig,
    PipelineConfig,
    TopologyConfig,
    TrainConfig,
)
from grain_sparsecore.config.source import SourceConfig
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.overflow import cap_ceilings
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology, as_plain
from grain_sparsecore.stacking import StackedLayout, make_layout


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Config:
    """A whole job. Equal and hashed by value, whatever the order of the tables.

    Attributes:
        topology: The devices.
        tables: The tables, each read by a feature.
        features: The features.
        pipeline: How batches are made and agreed on.
        limits: How limits follow the data.
        source: Where samples come from; None for a data set of your own.
        train: The training job of the command line.

    Raises:
        ConfigError: Sections do not go together; the text lists every reason.
    """

    topology: TopologyConfig
    tables: tuple[TableSpec, ...]
    features: tuple[FeatureSpec, ...]
    pipeline: PipelineConfig
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    source: SourceConfig | None = None
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        _check_types(self)
        errors = [
            *name_errors(
                [(t.name, as_plain(t)) for t in self.tables],
                [(f.name, as_plain(f)) for f in self.features],
            ),
            *source_errors(self.source, self.features, self.tables),
            *key_errors(self.source, self.features, self.train, self.pipeline.key),
        ]
        if not errors:
            errors = list(_layout_errors(self))
        if errors:
            raise ConfigError(
                "\n".join(f"{path}: {text}" if path else text for path, text in errors)
            )

    def layout(self, topology: Topology | None = None) -> StackedLayout:
        """The stacks of the model on a topology.

        Args:
            topology: The devices. None takes them from the ``topology`` section and,
                where that leaves counts out, from the running JAX job.

        Raises:
            ConfigError: The model does not fit the topology, see `make_layout`.
        """
        layout = make_layout(
            self.tables,
            self.features,
            topology=self.topology.resolve() if topology is None else topology,
            batch_size=self.pipeline.batch_size,
            rotation=self.topology.rotation,
            activation_bytes_limit=self.topology.activation_bytes_limit,
        )
        # Which stacks there are is only known here.
        cap_ceilings(self.limits.stack, layout=layout)
        return layout

    def canonical(self) -> dict[str, Any]:
        """All settings, defaults included, as a JSON-able dict of one order."""
        plain = {
            "topology": dataclasses.asdict(self.topology),
            "tables": {t.name: as_plain(t) for t in _by_name(self.tables)},
            "features": {f.name: as_plain(f) for f in _by_name(self.features)},
            "pipeline": dataclasses.asdict(self.pipeline),
            "limits": dataclasses.asdict(self.limits),
            "source": None if self.source is None else dataclasses.asdict(self.source),
            "train": dataclasses.asdict(self.train),
        }
        return json.loads(json.dumps(plain))  # tuples become lists, as in a file

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for `canonical`, the same everywhere."""
        text = json.dumps(self.canonical(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return int(self.fingerprint, 16)


def _check_types(config: Config) -> None:
    """Raises ConfigError unless each section is of its type."""
    for name, needed in (
        ("topology", TopologyConfig),
        ("pipeline", PipelineConfig),
        ("limits", LimitsConfig),
        ("source", SourceConfig),
        ("train", TrainConfig),
    ):
        value = getattr(config, name)
        if isinstance(value, needed) or (name == "source" and value is None):
            continue
        hint = ""
        if isinstance(value, Topology):
            hint = (
                " A Topology has all counts: pass it to Config.layout(topology), and "
                "its num_sc_per_device to TopologyConfig."
            )
        raise ConfigError(
            f"{name}: must be a {needed.__name__}, not a {type(value).__name__}.{hint}"
        )
    for name, needed in (("tables", TableSpec), ("features", FeatureSpec)):
        value = getattr(config, name)
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise ConfigError(
                f"{name}: must be a list of {needed.__name__}, not a "
                f"{type(value).__name__}."
            )
        object.__setattr__(config, name, tuple(value))  # it may be a generator
        for i, spec in enumerate(getattr(config, name)):
            if not isinstance(spec, needed):
                raise ConfigError(
                    f"{name}[{i}]: must be a {needed.__name__}, not a "
                    f"{type(spec).__name__}."
                )


def _by_name(specs: Iterable[Any]) -> list[Any]:
    return sorted(specs, key=lambda spec: spec.name)


def _layout_errors(config: Config) -> Iterator[tuple[str, str]]:
    """What `make_layout` refuses, as far as it is known without the job's devices."""
    counts = (config.topology.global_device_count, config.topology.local_device_count)
    try:
        if None not in counts:
            config.layout()
            return
        # Whether tables can be stacked does not depend on the devices: ask for one
        # device and the smallest batch. Buffer sizes do depend on them.
        cores = config.topology.num_sc_per_device
        make_layout(
            [
                dataclasses.replace(table, suggested_coo_buffer_size_per_device=None)
                for table in config.tables
            ],
            config.features,
            topology=Topology(
                global_device_count=1, local_device_count=1, num_sc_per_device=cores
            ),
            batch_size=cores,
        )
    except ConfigError as error:
        yield "", str(error)
