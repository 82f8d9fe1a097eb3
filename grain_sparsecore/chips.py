"""Which chip caps were found for, and whether a job runs on it.

Chips of two kinds can have as many SparseCores, and memory of other sizes: v6e:2x4 and
tpu7x:2x2x1 both have 8 devices with 2 each. So caps say what they were found for.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Devices call themselves by either name, depending on the runtime.
_SAME_KIND = {"TPU v5": "TPU v5p", "TPU v6 lite": "TPU v6e"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundFor:
    """What caps were found for.

    Attributes:
        topology: Its name, ``"v6e:4x4"``.
        device_kind: What its devices call themselves, ``"TPU v6 lite"``.
        libtpu: Version of the compiler, ``"0.0.42.1"``.
    """

    topology: str
    device_kind: str
    libtpu: str

    def __str__(self) -> str:
        return f"{self.topology} ({self.device_kind}, libtpu {self.libtpu})"

    @classmethod
    def from_plain(cls, plain: Any) -> "FoundFor":
        """From what ``dataclasses.asdict`` makes of it.

        Raises:
            ValueError: It is something else.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if (
            not isinstance(plain, Mapping)
            or set(plain) != set(names)
            or not all(isinstance(value, str) for value in plain.values())
        ):
            raise ValueError(f"must have the texts {', '.join(names)}")
        return cls(**plain)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What a job runs on, as far as it is known.

    Attributes:
        topology: Name of its topology, or empty.
        device_kind: What its TPU devices call themselves, or empty.
    """

    topology: str = ""
    device_kind: str = ""

    def __str__(self) -> str:
        return self.topology or self.device_kind

    def is_another(self, found: FoundFor) -> bool:
        """Whether this is certainly another kind of chip than caps were found for.

        How many chips there are, and so the limits, is compared elsewhere; how they
        are wired up is in no program.
        """
        if self.topology:
            kinds = [name.partition(":")[0] for name in (self.topology, found.topology)]
        elif self.device_kind:
            kinds = [
                _SAME_KIND.get(kind, kind)
                for kind in (self.device_kind, found.device_kind)
            ]
        else:
            return False
        return kinds[0] != kinds[1]


def running_chip() -> Chip:
    """The TPU of the running JAX job; nothing known where it has none.

    A job on CPUs may rehearse any chip.
    """
    import jax

    device = jax.devices()[0]
    if device.platform != "tpu":
        return Chip()
    return Chip(device_kind=device.device_kind)
