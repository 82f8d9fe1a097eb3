"""``--set path=value``: single settings from the command line.

A path is written as in error messages, ``pipeline.window`` or ``table[0].combiner``;
an entry of a list may also be named, ``table.item.combiner``. A value is TOML, and
whatever is no TOML is taken as a plain string.
"""

import re
import tomllib
from typing import Any

from grain_sparsecore.config.checks import nearest
from grain_sparsecore.errors import ConfigError

_STEP = re.compile(r'(?:"(?P<quoted>[^"]+)"|(?P<plain>[^."\[\]]+))(?P<index>\[\d+\])*')


def parse_override(text: str) -> tuple[list[str | int], Any]:
    """Splits ``path=value`` into the steps of the path and the value.

    Raises:
        ConfigError: It does not have that form.
    """
    path, equals, value = text.partition("=")
    steps: list[str | int] = []
    position = 0
    while True:
        match = _STEP.match(path.rstrip(), position)
        if not equals or match is None:
            raise ConfigError(
                f"--set {text}: write path=value, for example pipeline.window=16 or "
                "table[0].combiner=mean."
            )
        step = match["quoted"] or match["plain"].strip()
        rest = match.group()[len(step) + (2 if match["quoted"] else 0) :]
        steps += [step, *(int(n) for n in re.findall(r"\[(\d+)\]", rest))]
        position = match.end()
        if position == len(path.rstrip()):
            return steps, _parse_value(value.strip())
        if path[position] != ".":
            raise ConfigError(f"--set {text}: cannot read {path[position:]!r}.")
        position += 1


def _parse_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A folder called 2024-01-01 is no date, and a line break adds no key.
    if list(value) == ["value"] and isinstance(
        value["value"], bool | int | float | str | list | dict
    ):
        return value["value"]
    return text


def apply_override(data: dict[str, Any], text: str) -> str:
    """Applies one override in place.

    Returns:
        The path that was set, as error messages write it.

    Raises:
        ConfigError: The path has another form or leads through a missing entry.
    """
    steps, value = parse_override(text)
    if steps == ["limits", "window"]:
        steps = ["pipeline", "window"]
    here: Any = data
    path = ""
    for i, step in enumerate(steps):
        key = _find(here, step, path, text)
        path = _join(path, key)
        if i == len(steps) - 1:
            here[key] = value
        elif isinstance(key, str):
            here = here.setdefault(key, {})
        else:
            here = here[key]
    return path


def _find(here: Any, step: str | int, path: str, text: str) -> str | int:
    if isinstance(here, dict) and isinstance(step, str):
        return step
    if not isinstance(here, list):
        raise ConfigError(
            f"--set {text}: {path or 'the file'} is {here!r}; it has no {step!r}."
        )
    if isinstance(step, int):
        if step >= len(here):
            raise ConfigError(
                f"--set {text}: there is no {path}[{step}]; the file has {len(here)}, "
                "counted from 0."
            )
        return step
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in here]
    if step not in names:
        known = [name for name in names if isinstance(name, str)]
        raise ConfigError(
            f"--set {text}: there is no {path} {step!r}; {nearest(step, known)}"
        )
    return names.index(step)


def _join(path: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key
