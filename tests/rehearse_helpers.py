"""Layouts, limits and compiler messages that the rehearsal tests share."""

from collections.abc import Mapping
from typing import Any

from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.program import Program
from grain_sparsecore.rehearse.compiler import Outcome
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout

# What libtpu 0.0.42.1 said on v6e:2x2, word for word.
TOO_MANY_UNIQUE = (
    "INVALID_ARGUMENT: E3001: CompileTimeSparseCoreInvalidReplicaCount:\n"
    "No viable logical replica count for the embedding table with metadata: "
    "max_nz_per_row = 16384, max_unique_nz_per_row = 16384, feature_width = 32, "
    "sample_count = 64 (last tried split factor for vector splitting = 4, "
    "fixed_size_allocation_bytes = 590848, row_dependent_size_allocation_bytes = "
    "196608, total_spmem_size_bytes = 262144)\n"
    "See https://openxla.org/xla/errors/error_3001 for more details."
)
TOO_MANY_IDS = TOO_MANY_UNIQUE.replace("590848", "259936").replace("196608", "786432")
TOO_LARGE_TABLES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (47.68G) exceeds available HBM (31.25G)."
)
TOO_SHORT_BUFFER = (
    "INVALID_ARGUMENT: during context [Unknown]: SparseMapRow to_apply input parameter "
    "2 dimension size exceeds the major dimension size of the input Csr matrix's "
    "column element. This may be a user error since the specified maximum non-zero "
    "elements per row exceeds the maximum non-zero elements across all rows. Mismatch "
    "in parameter s32[1024]{0} and input element s32[128]{0}.\n"
    " Failed after sparse-dense-matmul-op-decomposer"
)


def layout_of(
    tables: Mapping[str, int] | None = None,
    *,
    hosts: int = 1,
    devices: int = 4,
    cores: int = 2,
    samples: int = 64,
    dim: int = 8,
    **options: Any,
) -> StackedLayout:
    """Tables by name and rows, a feature each; ``samples`` over all hosts."""
    tables = tables or {"item": 1000}
    return make_layout(
        [
            TableSpec(name=name, vocabulary_size=rows, embedding_dim=dim, **options)
            for name, rows in tables.items()
        ],
        [FeatureSpec(name=f"{name}_id", table=name) for name in tables],
        topology=Topology(
            global_device_count=devices,
            local_device_count=devices // hosts,
            num_sc_per_device=cores,
        ),
        batch_size=samples // hosts,
    )


def limits_of(layout: StackedLayout, ids: int, unique: int, size: int) -> Limits:
    """The same limits for every stack."""
    return Limits(
        {name: stack_limits(ids, unique, size) for name in layout.stack_names}
    )


def stack_limits(ids: int, unique: int, size: int = 64) -> StackLimits:
    return StackLimits(
        max_ids_per_partition=ids,
        max_unique_ids_per_partition=unique,
        buffer_size_per_device=size,
    )


class ChipModel:
    """Stands for the compiler: shared memory as libtpu accounts for it on v6e.

    36 bytes a unique id and 12 an id, of which a 256th part at a time. What is refused
    is refused at once; above ``patience`` ids a compilation takes too long.
    """

    def __init__(
        self, *, total: int = 262_144, heap: int = 2**62, patience: int = 2**62
    ) -> None:
        self.total = total
        self.patience = patience
        self.heap = heap
        self.outcomes: list[Outcome] = []

    def holds(self, ids: int, unique: int) -> bool:
        return 36 * unique + 1024 + 12 * ids / 256 <= self.total and ids < self.heap

    def compile(self, program: Program, topology: str) -> Outcome:
        assert topology == "v6e:2x2"
        (stack,) = program.stacks
        ids, unique = stack.max_ids_per_partition, stack.max_unique_ids_per_partition
        assert stack.buffer_size_per_device >= ids * program.num_sc_per_device
        error = ""
        if ids >= self.heap:
            error = TOO_LARGE_TABLES
        elif not self.holds(ids, unique):
            error = (
                f"E3001 fixed_size_allocation_bytes = {36 * unique + 1024}, "
                f"row_dependent_size_allocation_bytes = {12 * ids}, "
                f"total_spmem_size_bytes = {self.total}"
            )
        if not error and ids > self.patience:
            given_up = Outcome(fits=False, timed_out=True, seconds=60.0)
            self.outcomes.append(given_up)
            return self.outcomes[-1]
        self.outcomes.append(Outcome(fits=not error, error=error, seconds=1.0))
        return self.outcomes[-1]
