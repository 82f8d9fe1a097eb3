"""Statistics files of jax-tpu-embedding (FDO), read and written.

Its clients write one file for each process and publication,
``fdo_stats_<process>_<nanoseconds>.npz`` or ``.csv``, with one array for each stack and
statistic under ``<stack><suffix>``: one row or, with history, one row for each batch.
Neither the topology nor the age of a file is recorded, so here:

- every file counts, not only the newest of a process: after a restart the newest knows
  only the batches since then;
- files of other topologies and of processes that the job does not have are left out,
  and said to be;
- beside exported files lies ``fdo_topology.json``, which their clients do not look at,
  with the layout that the numbers belong to.
"""

import contextlib
import csv
import dataclasses
import io
import json
import os
import re
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from grain_sparsecore.atomic import write_atomically
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.limits_fit import differences, made_for, merge_limits
from grain_sparsecore.specs import round_up
from grain_sparsecore.stacking import (
    ALIGNMENT,
    INT32_MAX,
    StackedLayout,
    theoretical_buffer_size,
)

MAX_IDS_SUFFIX = "_max_ids"
MAX_UNIQUE_IDS_SUFFIX = "_max_unique_ids"
BUFFER_SUFFIX = "_required_buffer_size"
DROPS_SUFFIX = "_id_drop_counters"

STAMP_NAME = "fdo_topology.json"

# The longest first: a stack may be named so that one suffix ends in another.
_SUFFIXES = (BUFFER_SUFFIX, DROPS_SUFFIX, MAX_UNIQUE_IDS_SUFFIX, MAX_IDS_SUFFIX)
# Python's csv module reads no more of a field unless told to.
_LONGEST_ROW = 131_072

