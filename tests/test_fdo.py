import csv
import io
import json
from unittest import mock

import jax
import numpy as np
import pytest
from jax_tpu_embedding.sparsecore.lib.fdo import csv_file_fdo_client, file_fdo_client
from jax_tpu_embedding.sparsecore.lib.nn import embedding

from grain_sparsecore.errors import ConfigError
from grain_sparsecore.fdo import STAMP_NAME, export_fdo, import_fdo
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout
from grain_sparsecore.warm_start import load_start_limits

CLIENTS = {
    "npz": file_fdo_client.NPZFileFDOClient,
    "csv": csv_file_fdo_client.CSVFileFDOClient,
}


def layout_of(names=("a", "b"), *, devices=4, hosts=2, sc=2, **options):
    return make_layout(
        [
            TableSpec(name=n, vocabulary_size=500, embedding_dim=8, **options)
            for n in names
        ],
        [FeatureSpec(name=n, table=n) for n in names],
        topology=Topology(
            global_device_count=devices,
            local_device_count=devices // hosts,
            num_sc_per_device=sc,
        ),
        batch_size=16,
    )


def limits_of(ids, unique, size):
    return StackLimits(
        max_ids_per_partition=ids,
        max_unique_ids_per_partition=unique,
        buffer_size_per_device=size,
    )


def stats_of(ids, unique, per_sc, *, devices=2, partitions=8, sc=2):
    """Statistics of one process whose maxima are given by stack."""

    def spread(values, length):
        return {
            name: np.arange(value - length + 1, value + 1).clip(0).astype(np.int32)
            for name, value in values.items()
        }

    return embedding.SparseDenseMatmulInputStats(
        max_ids_per_partition=spread(ids, devices * partitions),
        max_unique_ids_per_partition=spread(unique, devices * partitions),
        required_buffer_size_per_sc=spread(per_sc, devices * sc),
        id_drop_counters=dict.fromkeys(ids, 0),
    )


def publish(client, process, stats):
    for one in stats:
        if isinstance(client, csv_file_fdo_client.CSVFileFDOClient):
            # It cannot write single numbers, which these are.
            one.id_drop_counters.clear()
        client.record(one)
    with mock.patch.object(jax, "process_index", return_value=process):
        client.publish()


@pytest.mark.parametrize("kind", CLIENTS)
def test_what_their_clients_publish_is_read(tmp_path, kind):
    # Two batches of history on process 0, one on process 1.
    history = [
        stats_of({"a": 30, "b": 5}, {"a": 20, "b": 5}, {"a": 64, "b": 16}),
        stats_of({"a": 7, "b": 9}, {"a": 21, "b": 2}, {"a": 24, "b": 40}),
    ]
    publish(CLIENTS[kind](str(tmp_path)), 0, history)
    last = stats_of({"a": 31, "b": 1}, {"a": 1, "b": 1}, {"a": 8, "b": 8})
    publish(CLIENTS[kind](str(tmp_path)), 1, [last])
    got = import_fdo(tmp_path, layout=layout_of())
    assert got.limits == Limits({"a": limits_of(31, 21, 128), "b": limits_of(9, 5, 80)})
    assert len(got.used) == 2
    assert got.skipped == {}


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_restart_does_not_lower_the_limits(tmp_path, kind):
    # Their loader takes the newest file of a process: 2. The data needed 5.
    for most in (5, 2):
        stats = stats_of({"a": most}, {"a": most}, {"a": 8 * most})
        publish(CLIENTS[kind](str(tmp_path)), 0, [stats])
    theirs = CLIENTS[kind](str(tmp_path)).load()
    assert np.max(theirs.max_ids_per_partition["a"]) == 2
    got = import_fdo(tmp_path, layout=layout_of("a"))
    assert got.limits["a"] == limits_of(5, 5, 80)


@pytest.mark.parametrize("kind", CLIENTS)
def test_what_is_exported_their_clients_load(tmp_path, kind):
    layout = layout_of()
    limits = Limits({"a": limits_of(31, 21, 128), "b": limits_of(9, 5, 80)})
    path = export_fdo(tmp_path / "new", limits, layout=layout, format=kind)
    assert path.suffix == f".{kind}"
    loaded = CLIENTS[kind](str(path.parent)).load()
    for name, value in limits.items():
        ids = loaded.max_ids_per_partition[name]
        assert ids.shape == (2 * 8,)
        assert np.max(ids) == value.max_ids_per_partition
        unique = loaded.max_unique_ids_per_partition[name]
        assert np.max(unique) == value.max_unique_ids_per_partition
        size = loaded.get_required_buffer_size_per_device(name, 2)
        assert size == value.buffer_size_per_device
    assert import_fdo(path.parent, layout=layout).limits == limits


