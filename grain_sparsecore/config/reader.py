"""From a TOML file to a `Config`, with every error of the file in one message."""

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grain_sparsecore.config.agreement import name_errors, source_errors
from grain_sparsecore.config.checks import nearest
from grain_sparsecore.config.job import Config
from grain_sparsecore.config.overrides import apply_override
from grain_sparsecore.config.sections import (
    LimitsConfig,
    PipelineConfig,
    TopologyConfig,
    TrainConfig,
)
from grain_sparsecore.config.source import (
    KINDS,
    CriteoOptions,
    ParquetOptions,
    PythonOptions,
    SourceConfig,
    TFRecordOptions,
)
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.specs import FeatureSpec, TableSpec

_SECTIONS: dict[str, type[Any]] = {
    "topology": TopologyConfig,
    "pipeline": PipelineConfig,
    "limits": LimitsConfig,
    "source": SourceConfig,
    "train": TrainConfig,
}
_LISTS: dict[str, type[Any]] = {"table": TableSpec, "feature": FeatureSpec}
_REQUIRED = ("topology", "pipeline", "table", "feature")

# A legal value for every required field, so that each given value can be checked on
# its own: a section is built with that one value and these for the rest.
_EXAMPLES: dict[type[Any], dict[str, Any]] = {
    SourceConfig: {"kind": "synthetic"},
    TopologyConfig: {"num_sc_per_device": 1},
    PipelineConfig: {"batch_size": 1},
    TableSpec: {"name": "?", "vocabulary_size": 1, "embedding_dim": 1},
    FeatureSpec: {"name": "?", "table": "?"},
    ParquetOptions: {"path": "?"},
    TFRecordOptions: {"path": "?"},
    CriteoOptions: {"path": "?"},
    PythonOptions: {"function": "module:function"},
}


