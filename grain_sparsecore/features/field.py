"""The names that every message about a feature's input carries."""

import dataclasses
from typing import Any

import numpy as np

from grain_sparsecore.errors import InputError, InputTypeError

# Longest text of a value in a message.
_MOST_CHARACTERS = 80


def shown(value: Any) -> str:
    """The value for a message: ``1.9`` for ``np.float32(1.9)``, cut where long."""
    if isinstance(value, np.floating):
        text = str(value)  # of the digits that its own dtype has
    else:
        text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """The ids or the weights of one feature.

    Attributes:
        feature: Name of the feature.
        table: Name of its table.
        key: Where they are in the batch.
        kind: ``"ids"`` or ``"weights"``.
        batch_size: Samples per host and batch (B).
    """

    feature: str
    table: str
    key: str
    kind: str
    batch_size: int

    def __str__(self) -> str:
        return (
            f"feature {self.feature!r} (table {self.table!r}), {self.kind} {self.key!r}"
        )

    @property
    def filler(self) -> str:
        """What to put where a value is missing."""
        if self.kind == "weights":
            return "a weight (0 takes the id out of every sum)"
        return "the padding_id of the feature"

    def error(self, text: str) -> InputError:
        """The error for a wrong value."""
        return InputError(f"{self}: {text}")

    def type_error(self, text: str) -> InputTypeError:
        """The error for values of a wrong type."""
        return InputTypeError(f"{self}: {text}")
