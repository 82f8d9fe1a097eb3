"""Random access to the rows in TFRecord files, many rows to a record.

The layout is the one of the MLPerf DLRM data sets: a record is a ``tf.train.Example``
that holds n rows. The label and dense features are lists of n (or n * k) numbers; ids
are lists of n * k integers, or one string of bytes with n * k little-endian int64s.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grain_sparsecore.batching import batch_ragged
from grain_sparsecore.config import Config, TFRecordOptions
from grain_sparsecore.config.checks import nearest
from grain_sparsecore.errors import ConfigError, InputError
from grain_sparsecore.sources.decoded import DecodedParts
from grain_sparsecore.sources.opened import OpenedSource
from grain_sparsecore.sources.order import Order, ShuffledGroups
from grain_sparsecore.sources.paths import expand_paths
from grain_sparsecore.sources.samples import keys_of_features, keys_of_training, put
from grain_sparsecore.tfrecord import TFRecordFile, parse_example

_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
_MIB = 2**20

# Records that may be decoded at the same time; more than a process has readers.
_DECODERS = 64


class TFRecordSource:
    """Rows of TFRecord files as samples: numpy scalars, and 1-D arrays for lists.

    Records are decoded as they are needed and the last used ones kept. Readers of
    several threads may share an instance; pickling it takes no decoded data along.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        label: str,
        keys: dict[str, str],
        cache_bytes: int,
    ) -> None:
        self._paths = [str(path) for path in files]
        self._files = [TFRecordFile(path) for path in files]
        self._label = label
        self._keys = keys
        self._decoded = DecodedParts[dict[str, np.ndarray]](
            most_bytes=cache_bytes, decoders=_DECODERS
        )
        counts = [len(file) for file in self._files]
        self._first_record = np.concatenate([[0], np.cumsum(counts)])
        self.group_starts = np.zeros(int(self._first_record[-1]) + 1, np.int64)
        np.cumsum(self._rows_per_record(), out=self.group_starts[1:])

    def _rows_per_record(self) -> np.ndarray:
        """Rows of every record; only the last of a file may have other than the first.

        Reading all records for that would read the whole data set.
        """
        rows = np.zeros(int(self._first_record[-1]), np.int64)
        expected = None
        for first, end in zip(
            self._first_record[:-1], self._first_record[1:], strict=True
        ):
            if first == end:
                continue
            if expected is None:
                expected = self._decode(int(first))[1]
            rows[first : end - 1] = expected
            rows[end - 1] = self._decode(int(end) - 1)[1]
        return rows

    def __len__(self) -> int:
        return int(self.group_starts[-1])

    def __repr__(self) -> str:
        more = f" and {len(self._paths) - 1} more" if len(self._paths) > 1 else ""
        return f"TFRecordSource({self._paths[0]}{more})"

    def __getitem__(self, index: Any) -> dict[str, Any]:
        index = int(index)
        record = int(np.searchsorted(self.group_starts, index, side="right")) - 1
        row = index - int(self.group_starts[record])
        sample: dict[str, Any] = {}
        for key, column in self._columns(record).items():
            put(sample, key, column[row])
        return sample

    def read_batch(
        self, indices: np.ndarray, positions: np.ndarray, host_index: int
    ) -> dict[str, Any]:
        """The batch of many records; see `OpenedSource`."""
        del positions, host_index
        records = np.searchsorted(self.group_starts, indices, side="right") - 1
        rows = indices - self.group_starts[records]
        distinct, which = np.unique(records, return_inverse=True)
        parts = [self._columns(record) for record in distinct.tolist()]
        batch: dict[str, Any] = {}
        for key, first in parts[0].items():
            if any(
                (part[key].shape[1:], part[key].dtype) != (first.shape[1:], first.dtype)
                for part in parts
            ):
                # Ragged: these are records of one row each, so there is nothing to
                # gain from taking many rows of a record at once.
                return batch_ragged([self[index] for index in indices])
            column = np.empty((len(indices), *first.shape[1:]), first.dtype)
            for i, part in enumerate(parts):
                mine = which == i
                column[mine] = part[key][rows[mine]]
            put(batch, key, column)
        return batch

    def record_bytes(self) -> int:
        """Bytes of the first record when decoded; 0 where there is none."""
        return self._decoded.get(0, self._checked)[1] if len(self) else 0

    def _columns(self, record: int) -> dict[str, np.ndarray]:
        return self._decoded.get(record, self._checked)[0]

    def _checked(self, record: int) -> tuple[dict[str, np.ndarray], int]:
        """The columns of a record, and their bytes."""
        columns, rows = self._decode(record)
        expected = int(self.group_starts[record + 1] - self.group_starts[record])
        if rows != expected:
            raise InputError(
                f"{self._where(record)}: {rows} rows, but {expected} in the first "
                "record; only the last record of a file may have another number."
            )
        return columns, sum(column.nbytes for column in columns.values())

    def _where(self, record: int) -> str:
        file = int(np.searchsorted(self._first_record, record, side="right")) - 1
        return f"{self._paths[file]}, record {record - int(self._first_record[file])}"

    def _decode(self, record: int) -> tuple[dict[str, np.ndarray], int]:
        """The columns of a record, [rows] or [rows, k], and the number of rows."""
        file = int(np.searchsorted(self._first_record, record, side="right")) - 1
        payload = self._files[file][record - int(self._first_record[file])]
        where = self._where(record)
        try:
            example = parse_example(payload, self._keys)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        for key, reason in self._keys.items():
            if key not in example:
                raise ConfigError(
                    f"{reason}: {where} has no feature {key!r}; "
                    f"{nearest(key, list(parse_example(payload)))}"
                )
        where_key = f"{where}: feature "
        rows = len(_numbers(example[self._label], f"{where_key}{self._label!r}"))
        if not rows:
            raise InputError(f"{where}: the label {self._label!r} has no value.")
        columns = {}
        for key, values in example.items():
            numbers = _numbers(values, f"{where_key}{key!r}")
            width, rest = divmod(len(numbers), rows)
            if rest:
                raise InputError(
                    f"{where}: feature {key!r} has {len(numbers)} values, which do not "
                    f"divide over the {rows} rows that the label {self._label!r} has."
                )
            columns[key] = numbers if width == 1 else numbers.reshape(rows, width)
        return columns, rows


