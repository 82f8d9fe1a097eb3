"""Generated samples with Zipf ids and labels that can be learnt.

Every number comes from a 64-bit mix of (seed, what it is for, record index), so a
record can be made alone, on any host, in any order, and is the same everywhere.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import grain
import numpy as np

from grain_sparsecore.batching import RaggedValues
from grain_sparsecore.config import DENSE_KEY, Config, SkewOptions, SyntheticOptions
from grain_sparsecore.sources.opened import OpenedSource
from grain_sparsecore.sources.samples import get, put
from grain_sparsecore.sources.scramble import GOLDEN, mix, unit

# Spread of the logit: the larger, the less noise is in the labels.
_SIGNAL = 5.0

_NEARLY_ZERO = 1e-9


def _key(seed: int, *names: object) -> int:
    """64 bits that stand for a purpose."""
    text = "\0".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclasses.dataclass(frozen=True)
class _Column:
    """The ids under one key of a sample, and the weights that belong to them."""

    path: str
    weights: tuple[str, ...]
    table: str
    vocabulary_size: int
    low: int
    high: int
    ragged: bool


class SyntheticSource:
    """Random access to generated samples; see `SyntheticOptions`.

    A feature with one id a sample is an int64 scalar, one with a fixed number an
    int64 [k], one with ``[low, high]`` an int64 array of that many ids; weights are
    float32 of the same shape, in [0.5, 1.5). The label is float32, 0 or 1.
    """

    def __init__(self, config: Config, options: SyntheticOptions) -> None:
        self._length = options.num_records
        self._zipf = options.zipf
        self._label = config.train.label
        self._columns = _columns(config, options)
        self._dense = options.dense
        seed = options.data_seed
        self._salt = np.array([_key(seed, "record")], np.uint64)

        # One slot for every id that a sample may have, column after column.
        widths = [column.high for column in self._columns]
        slots = [(c, j) for c in self._columns for j in range(c.high)]
        self._starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
        self._column_of = np.repeat(np.arange(len(widths)), widths)
        self._position = np.array([j for _, j in slots], np.int64)
        self._vocabulary = np.array([c.vocabulary_size for c, _ in slots], np.uint64)
        self._table_key = np.array(
            [_key(seed, "table", c.table) for c, _ in slots], np.uint64
        )
        self._score_key = np.array(
            [_key(seed, "score", c.path) for c, _ in slots], np.uint64
        )
        self._slot_key = np.array(
            [_key(seed, "slot", c.path, j) for c, j in slots], np.uint64
        )
        self._weighted = np.array([bool(c.weights) for c, _ in slots])
        self._low = np.array([c.low for c in self._columns], np.int64)
        self._spread = np.array([c.high - c.low + 1 for c in self._columns], np.int64)
        # Then one slot for the length of each column, each dense value, and the label.
        self._other_key = np.array(
            [
                *(_key(seed, "length", c.path) for c in self._columns),
                *(_key(seed, "dense", j) for j in range(self._dense)),
                _key(seed, "label"),
            ],
            np.uint64,
        )
        self._dense_score = 2 * unit(mix(self._other_key))[-1 - self._dense : -1] - 1
        self._skew = options.skew

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"SyntheticSource({self._length})"

    def __getitem__(self, index: Any) -> dict[str, Any]:
        records = self._generate(np.array([index]))
        sample: dict[str, Any] = {}
        for i, column in enumerate(self._columns):
            start = self._starts[i]
            where: Any = slice(start, start + records.lengths[0, i])
            if not column.ragged and column.high == 1:
                where = start  # a scalar
            put(sample, column.path, records.ids[0, where])
            for path in column.weights:
                put(sample, path, records.weights[0, where])
        if self._dense:
            sample[DENSE_KEY] = records.dense[0]
        put(sample, self._label, records.labels[0])
        return sample

    def read_batch(
        self, indices: np.ndarray, positions: np.ndarray, host_index: int
    ) -> dict[str, Any]:
        """The batch of many records; see `OpenedSource`."""
        records = self._generate(indices)
        skew = self._skew
        if skew is not None and skew.host == host_index:
            late = (positions >= skew.after)[:, None]
            records.ids = np.where(late, _rounded(records.ids, skew), records.ids)
        batch: dict[str, Any] = {}
        for i, column in enumerate(self._columns):
            slots = slice(self._starts[i], self._starts[i + 1])
            lengths = records.lengths[:, i]
            put(batch, column.path, _take(records.ids[:, slots], lengths, column))
            for path in column.weights:
                put(batch, path, _take(records.weights[:, slots], lengths, column))
        if self._dense:
            batch[DENSE_KEY] = records.dense
        put(batch, self._label, records.labels)
        return batch

    def _generate(self, indices: np.ndarray) -> "_Records":
        salt = mix(self._salt ^ (indices.astype(np.uint64) * GOLDEN))[:, None]
        bits = mix(self._slot_key ^ salt)
        other = unit(mix(self._other_key ^ salt))
        count = len(self._columns)
        lengths = self._low + (other[:, :count] * self._spread).astype(np.int64)
        dense = 2 * other[:, count:-1] - 1

        ids = mix(self._ranks(unit(bits)) ^ self._table_key) % self._vocabulary
        weights = np.where(self._weighted, 0.5 + unit(mix(bits)), 1.0)
        logits = self._logits(ids, weights, lengths, dense)
        return _Records(
            ids=ids.astype(np.int64),
            weights=weights.astype(np.float32),
            lengths=lengths,
            dense=dense.astype(np.float32),
            labels=(other[:, -1] < 1 / (1 + np.exp(-logits))).astype(np.float32),
        )

    def _ranks(self, u: np.ndarray) -> np.ndarray:
        """Popularity ranks from uniform numbers: a power law over the vocabulary.

        The inverse of the distribution function of x^-zipf on [1, vocabulary + 1).
        """
        top = self._vocabulary.astype(np.float64) + 1
        power = 1 - self._zipf
        if abs(power) < _NEARLY_ZERO:
            x = top**u
        else:
            x = (u * (top**power - 1) + 1) ** (1 / power)
        return np.minimum(x.astype(np.uint64) - np.uint64(1), self._vocabulary - 1)

    def _logits(
        self,
        ids: np.ndarray,
        weights: np.ndarray,
        lengths: np.ndarray,
        dense: np.ndarray,
    ) -> np.ndarray:
        """Weighted means of the ids' hidden scores, over columns and dense values."""
        scores = 2 * unit(mix(ids ^ self._score_key)) - 1
        filled = self._position < lengths[:, self._column_of]
        weights = weights * filled
        starts = self._starts[:-1]
        total = np.add.reduceat(scores * weights, starts, axis=1)
        weight = np.add.reduceat(weights, starts, axis=1)
        parts = total / np.maximum(weight, _NEARLY_ZERO)
        score = parts.sum(axis=1) + (dense * self._dense_score).sum(axis=1)
        return _SIGNAL * score / np.sqrt(len(self._columns) + self._dense)


