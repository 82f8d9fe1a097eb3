import itertools

import pytest

from grain_sparsecore.errors import ConfigError
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout, theoretical_buffer_size


def topology(devices=1, local=None, sc=2):
    return Topology(
        global_device_count=devices,
        local_device_count=local or devices,
        num_sc_per_device=sc,
    )


def table(name, vocabulary=64, dim=8, **kwargs):
    return TableSpec(name=name, vocabulary_size=vocabulary, embedding_dim=dim, **kwargs)


def feature(name, table_name):
    return FeatureSpec(name=name, table=table_name)


def layout_of(tables, features, *, batch_size=4, **kwargs):
    kwargs.setdefault("topology", topology())
    return make_layout(tables, features, batch_size=batch_size, **kwargs)


def test_features_of_one_table_are_stacked_in_the_order_of_their_names():
    layout = layout_of([table("t")], [feature("b", "t"), feature("a", "t")])
    (stack,) = layout.stacks
    assert [(f.name, f.row_offset) for f in stack.features] == [("a", 0), ("b", 4)]
    assert stack.name == "t"
    assert stack.samples_per_sc == 4
    assert [f.sample_offset for f in stack.features] == [0, 2]


def test_row_offsets_count_the_global_batch_and_sample_offsets_the_local_one():
    layout = layout_of(
        [table("t")],
        [feature("a", "t"), feature("b", "t"), feature("c", "t")],
        topology=topology(devices=4, local=2, sc=2),
        batch_size=8,
    )
    features = layout.stacks[0].features
    assert [f.row_offset for f in features] == [0, 16, 32]
    assert [f.sample_offset for f in features] == [0, 2, 4]
    assert layout.stacks[0].samples_per_sc == 6
    assert layout.samples_per_sc_per_feature == 2


@pytest.mark.parametrize(
    ("vocabulary", "padded"), [(1, 16), (31, 32), (33, 48), (65, 80), (100, 112)]
)
def test_vocabularies_are_padded_to_eight_rows_a_partition(vocabulary, padded):
    layout = layout_of([table("t", vocabulary)], [feature("f", "t")])
    assert layout.stacks[0].tables[0].padded_vocabulary_size == padded
    assert layout.stacks[0].vocabulary_size == padded


def test_stacked_tables_are_offset_and_rotated():
    tables = [table(n, v, stack="auto") for n, v in (("a", 100), ("b", 5), ("c", 20))]
    layout = layout_of(tables, [feature(n, n) for n in "abc"])
    (stack,) = layout.stacks
    assert stack.name == "a_b_c"
    # 100, 5 and 20 rows pad to 112, 16 and 32: 56, 8 and 16 rows a partition.
    assert [t.row_offset_in_shard for t in stack.tables] == [0, 56, 64]
    assert [f.col_offset for f in stack.features] == [0, 112, 128]
    assert [f.col_shift for f in stack.features] == [0, 0, 0]  # 2 and 4 mod N = 2
    assert stack.vocabulary_size == 160
    wide = layout_of(
        tables, [feature(n, n) for n in "abc"], topology=topology(4), batch_size=8
    )
    assert [f.col_shift for f in wide.stacks[0].features] == [0, 2, 4]
    turned = layout_of(
        tables,
        [feature(n, n) for n in "abc"],
        topology=topology(4),
        batch_size=8,
        rotation=3,
    )
    assert [f.col_shift for f in turned.stacks[0].features] == [0, 3, 6]


def test_auto_stacks_follow_padded_dim_combiner_and_optimizer():
    tables = [
        table("a", stack="auto", dim=5),
        table("b", stack="auto", dim=7),
        table("c", stack="auto", combiner="mean"),
        table("d", stack="auto", optimizer="sgd"),
        table("e", stack="auto", dim=16),
        table("f"),
    ]
    layout = layout_of(tables, [feature(n, n) for n in "abcdef"])
    assert layout.stack_names == ("a_b", "c", "d", "e", "f")
    assert layout.stack_by_name["a_b"].embedding_dim == 8
    assert layout.stack_of_feature["b"].name == "a_b"


def test_auto_stacks_split_where_activations_pass_the_limit():
    tables = [table(n, stack="auto") for n in "abc"]
    features = [feature(n, n) for n in "abc"]
    # Two samples a SparseCore of 8 float32: 64 bytes a table.
    split = layout_of(tables, features, activation_bytes_limit=128)
    assert split.stack_names == ("a_b", "c")
    whole = layout_of(tables, features, activation_bytes_limit=192)
    assert whole.stack_names == ("a_b_c",)


def test_long_stack_names_are_cut_and_hashed():
    names = [f"a_table_with_a_long_name_{i}" for i in range(4)]
    layout = layout_of(
        [table(n, stack="auto") for n in names], [feature(n, n) for n in names]
    )
    (name,) = layout.stack_names
    assert name.startswith("_".join(names)[:50] + "...")
    assert len(name) == 50 + 3 + 12


