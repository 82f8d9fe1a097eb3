"""Checks of single values, with one wording for all sections."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from grain_sparsecore.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'item'?``, or the list of what is known."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names)}." if names else "there is none at all."


def check_int(
    owner: str, field: str, value: Any, *, low: int, high: int = 2**63 - 1
) -> None:
    """Raises ConfigError unless ``value`` is an integer from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"{owner}: {field} must be an integer, not {value!r} "
            f"({type(value).__name__})."
        )
    if not low <= value <= high:
        bounds = f"{low} or more" if high == 2**63 - 1 else f"from {low} to {high}"
        raise ConfigError(f"{owner}: {field}={value} must be {bounds}.")


def check_float(
    owner: str, field: str, value: Any, *, low: float, open_end: bool = False
) -> float:
    """The value as a float.

    Raises:
        ConfigError: It is no finite number, or below ``low`` (with ``open_end``: not
            above it).
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"{owner}: {field} must be a number, not {value!r} "
            f"({type(value).__name__})."
        )
    if not math.isfinite(value) or value < low or (open_end and value == low):
        bounds = f"above {low:g}" if open_end else f"{low:g} or more"
        raise ConfigError(f"{owner}: {field}={value} must be {bounds}.")
    return float(value)


def check_bool(owner: str, field: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(
            f"{owner}: {field} must be true or false, not {value!r} "
            f"({type(value).__name__})."
        )


def check_str(owner: str, field: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{owner}: {field} must be a non-empty string, not {value!r}."
        )


def check_choice(owner: str, field: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(
            f"{owner}: {field}={value!r} is not one of {', '.join(allowed)}."
        )


def check_strs(owner: str, field: str, value: Any) -> tuple[str, ...]:
    """The list of non-empty strings as a tuple.

    Raises:
        ConfigError: It is none, or holds a string twice.
    """
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(f"{owner}: {field} must be a list of strings, not {value!r}.")
    for i, text in enumerate(value):
        check_str(owner, f"{field}[{i}]", text)
        if text in value[:i]:
            raise ConfigError(f"{owner}: {field} holds {text!r} twice.")
    return tuple(value)


def check_ints(owner: str, field: str, value: Any, *, low: int) -> tuple[int, ...]:
    """The list of integers from ``low`` up as a tuple, else ConfigError."""
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ConfigError(
            f"{owner}: {field} must be a list of integers, not {value!r}."
        )
    for i, number in enumerate(value):
        check_int(owner, f"{field}[{i}]", number, low=low)
    return tuple(value)


def check_mapping(owner: str, field: str, value: Any) -> Mapping[str, Any]:
    """The value itself if it is a mapping with string keys, else ConfigError."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise ConfigError(f"{owner}: {field} must be a table of keys, not {value!r}.")
    return value
