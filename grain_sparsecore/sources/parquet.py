"""Random access to the rows of Parquet files, by row group with a cache."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grain_sparsecore.config import Config, ParquetOptions
from grain_sparsecore.config.checks import nearest
from grain_sparsecore.errors import ConfigError, InputError, MissingExtraError
from grain_sparsecore.features.paths import SEPARATOR
from grain_sparsecore.sources.arrow_columns import (
    Column,
    check_type,
    concatenate,
    to_column,
)
from grain_sparsecore.sources.decoded import DecodedParts
from grain_sparsecore.sources.opened import OpenedSource
from grain_sparsecore.sources.order import Order, Shuffled, ShuffledGroups
from grain_sparsecore.sources.paths import expand_paths
from grain_sparsecore.sources.samples import keys_of_features, keys_of_training, put

_SUFFIXES = (".parquet", ".pq")
_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Key:
    """A key of the samples and the column behind it.

    Attributes:
        key: Where the samples hold it.
        column: Name of the top-level column.
        fields: Fields of nested structs that lead to the values.
        nullable: Whether a missing value is a row of no values.
    """

    key: str
    column: str
    fields: tuple[str, ...]
    nullable: bool


class ParquetSource:
    """Rows of Parquet files as samples: numpy scalars, and 1-D arrays for lists.

    Row groups are decoded as they are needed and the last used ones kept. Readers of
    several threads may share an instance; pickling it takes no decoded data along.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        feature_keys: dict[str, str],
        training_keys: dict[str, str],
        cache_bytes: int,
    ) -> None:
        self._files = [str(path) for path in files]
        # One decoder: pyarrow uses threads of its own.
        self._decoded = DecodedParts[dict[str, Column]](
            most_bytes=cache_bytes, decoders=1
        )
        wanted = {**training_keys, **feature_keys}
        first_schema = None
        sizes: list[int] = []
        groups: list[tuple[int, int]] = []
        self._keys: list[_Key] = []
        for i, path in enumerate(self._files):
            with _open(path) as file:
                schema = file.schema_arrow
                keys = [
                    _find_column(schema, key, wanted[key], key in feature_keys, path)
                    for key in sorted(wanted)
                ]
                if not i:
                    self._keys, first_schema = keys, schema
                _check_same(self._keys, keys, first_schema, schema, path)
                for group in range(file.num_row_groups):
                    rows = file.metadata.row_group(group).num_rows
                    if rows:
                        groups.append((i, group))
                        sizes.append(rows)
        self._groups = groups
        self.group_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.group_starts[-1])

    def __repr__(self) -> str:
        more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
        return f"ParquetSource({self._files[0]}{more})"

    def __getitem__(self, index: Any) -> dict[str, Any]:
        index = int(index)
        group = int(np.searchsorted(self.group_starts, index, side="right")) - 1
        row = index - int(self.group_starts[group])
        sample: dict[str, Any] = {}
        for key, column in self._columns(group).items():
            put(sample, key, column.row(row))
        return sample

    def read_batch(
        self, indices: np.ndarray, positions: np.ndarray, host_index: int
    ) -> dict[str, Any]:
        """The batch of many records; see `OpenedSource`."""
        del positions, host_index
        groups = np.searchsorted(self.group_starts, indices, side="right") - 1
        rows = indices - self.group_starts[groups]
        by_group = np.argsort(groups, kind="stable")
        parts: dict[str, list[Column]] = {key.key: [] for key in self._keys}
        for group in np.unique(groups).tolist():
            columns = self._columns(group)
            for key, column in columns.items():
                parts[key].append(column.take(rows[groups == group]))
        # Back from the order of the groups to that of the records.
        back = np.empty(len(indices), np.int64)
        back[by_group] = np.arange(len(indices))
        batch: dict[str, Any] = {}
        for key, columns in parts.items():
            column = concatenate(columns)
            put(
                batch,
                key,
                (column.take(back) if len(columns) > 1 else column).to_batch(),
            )
        return batch

    def decoded_bytes(self) -> int:
        """Bytes of all rows when decoded, judged by the first row group."""
        _, size = self._decoded.get(0, self._decode)
        return int(size * len(self) / max(1, int(self.group_starts[1])))

    def _columns(self, group: int) -> dict[str, Column]:
        return self._decoded.get(group, self._decode)[0]

    def _decode(self, group: int) -> tuple[dict[str, Column], int]:
        file_index, group_in_file = self._groups[group]
        path = self._files[file_index]
        names = sorted({key.column for key in self._keys})
        try:
            with _open(path) as file:
                table = file.read_row_group(group_in_file, columns=names)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{path}: row group {group_in_file} cannot be read: {error}"
            ) from error
        table = table.combine_chunks()
        columns = {}
        for key in self._keys:
            array = table[key.column].chunk(0)
            for field in key.fields:  # flatten hands nulls of the struct down
                array = array.flatten()[array.type.get_field_index(field)]
            where = f"{path}, row group {group_in_file}, column {key.column!r}"
            columns[key.key] = to_column(array, nullable=key.nullable, where=where)
        return columns, table.nbytes


