"""What hosts do with capped, frozen and shrinking limits; runs on every host."""

from typing import Any

from grain_sparsecore.coordination import process_reducer
from grain_sparsecore.overflow import OverflowPolicy
from grain_sparsecore.testing import TestHost
from tests.test_coordinate_overflow import CAP, layout_of, limits_of, pipeline


def _read(host: TestHost, needs: list[int], **options: Any) -> dict[str, Any]:
    it = iter(
        pipeline(needs, process_reducer(), layout=layout_of(host.count), **options)
    )
    elements, error = [], ""
    try:
        for element in it:
            elements.append(element)
    except ValueError as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {
        "limits": limits_of(elements),
        "error": error,
        "dropped": [
            int(e["sparsecore"].drops.per_feature[:, 1].sum())
            for e in elements
            if e["sparsecore"].drops is not None
        ],
    }


def capped(host: TestHost) -> dict[str, Any]:
    """A cap that only the last host goes above, in step 2, with each policy."""
    needs = [1, 2, 20, 1] if host.index == host.count - 1 else [1, 2, 3, 4]
    drop = OverflowPolicy(on_overflow="drop", drop_order="balanced", caps=CAP)
    return {
        "drop": _read(host, needs, name="drop", overflow=drop),
        "error": _read(host, needs, name="error", overflow=OverflowPolicy(caps=CAP)),
    }


def shrinking(host: TestHost) -> list[int]:
    """One hot batch on host 0, then two calls of shrink on every host."""
    needs = [30 if host.index == 0 else 1, 1, 2, 1, 3, 1]
    it = iter(pipeline(needs, process_reducer(), layout=layout_of(host.count)))
    seen = []
    for step, element in enumerate(it):
        seen += limits_of([element])
        if step in (1, 3):
            it.coordinator.shrink()
    return seen
