"""All features of one batch, from any form to flat checked ids and weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from grain_sparsecore.errors import InputError
from grain_sparsecore.features.counters import COUNTERS, ZERO_WEIGHT_ROWS
from grain_sparsecore.features.field import Field
from grain_sparsecore.features.forms import read_form
from grain_sparsecore.features.ids import legal_ids
from grain_sparsecore.features.paths import (
    feature_readers,
    find_values,
    leading_sizes,
    split_element,
)
from grain_sparsecore.features.ragged import Ragged
from grain_sparsecore.features.weights import legal_weights, match_weights
from grain_sparsecore.features.zero_rows import settle_zero_rows
from grain_sparsecore.stacking import StackedFeature, StackedLayout


@dataclasses.dataclass(frozen=True)
class FeatureIds:
    """The checked ids of one feature of one batch; B samples.

    Attributes:
        ids: int32 [n], C-contiguous, all in [0, vocabulary_size). May be the memory of
            the input, and read-only.
        row_splits: int64 [B + 1]: sample i has ids ``row_splits[i]`` to
            ``row_splits[i + 1]``; None where every sample has ``width`` ids.
        width: Ids per sample; 0 where row_splits is given or all samples are empty.
        weights: float32 [n], finite, or None for weight 1 everywhere. 0 in samples
            where the gains of one id would overflow when they are added up.
    """

    ids: np.ndarray
    row_splits: np.ndarray | None
    width: int
    weights: np.ndarray | None


def read_features(
    element: Mapping[str, Any], layout: StackedLayout
) -> tuple[list[FeatureIds], np.ndarray, int]:
    """Reads and checks the ids and weights of every feature of a batch.

    Args:
        element: The batch: a dict, possibly nested, of the forms described in
            `grain_sparsecore.features`, and of anything else.
        layout: The features; ``layout.batch_size`` is B.

    Returns:
        One `FeatureIds` per feature, in the order of ``layout.features``; counters
        int32 [F, C], columns as `COUNTERS`; and the number of samples of the batch.
        Where it has fewer than B, the rest are empty samples.

    Raises:
        InputTypeError: Ids or weights are of a type or form that cannot be read.
        InputError: A key is missing, features disagree on the number of samples, there
            are none or more than B, or a value is not allowed. Each names the
            feature, its table, the sample and the value.
    """
    found = find_values(element, feature_readers(layout))
    fields = [_field(feature, "ids", layout) for feature in layout.features]
    raws = [read_form(field, found[field.key]) for field in fields]
    num_samples = _agree_on_samples(fields, raws, element, layout)
    counters = np.zeros((len(fields), len(COUNTERS)), np.int32)
    results = []
    for feature, field, raw, counts in zip(
        layout.features, fields, raws, counters, strict=True
    ):
        weights = None
        if feature.spec.weights is not None:
            weights = found[feature.spec.weights]
        results.append(_read_feature(feature, field, raw, weights, layout, counts))
    return results, counters, num_samples


def _field(feature: StackedFeature, kind: str, layout: StackedLayout) -> Field:
    spec = feature.spec
    key = spec.ids if kind == "ids" else spec.weights
    return Field(spec.name, spec.table, key or "", kind, layout.batch_size)


def _agree_on_samples(
    fields: list[Field],
    raws: list[Ragged],
    element: Mapping[str, Any],
    layout: StackedLayout,
) -> int:
    """The number of samples; settles features that can be read in two ways."""
    if any(raw.other is not None for raw in raws):
        _settle(fields, raws, element, layout)
    first = raws[0].num_rows
    for field, raw in zip(fields, raws, strict=True):
        if raw.num_rows != first:
            raise field.error(
                f"{raw.num_rows} samples, but feature {fields[0].feature!r} has "
                f"{first}, and batch_size is {layout.batch_size}; every feature of a "
                "batch must have the same samples."
            )
    if first == 0:
        raise InputError(
            f"{fields[0]}: the batch has no sample (batch size 0); a batch has 1 to "
            f"batch_size={layout.batch_size} samples. Samples may be empty."
        )
    if first > layout.batch_size:
        raise InputError(_too_many_text(fields[0], first, layout))
    return first


def _settle(
    fields: list[Field],
    raws: list[Ragged],
    element: Mapping[str, Any],
    layout: StackedLayout,
) -> None:
    """Replaces features that can be read in two ways by what the batch says."""
    sizes = {raw.num_rows for raw in raws if raw.other is None}
    if not sizes:
        # Labels and dense features have as many entries as there are samples.
        sizes = set(leading_sizes(split_element(element, layout)))
    for i, raw in enumerate(raws):
        if raw.other is None:
            continue
        fitting = [r for r in (raw, raw.other) if r.num_rows in sizes]
        if len(fitting) != 1:
            raise fields[i].error(
                f"the {raw.num_rows} entries beside {raw.values.size} values can be "
                f"row_lengths of {raw.num_rows} samples or row_splits of "
                f"{raw.other.num_rows}, and nothing else in the batch tells which; "
                'give a dict with "values" and "row_lengths" or "row_splits".'
            )
        raws[i] = fitting[0]


def _too_many_text(field: Field, num_samples: int, layout: StackedLayout) -> str:
    topology = layout.topology
    cores = topology.local_sc_count
    lower = num_samples // cores * cores
    nearest = [lower] if lower == num_samples else [lower, lower + cores]
    sizes = " and ".join(str(size) for size in nearest if size)
    return (
        f"{field}: {num_samples} samples, but batch_size={layout.batch_size} per host "
        f"(it divides over {topology.local_device_count} local devices * "
        f"{topology.num_sc_per_device} SparseCores = {cores}). Batch "
        f"{layout.batch_size} samples, or set batch_size; nearest legal: {sizes}."
    )


def _read_feature(
    feature: StackedFeature,
    field: Field,
    raw: Ragged,
    weights: Any,
    layout: StackedLayout,
    counts: np.ndarray,
) -> FeatureIds:
    spec = feature.spec
    vocabulary_size = feature.table.vocabulary_size
    ids, kept = legal_ids(field, raw, spec, vocabulary_size, counts)
    row_splits, width = _rows(raw, kept, layout.batch_size)
    gains = None
    if weights is not None:
        weight_field = _field(feature, "weights", layout)
        given = read_form(weight_field, weights)
        if given.other is not None and given.other.num_rows == raw.num_rows:
            given = given.other
        values = match_weights(weight_field, raw, given)
        gains = legal_weights(weight_field, raw, values, kept, spec, counts)
        splits = row_splits
        if splits is None:
            splits = np.arange(layout.batch_size + 1, dtype=np.int64) * width
        gains, counts[ZERO_WEIGHT_ROWS] = settle_zero_rows(
            ids, gains, splits, feature.table.combiner
        )
    return FeatureIds(ids, row_splits, width, gains)


def _rows(
    raw: Ragged, kept: np.ndarray | None, batch_size: int
) -> tuple[np.ndarray | None, int]:
    """row_splits and width over B samples, the same for every form of one batch."""
    if raw.row_splits is None and kept is None and raw.num_rows == batch_size:
        return None, raw.width
    splits = raw.splits()
    if kept is not None:
        splits = np.searchsorted(kept, splits)
    if raw.num_rows < batch_size:
        padded = np.full(batch_size + 1, splits[-1], np.int64)
        padded[: len(splits)] = splits
        splits = padded
    width, rest = divmod(int(splits[-1]), batch_size)
    if rest == 0 and int(splits[1]) == width:
        regular = np.arange(batch_size + 1, dtype=np.int64) * width
        if np.array_equal(splits, regular):
            return None, width
    return splits, 0
