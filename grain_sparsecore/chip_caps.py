"""Caps that travel with limits: what ``rehearse --find-caps`` wrote into a file.

They say how far the limits of a stack may grow on a chip. A job and a plan that start
from such a file take them as they take the caps of ``[limits.stack.NAME]``; where both
set one, the lower counts. Caps of another kind of chip are refused. Those of other
stacks, devices or batch sizes, which say nothing about a job, are left out aloud.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping

from grain_sparsecore.chips import Chip, FoundFor, running_chip
from grain_sparsecore.config import Config
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits_file import LimitsFile, is_limits_file
from grain_sparsecore.limits_fit import differences, made_for
from grain_sparsecore.overflow import (
    CAP_FIELDS,
    OverflowPolicy,
    StackCaps,
    cap_ceilings,
)
from grain_sparsecore.stacking import StackedLayout

_logger = logging.getLogger(__name__)

FIND_CAPS = "rehearse CONFIG --topology NAME --find-caps --limits FILE"

# What the first of many differences is enough to tell.
_MOST_DIFFERENCES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileCaps:
    """The caps of one limits file.

    Attributes:
        path: The file.
        caps: By stack.
        found_for: The chip; None in a file that does not say.
    """

    path: str
    caps: Mapping[str, StackCaps]
    found_for: FoundFor | None

    def __str__(self) -> str:
        chip = "an unknown chip" if self.found_for is None else self.found_for
        return f"limits file {self.path!r}, found for {chip}"


def overflow_with_file_caps(
    config: Config,
    layout: StackedLayout,
    *,
    more: Iterable[str | os.PathLike[str]] = (),
    chip: Chip | None = None,
) -> OverflowPolicy:
    """The policy of ``config`` with the caps of the files in ``limits.file`` as well.

    Args:
        config: The job.
        layout: Its stacks. Caps of ``limits.file`` that were found for others are
            left out with a warning.
        more: Further files to look into; what they hold for others is left out.
        chip: What the job will run on; None for the TPU of the running JAX job.

    Raises:
        ConfigError: A file is damaged, its caps were found for another kind of chip,
            or a cap is below what its stack starts with.
    """
    own = config.limits.overflow
    starts = config.limits.file
    files = read_caps(starts, layout=layout, on_left_out=_logger.warning)
    files += read_caps(
        [path for path in more if os.fspath(path) not in starts], layout=layout
    )
    if not files:
        return own
    chip = running_chip() if chip is None else chip
    caps, origins = dict(own.caps), {}
    for file in files:
        _check_chip(file, chip)
        try:
            cap_ceilings(file.caps, layout=layout)
        except ConfigError as error:
            raise ConfigError(
                f"the caps in {file}, as high as the chip allows, are too low for the "
                f"tables: {error}"
            ) from error
        both = lowest_caps([caps, file.caps])
        for name, cap in file.caps.items():
            for field in CAP_FIELDS:
                value = getattr(cap, field)
                # Of equal caps the file's is named: raising the other one is no help.
                if value is not None and value == getattr(both[name], field):
                    origins.setdefault(name, {})[field] = str(file)
        caps = both
    return dataclasses.replace(own, caps=caps, cap_origins=origins)


def read_caps(
    paths: Iterable[str | os.PathLike[str]],
    *,
    layout: StackedLayout,
    on_left_out: Callable[[str], None] | None = None,
) -> list[FileCaps]:
    """The caps of all limits files that have some for ``layout``.

    Args:
        paths: Files; those that are no limits files have none.
        layout: The stacks. Caps depend on the chip and the batch, so those found for
            something else, which ``adapt`` turns into bounds, are left out.
        on_left_out: Told in words what was left out and how to get new caps.

    Raises:
        ConfigError: A limits file is damaged.
    """
    found = []
    wanted = made_for(layout)
    for path in paths:
        if not is_limits_file(path):
            continue
        file = LimitsFile.load(path)
        if not file.caps:
            continue
        other = differences(file.made_for, wanted)
        if not other:
            found.append(
                FileCaps(
                    path=os.fspath(path), caps=file.caps, found_for=file.caps_found_for
                )
            )
        elif on_left_out is not None:
            shown = "; ".join(other[:_MOST_DIFFERENCES])
            more = len(other) - _MOST_DIFFERENCES
            on_left_out(
                f"limits file {os.fspath(path)!r}: its caps (stack "
                f"{', '.join(sorted(file.caps))}) do not count, they were found for "
                f"something else: {shown}{f'; and {more} more' if more > 0 else ''}. "
                f"New ones: {FIND_CAPS}."
            )
    return found


def one_chip(files: Iterable[FileCaps]) -> FoundFor | None:
    """The chip that the lowest caps of several files hold for.

    Raises:
        ConfigError: They were found for several kinds of chips.
    """
    first: FileCaps | None = None
    for file in files:
        if file.found_for is None:
            # Caps may be lower than a chip allows, so the lowest hold for the other.
            continue
        if first is None:
            first = file
        elif Chip(topology=file.found_for.topology).is_another(_chip_of(first)):
            raise ConfigError(
                f"caps of two kinds of chips do not go into one file: {first}; {file}. "
                "Keep a file for each."
            )
    return None if first is None else first.found_for


def lowest_caps(several: Iterable[Mapping[str, StackCaps]]) -> dict[str, StackCaps]:
    """For each stack the lowest of each cap that anyone sets."""
    lowest: dict[str, StackCaps] = {}
    for caps in several:
        for name, cap in caps.items():
            before = lowest.get(name, StackCaps())
            lowest[name] = StackCaps(
                **{f: _lower(getattr(before, f), getattr(cap, f)) for f in CAP_FIELDS}
            )
    return {name: lowest[name] for name in sorted(lowest)}


def _check_chip(file: FileCaps, chip: Chip) -> None:
    if file.found_for is None:
        _logger.warning(
            f"limits file {file.path!r} does not say which chip its caps were found "
            f"for; they count all the same. New ones that say it: {FIND_CAPS}."
        )
    elif chip.is_another(file.found_for):
        raise ConfigError(
            f"the caps in {file}, are not for {chip}: the chips have other memories. "
            f"Find caps for it and keep them in a file of their own: {FIND_CAPS}."
        )


def _chip_of(file: FileCaps) -> FoundFor:
    assert file.found_for is not None
    return file.found_for


def _lower(one: int | None, two: int | None) -> int | None:
    return min((x for x in (one, two) if x is not None), default=None)
