"""The exceptions of grain_sparsecore.

Every exception takes exactly one string, so that it survives the pickling which
Grain's worker processes put it through. The text names what was wrong, the value,
where it was found and how to mend it.

Each type also derives from the builtin exception a caller would expect, so that
``except ValueError`` keeps working in code that does not know this package.
"""


class GrainSparseCoreError(Exception):
    """Base class: ``except GrainSparseCoreError`` catches all of ours."""


class ConfigError(GrainSparseCoreError, ValueError):
    """A specification, option or configuration file is wrong."""


class InputError(GrainSparseCoreError, ValueError):
    """A batch is wrong: its ids, weights, row splits, shapes or keys."""


class InputTypeError(InputError, TypeError):
    """A batch holds values of a type that cannot be ids or weights."""


class LimitsExceededError(GrainSparseCoreError, ValueError):
    """A batch needs more than a limit that is not allowed to grow."""


class CoordinationError(GrainSparseCoreError, RuntimeError):
    """The hosts could not agree. Final for the iterator that raised it."""


class HostMismatchError(CoordinationError):
    """Hosts run different configurations, or are not in the same step."""


class HostFailedError(CoordinationError):
    """Another host's input pipeline failed, or its process went away."""


class HostTimeoutError(CoordinationError, TimeoutError):
    """A host did not arrive at a round of agreement in time."""


class StageMisuseError(GrainSparseCoreError, RuntimeError):
    """A stage runs where it cannot work, or is used after its end."""


class CheckpointError(GrainSparseCoreError, ValueError):
    """A checkpoint state does not belong to this pipeline."""


class MissingExtraError(GrainSparseCoreError, ImportError):
    """An optional dependency is not installed; the text names the extra."""
