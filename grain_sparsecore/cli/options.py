"""Options that several commands share."""

import argparse
import dataclasses
from pathlib import Path

from grain_sparsecore.config import Config
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.failing.keep import MOST_FILES


def add_config(parser: argparse.ArgumentParser, *, required: str = "") -> None:
    """Adds ``CONFIG`` and ``--set``, and a usage line that begins with ``CONFIG``.

    ``--set`` takes all words up to the next option, a ``CONFIG`` behind it as well, and
    argparse's own usage line would put it there.

    Args:
        parser: Of the command.
        required: What the command needs besides, as in its usage line.
    """
    parser.usage = " ".join(filter(None, ("%(prog)s CONFIG", required, "[options]")))
    parser.add_argument("config", metavar="CONFIG", help="a TOML file")
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="extend",
        nargs="+",
        default=[],
        help="replace settings of the file, for example pipeline.window=16",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the result to FILE as well"
    )


def add_dump_failing(parser: argparse.ArgumentParser) -> None:
    """Adds ``--dump-failing``."""
    parser.add_argument(
        "--dump-failing",
        metavar="DIR",
        type=Path,
        help=(
            "keep batches that cannot be prepared in DIR, for the command replay: the "
            "one that ends the job and wrong ones that were read ahead, "
            f"{MOST_FILES} files at most"
        ),
    )


def with_dump_failing(config: Config, folder: Path | None) -> Config:
    """The configuration with ``--dump-failing`` in it, where that is given.

    Makes the folder, before any work is done.

    Raises:
        ConfigError: The folder cannot be made.
    """
    if folder is not None:
        pipeline = dataclasses.replace(config.pipeline, dump_failing=str(folder))
        config = dataclasses.replace(config, pipeline=pipeline)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--dump-failing {folder}: cannot be made a folder: {error}; name a "
                "folder, or where one can be made."
            ) from error
    return config


def positive(text: str) -> int:
    """An argparse type: a whole number from 1 up."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return value