def test_declaration_order_changes_nothing():
    tables = [
        table("a", stack="s"),
        table("b", 9, stack="s"),
        table("c", stack="auto"),
        table("d", stack="auto"),
    ]
    features = [feature(f"{t}{i}", t) for t in "abcd" for i in range(2)]
    expected = layout_of(tables, features)
    assert [f.index for f in expected.features] == list(range(8))
    for order in itertools.permutations(tables):
        layout = layout_of(order, features[::-1])
        assert layout == expected
        assert layout.fingerprint == expected.fingerprint


def test_limits_of_stacked_tables_add_up():
    tables = [
        table(
            n,
            stack="s",
            max_ids_per_partition=limit,
            max_unique_ids_per_partition=limit // 2,
            suggested_coo_buffer_size_per_device=limit,
        )
        for n, limit in (("a", 100), ("b", 300))
    ]
    (stack,) = layout_of(tables, [feature("a", "a"), feature("b", "b")]).stacks
    assert stack.start_max_ids_per_partition == 400
    assert stack.start_max_unique_ids_per_partition == 200
    assert stack.start_buffer_size_per_device == 400


def test_buffers_start_at_the_smallest_legal_size():
    (stack,) = layout_of([table("t")], [feature("f", "t")]).stacks
    assert stack.start_buffer_size_per_device == 16
    (stack,) = layout_of(
        [
            table(
                "t",
                max_ids_per_partition=9,
                suggested_coo_buffer_size_per_device=33,
            )
        ],
        [feature("f", "t")],
    ).stacks
    assert stack.start_buffer_size_per_device == 48


def test_theoretical_buffer_size():
    eight = Topology(global_device_count=2, local_device_count=1, num_sc_per_device=4)
    assert theoretical_buffer_size(17, eight) == 768


@pytest.mark.parametrize(
    ("tables", "features", "options", "message"),
    [
        (
            [table("t"), table("t", 65)],
            [feature("f", "t")],
            {},
            "two tables are named 't': vocabulary_size 64 and 65",
        ),
        (
            [table("t")],
            [feature("f", "t"), FeatureSpec(name="f", table="t", ids="g")],
            {},
            "two features are named 'f': ids 'f' and 'g'",
        ),
        (
            [table("t")],
            [feature("f", "t")] * 2,
            {},
            "two features are named 'f': with equal fields",
        ),
        ([], [feature("f", "t")], {}, "there is no table"),
        ([table("t")], [], {}, "there is no feature"),
        (
            [table("item")],
            [feature("f", "itme")],
            {},
            "feature 'f': there is no table 'itme'; did you mean 'item'?",
        ),
        (
            [table("t"), table("u")],
            [feature("f", "t")],
            {},
            "table 'u' is read by no feature",
        ),
        (
            [table("a", stack="s"), table("b", stack="s", combiner="mean")],
            [feature("a", "a"), feature("b", "b")],
            {},
            "stack 's': tables 'a' and 'b' differ in combiner ('sum' and 'mean')",
        ),
        (
            [table("a", stack="s"), table("b", stack="s", dim=9)],
            [feature("a", "a"), feature("b", "b")],
            {},
            "differ in embedding_dim rounded up to 8 (8 and 16)",
        ),
        (
            [table("a", stack="b"), table("b")],
            [feature("a", "a"), feature("b", "b")],
            {},
            "two stacks are named 'b'",
        ),
        (
            [table("t")],
            [feature("f", "t")],
            {"batch_size": 3},
            "batch_size=3 (samples per host) does not divide over 1 local devices * 2 "
            "SparseCores = 2; the nearest legal sizes: 2 and 4",
        ),
        (
            [table("t")],
            [feature("f", "t")],
            {"batch_size": 0},
            "the nearest legal sizes: 2",
        ),
        (
            [table("t")],
            [feature("f", "t")],
            {"batch_size": 4.0},
            "batch_size must be an integer (samples per host), not 4.0",
        ),
        (
            [table("t", max_ids_per_partition=2**20)],
            [feature("f", "t")],
            {"topology": topology(512, 1, 4)},
            "needs a buffer of up to 8589934592 slots",
        ),
        (
            [table("t", max_ids_per_partition=2**20)],
            [feature("f", "t")],
            {"topology": topology(512, 1, 4)},
            "the largest value that fits is 262136",
        ),
        (
            [table("t", suggested_coo_buffer_size_per_device=100_000)],
            [feature("f", "t")],
            {},
            "(tables ['t']): suggested_coo_buffer_size_per_device=100000 is above 32",
        ),
    ],
)
def test_refuses(tables, features, options, message):
    with pytest.raises(ConfigError) as error:
        layout_of(tables, features, **options)
    assert message in str(error.value)