def load_config(path: str | Path, *, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks a TOML file.

    Args:
        path: The file.
        overrides: Settings that replace those of the file, each ``"path=value"``:
            ``"pipeline.window=16"``, ``"table[0].combiner=mean"`` or
            ``"table.item.combiner=mean"``. Values are TOML, or plain strings.

    Raises:
        ConfigError: The file cannot be read or is wrong. The text lists every error
            with its path, its value and what is allowed.
    """
    data = _read_toml(Path(path))
    return read_config(data, origin=str(path), overrides=overrides)


def read_config(
    data: Mapping[str, Any], *, origin: str, overrides: Sequence[str] = ()
) -> Config:
    """Checks the contents of a configuration file.

    Args:
        data: As ``tomllib`` returns it.
        origin: Where it comes from, for error messages.
        overrides: As for `load_config`.

    Raises:
        ConfigError: Something is wrong; the text lists every error.
    """
    reader = _Reader()
    changed: dict[str, Any] = _copy(data)
    for text in overrides:
        try:
            reader.set_by[apply_override(changed, text)] = text
        except ConfigError as error:
            reader.errors.append(str(error))
    config = reader.read(changed)
    if config is None:
        count = len(reader.errors)
        lines = "".join(
            f"\n  {line}" for error in reader.errors for line in error.splitlines()
        )
        raise ConfigError(f"{origin}: {count} error{'s'[: count != 1]}:{lines}")
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file; {_hint(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is no valid TOML: {error}") from error


def _all_sections() -> Iterator[tuple[str, type[Any]]]:
    """Paths and classes of the sections, and of those inside of them."""
    for name, cls in (*_SECTIONS.items(), *_LISTS.items()):
        yield name if name in _SECTIONS else f"{name}.NAME", cls
        for field in dataclasses.fields(cls):
            if section := field.metadata.get("section"):
                yield f"{name}.{field.name}", section
            elif section := field.metadata.get("section_of_each"):
                yield f"{name}.{field.name}.NAME", section


def _hint(path: Path) -> str:
    """The nearest files: in the folder, or in the last one above it that exists."""
    folder = path.parent
    there = next((one for one in (folder, *folder.parents) if one.is_dir()), Path())
    files = [
        str(file.relative_to(there))
        for pattern in ("*.toml", "*/*.toml")
        for file in there.glob(pattern)
    ]
    # Most often the name is right and the folder is not.
    same = [file for file in files if Path(file).name == path.name]
    hint = nearest(path.name, same or files) if files else ""
    if there == folder:
        return hint or f"{folder} holds no .toml file."
    missing = f"there is no folder {folder} either"
    return f"{missing}; in {there}: {hint}" if hint else f"{missing}."


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


class _Reader:
    """Collects errors instead of stopping at the first."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.set_by: dict[str, str] = {}

    def read(self, data: dict[str, Any]) -> Config | None:
        self._move_window(data)
        known = [*_SECTIONS, *_LISTS]
        for key in data:
            if key not in known:
                self._add(key, f"there is no such section; {nearest(key, known)}")
        for key in _REQUIRED:
            if key not in data:
                name = f"[[{key}]]" if key in _LISTS else f"[{key}]"
                self._add(key, f"section {name} is missing.")
        sections = {
            key: self._section(cls, data[key], key)
            for key, cls in _SECTIONS.items()
            if key in data
        }
        specs = {
            key: self._list(cls, data.get(key, []), key) for key, cls in _LISTS.items()
        }
        self._check_references(data, sections.get("source"), specs)
        if self.errors:
            return None
        try:
            return Config(
                tables=tuple(specs["table"]),
                features=tuple(specs["feature"]),
                **{key: value for key, value in sections.items() if value is not None},
            )
        except ConfigError as error:
            self.errors.append(str(error))
            return None

    def _move_window(self, data: dict[str, Any]) -> None:
        """``limits.window`` is the same setting as ``pipeline.window``."""
        limits, pipeline = data.get("limits"), data.get("pipeline")
        if not isinstance(limits, dict) or "window" not in limits:
            return
        if isinstance(pipeline, dict):
            window = limits.pop("window")
            if "window" in pipeline:
                if "pipeline.window" not in self.set_by:
                    self._add(
                        "limits.window",
                        f"limits.window={window!r} and pipeline.window="
                        f"{pipeline['window']!r} are one setting; keep the second.",
                    )
            else:
                pipeline["window"] = window

    def _check_references(
        self, data: dict[str, Any], source: Any, specs: dict[str, list[Any]]
    ) -> None:
        """Runs also where single values are wrong, so that all is said at once."""
        named = {
            key: [
                (entry["name"], entry)
                for entry in data[key]
                if isinstance(entry, dict) and isinstance(entry.get("name"), str)
            ]
            for key in _LISTS
            if isinstance(data.get(key), list) and data[key]
        }
        # Positions are those of the file only if every entry has a name.
        if len(named) < len(_LISTS) or any(
            len(named[k]) < len(data[k]) for k in _LISTS
        ):
            return
        for path, text in name_errors(named["table"], named["feature"]):
            self._add(path, text)
        if all(None not in specs[key] for key in _LISTS):
            for path, text in source_errors(source, specs["feature"], specs["table"]):
                self._add(path, text)

    def _list(self, cls: type[Any], data: Any, path: str) -> list[Any]:
        if not isinstance(data, list):
            self._add(path, f"write [[{path}]] with two brackets, once for each.")
            return []
        return [
            self._section(cls, entry, f"{path}[{i}]") for i, entry in enumerate(data)
        ]

    def _section(self, cls: type[Any], data: Any, path: str) -> Any:
        """An instance of ``cls``, or None where something was wrong."""
        if not isinstance(data, Mapping):
            self._add(path, f"must be a section of keys, not {data!r}.")
            return None
        if cls is SourceConfig:
            return self._source(data, path)
        return self._build(cls, data, path)

    def _source(self, data: Mapping[str, Any], path: str) -> Any:
        """The options of a source stand beside ``kind``, not in a section below."""
        kind = data.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            value = "is missing" if kind is None else f"{kind!r} is not known"
            self._add(f"{path}.kind", f"{value}; choose one of {', '.join(KINDS)}.")
            return None
        common = [f.name for f in dataclasses.fields(SourceConfig)]
        common.remove("options")
        given = {key: data[key] for key in common if key in data}
        rest = {key: data[key] for key in data if key not in common}
        plain = {key: given[key] for key in given if key != "kind"}
        good = self._check_each(SourceConfig, plain, path)
        options = self._build(KINDS[kind], rest, path, also_known=common)
        if not good or options is None:
            return None
        return SourceConfig(**given, options=options)

    def _build(
        self,
        cls: type[Any],
        data: Mapping[str, Any],
        path: str,
        *,
        also_known: Sequence[str] = (),
    ) -> Any:
        fields = {field.name: field for field in dataclasses.fields(cls)}
        good = True
        values: dict[str, Any] = {}
        for key, value in data.items():
            if key not in fields:
                self._add_unknown(path, key, [*fields, *also_known])
                good = False
            elif section := fields[key].metadata.get("section"):
                values[key] = self._section(section, value, f"{path}.{key}")
                good = good and values[key] is not None
            elif section := fields[key].metadata.get("section_of_each"):
                values[key] = self._named(section, value, f"{path}.{key}")
                good = good and None not in values[key].values()
            else:
                values[key] = value
        for key in _EXAMPLES.get(cls, {}):
            if key not in data:
                self._add(f"{path}.{key}", "is missing.")
                good = False
        plain = {k: v for k, v in values.items() if not fields[k].metadata}
        if not self._check_each(cls, plain, path) or not good:
            return None
        try:
            return cls(**values)
        except ConfigError as error:
            self._add(path, str(error))
            return None

    def _named(self, cls: type[Any], data: Any, path: str) -> dict[str, Any]:
        """Sections by a name of the user's choice, ``[limits.stack.NAME]``."""
        if not isinstance(data, Mapping):
            self._add(path, f"write [{path}.NAME], not {data!r}.")
            return {"": None}
        return {
            name: self._section(cls, value, f"{path}.{name}")
            for name, value in data.items()
        }

    def _check_each(self, cls: type[Any], values: Mapping[str, Any], path: str) -> bool:
        """Checks each value on its own, so that one error does not hide another."""
        examples = dict(_EXAMPLES.get(cls, {}))
        name = values.get("name")
        if "name" in examples and isinstance(name, str) and name:
            examples["name"] = name
        good = True
        for key, value in values.items():
            try:
                cls(**{**examples, key: value})
            except ConfigError as error:
                self._add(f"{path}.{key}", str(error))
                good = False
        return good

    def _add_unknown(self, path: str, key: str, known: Sequence[str]) -> None:
        elsewhere = [
            f"{section}.{key}"
            for section, cls in _all_sections()
            if section != path and key in {f.name for f in dataclasses.fields(cls)}
        ]
        hint = f"did you mean {elsewhere[0]!r}?" if elsewhere else nearest(key, known)
        self._add(f"{path}.{key}", f"there is no such key; {hint}")

    def _add(self, path: str, text: str) -> None:
        # "pipeline: window=0 must be ..." repeats what the path says.
        owner = path.rpartition(".")[0] or path
        for prefix in (owner, owner.rpartition(".")[2]):
            text = text.removeprefix(f"{prefix}: ")
        set_by = [
            override
            for set_path, override in self.set_by.items()
            if set_path == path or set_path.startswith((f"{path}.", f"{path}["))
        ]
        where = f" (from --set {set_by[-1]})" if set_by else ""
        self.errors.append(f"{path}{where}: {text}")
