import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grain_sparsecore.buffers import PADDING_GAIN, PADDING_ID, SparseCoreInput
from grain_sparsecore.errors import InputError, InputTypeError
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.lookup import (
    embedding_lookup,
    shard_tables,
    sharded_embedding_lookup,
    to_global_arrays,
    unshard_tables,
    without_counts,
)
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import StackedLayout, make_layout
from tests.dense_lookup import (
    check_lookup,
    random_batch,
    random_layout,
    random_tables,
    random_topology,
)

AXIS = "device"


def one_table_layout(vocabulary_size: int = 8) -> StackedLayout:
    """One device with two SparseCores, two samples."""
    return make_layout(
        [TableSpec(name="t", vocabulary_size=vocabulary_size, embedding_dim=2)],
        [FeatureSpec(name="f", table="t")],
        topology=Topology(
            global_device_count=1, local_device_count=1, num_sc_per_device=2
        ),
        batch_size=2,
    )


def worked_example() -> SparseCoreInput:
    """Rows [0,0,0,2,4,1] and [1,1,1,3,3,5,5,7,7,0], laid out by hand."""
    embedding_ids = np.full(32, PADDING_ID)
    sample_ids = np.full(32, PADDING_ID)
    gains = np.full(32, PADDING_GAIN)
    for start, rows, factors in (
        (0, [0, 1, 2], [3, 1, 1]),
        (8, [0], [1]),
        (16, [0], [1]),
        (24, [0, 1, 2, 3], [3, 2, 2, 2]),
    ):
        slots = slice(start, start + len(rows))
        embedding_ids[slots] = rows
        gains[slots] = factors
        sample_ids[slots] = 0
    return SparseCoreInput(
        row_pointers={"t": np.array([[3, 9, *[16] * 6, 1, 12, *[16] * 6]], np.int32)},
        embedding_ids={"t": embedding_ids[None]},
        sample_ids={"t": sample_ids[None]},
        gains={"t": gains[None]},
        num_minibatches=np.ones(1, np.int32),
        num_valid_samples=np.full(1, 2, np.int32),
        counters=None,
        limits=Limits(
            {
                "t": StackLimits(
                    max_ids_per_partition=4,
                    max_unique_ids_per_partition=4,
                    buffer_size_per_device=32,
                )
            }
        ),
    )


def plain_table(rows: int = 8) -> np.ndarray:
    """Row i is [4**i, -i]: a sum of rows shows how often each was taken."""
    return np.stack(
        [4.0 ** np.arange(rows), -np.arange(rows, dtype=np.float64)], axis=1
    ).astype(np.float32)


def test_the_worked_example_sums_the_rows_of_each_sample():
    layout = one_table_layout()
    tables = shard_tables({"t": plain_table()}, layout)
    activations = embedding_lookup(tables, worked_example(), layout)
    assert set(activations) == {"f"}
    np.testing.assert_array_equal(
        activations["f"],
        [
            [3 + 4 + 16 + 4**4, -1 - 2 - 4],
            [1 + 3 * 4 + 2 * 4**3 + 2 * 4**5 + 2 * 4**7, -3 - 6 - 10 - 14],
        ],
    )


def test_the_gradient_of_the_worked_example_counts_the_ids():
    layout = one_table_layout()

    def total(plain):
        tables = shard_tables({"t": plain}, layout)
        return jnp.sum(embedding_lookup(tables, worked_example(), layout)["f"][:, 0])

    gradient = jax.jit(jax.grad(total))(jnp.asarray(plain_table()))
    np.testing.assert_array_equal(gradient[:, 0], [4, 4, 1, 2, 1, 2, 0, 2])
    np.testing.assert_array_equal(gradient[:, 1], np.zeros(8))


def test_only_the_row_pointers_say_which_slots_count():
    # Upstream leaves the tail of its buffers unset: any bytes may stand there.
    buffers = worked_example()
    for values, garbage in ((buffers.embedding_ids, 1), (buffers.sample_ids, 0)):
        unused = values["t"] == PADDING_ID
        values["t"][unused] = garbage
    layout = one_table_layout()
    table = plain_table()
    table[6] = np.nan  # no sample has id 6, so it must not show

    def total(plain):
        tables = shard_tables({"t": plain}, layout)
        return jnp.sum(embedding_lookup(tables, buffers, layout)["f"])

    value, gradient = jax.value_and_grad(total)(jnp.asarray(table))
    assert value == 279 - 7 + 34957 - 33
    np.testing.assert_array_equal(gradient[:, 0], [4, 4, 1, 2, 1, 2, 0, 2])


def test_a_batch_of_empty_rows_gives_zeros():
    buffers = worked_example()
    buffers.row_pointers["t"][:] = 0
    layout = one_table_layout()
    tables = shard_tables({"t": plain_table()}, layout)
    np.testing.assert_array_equal(
        embedding_lookup(tables, buffers, layout)["f"], np.zeros((2, 2))
    )


