"""Ids of any integer dtype to legal int32 ids: padding, hash, range, policy.

Everything is decided at the width the ids come in; narrowing is the last step.
"""

import numpy as np

from grain_sparsecore.errors import InputError
from grain_sparsecore.features import counters as c
from grain_sparsecore.features.field import Field, shown
from grain_sparsecore.features.ragged import Ragged
from grain_sparsecore.hashing import hash_ids
from grain_sparsecore.kernels.passes import largest
from grain_sparsecore.specs import FeatureSpec

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def legal_ids(
    field: Field,
    ragged: Ragged,
    spec: FeatureSpec,
    vocabulary_size: int,
    counts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Applies the feature's settings to its ids.

    Args:
        field: For messages.
        ragged: The ids, of any dtype.
        spec: on_invalid_id, padding_id and hash.
        vocabulary_size: Ids from 0 to below it are legal.
        counts: int32 [C], counted into.

    Returns:
        ids int32 [m], C-contiguous, in [0, vocabulary_size); and int64 [m], the place
        of each among all n values, or None where all n = m were kept.

    Raises:
        InputTypeError: The dtype cannot be ids.
        InputError: An id is out of range and on_invalid_id is ``"error"``.
    """
    values = ragged.values
    if values.size == 0:
        return np.zeros(0, np.int32), None
    integers = _check_dtype(field, values, spec)
    plain = integers and not spec.hash and spec.padding_id is None
    if plain and all_legal(values, vocabulary_size):
        # Nearly every batch ends here: one reduction and one narrowing copy.
        counts[c.IDS] = values.size
        return narrow(values), None
    flat = values.ravel()
    kept = None
    if spec.padding_id is not None:
        real = flat != spec.padding_id
        counts[c.PADDING_IDS] = flat.size - np.count_nonzero(real)
        if counts[c.PADDING_IDS]:
            # Gathering by places costs a seventh of gathering by a boolean mask.
            kept = np.flatnonzero(real)
            flat = flat.take(kept)
    if spec.hash:
        ids = _hashed(field, spec, vocabulary_size, flat)
    elif flat.size == 0 or (integers and all_legal(flat, vocabulary_size)):
        ids = narrow(flat)
    else:
        invalid = (flat < 0) | (flat >= vocabulary_size)
        places = np.flatnonzero(invalid)
        wrong = flat.take(places)
        if places.size == 0:
            # Legal, but of no integer dtype, as Python objects are.
            ids = narrow(flat)
        elif spec.on_invalid_id == "error":
            first = int(places[0]) if kept is None else int(kept[places[0]])
            raise field.error(_invalid_text(ragged, first, wrong, vocabulary_size))
        elif spec.on_invalid_id == "drop":
            valid = np.flatnonzero(~invalid)
            kept = valid if kept is None else kept.take(valid)
            ids = narrow(flat.take(valid))
        else:
            # What does not fit int32 must not be narrowed.
            ids = np.where(invalid, 0, flat).astype(np.int32)
            ids[places] = _mended(wrong, spec.on_invalid_id, vocabulary_size)
        counts[c.NEGATIVE_IDS] = np.count_nonzero(wrong < 0)
        counts[c.LARGE_IDS] = wrong.size - counts[c.NEGATIVE_IDS]
    counts[c.IDS] = ids.size
    return ids, kept


def all_legal(values: np.ndarray, vocabulary_size: int) -> bool:
    """Whether all ids of a non-empty integer array are in [0, vocabulary_size)."""
    dtype = values.dtype
    bits = 8 * dtype.itemsize
    if dtype.kind == "i":
        # Negative ids are 2 ** (bits - 1) and above when read as unsigned, so that one
        # maximum finds both kinds.
        limit = min(vocabulary_size, 1 << (bits - 1))
    elif vocabulary_size >= 1 << bits:
        return True
    else:
        limit = vocabulary_size
    return largest(values.view(_UNSIGNED[dtype.itemsize])) < limit


def narrow(values: np.ndarray) -> np.ndarray:
    """int32, C-contiguous, aligned, flat; the same memory where it is so already."""
    if not values.flags.aligned:
        values = values.copy()
    return values.astype(np.int32, order="C", copy=False).reshape(-1)


def _check_dtype(field: Field, values: np.ndarray, spec: FeatureSpec) -> bool:
    """Whether they are integers of a numpy dtype; raises where they cannot be ids."""
    dtype = values.dtype
    if dtype.kind in "iu":
        return True
    if dtype.kind == "O" and isinstance(values.flat[0], int):
        return False  # rows.py lets nothing but int through: too wide for a dtype
    strings = dtype.kind in "SUO"
    seen = f"ids are {_described(values)}, such as {shown(values.flat[0])}"
    if not strings:
        raise field.type_error(
            f"{seen}; ids must be integers (int8 to uint64). Convert them where they "
            "are made, so that no id is rounded."
        )
    if not spec.hash:
        raise field.type_error(
            f"{seen}; strings need hash = true on the feature, or map them to integers "
            "first."
        )
    if spec.padding_id is not None:
        raise field.type_error(
            f"{seen}, but padding_id={spec.padding_id} is an integer and equals none "
            "of them; leave padding out of the rows."
        )
    return False


def _described(values: np.ndarray) -> str:
    """The dtype, in words where it says too little."""
    if values.dtype.kind == "O":
        return f"{type(values.flat[0]).__name__} objects"
    if values.dtype.kind in "SU":
        return f"strings ({values.dtype})"
    return str(values.dtype)


def _hashed(
    field: Field, spec: FeatureSpec, vocabulary_size: int, flat: np.ndarray
) -> np.ndarray:
    try:
        hashed = hash_ids(flat, vocabulary_size=vocabulary_size, seed=spec.hash_seed)
    except InputError as error:
        raise field.error(str(error)) from error
    return hashed.astype(np.int32)


def _mended(wrong: np.ndarray, policy: str, vocabulary_size: int) -> np.ndarray:
    """int32 ids in place of those out of range: clipped, or modulo the vocabulary."""
    if policy == "clip":
        right = np.where(wrong < 0, 0, vocabulary_size - 1)
    else:
        # At full width: small dtypes cannot hold the vocabulary, and neither int64
        # nor uint64 the values of the other.
        wide = wrong.dtype.kind == "O" or wrong.dtype == np.uint64
        right = (wrong if wide else wrong.astype(np.int64)) % vocabulary_size
    return right.astype(np.int32)


def _invalid_text(
    ragged: Ragged, first: int, wrong: np.ndarray, vocabulary_size: int
) -> str:
    sample, position = ragged.locate(first)
    value = int(wrong[0])
    what = "below 0" if value < 0 else f"at or above vocabulary_size={vocabulary_size}"
    several = f" ({wrong.size} such ids in this batch)" if wrong.size > 1 else ""
    return (
        f"id {value} of sample {sample}, position {position}, is {what}; legal ids are "
        f"0 to {vocabulary_size - 1}{several}. Mend the data, raise vocabulary_size, "
        'set padding_id if it stands for "missing", set hash = true, or choose '
        'on_invalid_id = "drop", "clip" or "mod".'
    )
