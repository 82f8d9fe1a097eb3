"""Whether the compiler is installed, and in the version that jax needs."""

import importlib.metadata
import re
from collections.abc import Sequence

from grain_sparsecore.errors import MissingExtraError
from grain_sparsecore.program import require_jax_tpu_embedding

# How jax's own extra "tpu" names the one libtpu that it works with.
_PIN = re.compile(r"libtpu\s*==\s*([\d.]+)")


def check_installation() -> None:
    """Raises MissingExtraError unless jax-tpu-embedding and the right libtpu are here.

    The text has the line that installs what is missing.
    """
    require_jax_tpu_embedding("tpu")
    check_libtpu(
        installed=_version("libtpu"),
        jax=importlib.metadata.version("jax"),
        requirements=importlib.metadata.requires("jax") or (),
    )


def versions() -> dict[str, str]:
    """The versions that the outcome of a compilation depends on."""
    names = ("jax", "jaxlib", "libtpu", "jax-tpu-embedding")
    return {name: _version(name) or "" for name in names}


def check_libtpu(
    *, installed: str | None, jax: str, requirements: Sequence[str]
) -> None:
    """Raises MissingExtraError unless ``installed`` is what jax requires.

    Args:
        installed: Version of libtpu; None where it is not installed.
        jax: Version of jax.
        requirements: Those of jax, as in its metadata.
    """
    # jax's extra is the one place that names the version, so it does the installing.
    install = f"pip install 'grain_sparsecore[tpu]' 'jax[tpu]=={jax}'"
    if installed is None:
        raise MissingExtraError(
            f"rehearsing needs libtpu, the TPU compiler (Linux on x86-64): {install}."
        )
    pins = [match[1] for text in requirements if (match := _PIN.match(text))]
    if pins and not f"{installed}.".startswith(f"{pins[0].rstrip('.')}."):
        raise MissingExtraError(
            f"libtpu {installed} is installed, but jax {jax} works only with libtpu "
            f"{pins[0].rstrip('.')}.*: {install}."
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
