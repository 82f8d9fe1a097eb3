"""The largest limits of a stack that a chip can hold.

The two limits share the memory of the SparseCore, so there is no largest value of
each, only pairs of which neither can grow. The pair that is looked for lies on the
ray of what the data needs: both limits grow in the proportion they have, and then ids
alone. What compiles at a pair compiles at all smaller ones. Where a compilation is
given up at the time limit, the search goes on far below, and does not come back.

All stacks of a program share the memory of the device, of which the SparseCore reserves
some for every id that the limits allow: gigabytes, where they are high. So in the end
the caps are lowered until all stacks compile together.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from grain_sparsecore.chips import FoundFor
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import StackLimits
from grain_sparsecore.limits_file import FOUND_FOR_KEY
from grain_sparsecore.program import Program, ProgramStack
from grain_sparsecore.rehearse.compiler import Compiler, Outcome
from grain_sparsecore.rehearse.reasons import Refusal, explain, explain_timeout
from grain_sparsecore.specs import round_up
from grain_sparsecore.stacking import ALIGNMENT, max_ids_that_fit_int32

# How far below the largest possible value a cap may be, as a divisor.
_UNIQUE_PRECISION = 128
_IDS_PRECISION = 16

# Refused probes before the steps down double: a refusal takes a fiftieth of the time
# of a compilation, so it pays to come from above, but not for ever.
_PROBES_PER_STEP = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caps:
    """Limits that a stack can grow to.

    Attributes:
        max_ids_per_partition: Together with the other, the most that compiles.
        max_unique_ids_per_partition: Likewise.
        compiled: Programs that compiled on the way.
        refused: Programs that were refused or given up.
        cached: How many of both were known from earlier.
        seconds: Time of the compiler, without what was cached.
        reason: Why the limits cannot be higher, in words; empty where no batch can
            need more.
    """

    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    compiled: int
    refused: int
    cached: int
    seconds: float
    reason: str


def with_caps(
    limits_file: Mapping[str, Any], caps: Mapping[str, Caps], found_for: FoundFor
) -> dict[str, Any]:
    """The contents of a limits file with the caps added under ``"caps"``.

    There each stack has ``max_ids_per_partition`` and
    ``max_unique_ids_per_partition``. ``"caps_found_for"`` says for which chip;
    everything else in the file stays.
    """
    plain = {
        name: {
            "max_ids_per_partition": cap.max_ids_per_partition,
            "max_unique_ids_per_partition": cap.max_unique_ids_per_partition,
        }
        for name, cap in sorted(caps.items())
    }
    found = dataclasses.asdict(found_for)
    return {**limits_file, "caps": plain, FOUND_FOR_KEY: found}


def most_of_any_batch(program: Program, stack: ProgramStack) -> tuple[int, int]:
    """Ids and unique ids per partition that no batch can exceed.

    A partition holds so many rows; after merging, every sample has each at most once.
    """
    rows = stack.vocabulary_size // program.topology.num_partitions
    legal = max_ids_that_fit_int32(program.topology)
    return min(rows * stack.samples_per_sc, legal), min(rows, legal)


def largest(
    upper: int,
    compiles: Callable[[int], int | None],
    *,
    lower: int,
    precision: int,
) -> int | None:
    """The largest value that compiles, to within one part in ``precision``.

    Args:
        upper: Where to start; nothing above it matters.
        compiles: None where a value compiles, else a bound below the value: no value
            above the bound compiles, or is worth the time to find out.
        lower: The smallest value worth having.
        precision: As said.

    Returns:
        A multiple of 8, or ``upper`` or ``lower`` itself; None where not even
        ``lower`` compiles.
    """
    value, probes, factor, last = upper, 0, 1, upper
    while True:
        bound = compiles(value)
        if bound is None:
            break
        if value <= lower:
            return None
        last = bound + 1
        probes += 1
        if probes % _PROBES_PER_STEP == 0:
            factor *= 2
        step = factor * max(value // precision, ALIGNMENT)
        # A bound far below is worth more than a step; one just below is none.
        below = bound if value - bound > step else value - step
        value = max(below // ALIGNMENT * ALIGNMENT, lower)
    # Long steps may have gone past the largest value.
    while last - value > 2 * max(value // precision, ALIGNMENT):
        middle = (value + last) // 2 // ALIGNMENT * ALIGNMENT
        if compiles(middle) is None:
            value = middle
        else:
            last = middle
    return value


class CapsSearch:
    """Looks for the caps of one stack.

    Args:
        compiler: The compiler.
        program: The program of which ``stack`` is one.
        stack: The stack; its limits are what the data needs.
        topology: Name of the topology.
        on_probe: Called after every compilation with the limits and the outcome.
    """

    def __init__(
        self,
        compiler: Compiler,
        program: Program,
        stack: ProgramStack,
        *,
        topology: str,
        on_probe: Callable[[StackLimits, Outcome], None] | None = None,
    ) -> None:
        self._compiler = compiler
        self._program = program
        self._stack = stack
        self._topology = topology
        self._on_probe = on_probe
        self._outcomes: list[Outcome] = []
        self._reason = ""

    def run(self) -> Caps:
        """Searches.

        Raises:
            ConfigError: The stack does not fit whatever its limits.
        """
        most_ids, most_unique = most_of_any_batch(self._program, self._stack)
        need_ids = self._stack.max_ids_per_partition
        need_unique = self._stack.max_unique_ids_per_partition
        ratio = max(need_ids / need_unique, 1.0)

        def ids_for(unique: int) -> int:
            return min(round_up(round(unique * ratio), ALIGNMENT), most_ids)

        unique = largest(
            most_unique,
            lambda value: self._probe(ids_for(value), value),
            lower=1,
            precision=_UNIQUE_PRECISION,
        )
        if unique is None:
            raise ConfigError(
                f"no limits at all fit on {self._topology}: {self._reason}"
            )
        reason = self._reason
        ids = largest(
            most_ids,
            lambda value: self._probe_ids(value, unique, ids_for(unique)),
            lower=ids_for(unique),
            precision=_IDS_PRECISION,
        )
        assert ids is not None  # the smallest is what has just compiled
        return Caps(
            max_ids_per_partition=ids,
            max_unique_ids_per_partition=unique,
            compiled=sum(o.fits for o in self._outcomes),
            refused=sum(not o.fits for o in self._outcomes),
            cached=sum(o.cached for o in self._outcomes),
            seconds=sum(o.seconds for o in self._outcomes if not o.cached),
            reason=reason or self._reason,
        )

    def _probe_ids(self, ids: int, unique: int, compiled: int) -> int | None:
        if self._probe(ids, unique) is None:
            return None
        # Far above what has compiled, halves would be given up several times over.
        return math.isqrt(ids * compiled) if self._outcomes[-1].timed_out else ids - 1

    def _probe(self, ids: int, unique: int) -> int | None:
        """None where it compiles, else a bound on the number of unique ids."""
        stack = _raised(self._stack, ids, unique, self._program.num_sc_per_device)
        limits = stack.limits
        program = self._program.only(stack)
        outcome = self._compiler.compile(program, self._topology)
        self._outcomes.append(outcome)
        if self._on_probe is not None:
            self._on_probe(limits, outcome)
        if outcome.fits:
            return None
        refusal = _explain(outcome, limits, f"stack {self._stack.name!r}")
        self._reason = refusal.text
        if outcome.timed_out:
            # A refusal is quick. This took as long as may be, and a little less would
            # take as long again: with libtpu 0.0.42 compiling 3,200 unique ids takes
            # more than 8 times as long as 1,024, and above that minutes.
            return unique // 2
        bound = refusal.unique_ids_at_most
        return unique - 1 if bound is None else min(bound, unique - 1)


def fit_together(
    compiler: Compiler,
    program: Program,
    caps: Mapping[str, Caps],
    *,
    topology: str,
    on_probe: Callable[[Outcome], None] | None = None,
) -> dict[str, Caps]:
    """Halves caps on ids until all stacks compile in one program.

    Args:
        compiler: The compiler.
        program: All stacks; their limits are what the data needs.
        caps: The caps of each stack by itself.
        topology: Name of the topology.
        on_probe: Called after every compilation with the outcome.

    Returns:
        Caps that hold together, nowhere below what the data needs as far as ``caps``
        allow that.

    Raises:
        ConfigError: The stacks do not fit together at what the data needs.
    """
    share, tried, reason = 1, None, ""
    while True:
        lowered = {s.name: _lowered(caps[s.name], s, share) for s in program.stacks}
        raised = tuple(
            _raised(
                stack,
                lowered[stack.name].max_ids_per_partition,
                lowered[stack.name].max_unique_ids_per_partition,
                program.num_sc_per_device,
            )
            for stack in program.stacks
        )
        if raised == tried:
            raise ConfigError(
                f"the stacks do not fit together on {topology} at the limits that the "
                f"data needs: {reason}"
            )
        outcome = compiler.compile(
            dataclasses.replace(program, stacks=raised), topology
        )
        if on_probe is not None:
            on_probe(outcome)
        if outcome.fits:
            return lowered
        owner = f"all {len(raised)} stacks in one program"
        reason = _explain(outcome, None, owner).text
        share, tried = 2 * share, raised


def _lowered(cap: Caps, need: ProgramStack, share: int) -> Caps:
    part = cap.max_ids_per_partition // share // ALIGNMENT * ALIGNMENT
    if share > 1:
        floor = min(need.max_ids_per_partition, cap.max_ids_per_partition)
        cap = dataclasses.replace(cap, max_ids_per_partition=max(part, floor))
    # There are never more unique ids than ids.
    unique = min(cap.max_unique_ids_per_partition, cap.max_ids_per_partition)
    return dataclasses.replace(cap, max_unique_ids_per_partition=unique)


def _raised(stack: ProgramStack, ids: int, unique: int, cores: int) -> ProgramStack:
    # At least one full partition has room, as it will where limits are that high.
    size = max(round_up(ids, ALIGNMENT) * cores, stack.buffer_size_per_device)
    return stack.with_limits(
        StackLimits(
            max_ids_per_partition=ids,
            max_unique_ids_per_partition=unique,
            buffer_size_per_device=size,
        )
    )


def _explain(outcome: Outcome, limits: StackLimits | None, owner: str) -> Refusal:
    if outcome.timed_out:
        return explain_timeout(outcome.seconds, limits, owner)
    return explain(outcome.error, limits, owner)
