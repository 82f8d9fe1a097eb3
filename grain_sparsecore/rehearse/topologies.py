"""Topologies by name, and the SparseCores that their devices have."""

import dataclasses
import math
import re

from grain_sparsecore.errors import ConfigError
from grain_sparsecore.specs import Topology

# SparseCores per device, by the first part of a topology's name. What the compiler
# calls a device is a chip on v5p and v6e, and half a chip on TPU7x.
SPARSECORES = {"v5p": 4, "v6e": 2, "tpu7x": 2}

# Devices of a chip, where that is not one, and chips of a host.
_DEVICES_PER_CHIP = {"tpu7x": 2}
_CHIPS_PER_HOST = 4

EXAMPLES = "v6e:2x2, v6e:4x4, v5p:2x2x1, tpu7x:2x2x1"

_NAME = re.compile(r"([a-z0-9]+):\d+(x\d+)*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedTopology:
    """A topology as the compiler knows it.

    Attributes:
        name: Its name, ``"v6e:2x2"``.
        device_kind: What the devices call themselves, ``"TPU v6 lite"``.
        topology: Devices and SparseCores; devices are spread evenly over the hosts.
    """

    name: str
    device_kind: str
    topology: Topology


def sparsecores(name: str) -> int:
    """SparseCores of each device of the topology ``name``.

    Raises:
        ConfigError: The name is not of the form ``kind:AxB``, or devices of that kind
            have no SparseCores that we know of.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(
            f"topology {name!r} is not of the form kind:AxB or kind:AxBxC; for "
            f"example {EXAMPLES}."
        )
    kind = match[1]
    if kind not in SPARSECORES:
        raise ConfigError(
            f"topology {name!r}: {kind!r} is no kind of TPU with SparseCores that "
            f"jax-tpu-embedding can use; known: {', '.join(sorted(SPARSECORES))}."
        )
    return SPARSECORES[kind]


def topology_by_name(name: str) -> Topology:
    """Devices, hosts and SparseCores of a topology by its name alone.

    The same as the compiler has for all names that it knows; but this accepts names
    that it does not, and needs no compiler.

    Raises:
        ConfigError: As `sparsecores`.
    """
    cores = sparsecores(name)
    kind, _, sides = name.partition(":")
    chips = math.prod(map(int, sides.split("x")))
    if chips == 0:
        raise ConfigError(f"topology {name!r} has no chips; for example {EXAMPLES}.")
    devices = _DEVICES_PER_CHIP.get(kind, 1)
    return Topology(
        global_device_count=chips * devices,
        local_device_count=min(chips, _CHIPS_PER_HOST) * devices,
        num_sc_per_device=cores,
    )


def from_devices(
    name: str, *, device_kind: str, device_count: int, host_count: int
) -> NamedTopology:
    """A topology from what the compiler says about it."""
    return NamedTopology(
        name=name,
        device_kind=device_kind,
        topology=Topology(
            global_device_count=device_count,
            local_device_count=device_count // host_count,
            num_sc_per_device=sparsecores(name),
        ),
    )


def check_topology(made_for: Topology, named: NamedTopology) -> None:
    """Raises ConfigError where stacks were made for other partitions."""
    real = named.topology
    for field in ("num_sc_per_device", "global_device_count"):
        mine, theirs = getattr(made_for, field), getattr(real, field)
        if mine != theirs:
            raise ConfigError(
                f"the stacks were made for {field}={mine}, but {named.name} has "
                f"{theirs}; make them with global_device_count="
                f"{real.global_device_count} and num_sc_per_device="
                f"{real.num_sc_per_device}."
            )