def test_files_of_another_topology_and_process_are_left_out(tmp_path):
    client = file_fdo_client.NPZFileFDOClient
    publish(client(str(tmp_path)), 0, [stats_of({"a": 5}, {"a": 5}, {"a": 40})])
    publish(client(str(tmp_path)), 7, [stats_of({"a": 99}, {"a": 9}, {"a": 800})])
    wide = stats_of({"a": 77}, {"a": 7}, {"a": 800}, partitions=16)
    publish(client(str(tmp_path)), 1, [wide])
    got = import_fdo(tmp_path, layout=layout_of("a"))
    assert got.limits["a"] == limits_of(5, 5, 80)
    assert [name[:11] for name in got.used] == ["fdo_stats_0"]
    reasons = sorted(got.skipped.values())
    assert reasons == [
        "a_max_ids has 32 numbers, but 2 local devices with 2 SparseCores each and 8 "
        "partitions make 16",
        "written by process 7, but the job has 2",
    ]
    with pytest.raises(ConfigError) as error:
        import_fdo(tmp_path, layout=layout_of("a", devices=16))
    assert "no file belongs to this job. fdo_stats_0" in str(error.value)
    assert "make 256" in str(error.value)


def test_a_stamp_of_another_layout_is_refused(tmp_path):
    limits = Limits({"a": limits_of(3, 3, 32)})
    export_fdo(tmp_path, limits, layout=layout_of("a"))
    other = layout_of("a", devices=8)
    with pytest.raises(ConfigError, match="num_partitions: 8 in the file, 16 here"):
        import_fdo(tmp_path, layout=other)
    (tmp_path / STAMP_NAME).write_text("{")
    with pytest.raises(ConfigError, match=r"fdo_topology.json' cannot be read as JSON"):
        import_fdo(tmp_path, layout=other)


def test_nothing_there_yet(tmp_path):
    with pytest.raises(ConfigError, match="has no statistics yet"):
        import_fdo(tmp_path, layout=layout_of("a"))
    with pytest.raises(ConfigError, match=r"nowhere' does not exist"):
        import_fdo(tmp_path / "nowhere", layout=layout_of("a"))


def save(folder, **arrays):
    np.savez(folder / "fdo_stats_0_1.npz", **arrays)


def test_without_buffer_sizes_the_theoretical_one_is_taken(tmp_path):
    save(tmp_path, a_max_ids=np.full(16, 9), a_max_unique_ids=np.full(16, 4))
    got = import_fdo(tmp_path, layout=layout_of("ab"))
    # 9 ids are 16 slots, on 2 SparseCores with 8 partitions. b starts as configured.
    assert got.limits == Limits({"a": limits_of(9, 4, 256), "b": limits_of(1, 1, 16)})


def test_buffers_of_several_minibatches_are_larger_than_one_needs(tmp_path):
    save(
        tmp_path,
        a_max_ids=np.full(16, 9),
        a_max_unique_ids=np.full(16, 4),
        a_required_buffer_size=np.full(4, 400),
    )
    layout = layout_of("a")
    # As above, one takes 128 slots of each SparseCore at most.
    assert import_fdo(tmp_path, layout=layout).limits["a"] == limits_of(9, 4, 256)
    for minibatches, size in ((2, 512), (64, 800)):
        got = import_fdo(tmp_path, layout=layout, minibatches=minibatches)
        assert got.limits["a"] == limits_of(9, 4, size)
        started = load_start_limits([tmp_path], layout=layout, minibatches=minibatches)
        assert started == got.limits


def test_numbers_below_the_start_and_single_numbers(tmp_path):
    save(
        tmp_path,
        a_max_ids=np.int64(0),
        a_max_unique_ids=np.zeros(1, int),
        a_required_buffer_size=np.array([0.0]),
    )
    layout = layout_of("a", max_ids_per_partition=3)
    assert import_fdo(tmp_path, layout=layout).limits["a"] == limits_of(3, 1, 16)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"c_max_ids": np.ones(16, int)}, r"has a stack 'c', .* among a, b\. Stack"),
        ({"a_most": np.ones(16, int)}, "key 'a_most' ends in none of"),
        ({"_max_ids": np.ones(16, int)}, "key '_max_ids' ends in none of"),
        ({"a_max_ids": np.full(16, 2**31)}, "holds 2147483648, which does not fit"),
        ({"a_max_ids": np.full(16, "x")}, "has dtype <U1, not integers"),
    ],
)
def test_contents_that_are_refused(tmp_path, arrays, message):
    save(tmp_path, **arrays)
    with pytest.raises(ConfigError, match=message) as error:
        import_fdo(tmp_path, layout=layout_of())
    assert "fdo_stats_0_1.npz" in str(error.value)