_FILE_NAME = re.compile(r"fdo_stats_(\d+)_(\d+)\.(npz|csv)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FdoImport:
    """What a directory of FDO files says.

    Attributes:
        limits: The maximum over all files used, nowhere below the start of the layout.
        used: Names of the files that count, sorted.
        skipped: Why each of the others does not, by name.
    """

    limits: Limits
    used: tuple[str, ...]
    skipped: Mapping[str, str]


def import_fdo(
    directory: str | os.PathLike[str], *, layout: StackedLayout, minibatches: int = 1
) -> FdoImport:
    """Limits from the files that jax-tpu-embedding's FDO clients left in a directory.

    Args:
        directory: Where the files lie; npz and csv together.
        layout: The stacks, named as there, and the topology.
        minibatches: Into how many a batch may be split, whose buffer holds them all.

    Raises:
        ConfigError: There is no file, none fits the topology, one is damaged, or a
            stack is unknown here.
    """
    folder = Path(directory)
    where = f"FDO directory {os.fspath(directory)!r}"
    if not folder.is_dir():
        raise ConfigError(f"{where} does not exist.")
    files = sorted(p for p in folder.iterdir() if _FILE_NAME.fullmatch(p.name))
    if not files:
        raise ConfigError(
            f"{where} has no statistics yet: no fdo_stats_<process>_<time>.npz or "
            ".csv. Publish from a running job first, or start without it."
        )
    _check_stamp(folder, layout)
    used: list[str] = []
    skipped: dict[str, str] = {}
    found: list[Limits] = []
    for path in files:
        arrays = _read(path)
        reason = _misfit(path, arrays, layout)
        if reason:
            skipped[path.name] = reason
        else:
            used.append(path.name)
            found.append(_to_limits(path, arrays, layout, minibatches))
    if not used:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise ConfigError(f"{where}: no file belongs to this job. {reasons}.")
    return FdoImport(
        limits=merge_limits([Limits.start(layout), *found]),
        used=tuple(used),
        skipped=skipped,
    )


def export_fdo(
    directory: str | os.PathLike[str],
    limits: Limits,
    *,
    layout: StackedLayout,
    format: Literal["npz", "csv"] = "npz",
) -> Path:
    """Writes limits as a file that jax-tpu-embedding's FDO clients load.

    They take the newest file of each process; this one comes from process 0. What
    they load from it sets exactly ``limits``.

    Args:
        directory: Made where it does not exist.
        limits: The limits of every stack of ``layout``.
        layout: The stacks and the topology.
        format: ``"npz"`` for ``NPZFileFDOClient``, ``"csv"`` for
            ``CSVFileFDOClient``.

    Returns:
        The path of the file.

    Raises:
        ConfigError: Another format is asked for, a stack has no limits, or the job is
            too large for a csv file.
    """
    if format not in ("npz", "csv"):
        raise ConfigError(f"FDO format {format!r} is not one of npz, csv.")
    missing = sorted(set(layout.stack_names) - set(limits))
    if missing:
        raise ConfigError(f"FDO export: stack {missing[0]!r} has no limits.")
    topology = layout.topology
    arrays: dict[str, np.ndarray] = {}
    for name in layout.stack_names:
        value = limits[name]
        per_partition = topology.local_device_count * topology.num_partitions
        per_sc = value.buffer_size_per_device // topology.num_sc_per_device
        for suffix, number, length in (
            (MAX_IDS_SUFFIX, value.max_ids_per_partition, per_partition),
            (MAX_UNIQUE_IDS_SUFFIX, value.max_unique_ids_per_partition, per_partition),
            (BUFFER_SUFFIX, per_sc, topology.local_sc_count),
        ):
            arrays[name + suffix] = np.full(length, number, np.int64)
    data = _npz(arrays) if format == "npz" else _csv(arrays)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = json.dumps(made_for(layout), indent=1).encode() + b"\n"
    write_atomically(folder / STAMP_NAME, stamp)
    path = folder / f"fdo_stats_0_{time.time_ns()}.{format}"
    write_atomically(path, data)
    return path


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _csv(arrays: Mapping[str, np.ndarray]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["key", "values"])
    for key, array in arrays.items():
        row = " ".join(map(str, array.tolist()))
        if len(row) > _LONGEST_ROW:
            raise ConfigError(
                f"FDO export: {key} has {len(row):,} characters, but CSVFileFDOClient "
                f"reads {_LONGEST_ROW:,} a row at most; export npz."
            )
        writer.writerow([key, row])
    return file.getvalue().encode()


def _check_stamp(folder: Path, layout: StackedLayout) -> None:
    path = folder / STAMP_NAME
    if not path.exists():
        return
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{os.fspath(path)!r} cannot be read as JSON: {error}. Export anew, or "
            "remove it to take the numbers as they are."
        ) from error
    found = differences(stamp, made_for(layout))
    if found:
        raise ConfigError(
            f"FDO directory {os.fspath(folder)!r} was exported for something else: "
            f"{'; '.join(found)}. Export it anew, or remove {STAMP_NAME} to take the "
            "numbers as they are."
        )


