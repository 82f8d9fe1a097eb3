"""The files that a ``path`` option names."""

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

from grain_sparsecore.errors import ConfigError


def expand_paths(path: str | Sequence[str], suffixes: tuple[str, ...]) -> list[Path]:
    """All files of a path, a folder, a pattern, or a list of them.

    Args:
        path: Relative ones start at the working directory; ``~`` is the home folder.
        suffixes: Of the files that are taken from a folder, for example
            ``(".parquet",)``.

    Returns:
        Existing files. Those of a folder or pattern are in the order of their names.

    Raises:
        ConfigError: Something is missing; the text names the nearest file there is.
    """
    files: list[Path] = []
    for text in [path] if isinstance(path, str) else path:
        files += _expand(Path(text).expanduser(), suffixes)
    return files


def _expand(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.name.endswith(suffixes))
        if not found:
            raise ConfigError(
                f"source.path: folder {path} holds no file that ends in "
                f"{' or '.join(suffixes)}."
            )
        return found
    if glob.has_magic(str(path)):
        found = sorted(p for p in map(Path, glob.glob(str(path))) if p.is_file())
        if not found:
            raise ConfigError(f"source.path: no file matches {path}.")
        return found
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(
            f"source.path: there is no {path}, nor the folder {folder}. Relative "
            f"paths start at the working directory, {Path.cwd()}."
        )
    names = [p.name for p in folder.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "set source.path to your data."
    raise ConfigError(f"source.path: there is no {path}; {hint}")