_NOISE = np.random.default_rng(0).integers(0, 99, 5000)


def _array_bytes(save, *args, **kwargs):
    file = io.BytesIO()
    save(file, *args, **kwargs)
    return file.getvalue()


def _torn(data):
    middle = len(data) // 2
    return data[:middle] + bytes(64) + data[middle + 64 :]


@pytest.mark.parametrize("content", ["", "[" * 200_000, "1" * 5000, None])
def test_a_damaged_stamp_is_named(tmp_path, content):
    export_fdo(tmp_path, Limits({"a": limits_of(3, 3, 32)}), layout=layout_of("a"))
    stamp = tmp_path / "fdo_topology.json"
    stamp.unlink()
    if content is None:
        stamp.mkdir()
    else:
        stamp.write_text(content)
    with pytest.raises(ConfigError, match=r"fdo_topology.json' cannot be read as JSON"):
        import_fdo(tmp_path, layout=layout_of("a"))


def test_csv_rows_of_large_jobs(tmp_path):
    layout = layout_of("a", devices=8192, hosts=2048, sc=4)
    limits = Limits({"a": limits_of(1000, 1000, 16_384_000)})
    with pytest.raises(ConfigError, match=r"a_max_ids has .* at most; export npz"):
        export_fdo(tmp_path / "csv", limits, layout=layout, format="csv")
    assert not (tmp_path / "csv").exists()
    export_fdo(tmp_path / "npz", limits, layout=layout)
    assert import_fdo(tmp_path / "npz", layout=layout).limits == limits
    # Others may have written such rows.
    before = csv.field_size_limit()
    (tmp_path / "csv").mkdir()
    with np.load(next((tmp_path / "npz").glob("*.npz"))) as arrays:
        rows = [f"{key},{' '.join(map(str, arrays[key]))}" for key in arrays.files]
    path = tmp_path / "csv" / "fdo_stats_0_1.csv"
    path.write_text("\n".join(["key,values", *rows]))
    assert import_fdo(tmp_path / "csv", layout=layout).limits == limits
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("fdo_stats_0_1.npz", b""),
        ("fdo_stats_0_1.npz", b"PK\x03\x04 cut"),
        ("fdo_stats_0_1.csv", b"key,values\na_max_ids,1 2\na_max_ids,1\n"),
        ("fdo_stats_0_1.csv", b"key,values\na_max_ids\n"),
        ("fdo_stats_0_1.csv", b"key,values\na_max_ids,1 x\n"),
        ("fdo_stats_0_1.csv", b"key,values\na_max_ids,1" + 30 * b"0" + b"\n"),
        ("fdo_stats_0_1.npz", _array_bytes(np.save, np.arange(3))),
        ("fdo_stats_0_1.npz", _array_bytes(np.savez, a_max_ids=np.array([np.nan]))),
        ("fdo_stats_0_1.npz", _array_bytes(np.savez, a_max_ids=np.array([np.inf]))),
        ("fdo_stats_0_1.npz", _torn(_array_bytes(np.savez_compressed, a=_NOISE))),
    ],
)
def test_damaged_files_are_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{name}' cannot be read: .* remove the"):
        import_fdo(tmp_path, layout=layout_of("a"))


def test_pickled_arrays_are_not_run(tmp_path):
    save(tmp_path, a_max_ids=np.array([{"x": 1}], dtype=object))
    with pytest.raises(ConfigError, match="cannot be read"):
        import_fdo(tmp_path, layout=layout_of("a"))


def test_export_refuses(tmp_path):
    limits = Limits({"a": limits_of(3, 3, 32)})
    with pytest.raises(ConfigError, match="'xml' is not one of npz, csv"):
        export_fdo(tmp_path, limits, layout=layout_of("a"), format="xml")
    with pytest.raises(ConfigError, match="stack 'b' has no limits"):
        export_fdo(tmp_path, limits, layout=layout_of())


def test_the_stamp_is_json(tmp_path):
    export_fdo(tmp_path, Limits.start(layout_of("a")), layout=layout_of("a"))
    stamp = json.loads((tmp_path / STAMP_NAME).read_text())
    assert stamp["topology"]["num_partitions"] == 8
