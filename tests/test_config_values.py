"""Configurations as values: equal, hashed, checked also where Python makes them."""

import copy
import dataclasses
import json
import pickle
import tomllib
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from grain_sparsecore.config import (
    Config,
    CriteoOptions,
    LimitsConfig,
    ParquetOptions,
    PipelineConfig,
    PythonOptions,
    SourceConfig,
    SyntheticOptions,
    TopologyConfig,
    TrainConfig,
    load_config,
    read_config,
)
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import GrowthPolicy
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from tests.config_files import GOOD, write


def small(**sections: object) -> Config:
    return Config(
        **{
            "topology": TopologyConfig(num_sc_per_device=2),
            "pipeline": PipelineConfig(batch_size=16),
            "tables": (
                TableSpec(name="a", vocabulary_size=8, embedding_dim=8),
                TableSpec(name="b", vocabulary_size=8, embedding_dim=8),
            ),
            "features": (
                FeatureSpec(name="a", table="a"),
                FeatureSpec(name="b", table="b"),
            ),
            **sections,
        }  # type: ignore[arg-type]
    )


def test_equality_and_hash_are_by_value_whatever_the_order() -> None:
    config = small()
    turned = small(tables=config.tables[::-1], features=list(config.features[::-1]))
    assert config == turned
    assert hash(config) == hash(turned)
    assert config.canonical() == turned.canonical()
    assert config != small(pipeline=PipelineConfig(batch_size=32))
    assert config != small(train=TrainConfig(seed=1))
    assert config != "config"
    # 300 and 300.0 are one value.
    same = PipelineConfig(batch_size=16, timeout_seconds=300)
    assert config == small(pipeline=same)


def test_canonical_is_json_and_complete(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    canonical = config.canonical()
    assert json.loads(json.dumps(canonical)) == canonical
    assert set(canonical) == {field.name for field in dataclasses.fields(Config)}
    assert canonical["pipeline"]["batch_size"] == 64
    assert canonical["source"]["options"]["ids_per_sample"] == {
        "history": [0, 5],
        "tags": 3,
    }
    assert canonical["tables"]["item"]["combiner"] == "mean"


def test_a_config_travels_to_worker_processes(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_made_in_python_reports_all_that_does_not_go_together() -> None:
    with pytest.raises(ConfigError) as caught:
        small(
            features=(
                FeatureSpec(name="a", table="c"),
                FeatureSpec(name="a", table="a"),
            ),
            pipeline=PipelineConfig(batch_size=16, key="label"),
        )
    text = str(caught.value)
    assert "feature[1].name: 'a' is also the name of feature[0]" in text
    assert "feature[0].table: feature 'a': there is no table 'c'" in text
    assert "table[1].name: table 'b' is read by no feature" in text
    assert "pipeline.key: 'label' is also the key of an input" in text


def test_counts_that_are_left_out_come_from_the_running_job() -> None:
    # tests run on eight CPU devices
    assert small().layout().topology == Topology(
        global_device_count=8, local_device_count=8, num_sc_per_device=2
    )
    topology = Topology(
        global_device_count=2, local_device_count=1, num_sc_per_device=2
    )
    assert small().layout(topology).topology == topology


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: SourceConfig(kind="parquet"), "kind 'parquet' needs 'path'"),
        (
            lambda: SourceConfig(kind="parquet", options={"pth": "x"}),
            "'pth' is no option of kind 'parquet'; did you mean 'path'?",
        ),
        (
            lambda: SourceConfig(kind="parquet", options=PythonOptions(function="a:b")),
            "options must be a table of keys",
        ),
        (lambda: ParquetOptions(path=""), "path must be a non-empty string"),
        (lambda: ParquetOptions(path=()), "path is an empty list"),
        (lambda: ParquetOptions(path=["a", "a"]), "path holds 'a' twice"),  # type: ignore[arg-type]
        (lambda: CriteoOptions(path="a", hash_seed=-1), "hash_seed=-1 must be"),
        (lambda: PythonOptions(function="ab"), "must read 'module:function'"),
        (
            lambda: PythonOptions(function="a:b", args={"x": object()}),
            "must hold numbers, strings, lists and tables",
        ),
        (
            lambda: SyntheticOptions(ids_per_sample={"a": (1, 2, 3)}),  # type: ignore[dict-item]
            "must be a number or [low, high]",
        ),
        (lambda: SyntheticOptions(skew=3), "skew must be SkewOptions"),  # type: ignore[arg-type]
        (lambda: LimitsConfig(growth="exact"), "growth must be a GrowthPolicy"),  # type: ignore[arg-type]
        (lambda: PipelineConfig(batch_size=1.5), "batch_size must be an integer"),  # type: ignore[arg-type]
        (lambda: GrowthPolicy(factor="2"), "factor must be a number, not '2'"),  # type: ignore[arg-type]
    ],
)
def test_sections_made_in_python_are_checked(build, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert expected in str(caught.value)


def test_read_config_leaves_its_input_alone() -> None:
    data = {
        "topology": {"num_sc_per_device": 2},
        "pipeline": {"batch_size": 16},
        "limits": {"window": 3},
        "table": [{"name": "a", "vocabulary_size": 8, "embedding_dim": 8}],
        "feature": [{"name": "a", "table": "a"}],
    }
    before = json.dumps(data)
    config = read_config(data, origin="test", overrides=["table[0].embedding_dim=16"])
    assert config.pipeline.window == 3
    assert config.tables[0].embedding_dim == 16
    assert json.dumps(data) == before


@pytest.mark.parametrize(
    ("kind", "options", "ids", "label", "expected"),
    [
        ("synthetic", {}, "a", "a", "'a' would be the key of the label and of ids"),
        (
            "synthetic",
            {"dense": 2},
            "dense",
            "label",
            "'dense' would be the key of ids and of the dense values",
        ),
        (
            "criteo_tsv",
            {"path": "x"},
            "C1",
            "dense",
            "'dense' would be the key of the label and of the dense values",
        ),
        ("parquet", {"path": "x"}, "x/a", "x", "'x' cannot hold both a value and 'x/"),
    ],
)
def test_a_key_means_one_thing(
    kind: str, options: dict, ids: str, label: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        small(
            tables=(TableSpec(name="a", vocabulary_size=8, embedding_dim=8),),
            features=(FeatureSpec(name="a", table="a", ids=ids),),
            source=SourceConfig(kind=kind, options=options),
            train=TrainConfig(label=label),
        )
    assert expected in str(caught.value)


def test_a_label_of_a_file_may_also_be_an_id() -> None:
    config = small(
        source=SourceConfig(kind="parquet", options={"path": "x"}),
        train=TrainConfig(label="a"),
    )
    assert config.train.label == config.features[0].ids


JUNK = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        2**70,
        1.5,
        float("nan"),
        "",
        "x",
        [],
        [1],
        ["x"],
        [{}],
        {},
        {"name": 3},
        {"x": [1]},
        [[1, 2]],
    ]
)


