"""Limits as a JSON file: what they are, what they were made for, and nothing else.

A file names the tables, the features and the topology that its numbers belong to. One
that was made for something else is refused with the difference in words, or adapted
on request. Files are written atomically: a reader sees the old one or the new one.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Self

from grain_sparsecore.atomic import atomic_target, write_atomically
from grain_sparsecore.chips import FoundFor
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.limits_fit import (
    adapt_limits,
    differences,
    fingerprint,
    made_for,
    merge_limits,
)
from grain_sparsecore.overflow import StackCaps
from grain_sparsecore.stacking import (
    ALIGNMENT,
    INT32_MAX,
    StackedLayout,
    max_ids_that_fit_int32,
    theoretical_buffer_size,
)

FORMAT = "grain_sparsecore limits"
VERSION = 1

# Beside "caps"; a file without it, of an earlier release, is of the same version.
FOUND_FOR_KEY = "caps_found_for"

# Differences beyond this many are counted, not listed: the first ones tell the story.
_MOST_DIFFERENCES = 8

# Names of the caps in a file, which are those of the limits, and in the configuration.
_CAPS = {
    "max_ids_per_partition": "max_ids_cap",
    "max_unique_ids_per_partition": "max_unique_ids_cap",
}

_FIELDS = tuple(field.name for field in dataclasses.fields(StackLimits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitsFile:
    """The contents of a limits file.

    Attributes:
        limits: The numbers, by stack.
        made_for: What they belong to, see `made_for`.
        origin: Where they come from, in the writer's words: command, batches, policy.
            For people; nothing depends on it.
        caps: How far limits may grow on the chip, by stack; of ids and unique ids.
        caps_found_for: That chip; None where there are no caps, or an earlier release
            wrote them, which did not say.
    """

    limits: Limits
    made_for: Mapping[str, Any]
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    caps: Mapping[str, StackCaps] = dataclasses.field(default_factory=dict)
    caps_found_for: FoundFor | None = None

    @classmethod
    def of(
        cls,
        limits: Limits,
        *,
        layout: StackedLayout,
        origin: Mapping[str, Any] | None = None,
        caps: Mapping[str, StackCaps] | None = None,
        caps_found_for: FoundFor | None = None,
    ) -> Self:
        """The limits of ``layout``, ready to be saved."""
        return cls(
            limits=limits,
            made_for=made_for(layout),
            origin=origin or {},
            caps=caps or {},
            caps_found_for=caps_found_for,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically; an existing one is replaced.

        Raises:
            OSError: The directory does not exist or cannot be written.
        """
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint(self.made_for),
            "limits": self.limits.to_plain(),
            "made_for": self.made_for,
            "origin": self.origin,
        }
        if self.caps:
            plain["caps"] = {
                name: {key: getattr(cap, field) for key, field in _CAPS.items()}
                for name, cap in sorted(self.caps.items())
            }
        if self.caps_found_for is not None:
            plain[FOUND_FOR_KEY] = dataclasses.asdict(self.caps_found_for)
        write_atomically(path, json.dumps(plain, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `save` wrote.

        Raises:
            ConfigError: There is no such file, it is no limits file, it is of another
                version, or it was damaged or edited into something impossible.
        """
        where = f"limits file {os.fspath(path)!r}"
        try:
            # Of a device or a pipe there may be no end.
            plain = json.loads(atomic_target(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{where} does not exist; the commands plan, stats and train write "
                "one with --limits FILE."
            ) from error
        except (ValueError, RecursionError) as error:
            # Python's own limits on digits and on depth among them.
            raise ConfigError(f"{where} is not JSON: {error}.") from error
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error}.") from error
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise ConfigError(
                f"{where} is JSON, but no limits file: its key 'format' is not "
                f"{FORMAT!r}."
            )
        if plain.get("version") != VERSION:
            raise ConfigError(
                f"{where} has version {plain.get('version')!r}; this release reads "
                f"version {VERSION}. Write it anew with the same release."
            )
        stacks, what = plain.get("limits"), plain.get("made_for")
        if not isinstance(stacks, dict) or not isinstance(what, dict):
            raise ConfigError(f"{where} lacks 'limits' or 'made_for'; write it anew.")
        if plain.get("fingerprint") != fingerprint(what):
            raise ConfigError(
                f"{where}: 'made_for' was edited, its fingerprint is "
                f"{fingerprint(what)} and not {plain.get('fingerprint')!r}. Change "
                "the configuration instead and load the file with adapt."
            )
        _check_made_for(where, what, stacks)
        limits = Limits(
            {
                name: _read_stack(f"{where}: limits[{name!r}]", value)
                for name, value in stacks.items()
            }
        )
        origin = plain.get("origin")
        return cls(
            limits=limits,
            made_for=what,
            origin=origin if isinstance(origin, dict) else {},
            caps=_read_caps(where, plain.get("caps", {}), stacks),
            caps_found_for=_read_found_for(where, plain.get(FOUND_FOR_KEY)),
        )


def is_limits_file(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a file that says it is one of limits."""
    try:
        plain = json.loads(atomic_target(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and plain.get("format") == FORMAT


def load_limits(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    layout: StackedLayout,
    adapt: bool = False,
    minibatches: int = 1,
) -> Limits:
    """The limits of one or more files, merged by maximum, for ``layout``.

    Args:
        paths: A file, or several, for example of several runs on the same data.
        layout: The stacks that the limits are for.
        adapt: Turn limits made for something else into upper bounds for ``layout``
            (see `adapt_limits`) instead of refusing them.
        minibatches: Into how many a batch may be split, whose buffer holds them all.

    Returns:
        Limits of every stack, nowhere below what ``layout`` starts with.

    Raises:
        ConfigError: A file cannot be read, or it was made for something else and
            ``adapt`` is false.
    """
    single = isinstance(paths, str | os.PathLike)
    found = [
        fit_limits(
            LimitsFile.load(path),
            layout=layout,
            adapt=adapt,
            path=path,
            minibatches=minibatches,
        )
        for path in ([paths] if single else paths)
    ]
    return merge_limits([Limits.start(layout), *found])


def fit_limits(
    file: LimitsFile,
    *,
    layout: StackedLayout,
    adapt: bool,
    path: str | os.PathLike[str],
    minibatches: int = 1,
) -> Limits:
    """The limits of one file for ``layout``; ``path`` is for messages.

    Raises:
        ConfigError: As `load_limits`.
    """
    where = f"limits file {os.fspath(path)!r}"
    found = differences(file.made_for, made_for(layout))
    if not found:
        _check_fits(where, file.limits, layout, minibatches)
        return file.limits
    if adapt:
        return adapt_limits(
            file.limits,
            made_for_then=file.made_for,
            layout=layout,
            minibatches=minibatches,
        )
    shown = "; ".join(found[:_MOST_DIFFERENCES])
    more = len(found) - _MOST_DIFFERENCES
    raise ConfigError(
        f"{where} was made for something else: {shown}"
        f"{f'; and {more} more' if more > 0 else ''}. Make a new one with the command "
        "plan, or set limits.adapt = true (of the command limits: --adapt), which "
        "turns its numbers into upper bounds."
    )


def _check_made_for(
    where: str, what: Mapping[str, Any], stacks: Mapping[str, Any]
) -> None:
    try:
        numbers = [
            what["topology"][key]
            for key in ("num_partitions", "num_sc_per_device", "samples_per_sc")
        ]
        numbers += [
            table["vocabulary_size"]
            for stack in what["stacks"].values()
            for table in stack["tables"].values()
        ]
        names = set(what["stacks"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: 'made_for' lacks {error}; write it anew.") from (
            error
        )
    if not all(_is_positive_int32(n) for n in numbers):
        raise ConfigError(f"{where}: a number in 'made_for' is no positive integer.")
    if names != set(stacks):
        raise ConfigError(
            f"{where}: 'limits' has the stacks {sorted(stacks)}, 'made_for' has "
            f"{sorted(names)}; write it anew."
        )


def _is_positive_int32(value: Any) -> bool:
    # bool is an int to Python, and JSON has both.
    return type(value) is int and 1 <= value <= INT32_MAX


def _read_stack(where: str, value: Any) -> StackLimits:
    if not isinstance(value, dict) or set(value) != set(_FIELDS):
        raise ConfigError(f"{where} must have exactly the keys {', '.join(_FIELDS)}.")
    for key, number in value.items():
        if not _is_positive_int32(number):
            raise ConfigError(
                f"{where}.{key} is {number!r}; it must be an integer from 1 to "
                f"{INT32_MAX}."
            )
    return StackLimits(**value)


def _read_caps(where: str, caps: Any, stacks: Any) -> dict[str, StackCaps]:
    if not isinstance(caps, dict) or not set(caps) <= set(stacks):
        raise ConfigError(
            f"{where}: 'caps' must have only the stacks {', '.join(stacks)}; write "
            "them anew with rehearse --find-caps."
        )
    found = {}
    for name, value in caps.items():
        if not isinstance(value, dict) or not set(value) <= set(_CAPS):
            raise ConfigError(
                f"{where}: caps[{name!r}] must have only the keys {', '.join(_CAPS)}."
            )
        try:
            found[name] = StackCaps(**{_CAPS[key]: n for key, n in value.items()})
        except ConfigError as error:
            raise ConfigError(f"{where}: caps[{name!r}]: {error}") from error
    return found


def _read_found_for(where: str, plain: Any) -> FoundFor | None:
    if plain is None:
        return None
    try:
        return FoundFor.from_plain(plain)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {FOUND_FOR_KEY!r} {error}; write it anew with rehearse "
            "--find-caps."
        ) from error


def _check_fits(
    where: str, limits: Limits, layout: StackedLayout, minibatches: int
) -> None:
    """Numbers that somebody typed must still make legal buffers."""
    topology = layout.topology
    unit = ALIGNMENT * topology.num_sc_per_device
    most = max_ids_that_fit_int32(topology)
    for name, value in limits.items():
        ids, size = value.max_ids_per_partition, value.buffer_size_per_device
        if ids > most:
            raise ConfigError(
                f"{where}: limits[{name!r}].max_ids_per_partition={ids} is above "
                f"{most}, the most whose buffers fit int32."
            )
        largest = theoretical_buffer_size(ids, topology) * minibatches
        largest = min(largest, INT32_MAX // unit * unit)
        if size % unit or size > largest:
            raise ConfigError(
                f"{where}: limits[{name!r}].buffer_size_per_device={size} must be a "
                f"multiple of {unit} (8 slots for each SparseCore of a device) and "
                f"at most {largest}, which max_ids_per_partition={ids} can fill "
                + (
                    f"in {minibatches} minibatches."
                    if minibatches > 1
                    else 'unless limits.on_overflow is "minibatch".'
                )
            )
