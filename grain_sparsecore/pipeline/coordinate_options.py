"""The options of stage 2, checked, and what of them all hosts must share."""

import dataclasses
import functools
import math
from typing import Any, Literal

import numpy as np

from grain_sparsecore.coordination.protocol import ON_EXHAUSTED, OnExhausted
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import GrowthPolicy, Limits, grow_limits
from grain_sparsecore.minibatch import BUCKETS
from grain_sparsecore.overflow import OverflowPolicy, cap_ceilings
from grain_sparsecore.pipeline.compute import DEFAULT_KEY
from grain_sparsecore.stacking import StackedLayout

OnPartialBatch = Literal["drop", "pad", "error"]
ON_PARTIAL_BATCH: tuple[str, ...] = ("drop", "pad", "error")

# Batches a host may hold at once; the round's arithmetic is int32.
MAX_WINDOW = 65536

DEFAULT_TIMEOUT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinateOptions:
    """The options of `CoordinateLimitsIterDataset`, checked; see there."""

    layout: StackedLayout
    policy: GrowthPolicy = dataclasses.field(default_factory=GrowthPolicy)
    window: int = 8
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    start_limits: Limits | None = None
    name: str = "train"
    key: str = DEFAULT_KEY
    on_partial_batch: OnPartialBatch = "drop"
    on_exhausted: OnExhausted = "stop"
    elastic: bool = False
    overflow: OverflowPolicy = dataclasses.field(default_factory=OverflowPolicy)

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int):
            raise ConfigError(f"window must be an integer, not {self.window!r}.")
        if not 1 <= self.window <= MAX_WINDOW:
            raise ConfigError(
                f"window={self.window} batches is out of range; it must be from 1 to "
                f"{MAX_WINDOW}."
            )
        seconds = self.timeout_seconds
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"timeout_seconds={seconds} must be above 0.")
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise ConfigError(
                f"name={self.name!r} must be a non-empty string without a slash."
            )
        for field, allowed in (
            ("on_partial_batch", ON_PARTIAL_BATCH),
            ("on_exhausted", ON_EXHAUSTED),
        ):
            if getattr(self, field) not in allowed:
                raise ConfigError(
                    f"{field}={getattr(self, field)!r} is not one of "
                    f"{', '.join(allowed)}."
                )
        if self.start_limits is not None:
            names = self.layout.stack_names
            if tuple(self.start_limits) != names:
                raise ConfigError(
                    f"start_limits are of stacks {list(self.start_limits)}, but the "
                    f"layout has {list(names)}."
                )
        # Caps that cannot hold are refused here.
        assert self._caps.shape == (len(self.layout.stacks), 3)

    @functools.cached_property
    def _caps(self) -> np.ndarray:
        return cap_ceilings(self.overflow.caps, layout=self.layout)

    def first_limits(self) -> Limits:
        """Where limits start: from the floors of the layout up to the caps."""
        floor = Limits.start(self.layout)
        if self.start_limits is None:
            return floor
        both = np.maximum(floor.to_array(), self.start_limits.to_array())
        return Limits.from_array(self.layout.stack_names, np.minimum(both, self._caps))

    def ceilings(self, limits: Limits) -> np.ndarray:
        """How far limits may grow from ``limits``, int64 [stacks, 3]."""
        if self.overflow.frozen:
            return limits.to_array().astype(np.int64)
        return self._caps

    @property
    def minibatches(self) -> int:
        """Into how many minibatches a batch may be split."""
        return BUCKETS if self.overflow.minibatching else 1

    def shrunk(self, needed: list[list[int]]) -> Limits:
        """The smallest limits for ``needed``, [stacks][3]: from the floors up."""
        return grow_limits(
            Limits.start(self.layout),
            np.array(needed, np.int32),
            layout=self.layout,
            policy=self.policy,
            ceilings=self._caps,
            minibatches=self.minibatches,
        )

    def configuration(self) -> dict[str, Any]:
        """What must be equal on all hosts, and in a checkpoint, as JSON-able values."""
        return {
            **self.layout.canonical(),
            "name": self.name,
            "key": self.key,
            "window": self.window,
            "growth": dataclasses.asdict(self.policy),
            "on_partial_batch": self.on_partial_batch,
            "on_exhausted": self.on_exhausted,
            "start_limits": self.first_limits().to_plain(),
            "overflow": self.overflow.plain(),
        }
