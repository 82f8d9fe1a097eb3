"""What limits were made for, and what they are worth for something else."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.specs import round_up
from grain_sparsecore.stacking import (
    ALIGNMENT,
    INT32_MAX,
    StackedLayout,
    max_ids_that_fit_int32,
    theoretical_buffer_size,
)

_FIELDS = tuple(field.name for field in dataclasses.fields(StackLimits))


def made_for(layout: StackedLayout) -> dict[str, Any]:
    """What the counts of a layout depend on, as a JSON-able dict.

    The number of hosts is not in it, nor is the batch size of one: limits are per
    (SparseCore, partition), so only the samples of one SparseCore matter. Neither are
    combiners, dimensions and starting limits, which move no id.
    """
    return {
        "topology": {
            "num_partitions": layout.topology.num_partitions,
            "num_sc_per_device": layout.topology.num_sc_per_device,
            "samples_per_sc": layout.samples_per_sc_per_feature,
        },
        "stacks": {
            stack.name: {
                "tables": {
                    table.spec.name: {
                        "vocabulary_size": table.spec.vocabulary_size,
                        "rotation": table.shard_rotation,
                    }
                    for table in stack.tables
                },
                "features": {f.name: f.table.name for f in stack.features},
            }
            for stack in layout.stacks
        },
    }


def fingerprint(what: Mapping[str, Any]) -> str:
    """16 hexadecimal digits that stand for a result of `made_for`."""
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def merge_limits(several: Iterable[Limits]) -> Limits:
    """The maximum of every number; a stack may be missing from some of them."""
    merged: dict[str, StackLimits] = {}
    for limits in several:
        for name, value in limits.items():
            known = merged.get(name, value)
            merged[name] = StackLimits(
                **{f: max(getattr(known, f), getattr(value, f)) for f in _FIELDS}
            )
    return Limits(merged)


def differences(file: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Every difference in words, ``path: x in the file, y here``, sorted by path."""
    found: list[str] = []
    _compare("", file, here, found)
    return found


def _compare(path: str, file: Any, here: Any, found: list[str]) -> None:
    if isinstance(file, Mapping) and isinstance(here, Mapping):
        for key in sorted({*file, *here}):
            below = f"{path}.{key}" if path else str(key)
            if key not in file:
                found.append(f"{below}: not in the file")
            elif key not in here:
                found.append(f"{below}: only in the file")
            else:
                _compare(below, file[key], here[key], found)
    elif file != here:
        found.append(f"{path}: {file!r} in the file, {here!r} here")


def adapt_limits(
    limits: Limits,
    *,
    made_for_then: Mapping[str, Any],
    layout: StackedLayout,
    minibatches: int = 1,
) -> Limits:
    """Upper bounds for ``layout`` from limits made for another layout.

    The same samples in the same order, cut into other SparseCores and partitions, stay
    within the result as long as the tables and features of a stack are the same:

    - fewer partitions: up to N / N' old ones meet in a new one; more: each new one
      is a part of an old one, so the limit stays;
    - more samples per SparseCore: as many old SparseCores as a new one covers;
    - tables rotated otherwise against each other: each alone is within the limit, so
      their number bounds the sum;
    - slots: rounding up to 8 costs at most 7 slots for each partition.

    Bounds that hold are often far above what is needed; a new plan is tighter. Where
    the tables or features of a stack changed, its numbers are a start and no bound.
    Stacks that the file does not know start as configured.
    """
    here = made_for(layout)
    start = Limits.start(layout)
    adapted = {
        name: (
            _adapt_stack(name, limits[name], made_for_then, here, layout, minibatches)
            if name in limits
            else start[name]
        )
        for name in layout.stack_names
    }
    return merge_limits([start, Limits(adapted)])


def _adapt_stack(
    name: str,
    value: StackLimits,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    layout: StackedLayout,
    minibatches: int,
) -> StackLimits:
    was, now = old["topology"], new["topology"]
    cores = _blocks_met(now["samples_per_sc"], was["samples_per_sc"])
    folded = max(1, was["num_partitions"] // now["num_partitions"])
    fewest = min(was["num_partitions"], now["num_partitions"])
    before, after = old["stacks"][name]["tables"], new["stacks"][name]["tables"]
    tables = 1 if _rotated_alike(before, after, fewest) else len(after)
    most = max_ids_that_fit_int32(layout.topology)
    ids = min(value.max_ids_per_partition * cores * folded * tables, most)
    unique = value.max_unique_ids_per_partition * cores * folded * tables
    slots = value.buffer_size_per_device // was["num_sc_per_device"] * cores
    if tables > 1 or now["num_partitions"] > was["num_partitions"]:
        slots += (ALIGNMENT - 1) * now["num_partitions"]
    sc_count = layout.topology.num_sc_per_device
    unit = ALIGNMENT * sc_count
    size = min(
        round_up(slots, ALIGNMENT) * sc_count,
        theoretical_buffer_size(ids, layout.topology) * minibatches,
        INT32_MAX // unit * unit,
    )
    return StackLimits(
        max_ids_per_partition=ids,
        max_unique_ids_per_partition=min(unique, ids),
        buffer_size_per_device=size,
    )


def _blocks_met(length: int, block: int) -> int:
    """Most blocks of ``block`` samples that ``length`` consecutive samples touch."""
    if block % length == 0:
        return 1
    ratio, rest = divmod(length, block)
    return ratio + 2 if rest else ratio


def _rotated_alike(
    before: Mapping[str, Any], after: Mapping[str, Any], partitions: int
) -> bool:
    """Whether tables meet in the same partitions, up to one turn of all of them."""
    turns = {
        (after[t]["rotation"] - before[t]["rotation"]) % partitions
        for t in after
        if t in before
    }
    return len(turns) <= 1
