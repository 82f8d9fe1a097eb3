"""A source of your own: a function that returns a Grain data set."""

import importlib
from typing import Any

import grain

from grain_sparsecore.config import Config, PythonOptions
from grain_sparsecore.config.checks import nearest
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.sources.opened import OpenedSource


def open_python(config: Config, options: PythonOptions) -> OpenedSource:
    """Opens the source of kind ``python``.

    Raises:
        ConfigError: The function cannot be imported or called, or returns no
            MapDataset.
    """
    del config
    name = f"source.function {options.function!r}"
    function = _find(name, options.function)
    try:
        ds = function(**options.args)
    except Exception as error:
        raise ConfigError(
            f"{name} with args {dict(options.args)} raised {type(error).__name__}: "
            f"{error}"
        ) from error
    if not isinstance(ds, grain.MapDataset):
        hint = (
            " An IterDataset can be neither shuffled as a whole nor dealt to hosts."
            if isinstance(ds, grain.IterDataset)
            else " Wrap a list with grain.MapDataset.source(...)."
        )
        raise ConfigError(
            f"{name} returned {type(ds).__name__}, not a grain.MapDataset.{hint}"
        )
    return OpenedSource(name=name, records=ds, batched=options.batched)


def _find(name: str, function: str) -> Any:
    module_name, _, attribute = function.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{name}: cannot import {module_name!r}: {error}. It must be installed, or "
            "lie where Python looks (PYTHONPATH)."
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(
                f"{name}: {module_name!r} has no {part!r}; {nearest(part, dir(value))}"
            )
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(f"{name} is {type(value).__name__}, not a function.")
    return value
