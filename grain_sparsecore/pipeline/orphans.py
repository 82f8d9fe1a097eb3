"""No worker outlives the process that it works for.

Grain ends its workers where that process ends in an orderly way. One that is killed
leaves them behind, waiting for room in their queues, with all their memory.
"""

import functools
import multiprocessing
import os
import threading
from multiprocessing.connection import wait


@functools.cache
def end_with_parent() -> None:
    """Ends this worker when its parent has ended, however that was."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        # Nobody is left to hear of it. What is shared is freed by Python's resource
        # tracker once the last process that knows it is gone.
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
