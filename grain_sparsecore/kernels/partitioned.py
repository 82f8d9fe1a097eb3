"""What every kernel returns."""

from typing import NamedTuple

import numpy as np

from grain_sparsecore.errors import LimitsExceededError
from grain_sparsecore.stacking import INT32_MAX, StackedLayout


class Partitioned(NamedTuple):
    """Shapes and meaning as in `PartitionedBatch`."""

    embedding_ids: np.ndarray
    sample_ids: np.ndarray
    gains: np.ndarray
    row_pointers: np.ndarray
    stats: np.ndarray


def check_slots(slots: np.ndarray, layout: StackedLayout) -> None:
    """Raises LimitsExceededError unless the slots per device, [T], fit int32."""
    worst = int(np.argmax(slots))
    if slots[worst] > INT32_MAX:
        raise LimitsExceededError(
            f"stack {layout.stacks[worst].name!r}: the batch needs {slots[worst]} "
            "slots per device, which do not fit int32; lower the batch size."
        )
