"""What the compiler said, on disk, by the program it said it about."""

import hashlib
import json
import os
from pathlib import Path

from grain_sparsecore.rehearse.installation import versions

# Settings of the environment that change what the compiler does.
_ENVIRONMENT = ("LIBTPU_INIT_ARGS",)


def default_cache() -> Path:
    """The folder of the user's caches that is ours."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "grain_sparsecore", "rehearse")


def program_key(text: str, topology: str) -> str:
    """64 hexadecimal digits: program, topology, versions, compiler settings.

    Args:
        text: The program as lowered.
        topology: Name of the topology it is compiled for.
    """
    settings = {name: os.environ.get(name, "") for name in _ENVIRONMENT}
    rest = json.dumps([topology, versions(), settings], sort_keys=True)
    return hashlib.sha256(f"{rest}\n{text}".encode()).hexdigest()