def stacked_layout() -> StackedLayout:
    """Two devices, N = 4; two tables of one stack, the second rotated by 2."""
    return make_layout(
        [
            TableSpec(name="a", vocabulary_size=40, embedding_dim=3, stack="both"),
            TableSpec(name="b", vocabulary_size=5, embedding_dim=8, stack="both"),
        ],
        [FeatureSpec(name="fa", table="a"), FeatureSpec(name="fb", table="b")],
        topology=Topology(
            global_device_count=2, local_device_count=2, num_sc_per_device=2
        ),
        batch_size=8,
    )


def test_a_row_is_where_the_sparsecore_looks_for_it():
    layout = stacked_layout()
    a = np.arange(1, 121, dtype=np.float32).reshape(40, 3)
    b = -np.arange(1, 41, dtype=np.float32).reshape(5, 8)
    stacked = shard_tables({"a": a, "b": b}, layout)["both"]
    # 40 rows of a pad to 64, 16 a partition; 5 rows of b to 32, 8 a partition.
    assert stacked.shape == (96, 8)
    shards = stacked.reshape(4, 24, 8)
    np.testing.assert_array_equal(shards[37 % 4, 37 // 4, :3], a[37])
    np.testing.assert_array_equal(shards[(4 + 2) % 4, 16 + 1], b[4])
    assert np.count_nonzero(stacked) == 120 + 40


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_unsharding_undoes_sharding_and_keeps_the_kind_of_array(kind):
    layout = stacked_layout()
    rng = np.random.default_rng(0)
    plain = {
        "a": kind(rng.normal(size=(40, 3)).astype(np.float32)),
        "b": kind(rng.normal(size=(5, 8)).astype(np.float32)),
    }
    stacked = shard_tables(plain, layout)
    assert isinstance(stacked["both"], type(plain["a"]))
    back = unshard_tables(stacked, layout)
    for name, table in plain.items():
        assert isinstance(back[name], type(table))
        np.testing.assert_array_equal(back[name], table)


def test_shapes_that_do_not_fit_are_named():
    layout = one_table_layout()
    with pytest.raises(InputError, match=r"table 't' is missing; got \['u'\]"):
        shard_tables({"u": plain_table()}, layout)
    with pytest.raises(InputError, match=r"'t' has shape \(7, 2\), not \(8, 2\)"):
        shard_tables({"t": plain_table(7)}, layout)
    with pytest.raises(
        InputError, match=r"stack 't': the table has shape \(8, 2\), not \(16, 8\)"
    ):
        embedding_lookup({"t": plain_table()}, worked_example(), layout)
    tables = shard_tables({"t": plain_table()}, layout)
    buffers = worked_example()
    buffers.row_pointers["t"] = buffers.row_pointers["t"][:, :8]
    with pytest.raises(
        InputError, match=r"row_pointers have shape \(1, 8\), not \[devices, 16\]"
    ):
        embedding_lookup(tables, buffers, layout)


@pytest.mark.parametrize(
    ("batch", "fix"),
    [
        (
            {"label": 1, "buffers": worked_example()},
            r"a dict; pass batch\['buffers'\]\.",
        ),
        (
            {"b": 1, "label": 2},
            r"a dict; none is under its keys 'b', 'label'; pass what",
        ),
        (None, "a NoneType; pass what the last stage makes of the batch"),
    ],
)
def test_the_whole_batch_is_refused_with_the_key_to_pass(batch, fix):
    layout = one_table_layout()
    tables = shard_tables({"t": plain_table()}, layout)
    message = f"takes a SparseCoreInput, not {fix}"
    with pytest.raises(InputTypeError, match=f"^embedding_lookup {message}"):
        jax.jit(lambda b: embedding_lookup(tables, b, layout))(batch)
    with pytest.raises(InputTypeError, match=f"^sharded_embedding_lookup {message}"):
        sharded_embedding_lookup(tables, batch, layout, mesh=make_mesh(1), axis=AXIS)


def make_mesh(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,))


def test_a_mesh_of_another_size_is_named():
    with pytest.raises(
        InputError, match=r"mesh axis 'device' has 2 devices, but the layout is for 1"
    ):
        sharded_embedding_lookup(
            {}, worked_example(), one_table_layout(), mesh=make_mesh(2), axis=AXIS
        )


def test_global_arrays_keep_values_and_limits_and_lose_the_counters():
    buffers = dataclasses.replace(worked_example(), counters=np.ones((1, 3), np.int32))
    label = np.arange(2, dtype=np.float32)
    mesh = make_mesh(1)
    batch = to_global_arrays({"sparsecore": buffers, "label": label}, mesh, AXIS)
    result = batch["sparsecore"]
    assert result.counters is None
    assert result.limits == buffers.limits
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    for leaf in jax.tree.leaves(batch):
        assert leaf.sharding == sharding
    np.testing.assert_array_equal(batch["label"], label)
    np.testing.assert_array_equal(result.embedding_ids["t"], buffers.embedding_ids["t"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, np.bool_, np.int8])
def test_numbers_of_every_type_go_to_devices(dtype):
    values = np.arange(8).astype(dtype)
    result = to_global_arrays({"x": values}, make_mesh(4), AXIS)["x"]
    assert result.dtype == dtype
    assert np.asarray(result).tobytes() == values.tobytes()


def test_leaves_that_cannot_be_spread_are_named():
    put = functools.partial(to_global_arrays, mesh=make_mesh(2), axis=AXIS)
    with pytest.raises(InputTypeError, match=r"leaf \['city'\] .* of <U5"):
        put({"city": np.array(["Paris", "Lyon"])})
    with pytest.raises(InputTypeError, match=r"leaf \['when'\] .* of timedelta64"):
        put({"when": np.zeros(2, "m8[s]")})
    with pytest.raises(InputError, match=r"\['x'\] .* shape \(3,\); .* divide by 2,"):
        put({"x": np.zeros(3)})
    with pytest.raises(InputError, match=r"\['step'\] .* shape \(\)"):
        put({"step": np.int32(3)})


@pytest.mark.parametrize("seed", range(12))
def test_any_batch_and_its_gradient_equal_the_dense_lookup_of_the_raw_ids(seed):
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, random_topology(rng))
    buffers, features = random_batch(rng, layout)
    plain = random_tables(rng, layout)
    check_lookup(
        lambda stacked: embedding_lookup(stacked, buffers, layout),
        plain,
        features,
        layout,
        rng,
    )