@hypothesis.given(data=st.data())
def test_whatever_a_file_says_the_answer_is_a_config_or_a_config_error(
    data: st.DataObject,
) -> None:
    contents: Any = tomllib.loads(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        here = contents
        while True:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(here[key], dict | list) and data.draw(st.booleans()):
                here = here[key]
                continue
            here[key] = copy.deepcopy(data.draw(JUNK))
            break
    text, config = "test: ", None
    try:
        config = read_config(contents, origin="test")
    except ConfigError as error:
        text = str(error)
    assert text.startswith("test: ")
    assert config is None or pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {
                "topology": Topology(
                    global_device_count=1, local_device_count=1, num_sc_per_device=2
                )
            },
            "topology: must be a TopologyConfig, not a Topology. A Topology has all",
        ),
        (
            {"pipeline": {"batch_size": 4}},
            "pipeline: must be a PipelineConfig, not a d",
        ),
        ({"source": {"kind": "x"}}, "source: must be a SourceConfig, not a dict"),
        (
            {"tables": TableSpec(name="t", vocabulary_size=8, embedding_dim=8)},
            "tables: must be a list of TableSpec, not a TableSpec",
        ),
        (
            {"features": FeatureSpec(name="f", table="t")},
            "features: must be a list of FeatureSpec, not a FeatureSpec",
        ),
        ({"tables": ["t"]}, "tables[0]: must be a TableSpec, not a str"),
    ],
)
def test_a_section_of_another_type_is_refused(sections: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as found:
        small(**sections)
    assert expected in str(found.value)


def test_caps_of_another_type_are_told_where_theirs_is() -> None:
    caps: Any = {"item": {"max_ids_cap": 8}}
    with pytest.raises(ConfigError, match=r"grain_sparsecore\.overflow\.StackCaps"):
        LimitsConfig(stack=caps)
