"""The source section: which data, and the options of each kind of source."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from grain_sparsecore.config.checks import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_mapping,
    check_str,
    check_strs,
    nearest,
)
from grain_sparsecore.errors import ConfigError

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkewOptions:
    """Makes the data of one host harder from some point on.

    From then on its ids are rounded down to multiples of ``stride``, so that they
    meet in few partitions and the limits have to grow because of one host alone.

    Attributes:
        host: Index of the host.
        after: Samples of that host before the skew begins.
        stride: Ids become multiples of it; 64 leaves one of 64 partitions.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    host: int = 0
    after: int = 0
    stride: int = 64

    def __post_init__(self) -> None:
        owner = "source.skew"
        check_int(owner, "host", self.host, low=0)
        check_int(owner, "after", self.after, low=0)
        check_int(owner, "stride", self.stride, low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """Generated samples: each is a function of its index and ``data_seed`` alone.

    A sample holds the ids (and weights) of every feature of the configuration and
    a label under ``train.label``, drawn from a hidden score of each id.

    Attributes:
        num_records: Samples of one epoch.
        data_seed: Seed of the samples and of the hidden scores.
        zipf: Exponent of the popularity of ids; 0 makes all equally frequent.
        ids_per_sample: By feature, how many ids a sample has: a number, or
            ``[low, high]`` for a different number in every sample. Default 1.
        dense: Number of dense values, float32 under the key ``dense``; 0 for none.
        skew: Makes the data of one host harder; None does not.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    num_records: int = 100_000
    data_seed: int = 0
    zipf: float = 1.2
    ids_per_sample: Mapping[str, int | tuple[int, int]] = dataclasses.field(
        default_factory=dict
    )
    dense: int = 0
    skew: SkewOptions | None = dataclasses.field(
        default=None, metadata={"section": SkewOptions}
    )

    def __post_init__(self) -> None:
        owner = "source"
        check_int(owner, "num_records", self.num_records, low=1, high=2**32)
        check_int(owner, "data_seed", self.data_seed, low=0, high=2**64 - 1)
        zipf = check_float(owner, "zipf", self.zipf, low=0)
        check_int(owner, "dense", self.dense, low=0, high=2**16)
        mapping = check_mapping(owner, "ids_per_sample", self.ids_per_sample)
        counts = {key: _check_count(key, value) for key, value in mapping.items()}
        if self.skew is not None and not isinstance(self.skew, SkewOptions):
            raise ConfigError(f"{owner}: skew must be SkewOptions, not {self.skew!r}.")
        object.__setattr__(self, "zipf", zipf)
        object.__setattr__(self, "ids_per_sample", counts)


def _check_count(feature: str, value: Any) -> int | tuple[int, int]:
    owner, field = "source", f"ids_per_sample.{feature}"
    if isinstance(value, list | tuple):
        if len(value) != 2:
            raise ConfigError(
                f"{owner}: {field}={value!r} must be a number or [low, high]."
            )
        low, high = value
        check_int(owner, f"{field}[0]", low, low=0, high=2**16)
        check_int(owner, f"{field}[1]", high, low=max(low, 1), high=2**16)
        return (low, high)
    check_int(owner, field, value, low=1, high=2**16)
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetOptions:
    """Parquet files; a sample holds the columns that the configuration names.

    Attributes:
        path: A file, a folder, a pattern such as ``"day_*.parquet"``, or a list of
            them. Rows are numbered through the files in sorted order.
        cache_mib: MiB of decoded row groups that a process keeps.
        shuffle_row_groups: 0 shuffles all rows; the columns read must then fit the
            cache. n above 0 shuffles the row groups, and then the rows inside runs of
            n groups, so that only about n groups are needed at a time.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: str | tuple[str, ...]
    cache_mib: int = 1024
    shuffle_row_groups: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _check_path(self.path))
        check_int("source", "cache_mib", self.cache_mib, low=1)
        check_int("source", "shuffle_row_groups", self.shuffle_row_groups, low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TFRecordOptions:
    """TFRecord files of ``tf.train.Example`` messages, each of them many rows.

    The rows of a record are told by the length of its ``train.label``. Ids are lists
    of integers or one string of little-endian int64s, as in the MLPerf DLRM data.

    Attributes:
        path: As for Parquet; files that end in ``.tfrecord``, not compressed.
        cache_mib: MiB of decoded records that a process keeps.
        shuffle_records: The records are shuffled, and then the rows inside runs of
            this many records.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: str | tuple[str, ...]
    cache_mib: int = 1024
    shuffle_records: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _check_path(self.path))
        check_int("source", "cache_mib", self.cache_mib, low=1)
        check_int("source", "shuffle_records", self.shuffle_records, low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoOptions:
    """Criteo's text format: label, 13 integers, 26 hexadecimal categories, by tabs.

    A sample holds ``dense`` (float32 [13], log(1 + integer)), the label under
    ``train.label``, and the ids of the features, whose ``ids`` are ``"C1"`` to
    ``"C26"``.

    Attributes:
        path: As for Parquet; files that end in ``.gz`` are decompressed once.
        hash_seed: Seed of `grain_sparsecore.hashing.hash_ids`, which maps each
            category onto the vocabulary of its table.
        cache_dir: Where decompressed files are kept for the next run. None:
            ``$XDG_CACHE_HOME/grain_sparsecore``, or ``~/.cache/grain_sparsecore``.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: str | tuple[str, ...]
    hash_seed: int = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _check_path(self.path))
        check_int("source", "hash_seed", self.hash_seed, low=0, high=2**64 - 1)
        if self.cache_dir is not None:
            check_str("source", "cache_dir", self.cache_dir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonOptions:
    """A function of yours that returns a ``grain.MapDataset``.

    Attributes:
        function: ``"module:function"``, importable where the job runs.
        args: Keyword arguments of the function.
        batched: Whether the elements are batches of ``pipeline.batch_size`` samples
            instead of single samples.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    function: str
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batched: bool = False

    def __post_init__(self) -> None:
        check_str("source", "function", self.function)
        if not _FUNCTION.fullmatch(self.function):
            raise ConfigError(
                f"source: function={self.function!r} must read 'module:function'."
            )
        args = dict(check_mapping("source", "args", self.args))
        check_bool("source", "batched", self.batched)
        try:
            json.dumps(args)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"source: args={args!r} must hold numbers, strings, lists and tables "
                f"only ({error})."
            ) from error
        object.__setattr__(self, "args", args)


def _check_path(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, list | tuple):
        if not value:
            raise ConfigError("source: path is an empty list; name at least one file.")
        return check_strs("source", "path", value)
    check_str("source", "path", value)
    return value


SourceOptions = (
    SyntheticOptions | ParquetOptions | TFRecordOptions | CriteoOptions | PythonOptions
)

KINDS: dict[str, type[Any]] = {
    "synthetic": SyntheticOptions,
    "parquet": ParquetOptions,
    "tfrecord": TFRecordOptions,
    "criteo_tsv": CriteoOptions,
    "python": PythonOptions,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where samples come from.

    Attributes:
        kind: ``"synthetic"``, ``"parquet"``, ``"tfrecord"``, ``"criteo_tsv"`` or
            ``"python"``.
        options: Options of that kind; a mapping is turned into them. In a TOML file
            they stand beside ``kind``.
        shuffle: Whether all records are shuffled by ``pipeline.seed``, anew in each
            epoch, before they are dealt to the hosts.
        epochs: How often the data is read; 0 repeats it without end.

    Raises:
        ConfigError: The kind is unknown, or an option is wrong.
    """

    kind: str
    options: Any = None
    shuffle: bool = True
    epochs: int = 1

    def __post_init__(self) -> None:
        check_choice("source", "kind", self.kind, tuple(KINDS))
        check_bool("source", "shuffle", self.shuffle)
        check_int("source", "epochs", self.epochs, low=0)
        cls = KINDS[self.kind]
        if isinstance(self.options, cls):
            return
        options = check_mapping("source", "options", self.options or {})
        known = [field.name for field in dataclasses.fields(cls)]
        required = [f.name for f in dataclasses.fields(cls) if _is_required(f)]
        for key in options:
            if key not in known:
                raise ConfigError(
                    f"source: {key!r} is no option of kind {self.kind!r}; "
                    f"{nearest(key, known)}"
                )
        for key in required:
            if key not in options:
                raise ConfigError(f"source: kind {self.kind!r} needs {key!r}.")
        object.__setattr__(self, "options", cls(**options))


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return (
        field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    )