def _numbers(values: np.ndarray | list[bytes], where: str) -> np.ndarray:
    """Numbers of a feature; bytes are little-endian int64s."""
    if isinstance(values, np.ndarray):
        return values
    joined = b"".join(values)
    if len(joined) % 8:
        raise InputError(
            f"{where}: {len(joined)} bytes are no whole number of int64s; features "
            "of bytes must hold little-endian int64 ids."
        )
    return np.frombuffer(joined, "<i8")


def open_tfrecord(config: Config, options: TFRecordOptions) -> OpenedSource:
    """Opens the source of kind ``tfrecord``.

    Raises:
        ConfigError: Files or features are missing.
        InputError: A file is damaged, compressed or no TFRecord file.
    """
    source = TFRecordSource(
        expand_paths(options.path, _SUFFIXES),
        label=config.train.label,
        keys={**keys_of_training(config), **keys_of_features(config)},
        cache_bytes=options.cache_mib * _MIB,
    )

    needed = -(-source.record_bytes() * options.shuffle_records // _MIB)
    if needed > options.cache_mib:
        raise ConfigError(
            f"source.cache_mib={options.cache_mib}: a run of shuffle_records="
            f"{options.shuffle_records} records takes about {needed} MiB, so that rows "
            "in shuffled order would need a record decoded for almost each of them; "
            f"set cache_mib={needed} or more, or a smaller shuffle_records."
        )

    def shuffled(seed: int) -> Order:
        return ShuffledGroups(
            source.group_starts, groups_in_run=options.shuffle_records, seed=seed
        )

    return OpenedSource(
        name=str(options.path),
        records=source,
        shuffled=shuffled,
        read_batch=source.read_batch,
    )