@dataclasses.dataclass
class _Records:
    """Generated numbers of n records, for all slots whether filled or not.

    Attributes:
        ids: int64 [n, slots].
        weights: float32 [n, slots].
        lengths: int64 [n, columns], how many slots of a column are filled.
        dense: float32 [n, dense].
        labels: float32 [n].
    """

    ids: np.ndarray
    weights: np.ndarray
    lengths: np.ndarray
    dense: np.ndarray
    labels: np.ndarray


def _take(slots: np.ndarray, lengths: np.ndarray, column: _Column) -> Any:
    """The filled slots [n, high] of a column, in the form of ``batch_ragged``."""
    if not column.ragged:
        return slots[:, 0].copy() if column.high == 1 else slots.copy()
    if (lengths == lengths[0]).all():
        return slots[:, : lengths[0]].copy()
    splits = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=splits[1:])
    filled = np.arange(column.high) < lengths[:, None]
    return RaggedValues(slots[filled], splits)


def _rounded(ids: Any, skew: SkewOptions) -> Any:
    return ids // skew.stride * skew.stride


def _columns(config: Config, options: SyntheticOptions) -> list[_Column]:
    """One column for each ids key; features that share a key share its ids."""
    sizes = {table.name: table.vocabulary_size for table in config.tables}
    by_path: dict[str, _Column] = {}
    for feature in sorted(config.features, key=lambda f: f.name):
        count = options.ids_per_sample.get(feature.name, 1)
        low, high = count if isinstance(count, tuple) else (count, count)
        column = by_path.get(feature.ids) or _Column(
            path=feature.ids,
            weights=(),
            table=feature.table,
            vocabulary_size=sizes[feature.table],
            low=low,
            high=high,
            ragged=isinstance(count, tuple),
        )
        extra = () if feature.weights is None else (feature.weights,)
        by_path[feature.ids] = dataclasses.replace(
            column,
            # Legal in every table that reads it.
            vocabulary_size=min(column.vocabulary_size, sizes[feature.table]),
            weights=tuple(dict.fromkeys(column.weights + extra)),
        )
    return [by_path[path] for path in sorted(by_path)]


def _skew(
    index: int, sample: dict[str, Any], *, options: SkewOptions, paths: tuple[str, ...]
) -> dict[str, Any]:
    """Rounds the ids of a host's sample down if its time has come."""
    if index >= options.after:
        for path in paths:
            put(sample, path, _rounded(get(sample, path), options))
    return sample


def open_synthetic(config: Config, options: SyntheticOptions) -> OpenedSource:
    """Opens the source of kind ``synthetic``."""
    source = SyntheticSource(config, options)
    paths = tuple(sorted({feature.ids for feature in config.features}))

    def skew(ds: grain.MapDataset[Any], host_index: int) -> grain.MapDataset[Any]:
        if options.skew is None or options.skew.host != host_index:
            return ds
        return ds.map_with_index(
            functools.partial(_skew, options=options.skew, paths=paths)
        )

    return OpenedSource(
        name="synthetic",
        records=source,
        per_host=skew,
        read_batch=source.read_batch,
    )
