"""Where stage 2 may run: in the consumer's thread of the main process, and only there.

Its collectives must come in the order of the consumer's ``next`` calls, the same on
all hosts. A stage that reads it ahead, in threads or worker processes, breaks that.
"""

import sys
from types import FrameType

from grain_sparsecore.errors import StageMisuseError

# Parts of the names of Grain's modules that read ahead, with what users call them.
# The first that is found is named: some are made of those below them.
_READERS_AHEAD = (
    (".process_prefetch", "mp_prefetch"),
    (".interleave", "mp_prefetch, multithread_prefetch or an interleave"),
    (".prefetch", "ThreadPrefetchIterDataset or device_put"),
    (".device_put", "device_put"),
    (".grain_pool", "a DataLoader's workers"),
    (".data_loader", "a DataLoader"),
)


def check_placement() -> None:
    """Raises where the calling stage is read by a stage that reads ahead.

    Called while iterators are made and datasets copied: a stage that reads ahead makes
    the iterator of its parent itself, or copies the dataset, so it is on the call
    stack.

    Raises:
        StageMisuseError: Naming the stage that reads ahead.
    """
    modules: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.endswith(".process_prefetch") and frame.f_code.co_name == "get_state":
            # mp_prefetch asks for the first state while it makes its own iterator,
            # which an error would leave half-built, with noise when it is collected.
            # It is refused when it pickles the dataset for its workers.
            return
        modules.add(module)
        frame = frame.f_back
    callers = [module for module in modules if module.startswith("grain.")]
    for part, reader in _READERS_AHEAD:
        if any(part in module for module in callers):
            raise StageMisuseError(
                f"CoordinateLimitsIterDataset runs inside {reader}, where the order of "
                "its collectives differs between hosts. Put it, and "
                "RepartitionIterDataset, behind every prefetch: "
                "ds.map(ComputeInputStats(layout)).mp_prefetch(...)"
                ".pipe(CoordinateLimitsIterDataset, ...), and let the training loop "
                "read it directly."
            )
