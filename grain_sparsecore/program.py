"""The program that a TPU runs on our buffers: lookup and update of every stack.

It is jax-tpu-embedding's own lookup and gradient, applied to a `SparseCoreInput` of
global arrays. The text it lowers to is a function of the stacks, the topology and the
agreed limits, and of nothing else, so hosts that agree have the same text. Lowering
needs jax-tpu-embedding, but neither a TPU nor libtpu.
"""

import dataclasses
import hashlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.errors import ConfigError, MissingExtraError
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.minibatch import BUCKETS
from grain_sparsecore.specs import Topology
from grain_sparsecore.stacking import MIN_ROW_POINTERS, StackedLayout

# Labels of TableSpec.optimizer, and the optimizer of jax-tpu-embedding that each is.
# A label may go on with "#2", as labels of a second optimizer of one kind do.
OPTIMIZERS = {
    "sgd": "SGDOptimizerSpec",
    "adagrad": "AdagradOptimizerSpec",
    "adagrad_momentum": "AdagradMomentumOptimizerSpec",
    "adam": "AdamOptimizerSpec",
    "ftrl": "FTRLOptimizerSpec",
    "laprop": "LaPropOptimizerSpec",
    "f2a": "F2AOptimizerSpec",
}

_AXIS = "device"

# The order in which the SparseCore wants the rows of a table: row by row, in tiles
# of 8 values.
_TABLE_TILING = ((8,),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramFeature:
    """A feature as the program knows it; fields as in `StackedFeature`."""

    name: str
    embedding_dim: int
    row_offset: int
    col_offset: int
    col_shift: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramStack:
    """A stack as the program knows it; fields as in `Stack` and `StackLimits`."""

    name: str
    vocabulary_size: int
    embedding_dim: int
    combiner: str
    optimizer: str
    samples_per_sc: int
    features: tuple[ProgramFeature, ...]
    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    buffer_size_per_device: int

    @property
    def limits(self) -> StackLimits:
        """Its limits alone."""
        return StackLimits(
            max_ids_per_partition=self.max_ids_per_partition,
            max_unique_ids_per_partition=self.max_unique_ids_per_partition,
            buffer_size_per_device=self.buffer_size_per_device,
        )

    def with_limits(self, limits: StackLimits) -> "ProgramStack":
        """The same stack with other limits."""
        return dataclasses.replace(self, **dataclasses.asdict(limits))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that the text of the program depends on.

    Attributes:
        global_device_count: Devices of the job (G).
        num_sc_per_device: SparseCores per device (S).
        stacks: The stacks, sorted by name.
        minibatching: Whether batches may come as several minibatches.
    """

    global_device_count: int
    num_sc_per_device: int
    stacks: tuple[ProgramStack, ...]
    minibatching: bool = False

    @classmethod
    def of(
        cls, layout: StackedLayout, limits: Limits, *, minibatching: bool = False
    ) -> "Program":
        """The program of all stacks of a layout.

        Raises:
            ConfigError: ``limits`` lack a stack, or an optimizer is unknown.
        """
        topology = layout.topology
        missing = sorted(set(layout.stack_names) - set(limits))
        if missing:
            raise ConfigError(
                f"there are no limits for stack {missing[0]!r}; known: "
                f"{sorted(limits)}."
            )
        for stack in layout.stacks:
            _check_optimizer(stack.tables[0].spec.name, _optimizer(stack))
        return cls(
            global_device_count=topology.global_device_count,
            num_sc_per_device=topology.num_sc_per_device,
            minibatching=minibatching,
            stacks=tuple(
                ProgramStack(
                    name=stack.name,
                    vocabulary_size=stack.vocabulary_size,
                    embedding_dim=stack.embedding_dim,
                    combiner=stack.combiner,
                    optimizer=_optimizer(stack),
                    samples_per_sc=stack.samples_per_sc,
                    features=tuple(
                        ProgramFeature(
                            name=feature.name,
                            embedding_dim=feature.table.embedding_dim,
                            row_offset=feature.row_offset,
                            col_offset=feature.col_offset,
                            col_shift=feature.col_shift,
                        )
                        for feature in stack.features
                    ),
                    **dataclasses.asdict(limits[stack.name]),
                )
                for stack in layout.stacks
            ),
        )

    def only(self, stack: ProgramStack) -> "Program":
        """The program of one stack by itself."""
        return dataclasses.replace(self, stacks=(stack,))

    @property
    def topology(self) -> Topology:
        """The whole job as one host: programs know no hosts."""
        return Topology(
            global_device_count=self.global_device_count,
            local_device_count=self.global_device_count,
            num_sc_per_device=self.num_sc_per_device,
        )

    def to_plain(self) -> dict[str, Any]:
        """A JSON-able dict."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Program":
        """The inverse of `to_plain`."""
        stacks = tuple(
            ProgramStack(
                **{
                    **stack,
                    "features": tuple(ProgramFeature(**f) for f in stack["features"]),
                }
            )
            for stack in plain["stacks"]
        )
        return cls(**{**plain, "stacks": stacks})


def _optimizer(stack: Any) -> str:
    return stack.tables[0].spec.optimizer.split("#")[0]


def _check_optimizer(table: str, label: str) -> None:
    if label not in OPTIMIZERS:
        raise ConfigError(
            f"table {table!r}: optimizer={label!r} is none that jax-tpu-embedding "
            f"has on SparseCore; known: {', '.join(sorted(OPTIMIZERS))}."
        )


def program_fingerprint(
    limits: Limits, layout: StackedLayout, *, minibatching: bool = False
) -> str:
    """64 hexadecimal digits that stand for the program of these limits.

    The sha256 of the text that lookup and update lower to for platform ``tpu``. Hosts
    of one job must have equal ones in every step.

    Args:
        limits: The agreed limits, as in `SparseCoreInput.limits`.
        layout: The stacks on the topology of the job.
        minibatching: Whether ``on_overflow`` is ``"minibatch"``.

    Raises:
        ConfigError: A stack lacks limits, or its optimizer is unknown.
        MissingExtraError: jax-tpu-embedding is not installed.
    """
    program = Program.of(layout, limits, minibatching=minibatching)
    text = lower(program).as_text()
    return hashlib.sha256(text.encode()).hexdigest()


def buffer_shapes(
    stacks: Sequence[ProgramStack], topology: Topology, *, minibatching: bool = False
) -> SparseCoreInput:
    """The buffers of one host of ``topology`` as ``jax.ShapeDtypeStruct``s.

    With every device on one host these are the global arrays that the program takes.
    """
    devices, cores = topology.local_device_count, topology.num_sc_per_device
    pointers = cores * max(topology.num_partitions, MIN_ROW_POINTERS)
    if minibatching:
        pointers *= BUCKETS

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((devices, *shape), dtype)

    def slots(dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        return {s.name: array(dtype, s.buffer_size_per_device) for s in stacks}

    return SparseCoreInput(
        row_pointers={s.name: array(np.int32, pointers) for s in stacks},
        embedding_ids=slots(np.int32),
        sample_ids=slots(np.int32),
        gains=slots(np.float32),
        num_minibatches=array(np.int32),
        num_valid_samples=array(np.int32),
        counters=None,
        limits=Limits({s.name: s.limits for s in stacks}),
    )


def require_jax_tpu_embedding(extra: str) -> None:
    """Raises MissingExtraError, naming ``extra``, without jax-tpu-embedding."""
    if importlib.util.find_spec("jax_tpu_embedding") is None:
        raise MissingExtraError(
            "the SparseCore program needs jax-tpu-embedding (Linux on x86-64): "
            f"pip install 'grain_sparsecore[{extra}]'."
        )


def lower(program: Program, devices: Sequence[Any] | None = None) -> Any:
    """Lowers the program for platform ``tpu``.

    Args:
        program: What to lower.
        devices: The devices of a topology, to compile for; None to look at the text.

    Returns:
        A ``jax.stages.Lowered`` whose arguments are a `SparseCoreInput` of global
        arrays and, by stack, the table and its optimizer's slots.

    Raises:
        MissingExtraError: jax-tpu-embedding is not installed.
    """
    require_jax_tpu_embedding("sparsecore")
    from jax.experimental.layout import Format, Layout
    from jax_tpu_embedding.sparsecore.lib.nn import embedding

    specs = _feature_specs(program)
    count, cores = program.global_device_count, program.num_sc_per_device
    spread = PartitionSpec(_AXIS)

    def step(inputs: SparseCoreInput, variables: Any) -> Any:
        flat = inputs.to_jax_tpu_embedding()
        options: Any = {
            "global_device_count": count,
            "num_sc_per_device": cores,
            "enable_minibatching": program.minibatching,
        }
        activations = embedding.tpu_sparse_dense_matmul(
            flat, variables, specs, **options
        )
        # Any gradient of these shapes will do: the activations are one.
        variables = embedding.tpu_sparse_dense_matmul_grad(
            activations, flat, variables, specs, **options
        )
        return activations, variables

    # Said outright, since the default differs between versions of JAX.
    kinds = (AxisType.Auto,)
    mesh: Any = (
        AbstractMesh((count,), (_AXIS,), axis_types=kinds)
        if devices is None
        else Mesh(np.array(devices), (_AXIS,), axis_types=kinds)
    )
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(spread, spread),
        out_specs=spread,
        check_vma=False,
    )
    inputs = buffer_shapes(
        program.stacks, program.topology, minibatching=program.minibatching
    )
    variables = _variables(program, specs)
    if devices is None:
        jitted = jax.jit(mapped, donate_argnums=1)
    else:
        sharding = NamedSharding(mesh, spread)
        rows = Format(
            Layout(major_to_minor=(0, 1), tiling=_TABLE_TILING),  # pyright: ignore
            sharding,
        )
        jitted = jax.jit(
            mapped,
            in_shardings=(sharding, rows),
            out_shardings=(sharding, rows),
            donate_argnums=1,
        )
    return jitted.trace(inputs, variables).lower(lowering_platforms=("tpu",))


def _feature_specs(program: Program) -> dict[str, Any]:
    """The features as jax-tpu-embedding has them after its own preparation."""
    from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec

    partitions = program.global_device_count * program.num_sc_per_device
    specs = {}
    for stack in program.stacks:
        samples = stack.samples_per_sc * partitions
        batch = samples // len(stack.features)
        optimizer = getattr(embedding_spec, OPTIMIZERS[stack.optimizer])()
        stacked = embedding_spec.StackedTableSpec(
            stack_name=stack.name,
            stack_vocab_size=stack.vocabulary_size,
            stack_embedding_dim=stack.embedding_dim,
            optimizer=optimizer,
            combiner=stack.combiner,
            total_sample_count=samples,
            max_ids_per_partition=stack.max_ids_per_partition,
            max_unique_ids_per_partition=stack.max_unique_ids_per_partition,
            suggested_coo_buffer_size_per_device=stack.buffer_size_per_device,
        )
        for feature in stack.features:
            # One table for each feature: the program sees the stack, and of a table
            # only the columns that are its own.
            table = embedding_spec.TableSpec(
                name=feature.name,
                vocabulary_size=stack.vocabulary_size,
                embedding_dim=feature.embedding_dim,
                initializer=jax.nn.initializers.zeros,
                optimizer=optimizer,
                combiner=stack.combiner,
                _setting_in_stack=embedding_spec.TableSettingInStack(
                    stack_name=stack.name,
                    padded_vocab_size=stack.vocabulary_size,
                    padded_embedding_dim=stack.embedding_dim,
                    row_offset_in_shard=0,
                    shard_rotation=0,
                ),
                _stacked_table_spec=stacked,
            )
            specs[feature.name] = embedding_spec.FeatureSpec(
                name=feature.name,
                table_spec=table,
                input_shape=(batch, 1),
                output_shape=(batch, feature.embedding_dim),
                _id_transformation=embedding_spec.FeatureIdTransformation(
                    row_offset=feature.row_offset,
                    col_offset=feature.col_offset,
                    col_shift=feature.col_shift,
                ),
            )
    return specs


def _variables(program: Program, specs: dict[str, Any]) -> dict[str, Any]:
    """Table and slots of every stack, as shapes of global arrays."""
    from jax_tpu_embedding.sparsecore.lib.nn import embedding

    variables = {}
    for stack in program.stacks:
        rows = jax.ShapeDtypeStruct(
            (stack.vocabulary_size, stack.embedding_dim), np.float32
        )
        optimizer = specs[stack.features[0].name].table_spec.optimizer
        slots = optimizer.slot_variables_initializers()
        slots = jax.tree.map(lambda _, rows=rows: rows, slots)
        variables[stack.name] = embedding.EmbeddingVariables(rows, slots)  # pyright: ignore[reportArgumentType]
    return variables
