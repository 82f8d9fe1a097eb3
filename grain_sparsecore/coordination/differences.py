"""What differs between the configurations of hosts, or of a host and a checkpoint."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Differing keys that a message shows; the rest is counted.
_SHOWN_KEYS = 5


def canonical_json(configuration: Mapping[str, Any]) -> str:
    """One text for equal configurations, whatever the order of their keys."""
    return json.dumps(configuration, sort_keys=True, separators=(",", ":"))


def differing_keys(one: Any, two: Any) -> list[tuple[str, str, str]]:
    """Dotted key and both values, for every leaf that differs, in sorted order."""
    return [
        (".".join(path), _show(first), _show(second))
        for path, first, second in _walk((), one, two)
    ]


def describe_keys(keys: Sequence[tuple[str, str, str]], one: str, two: str) -> str:
    """The first differing keys with both values; ``one`` and ``two`` say where."""
    parts = [
        f"{key} is {first} {one} and {second} {two}"
        for key, first, second in keys[:_SHOWN_KEYS]
    ]
    if len(keys) > _SHOWN_KEYS:
        parts.append(f"{len(keys) - _SHOWN_KEYS} more keys differ")
    return "; ".join(parts)


def name_hosts(hosts: Sequence[int]) -> str:
    """``host 3`` or ``hosts 1, 2 and 5``."""
    if not hosts:
        return "no host"
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    return f"hosts {', '.join(str(h) for h in hosts[:-1])} and {hosts[-1]}"


_MISSING = object()


def _walk(
    path: tuple[str, ...], one: Any, two: Any
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in sorted({*one, *two}):
            yield from _walk(
                (*path, str(key)), one.get(key, _MISSING), two.get(key, _MISSING)
            )
    elif one != two:
        yield path, one, two


def _show(value: Any) -> str:
    if value is _MISSING:
        return "absent"
    if isinstance(value, Mapping):
        return "present"
    return json.dumps(value)