def _read(path: Path) -> dict[str, np.ndarray]:
    """Every array of a file, int64; rows of a csv file that share a key together."""
    try:
        if path.suffix == ".npz":
            # From memory: np.load leaves a damaged file open.
            file = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ValueError("it is a single array, not an archive of some")
            with file:
                raw = {key: np.asarray(file[key]) for key in file.files}
        else:
            raw = _read_csv(path)
        # The buffer size of a single number comes as a float there.
        return {
            key: _whole(value, key) if value.dtype.kind == "f" else value
            for key, value in raw.items()
        }
    except (
        OSError,
        ValueError,
        LookupError,
        ArithmeticError,
        EOFError,
        RuntimeError,
        csv.Error,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ConfigError(
            f"FDO file {os.fspath(path)!r} cannot be read: {error}. If its writer was "
            "stopped half-way, remove the file."
        ) from error


def _whole(values: np.ndarray, key: str) -> np.ndarray:
    if not (np.abs(values) <= INT32_MAX).all():
        raise ValueError(f"{key} holds a number that is no count")
    return np.ceil(values).astype(np.int64)


@contextlib.contextmanager
def _long_rows() -> Iterator[None]:
    """Meanwhile csv reads rows of any length, as large jobs have them."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_csv(path: Path) -> dict[str, np.ndarray]:
    rows: dict[str, list[list[int]]] = {}
    with path.open(newline="", encoding="utf-8") as file, _long_rows():
        for i, row in enumerate(csv.reader(file)):
            if i == 0 or not row:
                continue
            if len(row) != 2:
                raise ValueError(f"line {i + 1} has {len(row)} columns, not 2")
            rows.setdefault(row[0], []).append([int(v) for v in row[1].split()])
    # Rows of different lengths are two topologies in one file; numpy says so.
    return {key: np.array(value, np.int64) for key, value in rows.items()}


def _split(path: Path, key: str) -> tuple[str, str]:
    for suffix in _SUFFIXES:
        if key.endswith(suffix) and len(key) > len(suffix):
            return key.removesuffix(suffix), suffix
    raise ConfigError(
        f"FDO file {os.fspath(path)!r}: key {key!r} ends in none of "
        f"{', '.join(_SUFFIXES)}."
    )


def _misfit(
    path: Path, arrays: Mapping[str, np.ndarray], layout: StackedLayout
) -> str | None:
    """Why the file is not of this job, or None where it is."""
    topology = layout.topology
    match = _FILE_NAME.fullmatch(path.name)
    if match and int(match[1]) >= topology.num_hosts:
        return f"written by process {match[1]}, but the job has {topology.num_hosts}"
    lengths = {
        MAX_IDS_SUFFIX: topology.local_device_count * topology.num_partitions,
        MAX_UNIQUE_IDS_SUFFIX: topology.local_device_count * topology.num_partitions,
        BUFFER_SUFFIX: topology.local_sc_count,
    }
    for key, array in arrays.items():
        expected = lengths.get(_split(path, key)[1])
        length = array.shape[-1] if array.ndim else 1
        # A single number is a maximum that somebody took already.
        if expected is not None and length not in (1, expected):
            return (
                f"{key} has {length} numbers, but {topology.local_device_count} local "
                f"devices with {topology.num_sc_per_device} SparseCores each and "
                f"{topology.num_partitions} partitions make {expected}"
            )
    return None


def _to_limits(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    layout: StackedLayout,
    minibatches: int,
) -> Limits:
    most: dict[str, dict[str, int]] = {}
    for key, array in arrays.items():
        name, suffix = _split(path, key)
        if array.dtype.kind not in "iu":
            raise ConfigError(
                f"FDO file {os.fspath(path)!r}: {key} has dtype {array.dtype}, not "
                "integers."
            )
        value = int(array.max(initial=0))
        if suffix != DROPS_SUFFIX and not 0 <= value <= INT32_MAX:
            raise ConfigError(
                f"FDO file {os.fspath(path)!r}: {key} holds {value}, which does not "
                "fit int32."
            )
        most.setdefault(name, {})[suffix] = value
    unknown = sorted(set(most) - set(layout.stack_names))
    if unknown:
        raise ConfigError(
            f"FDO file {os.fspath(path)!r} has a stack {unknown[0]!r}, which is not "
            f"among {', '.join(layout.stack_names)}. Stack the same tables, or name "
            "the stack in the tables."
        )
    return Limits(
        {
            name: _stack_limits(value, layout, minibatches)
            for name, value in most.items()
        }
    )


def _stack_limits(
    most: Mapping[str, int], layout: StackedLayout, minibatches: int
) -> StackLimits:
    sc_count = layout.topology.num_sc_per_device
    ids = max(most.get(MAX_IDS_SUFFIX, 0), 1)
    unit = ALIGNMENT * sc_count
    sure = min(theoretical_buffer_size(ids, layout.topology), INT32_MAX // unit * unit)
    largest = min(sure * minibatches, INT32_MAX // unit * unit)
    # Older releases did not record it; then only the theoretical size is sure.
    size = sure
    if BUFFER_SUFFIX in most:
        size = round_up(max(most[BUFFER_SUFFIX], 1), ALIGNMENT) * sc_count
    return StackLimits(
        max_ids_per_partition=ids,
        max_unique_ids_per_partition=max(most.get(MAX_UNIQUE_IDS_SUFFIX, 0), 1),
        buffer_size_per_device=min(size, largest),
    )
