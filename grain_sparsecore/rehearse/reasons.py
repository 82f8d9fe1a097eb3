"""Why the compiler refused a stack, in our words.

The compiler's messages are matched, never relied on: what is not recognised is quoted.
The numbers in the comments are from libtpu 0.0.42 and 0.0.50.
"""

import dataclasses
import re

from grain_sparsecore.limits import StackLimits
from grain_sparsecore.stacking import ALIGNMENT

# "E3001 ... No viable logical replica count": what every unique id needs (36 bytes)
# has to fit the SparseCore's shared memory at once, what every id needs (8 to 12
# bytes) in a limited number of turns.
_SHARED_MEMORY = re.compile(
    r"fixed_size_allocation_bytes = (\d+).*?"
    r"row_dependent_size_allocation_bytes = (\d+).*?"
    r"total_spmem_size_bytes = (\d+)",
    re.DOTALL,
)

# "... required for HLO temporaries (47.68G) exceeds available HBM (31.25G)", or
# "... in memory space hbm. Used 56.66G of 31.24G hbm".
_DEVICE_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED.*?hbm.*?([\d.]+[KMGT])\b.*?([\d.]+[KMGT])\b",
    re.DOTALL | re.IGNORECASE,
)

# "SparseMapRow ... Mismatch in parameter s32[1024]{0} and input element s32[128]{0}":
# the buffer is shorter than what is read from it at a time. libtpu 0.0.50 reads less.
_SHORT_BUFFER = re.compile(
    r"SparseMapRow.*?parameter \w+\[(\d+)\].*?element \w+\[(\d+)\]", re.DOTALL
)

# No unique id takes less of the shared memory than its own int32.
_BYTES_PER_ID = 4

# Characters of a message that is quoted.
_QUOTED = 300

_FEWER_IDS = (
    "Lower pipeline.batch_size, use more devices, put fewer tables into the stack, or "
    "cap the limit."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A refusal that was understood.

    Attributes:
        text: What to tell the user: which stack, which limit, how far off, what to do.
        unique_ids_at_most: More unique ids per partition cannot fit; None where the
            refusal says nothing about that.
    """

    text: str
    unique_ids_at_most: int | None = None


def explain(error: str, limits: StackLimits | None, owner: str) -> Refusal:
    """Puts the compiler's message into words.

    Args:
        error: The message.
        limits: What the program was compiled for; None for more than one stack.
        owner: What was compiled, ``"stack 'item'"``.
    """
    if limits is not None and (match := _SHARED_MEMORY.search(error)):
        fixed, by_row, total = map(int, match.groups())
        return _shared_memory(fixed, by_row, total, limits, owner)
    if match := _DEVICE_MEMORY.search(error):
        needed, available = match.groups()
        return Refusal(
            text=(
                f"{owner}: a device would need {needed} of memory and has "
                f"{available}. Use more devices, smaller tables or an optimizer with "
                "fewer slots; if the buffers are what is large, lower "
                "pipeline.batch_size."
            )
        )
    if limits is not None and (match := _SHORT_BUFFER.search(error)):
        read, present = map(int, match.groups())
        return Refusal(
            text=(
                f"{owner}: buffer_size_per_device={limits.buffer_size_per_device} is "
                f"too short: with max_ids_per_partition="
                f"{limits.max_ids_per_partition} the compiler reads {read} slots at a "
                f"time from {present}. Raise suggested_coo_buffer_size_per_device of "
                "its tables, or lower the limit."
            )
        )
    quoted = " ".join(error.split())
    if len(quoted) > _QUOTED:
        quoted = f"{quoted[:_QUOTED]}..."
    return Refusal(text=f"{owner}: the compiler refused it and said: {quoted}")


def explain_timeout(seconds: float, limits: StackLimits | None, owner: str) -> Refusal:
    """What to say about a compilation that was given up; arguments as `explain`."""
    at = (
        ""
        if limits is None
        else f" at max_ids_per_partition={limits.max_ids_per_partition}, "
        f"max_unique_ids_per_partition={limits.max_unique_ids_per_partition}"
    )
    return Refusal(
        text=(
            f"{owner}: not compiled within {seconds:.0f} s{at}. Raise the time limit, "
            "or lower the limits: compilations get slow where a stack only just fits."
        )
    )


def _shared_memory(
    fixed: int, by_row: int, total: int, limits: StackLimits, owner: str
) -> Refusal:
    ids, unique = limits.max_ids_per_partition, limits.max_unique_ids_per_partition
    if fixed > total:
        most = unique * total // fixed // ALIGNMENT * ALIGNMENT
        return Refusal(
            text=(
                f"{owner}: max_unique_ids_per_partition={unique} needs {fixed:,} bytes "
                f"of the SparseCore's shared memory, which has {total:,}: about "
                f"{most:,} would be the most, so the limit is {fixed / total:.2f} "
                f"times too high. {_FEWER_IDS}"
            ),
            unique_ids_at_most=most,
        )
    # What the unique ids leave is too little: both limits share the memory.
    return Refusal(
        text=(
            f"{owner}: max_unique_ids_per_partition={unique} leaves "
            f"{total - fixed:,} of {total:,} bytes of the SparseCore's shared memory, "
            f"too little for the {by_row:,} bytes of max_ids_per_partition={ids}: "
            f"lower one of the two. {_FEWER_IDS}"
        ),
        unique_ids_at_most=min(unique - 1, total // _BYTES_PER_ID),
    )