def _open(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(
            "source kind 'parquet' needs pyarrow: "
            "pip install 'grain_sparsecore[parquet]'."
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path} is no readable Parquet file: {error}") from error


def _find_column(schema: Any, key: str, where: str, nullable: bool, path: str) -> _Key:
    """The column of a key: one of that name, or else fields of a struct."""
    import pyarrow as pa

    names = schema.names
    head, *fields = [key] if key in names else key.split(SEPARATOR)
    if head not in names:
        raise ConfigError(
            f"{where}: {path} has no column {head!r}; {nearest(head, names)}"
        )
    kind = schema.field(head).type
    for field in fields:
        children = [kind.field(i).name for i in range(kind.num_fields)]
        if not pa.types.is_struct(kind) or field not in children:
            raise ConfigError(
                f"{where}: column {head!r} of {path} has no field {field!r}; "
                f"{nearest(field, children)}"
            )
        kind = kind.field(children.index(field)).type
    check_type(kind, key, where)
    return _Key(key=key, column=head, fields=tuple(fields), nullable=nullable)


def _check_same(
    first_keys: Sequence[_Key],
    keys: Sequence[_Key],
    first_schema: Any,
    schema: Any,
    path: str,
) -> None:
    for one, two in zip(first_keys, keys, strict=True):
        types = first_schema.field(one.column).type, schema.field(two.column).type
        if one != two or types[0] != types[1]:
            raise ConfigError(
                f"source.path: column {two.column!r} of {path} has type {types[1]}, "
                f"but {types[0]} in the first file; all files must have the same types."
            )


def open_parquet(config: Config, options: ParquetOptions) -> OpenedSource:
    """Opens the source of kind ``parquet``.

    Raises:
        ConfigError: Files or columns are missing or do not fit together, or the cache
            is too small to shuffle all rows.
        InputError: A file is no Parquet file.
        MissingExtraError: pyarrow is not installed.
    """
    files = expand_paths(options.path, _SUFFIXES)
    source = ParquetSource(
        files,
        feature_keys=keys_of_features(config),
        training_keys=keys_of_training(config),
        cache_bytes=options.cache_mib * _MIB,
    )

    def shuffled(seed: int) -> Order:
        if options.shuffle_row_groups:
            return ShuffledGroups(
                source.group_starts,
                groups_in_run=options.shuffle_row_groups,
                seed=seed,
            )
        needed = -(-source.decoded_bytes() // _MIB)
        if len(source.group_starts) > 2 and needed > options.cache_mib:
            raise ConfigError(
                f"source.cache_mib={options.cache_mib}: the columns that are read take "
                f"about {needed} MiB, so that rows in shuffled order would need a row "
                f"group decoded for almost each of them. Set cache_mib={needed} or "
                "more, or shuffle_row_groups=4, for example, to shuffle row groups and "
                "the rows inside runs of four."
            )
        return Shuffled(len(source), seed)

    return OpenedSource(
        name=str(options.path),
        records=source,
        shuffled=shuffled,
        read_batch=source.read_batch,
    )
