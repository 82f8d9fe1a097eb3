"""Our stacks against those of jax-tpu-embedding, on random sets of tables."""

import jax
import numpy as np
import pytest
from jax_tpu_embedding.sparsecore.lib.nn import (
    embedding,
    embedding_spec,
    table_stacking,
)

from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout

_OPTIMIZERS = {
    "sgd": embedding_spec.SGDOptimizerSpec(learning_rate=0.1),
    "adagrad": embedding_spec.AdagradOptimizerSpec(learning_rate=0.1),
}


def _upstream(
    tables: list[TableSpec], features: list[FeatureSpec], global_batch: int
) -> dict[str, embedding_spec.FeatureSpec]:
    """The same declarations as unprepared specs of jax-tpu-embedding."""
    specs = {
        table.name: embedding_spec.TableSpec(
            name=table.name,
            vocabulary_size=table.vocabulary_size,
            embedding_dim=table.embedding_dim,
            initializer=jax.nn.initializers.zeros,
            optimizer=_OPTIMIZERS[table.optimizer],
            combiner=table.combiner,
            max_ids_per_partition=table.max_ids_per_partition,
            max_unique_ids_per_partition=table.max_unique_ids_per_partition,
        )
        for table in tables
    }
    return {
        feature.name: embedding_spec.FeatureSpec(
            name=feature.name,
            table_spec=specs[feature.table],
            input_shape=[global_batch, 1],
            output_shape=[global_batch, specs[feature.table].embedding_dim],
        )
        for feature in features
    }


def _check_same(layout: StackedLayout, specs: dict, label: str) -> None:
    """Every number of the layout against the prepared specs."""
    stacked = embedding.get_stacked_table_specs(specs)
    assert sorted(stacked) == list(layout.stack_names), label
    for stack in layout.stacks:
        theirs = stacked[stack.name]
        assert stack.vocabulary_size == theirs.stack_vocab_size, label
        assert stack.embedding_dim == theirs.stack_embedding_dim, label
        assert stack.combiner == theirs.combiner, label
        total = len(stack.features) * layout.batch_size * layout.topology.num_hosts
        assert total == theirs.total_sample_count, label
        for table in stack.tables:
            setting = next(
                f.table_spec.setting_in_stack
                for f in specs.values()
                if f.table_spec.name == table.spec.name
            )
            assert setting.stack_name == stack.name, label
            assert setting.padded_vocab_size == table.padded_vocabulary_size, label
            assert setting.row_offset_in_shard == table.row_offset_in_shard, label
            assert setting.shard_rotation == table.shard_rotation, label
    for feature in layout.features:
        theirs = specs[feature.name].id_transformation
        assert theirs.row_offset == feature.row_offset, label
        assert theirs.col_offset == feature.col_offset, label
        assert theirs.col_shift == feature.col_shift, label


def _random_declarations(
    rng: np.random.Generator, stack: str
) -> tuple[list[TableSpec], list[FeatureSpec]]:
    long_names = rng.random() < 0.3
    tables = [
        TableSpec(
            name=f"{'a_rather_long_table_name_' if long_names else 't'}{i}",
            vocabulary_size=int(rng.integers(1, 3000)),
            embedding_dim=int(rng.choice([3, 8, 13, 16, 32])),
            combiner=str(rng.choice(["sum", "mean", "sqrtn"])),  # type: ignore[arg-type]
            optimizer=str(rng.choice(["sgd", "adagrad"])),
            stack=stack,
        )
        for i in range(int(rng.integers(1, 13)))
    ]
    # Every table once, some several times, under names that mix the order up.
    reads = [t.name for t in tables] + [
        str(rng.choice([t.name for t in tables])) for _ in range(rng.integers(0, 6))
    ]
    names = rng.permutation(len(reads))
    features = [
        FeatureSpec(name=f"f{names[i]:02d}", table=table)
        for i, table in enumerate(reads)
    ]
    return tables, features


def _random_topology(rng: np.random.Generator) -> tuple[Topology, int]:
    topology = Topology(
        global_device_count=(devices := int(2 ** rng.integers(0, 6))),
        local_device_count=int(2 ** rng.integers(0, min(3, devices.bit_length()))),
        num_sc_per_device=int(rng.choice([2, 4])),
    )
    return topology, topology.local_sc_count * int(2 ** rng.integers(0, 12))


