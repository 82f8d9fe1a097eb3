"""What hosts do that start late, or end before their first round."""

import time
from typing import Any

from grain_sparsecore.testing import TestHost
from tests.multihost.scenarios import pipeline, read, summary


def first_round(
    host: TestHost, *, victim: int, how: str, timeout_seconds: float
) -> Any:
    """Host ``victim`` does not come to the first round as the others do."""
    ds = pipeline(host, [1] * 4, window=2, timeout_seconds=timeout_seconds)
    iterator = iter(ds)
    host.barrier("made")
    if host.index == victim:
        if how == "raise":
            raise FileNotFoundError("the data of this host")
        time.sleep(float(how))
    started = time.monotonic()
    result = summary(read(iterator))
    return {**result, "seconds": time.monotonic() - started}
