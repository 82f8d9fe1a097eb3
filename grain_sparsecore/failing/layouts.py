"""A layout as plain values, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology, as_plain
from grain_sparsecore.stacking import (
    Stack,
    StackedLayout,
    check_batch_size,
    make_stack,
)

_START = (
    "start_max_ids_per_partition",
    "start_max_unique_ids_per_partition",
    "start_buffer_size_per_device",
)


def layout_to_plain(layout: StackedLayout) -> dict[str, Any]:
    """What a layout is computed from, as a JSON-able dict."""
    return {
        "topology": as_plain(layout.topology),
        "batch_size": layout.batch_size,
        "stacks": [_stack_to_plain(stack) for stack in layout.stacks],
        "fingerprint": layout.fingerprint,
    }


def _stack_to_plain(stack: Stack) -> dict[str, Any]:
    tables = stack.tables
    return {
        "name": stack.name,
        # The second table is rotated by one rotation.
        "rotation": tables[1].shard_rotation if len(tables) > 1 else 0,
        "tables": [as_plain(table.spec) for table in tables],
        "features": [as_plain(feature.spec) for feature in stack.features],
        # Foreign specs may have replaced those that the tables add up to.
        "start": [getattr(stack, name) for name in _START],
    }


def layout_from_plain(plain: Mapping[str, Any]) -> StackedLayout:
    """The inverse of `layout_to_plain`; every offset is computed anew.

    Raises:
        ConfigError: A spec, the topology or the batch size is wrong.
        ValueError: The offsets of this release are others than those of the writer.
        Exception: Something else is missing or of a wrong type.
    """
    topology = Topology(**plain["topology"])
    batch_size = plain["batch_size"]
    check_batch_size(batch_size, topology)
    stacks: list[Stack] = []
    first = 0
    for index, one in enumerate(plain["stacks"]):
        stack = make_stack(
            one["name"],
            index,
            first,
            [TableSpec(**table) for table in one["tables"]],
            [FeatureSpec(**feature) for feature in one["features"]],
            topology,
            batch_size,
            one["rotation"],
        )
        start = dict(zip(_START, one["start"], strict=True))
        stacks.append(dataclasses.replace(stack, **start))
        first += len(stack.features)
    layout = StackedLayout(
        topology=topology,
        batch_size=batch_size,
        stacks=tuple(stacks),
        features=tuple(f for stack in stacks for f in stack.features),
    )
    if layout.fingerprint != plain["fingerprint"]:
        raise ValueError(
            f"the layout has fingerprint {layout.fingerprint}, not "
            f"{plain['fingerprint']!r}: it was edited, or written by another release"
        )
    return layout