def test_automatic_stacks_equal_auto_stack_tables() -> None:
    split_by_memory = 0
    shortened = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        topology, batch_size = _random_topology(rng)
        tables, features = _random_declarations(rng, "auto")
        rotation = None if rng.random() < 0.5 else int(rng.integers(0, 9))
        limit = 2048 * 1024 if rng.random() < 0.3 else int(2 ** rng.uniform(6, 20))
        layout = make_layout(
            rng.permutation(np.array(tables, object)).tolist(),
            rng.permutation(np.array(features, object)).tolist(),
            topology=topology,
            batch_size=batch_size,
            rotation=rotation,
            activation_bytes_limit=limit,
        )
        specs = _upstream(tables, features, batch_size * topology.num_hosts)
        table_stacking.auto_stack_tables(
            specs,
            topology.global_device_count,
            topology.num_sc_per_device,
            rotation=rotation,
            activation_mem_bytes_limit=limit,
        )
        _check_same(layout, specs, f"seed {seed}")
        groups = {(-(-t.embedding_dim // 8), t.combiner, t.optimizer) for t in tables}
        split_by_memory += len(layout.stacks) > len(groups)
        shortened += any("..." in name for name in layout.stack_names)
    # The comparison means little unless the rare branches were in it.
    assert split_by_memory > 50
    assert shortened > 10


def test_default_activation_limit_is_the_one_of_embedding_auto_stack_tables() -> None:
    # 8192 samples of 64 float32 columns a SparseCore are exactly 2 MiB: one table
    # fills a stack, so the second starts another.
    topology = Topology(
        global_device_count=1, local_device_count=1, num_sc_per_device=2
    )
    tables = [
        TableSpec(name=name, vocabulary_size=100, embedding_dim=64, stack="auto")
        for name in ("one", "two", "three")
    ]
    features = [FeatureSpec(name=t.name, table=t.name) for t in tables]
    for batch_size, stacks in ((2 * 8192, 3), (8192, 2), (2 * 2048, 1)):
        layout = make_layout(tables, features, topology=topology, batch_size=batch_size)
        specs = _upstream(tables, features, batch_size)
        embedding.auto_stack_tables(specs, 1, 2)
        _check_same(layout, specs, f"batch {batch_size}")
        assert len(layout.stacks) == stacks


def test_manual_stacks_equal_stack_tables() -> None:
    for seed in range(100):
        rng = np.random.default_rng(1000 + seed)
        topology, batch_size = _random_topology(rng)
        drawn, features = _random_declarations(rng, "auto")
        # What stacks by hand: any grouping of tables that agree.
        tables = []
        members: dict[str, list[str]] = {}
        for table in drawn:
            columns = -(-table.embedding_dim // 8)
            name = f"s{columns}{table.combiner}{table.optimizer}{rng.integers(0, 2)}"
            stack = name if rng.random() < 0.7 else None
            if stack is not None:
                members.setdefault(stack, []).append(table.name)
            tables.append(
                TableSpec(
                    name=table.name,
                    vocabulary_size=table.vocabulary_size,
                    embedding_dim=table.embedding_dim,
                    combiner=table.combiner,
                    optimizer=table.optimizer,
                    stack=stack,
                )
            )
        layout = make_layout(tables, features, topology=topology, batch_size=batch_size)
        specs = _upstream(tables, features, batch_size * topology.num_hosts)
        first_read = list(
            dict.fromkeys(specs[name].table_spec.name for name in sorted(specs))
        )
        for stack, names in members.items():
            table_stacking.stack_tables(
                specs,
                sorted(names, key=first_read.index),
                topology.global_device_count,
                topology.num_sc_per_device,
                stack_name=stack,
            )
        embedding.prepare_feature_specs_for_training(
            specs, topology.global_device_count, topology.num_sc_per_device
        )
        _check_same(layout, specs, f"seed {seed}")


@pytest.mark.parametrize("limit_for", ["ids", "unique"])
def test_limits_of_the_tables_of_a_stack_add_up_where_upstream_forgets_them(
    limit_for: str,
) -> None:
    # Upstream replaces 100 and 300 by 256, without an error.
    tables = [
        TableSpec(
            name=name,
            vocabulary_size=1000,
            embedding_dim=8,
            stack="auto",
            max_ids_per_partition=limit,
            max_unique_ids_per_partition=limit,
        )
        for name, limit in (("a", 100), ("b", 300))
    ]
    features = [FeatureSpec(name=t.name, table=t.name) for t in tables]
    topology = Topology(
        global_device_count=1, local_device_count=1, num_sc_per_device=2
    )
    layout = make_layout(tables, features, topology=topology, batch_size=8)
    specs = _upstream(tables, features, 8)
    embedding.auto_stack_tables(specs, 1, 2)
    (stack,) = layout.stacks
    theirs = embedding.get_stacked_table_specs(specs)[stack.name]
    if limit_for == "ids":
        assert stack.start_max_ids_per_partition == 400
        assert theirs.max_ids_per_partition == 256
    else:
        assert stack.start_max_unique_ids_per_partition == 400
        assert theirs.max_unique_ids_per_partition == 256
