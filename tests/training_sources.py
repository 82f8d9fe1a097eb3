"""Sources for training jobs of the tests, by ``source.function``."""

import os
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np


class _Records:
    """Samples that are functions of their index."""

    def __init__(
        self,
        count: int,
        *,
        fail_at: int | None = None,
        pid_folder: str | None = None,
        dense: float = 0.0,
    ) -> None:
        self._count = count
        self._fail_at = fail_at
        self._pid_folder = pid_folder
        self._dense = dense

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._pid_folder is not None:
            Path(self._pid_folder, str(os.getpid())).touch()
        if index == self._fail_at:
            raise ValueError(f"record {index} is broken")
        return {
            "item": np.array([index % 16, index % 7]),
            "user": np.array([index % 5]),
            "dense": np.array([self._dense], np.float32),
            "label": np.float32(index % 16 < 8),
            "city": np.array("Paris"),
        }

    def __repr__(self) -> str:
        return f"_Records({self._count})"


def records(
    count: int = 4096, *, absent_on_host: int | None = None, **options
) -> grain.MapDataset:
    """Samples with ids, a dense value, a label, and a string that nobody reads."""
    if absent_on_host == jax.process_index():
        raise FileNotFoundError("records are missing here")
    return grain.MapDataset.source(_Records(count, **options))
