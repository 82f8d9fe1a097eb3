"""What a training step reads of a batch besides ids: the label and dense features."""

import dataclasses
import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import grain
import numpy as np

from grain_sparsecore.batching import RaggedValues
from grain_sparsecore.errors import InputError, InputTypeError
from grain_sparsecore.failing import keep_failing
from grain_sparsecore.features.paths import SEPARATOR, feature_readers, find_values
from grain_sparsecore.stacking import StackedLayout

# Keys of the results; written as in a configuration, so that no data has them.
LABEL_KEY = "train.label"
DENSE_KEY = "train.dense"

# How many keys of a batch a message lists before it stops.
_MOST_LISTED = 20


@dataclasses.dataclass(frozen=True)
class TakeColumns(grain.transforms.Map):
    """Keeps of a batch what the job reads, and checks it.

    It goes before `ComputeInputStats`, so that a wrong label stops all hosts in the
    same step as a wrong id does, and columns that nobody reads cost nothing later.

    Attributes:
        layout: The features, whose ids and weights are kept.
        label: Key of the labels, [samples] or [samples, 1].
        dense: Keys of dense features, each [samples] or [samples, n].
        dump_failing: Folder for batches that are wrong, as of `ComputeInputStats`.
    """

    layout: StackedLayout
    label: str
    dense: tuple[str, ...]
    dump_failing: str | os.PathLike[str] | None = None

    def map(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, element: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The ids and weights, and under two fixed keys float32 arrays.

        `LABEL_KEY` holds [samples], `DENSE_KEY` [samples, values], which is
        [samples, 0] without dense features.

        Raises:
            InputError: A key is missing, a shape is wrong, a label is not from 0 to 1
                or a dense value is not finite.
            InputTypeError: A column holds no numbers.
        """
        try:
            return self._map(element)
        except Exception as error:
            if self.dump_failing is not None:
                keep_failing(
                    self.dump_failing,
                    element,
                    error,
                    layout=self.layout,
                    columns=(self.label, self.dense),
                )
            raise

    def _map(self, element: Mapping[str, Any]) -> dict[str, Any]:
        kept = find_values(element, feature_readers(self.layout))
        labels = self._label(element)
        columns = [np.empty((len(labels), 0), np.float32)]
        columns += [self._dense(element, key, len(labels)) for key in self.dense]
        return {**kept, LABEL_KEY: labels, DENSE_KEY: np.concatenate(columns, axis=1)}

    def _label(self, element: Mapping[str, Any]) -> np.ndarray:
        where = f"train.label {self.label!r}"
        values = _numbers(element, self.label, where)
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1:
            raise InputError(
                f"{where} has shape {values.shape}, not [samples]; there is one label "
                "per sample."
            )
        wrong = ~((values >= 0) & (values <= 1))
        if wrong.any():
            sample = int(wrong.argmax())
            raise InputError(
                f"{where}: sample {sample} has {values[sample]}; labels are numbers "
                "from 0 to 1."
            )
        return values

    def _dense(self, element: Mapping[str, Any], key: str, samples: int) -> np.ndarray:
        where = f"train.dense {key!r}"
        values = _numbers(element, key, where)
        if values.ndim == 1:
            values = values[:, None]
        if values.ndim != 2 or len(values) != samples:
            raise InputError(
                f"{where} has shape {values.shape}, not [{samples}] or [{samples}, n] "
                "as the labels say."
            )
        wrong = ~np.isfinite(values)
        if wrong.any():
            sample, column = (int(i[0]) for i in np.nonzero(wrong))
            raise InputError(
                f"{where}: sample {sample} has {values[sample, column]} in column "
                f"{column}; dense values must be finite float32."
            )
        return values


def _numbers(element: Mapping[str, Any], key: str, where: str) -> np.ndarray:
    try:
        found = find_values(element, {key: where})[key]
    except InputError as error:
        # That text is about keys of features.
        raise InputError(_missing_text(element, key, where)) from error
    try:
        values = None if isinstance(found, RaggedValues) else np.asarray(found)
    except ValueError:  # lists of unequal length
        values = None
    if values is None or values.dtype.kind == "O":
        raise InputTypeError(
            f"{where} holds lists or objects; it needs numbers, equally many for each "
            "sample. Name another column, or make one number of each list."
        )
    if values.dtype.kind not in "biuf":
        raise InputTypeError(f"{where} is an array of {values.dtype}, not of numbers.")
    # Values beyond float32 become infinite here and are refused as such.
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _missing_text(element: Mapping[str, Any], key: str, where: str) -> str:
    having = list(_paths(element))
    listed = ", ".join(repr(path) for path in having[:_MOST_LISTED])
    more = len(having) - _MOST_LISTED
    near = difflib.get_close_matches(key, having, n=1)
    return (
        f"{where}: the batch has no such key; it has {listed}"
        f"{f' and {more} more' if more > 0 else ''}. "
        f"{f'Did you mean {near[0]!r}? ' if near else ''}"
        f"Set {where.split()[0]} to what the batch has, or rename the key."
    )


def _paths(element: Mapping[str, Any]) -> Iterator[str]:
    for key, value in element.items():
        if isinstance(value, Mapping):
            yield from (f"{key}{SEPARATOR}{path}" for path in _paths(value))
        else:
            yield str(key)