@pytest.mark.parametrize(("seed", "devices"), [(0, 2), (1, 4), (2, 8)])
def test_sharded_tables_give_the_same_values_and_gradients(seed, devices):
    rng = np.random.default_rng(seed)
    topology = Topology(
        global_device_count=devices, local_device_count=devices, num_sc_per_device=2
    )
    layout = random_layout(rng, topology)
    buffers, features = random_batch(rng, layout)
    mesh = make_mesh(devices)
    batch = to_global_arrays(buffers, mesh, AXIS)
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    def lookup(stacked):
        stacked = jax.lax.with_sharding_constraint(stacked, sharding)
        activations = sharded_embedding_lookup(
            stacked, batch, layout, mesh=mesh, axis=AXIS
        )
        for values in activations.values():
            jax.debug.inspect_array_sharding(
                values, callback=lambda s, v=values: shardings.append((s, v.ndim))
            )
        return activations

    shardings = []
    check_lookup(lookup, random_tables(rng, layout), features, layout, rng)
    assert shardings
    assert all(actual.is_equivalent_to(sharding, ndim) for actual, ndim in shardings)


def test_a_mesh_may_have_other_axes():
    rng = np.random.default_rng(4)
    topology = Topology(
        global_device_count=4, local_device_count=4, num_sc_per_device=2
    )
    layout = random_layout(rng, topology)
    buffers, features = random_batch(rng, layout)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), (AXIS, "model"))
    batch = to_global_arrays(buffers, mesh, AXIS)
    check_lookup(
        lambda stacked: sharded_embedding_lookup(
            stacked, batch, layout, mesh=mesh, axis=AXIS
        ),
        random_tables(rng, layout),
        features,
        layout,
        rng,
    )


def test_replicated_tables_serve_buffers_that_are_spread_over_devices():
    rng = np.random.default_rng(3)
    topology = Topology(
        global_device_count=4, local_device_count=4, num_sc_per_device=2
    )
    layout = random_layout(rng, topology)
    buffers, features = random_batch(rng, layout)
    batch = to_global_arrays(buffers, make_mesh(4), AXIS)
    check_lookup(
        lambda stacked: embedding_lookup(stacked, batch, layout),
        random_tables(rng, layout),
        features,
        layout,
        rng,
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_a_missing_table_is_named_with_those_there_are(sharded: bool):
    layout = one_table_layout()
    rng = np.random.default_rng(0)
    buffers, _ = random_batch(rng, layout)
    lookup = embedding_lookup
    if sharded:
        lookup = functools.partial(
            sharded_embedding_lookup, mesh=make_mesh(1), axis=AXIS
        )
    with pytest.raises(InputError, match=r"no table of stack 't'; got \['other'\]"):
        lookup({"other": jnp.zeros((8, 8))}, buffers, layout)


def test_tables_put_behind_one_another_by_the_hosts_are_told_how_to_travel():
    topology = Topology(
        global_device_count=2, local_device_count=1, num_sc_per_device=2
    )
    layout = make_layout(
        [TableSpec(name="t", vocabulary_size=8, embedding_dim=2)],
        [FeatureSpec(name="f", table="t")],
        topology=topology,
        batch_size=2,
    )
    buffers, _ = random_batch(np.random.default_rng(0), layout)
    stack = layout.stacks[0]
    twice = np.zeros((2 * stack.vocabulary_size, stack.embedding_dim), np.float32)
    mesh = make_mesh(2)
    tables = to_global_arrays({"t": twice}, mesh, AXIS)
    both = jax.tree.map(lambda x: np.concatenate([x, x]), without_counts(buffers))
    batch = to_global_arrays(both, mesh, AXIS)
    with pytest.raises(InputError, match="to_global_arrays is for batches") as found:
        sharded_embedding_lookup(tables, batch, layout, mesh=mesh, axis=AXIS)
    assert f"NamedSharding(mesh, PartitionSpec({AXIS!r}))" in str(found.value)
