"""Compiling every stack of a model for a topology, and what that shows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from grain_sparsecore.config import Config
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.program import Program
from grain_sparsecore.rehearse.caps import Caps, CapsSearch, fit_together
from grain_sparsecore.rehearse.compiler import Compiler, Outcome
from grain_sparsecore.rehearse.reasons import explain, explain_timeout
from grain_sparsecore.rehearse.topologies import NamedTopology, check_topology
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.stats import buffer_bytes_per_device

# Limits, or how to find them once the layout on the topology is known.
LimitsChoice = Limits | Callable[[StackedLayout], Limits] | None

ALL_STACKS = "all stacks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRehearsal:
    """One stack, or all of them in one program, compiled for a topology.

    Attributes:
        name: The stack, or ``"all stacks"``.
        limits: What it was compiled for; None for all stacks.
        fits: Whether it compiled.
        reason: Why not, in words; else empty.
        argument_bytes: Per device: table rows, optimizer slots and buffers; 0 where
            it does not fit, like the next.
        temporary_bytes: Per device. With jaxlib 0.12 or later this includes what the
            SparseCore reserves, which grows with the limits.
        buffer_bytes: Per device and batch, of the arguments.
        seconds: Time of the compilation.
        cached: Whether that was at an earlier time.
        program: Key of the program.
    """

    name: str
    limits: StackLimits | None
    fits: bool
    reason: str
    argument_bytes: int
    temporary_bytes: int
    buffer_bytes: int
    seconds: float
    cached: bool
    program: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A model compiled for a topology.

    Attributes:
        named: The topology.
        layout: The stacks on it.
        limits: What they were compiled for.
        stacks: Each stack by itself and, where there are several and all fit, all of
            them in one program, as a training step has them.
    """

    named: NamedTopology
    layout: StackedLayout
    limits: Limits
    stacks: tuple[StackRehearsal, ...]

    @property
    def fits(self) -> bool:
        """Whether everything does."""
        return all(stack.fits for stack in self.stacks)

    def to_plain(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return {
            "topology": self.named.name,
            "device_kind": self.named.device_kind,
            **dataclasses.asdict(self.layout.topology),
            "batch_size": self.layout.batch_size,
            "fits": self.fits,
            "stacks": [dataclasses.asdict(stack) for stack in self.stacks],
        }


def rehearse(
    model: Config | StackedLayout,
    topology: str,
    *,
    compiler: Compiler,
    limits: LimitsChoice = None,
    on_progress: Callable[[str], None] | None = None,
) -> Rehearsal:
    """Compiles lookup and update of every stack for a topology, without a TPU.

    Args:
        model: A configuration, whose ``topology`` section is not looked at, or stacks
            made for as many devices and SparseCores as the topology has.
        topology: Its name, ``"v6e:2x2"``.
        compiler: What compiles.
        limits: What the buffers hold; where they start, if None. Or a function that
            is given the layout on the topology.
        on_progress: Called with a line of text before and after every compilation.

    Raises:
        ConfigError: The topology is unknown, the model does not fit its devices, or an
            optimizer is unknown.
    """
    named, layout, limits = _resolve(model, topology, compiler, limits)
    program = Program.of(layout, limits, minibatching=_minibatching(model))
    tell = on_progress or (lambda _: None)
    rows = []
    for stack in program.stacks:
        tell(f"{topology}: compiling stack {stack.name!r}")
        outcome = compiler.compile(program.only(stack), topology)
        rows.append(
            _row(
                stack.name,
                stack.limits,
                outcome,
                owner=f"stack {stack.name!r}",
                buffer_bytes=buffer_bytes_per_device(
                    stack.limits, layout, minibatching=program.minibatching
                ),
            )
        )
    if len(rows) > 1 and all(row.fits for row in rows):
        tell(f"{topology}: compiling all stacks in one program")
        outcome = compiler.compile(program, topology)
        rows.append(
            _row(
                ALL_STACKS,
                None,
                outcome,
                owner=f"all {len(rows)} stacks in one program",
                buffer_bytes=sum(row.buffer_bytes for row in rows),
            )
        )
    return Rehearsal(named=named, layout=layout, limits=limits, stacks=tuple(rows))


def _minibatching(model: Config | StackedLayout) -> bool:
    return isinstance(model, Config) and model.limits.overflow.minibatching


def find_caps(
    model: Config | StackedLayout,
    topology: str,
    *,
    compiler: Compiler,
    limits: LimitsChoice = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[StackedLayout, Limits, Mapping[str, Caps]]:
    """Finds the largest limits of each stack that compile for a topology.

    All stacks together compile at the caps, too.

    Args:
        model: As for `rehearse`.
        topology: As for `rehearse`.
        compiler: As for `rehearse`. With a cache, an interrupted search goes on where
            it was.
        limits: What the data needs; the caps keep its proportion of ids to unique ids
            as far as they can.
        on_progress: Called with a line of text after every compilation.

    Returns:
        The layout on the topology, the limits, and the caps by stack.

    Raises:
        ConfigError: As for `rehearse`; or a stack does not fit whatever its limits.
    """
    _, layout, limits = _resolve(model, topology, compiler, limits)
    program = Program.of(layout, limits, minibatching=_minibatching(model))
    caps = {}
    for number, stack in enumerate(program.stacks, 1):
        where = f"{topology} {number}/{len(program.stacks)} {stack.name}"

        def tell(probe: StackLimits, outcome: Outcome, where: str = where) -> None:
            if on_progress is not None:
                ids = probe.max_ids_per_partition
                unique = probe.max_unique_ids_per_partition
                on_progress(
                    f"{where}: ids {ids:,}, unique {unique:,}: {_verdict(outcome)}"
                )

        search = CapsSearch(compiler, program, stack, topology=topology, on_probe=tell)
        caps[stack.name] = search.run()
    if len(caps) > 1:

        def tell_all(outcome: Outcome) -> None:
            if on_progress is not None:
                on_progress(f"{topology} all stacks at once: {_verdict(outcome)}")

        caps = fit_together(
            compiler, program, caps, topology=topology, on_probe=tell_all
        )
    return layout, limits, caps


def _verdict(outcome: Outcome) -> str:
    if outcome.timed_out:
        return "given up"
    verdict = "compiles" if outcome.fits else "refused"
    return f"{verdict} ({'cached' if outcome.cached else f'{outcome.seconds:.1f} s'})"


def _resolve(
    model: Config | StackedLayout,
    topology: str,
    compiler: Compiler,
    limits: LimitsChoice,
) -> tuple[NamedTopology, StackedLayout, Limits]:
    named = compiler.topology(topology)
    if isinstance(model, StackedLayout):
        layout = model
        check_topology(layout.topology, named)
    else:
        layout = model.layout(named.topology)
    if limits is None:
        return named, layout, Limits.start(layout)
    return named, layout, limits(layout) if callable(limits) else limits


def _row(
    name: str,
    limits: StackLimits | None,
    outcome: Outcome,
    *,
    owner: str,
    buffer_bytes: int,
) -> StackRehearsal:
    reason = ""
    if outcome.timed_out:
        reason = explain_timeout(outcome.seconds, limits, owner).text
    elif not outcome.fits:
        reason = explain(outcome.error, limits, owner).text
    return StackRehearsal(
        name=name,
        limits=limits,
        fits=outcome.fits,
        reason=reason,
        argument_bytes=outcome.argument_bytes,
        temporary_bytes=outcome.temporary_bytes,
        buffer_bytes=buffer_bytes,
        seconds=outcome.seconds,
        cached=outcome.cached,
        program=outcome.program,
    )
