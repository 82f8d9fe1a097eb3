import dataclasses

import pytest

from grain_sparsecore.errors import ConfigError
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology

TABLE = {"name": "item", "vocabulary_size": 100, "embedding_dim": 8}
FEATURE = {"name": "clicks", "table": "item"}
TOPOLOGY = {"global_device_count": 8, "local_device_count": 4, "num_sc_per_device": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "table: name must be a non-empty string, not ''"),
        ({"vocabulary_size": 0}, "table 'item': vocabulary_size=0 is out of range"),
        ({"vocabulary_size": 2**31}, "it must be from 1 to 2147483647"),
        ({"vocabulary_size": 10.0}, "must be an integer, not 10.0 (float)"),
        ({"vocabulary_size": True}, "must be an integer, not True (bool)"),
        ({"embedding_dim": -1}, "embedding_dim=-1 is out of range"),
        ({"combiner": "max"}, "combiner='max' is not one of sum, mean, sqrtn"),
        ({"optimizer": ""}, "optimizer must be a non-empty string"),
        ({"stack": ""}, "stack must be a non-empty string"),
        ({"max_ids_per_partition": 0}, "max_ids_per_partition=0 is out of range"),
        ({"max_unique_ids_per_partition": 0}, "max_unique_ids_per_partition=0"),
        (
            {"suggested_coo_buffer_size_per_device": 0},
            "suggested_coo_buffer_size_per_device=0 is out of range",
        ),
    ],
)
def test_table_spec_refuses(change, message):
    with pytest.raises(ConfigError) as error:
        TableSpec(**{**TABLE, **change})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, "feature: name must be a non-empty string, not None"),
        ({"table": ""}, "feature 'clicks': table must be a non-empty string"),
        ({"weights": ""}, "weights must be a non-empty string"),
        ({"on_invalid_id": "wrap"}, "on_invalid_id='wrap' is not one of error, drop"),
        ({"on_invalid_weight": "drop"}, "on_invalid_weight='drop' is not one of error"),
        ({"padding_id": 1.5}, "padding_id must be an integer, not 1.5"),
        ({"hash_seed": -1}, "hash_seed=-1 is out of range"),
        ({"hash": 1}, "hash must be true or false, not 1"),
        ({"allow_negative_weights": "no"}, "allow_negative_weights must be true or"),
    ],
)
def test_feature_spec_refuses(change, message):
    with pytest.raises(ConfigError) as error:
        FeatureSpec(**{**FEATURE, **change})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_device_count": 0}, "global_device_count=0 is out of range"),
        ({"local_device_count": 3}, "is not a multiple of local_device_count=3"),
        (
            {"global_device_count": 12, "num_sc_per_device": 2},
            "= 24 partitions is not a power of two; the nearest are 16 and 32",
        ),
        ({"num_sc_per_device": 3}, "= 24 partitions is not a power of two"),
    ],
)
def test_topology_refuses(change, message):
    with pytest.raises(ConfigError) as error:
        Topology(**{**TOPOLOGY, **change})
    assert message in str(error.value)


def test_topology_counts():
    topology = Topology(**TOPOLOGY)
    assert topology.num_partitions == 32
    assert topology.local_sc_count == 16
    assert topology.num_hosts == 2


def test_topology_of_three_cores_and_no_device_is_legal_only_as_a_power_of_two():
    assert Topology(**{**TOPOLOGY, "num_sc_per_device": 1}).num_partitions == 8


def test_topology_from_jax_counts_the_devices_of_this_process():
    # tests/conftest.py gives this process eight CPU devices.
    topology = Topology.from_jax(num_sc_per_device=2)
    assert dataclasses.astuple(topology) == (8, 8, 2)


def test_ids_key_defaults_to_the_name():
    assert FeatureSpec(**FEATURE).ids == "clicks"
    assert FeatureSpec(**FEATURE, ids="user/clicks").ids == "user/clicks"
