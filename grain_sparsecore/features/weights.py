"""Weights to float32, matched to the ids of their rows."""

import numpy as np

from grain_sparsecore.features import counters as c
from grain_sparsecore.features.field import Field, shown
from grain_sparsecore.features.ragged import Ragged
from grain_sparsecore.kernels.passes import bounds, equal
from grain_sparsecore.specs import FeatureSpec


def match_weights(field: Field, ids: Ragged, weights: Ragged) -> np.ndarray:
    """The weights in the order of the ids, flat, of the dtype they came in.

    Raises:
        InputError: Rows differ in number or length; the first such sample is named.
    """
    values = weights.values.ravel()
    if (
        ids.compressed
        and not weights.compressed
        and weights.row_splits is None
        and weights.values.ndim == 1
        and len(values) == ids.values.size
    ):
        # A plain array beside CSR or COO ids: one weight for each of their values.
        return values if ids.order is None else values[ids.order]
    if ids.num_rows != weights.num_rows:
        raise field.error(
            f"{weights.num_rows} samples have weights, but {ids.num_rows} have ids."
        )
    if ids.row_splits is None and weights.row_splits is None:
        if ids.width != weights.width:
            raise field.error(_length_text(0, ids.width, weights.width))
    elif not equal(ids.splits(), weights.splits()):
        id_splits, weight_splits = ids.splits(), weights.splits()
        different = np.flatnonzero(np.diff(id_splits) != np.diff(weight_splits))
        if different.size:
            row = int(different[0])
            raise field.error(
                _length_text(
                    row,
                    int(id_splits[row + 1] - id_splits[row]),
                    int(weight_splits[row + 1] - weight_splits[row]),
                )
            )
    if ids.indices is not None and weights.indices is not None:
        _check_indices(field, ids, weights)
    return values


def _length_text(sample: int, num_ids: int, num_weights: int) -> str:
    return (
        f"sample {sample} has {num_ids} ids but {num_weights} weights; there must be "
        "one weight for each id."
    )


def _check_indices(field: Field, ids: Ragged, weights: Ragged) -> None:
    one, two = ids.indices, weights.indices
    assert one is not None
    assert two is not None
    if one.shape != two.shape or not np.array_equal(one, two):
        at = 0
        if one.shape == two.shape:
            at = int(np.flatnonzero((one != two).any(axis=1))[0])
        raise field.error(
            f"in row-major order, entry {at} of the ids has index {one[at].tolist()} "
            f"and of the weights {two[at].tolist()}; give both the same indices."
        )


def legal_weights(
    field: Field,
    ids: Ragged,
    values: np.ndarray,
    kept: np.ndarray | None,
    spec: FeatureSpec,
    counts: np.ndarray,
) -> np.ndarray:
    """Applies the feature's settings to the weights of the ids that were kept.

    Returns:
        float32 [m], finite.

    Raises:
        InputTypeError: The dtype cannot be weights.
        InputError: A weight is NaN, infinite (in float32) or negative where that is
            not allowed.
    """
    if kept is not None:
        values = values.take(kept)
    if values.size == 0:
        return np.zeros(0, np.float32)
    if values.dtype.kind not in "iufb" and values.dtype.name != "bfloat16":
        raise field.type_error(
            f"weights are {values.dtype}, such as {shown(values.flat[0])}; weights "
            "must be floats or integers."
        )
    with np.errstate(over="ignore"):  # above float32 is infinite, which is checked
        result = values.astype(np.float32, copy=False)
    result = np.ascontiguousarray(result)
    low, high = bounds(result)  # NaN passes through both
    if not (np.isfinite(low) and np.isfinite(high)):
        bad = np.flatnonzero(~np.isfinite(result))
        if spec.on_invalid_weight == "error":
            raise field.error(
                f"weight {_located(ids, values, kept, bad)} is not finite in float32. "
                'Mend the data, or set on_invalid_weight = "zero".'
            )
        counts[c.INVALID_WEIGHTS] = bad.size
        result = result.copy()
        result[bad] = 0
        low = result.min()
    if low < 0 and not spec.allow_negative_weights:
        bad = np.flatnonzero(result < 0)
        raise field.error(
            f"weight {_located(ids, values, kept, bad)} is negative. Mend the data, or "
            "set allow_negative_weights = true."
        )
    return result


def _located(
    ids: Ragged, values: np.ndarray, kept: np.ndarray | None, bad: np.ndarray
) -> str:
    at = int(bad[0])
    value = values[at]
    if kept is not None:
        at = int(kept[at])
    sample, position = ids.locate(at)
    several = f" (the first of {bad.size} such weights)" if bad.size > 1 else ""
    return f"{shown(value)} of sample {sample}, position {position}{several},"
