"""The one seam between the batch and the code that sorts it.

A kernel turns the ids of all features into sorted, merged and aligned segments. There
are two, which agree bit for bit: ``numpy`` needs nothing else, and ``fast`` needs numba
and is taken where that is installed. Nothing outside this package knows which one ran.
"""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from grain_sparsecore.errors import ConfigError, MissingExtraError
from grain_sparsecore.kernels.partitioned import Partitioned
from grain_sparsecore.stacking import StackedLayout

if TYPE_CHECKING:
    from grain_sparsecore.features import FeatureIds

_logger = logging.getLogger(__name__)

# Environment variable that forces a kernel, and its values.
KERNEL_VARIABLE = "GRAIN_SPARSECORE_KERNEL"
KERNELS: tuple[str, ...] = ("numpy", "fast")


def runnable_kernels() -> tuple[str, ...]:
    """The kernels of `KERNELS` whose extras are installed."""
    if importlib.util.find_spec("numba") is None:
        return ("numpy",)
    return KERNELS


# Features in the order of ``layout.features``, and the layout.
Kernel = Callable[["Sequence[FeatureIds]", StackedLayout], Partitioned]


def active_kernel() -> Kernel:
    """The kernel of this process.

    Raises:
        ConfigError: GRAIN_SPARSECORE_KERNEL is neither ``numpy`` nor ``fast``.
        MissingExtraError: It is ``fast``, and numba is not installed.
    """
    return load_kernel(os.environ.get(KERNEL_VARIABLE, ""))


def is_compiled() -> bool:
    """Whether the kernel of this process is the compiled one; raises as that does."""
    return active_kernel().__module__.endswith(".fast")


@functools.cache
def load_kernel(name: str) -> Kernel:
    """The kernel of a name; an empty name takes the fastest that can run."""
    if name not in ("", *KERNELS):
        raise ConfigError(
            f"{KERNEL_VARIABLE}={name!r} is not one of {', '.join(KERNELS)}; unset it "
            "to take the fastest that can run."
        )
    if name != "numpy" and (name or importlib.util.find_spec("numba") is not None):
        try:
            from grain_sparsecore.kernels.fast import partition as fast
        except ImportError as error:
            if name:
                raise MissingExtraError(
                    f"{KERNEL_VARIABLE}=fast needs numba, which cannot be imported "
                    f"({error}); pip install 'grain_sparsecore[fast]', or set it to "
                    "numpy."
                ) from error
            _logger.warning(
                "numba is installed but cannot be imported (%s); batches are sorted by "
                "numpy, at about half the speed. %s=numpy silences this.",
                error,
                KERNEL_VARIABLE,
            )
        else:
            return fast
    from grain_sparsecore.kernels.numpy_kernels import partition

    return partition
