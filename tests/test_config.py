"""Configuration files: strict, all errors at once, equal by value."""

from pathlib import Path

import pytest

from grain_sparsecore.config import (
    Config,
    LimitsConfig,
    PipelineConfig,
    SkewOptions,
    SourceConfig,
    SyntheticOptions,
    TopologyConfig,
    TrainConfig,
    load_config,
)
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import GrowthPolicy
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from tests.config_files import GOOD, errors_of, write


def test_a_good_file_becomes_dataclasses(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD))
    assert config == Config(
        topology=TopologyConfig(
            num_sc_per_device=4, global_device_count=8, local_device_count=4
        ),
        pipeline=PipelineConfig(batch_size=64, window=4, timeout_seconds=20.0),
        limits=LimitsConfig(growth=GrowthPolicy(kind="headroom", factor=2.0)),
        source=SourceConfig(
            kind="synthetic",
            options=SyntheticOptions(
                num_records=1000,
                ids_per_sample={"history": (0, 5), "tags": 3},
                skew=SkewOptions(host=1, after=10, stride=8),
            ),
        ),
        train=TrainConfig(steps=7, dense=("dense",), hidden=(16,)),
        tables=(
            TableSpec(
                name="item", vocabulary_size=1000, embedding_dim=16, combiner="mean"
            ),
            TableSpec(name="tag", vocabulary_size=10, embedding_dim=8),
        ),
        features=(
            FeatureSpec(
                name="history",
                table="item",
                ids="user/history",
                weights="user/history_weights",
            ),
            FeatureSpec(name="tags", table="tag"),
        ),
    )
    assert config.features[0].weights == "user/history_weights"
    assert config.source is not None
    assert config.source.options.skew == SkewOptions(host=1, after=10, stride=8)
    assert config.train.hidden == (16,)
    assert config.limits.growth.factor == 2.0
    assert config.layout().topology == Topology(
        global_device_count=8, local_device_count=4, num_sc_per_device=4
    )
    assert config.layout().batch_size == 64


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "num_sc_per_device = 4",
            "num_sc_per_device = 3",
            "topology.num_sc_per_device: num_sc_per_device=3 must be a power of two: "
            "4 on TPU v5p, 2 on v6e and TPU7x.",
        ),
        (
            "global_device_count = 8",
            "global_device_count = 6",
            "topology: global_device_count=6 is not a multiple of "
            "local_device_count=4; every host must have the same number of devices.",
        ),
        (
            "batch_size = 64",
            "batch_size = 0",
            "pipeline.batch_size: batch_size=0 must be from 1 to 2147483647. It counts "
            "the samples of one host.",
        ),
        (
            "batch_size = 64",
            "batch_size = 40",
            "batch_size=40 (samples per host) does not divide over 4 local devices * "
            "4 SparseCores = 16; the nearest legal sizes: 32 and 48.",
        ),
        (
            "batch_size = 64",
            "batch_sise = 64",
            "pipeline.batch_sise: there is no such key; did you mean 'batch_size'?",
        ),
        (
            "batch_size = 64",
            "batch_size = 64\nlearning_rate = 1",
            "pipeline.learning_rate: there is no such key; did you mean "
            "'train.learning_rate'?",
        ),
        (
            "timeout_seconds = 20",
            "timeout_seconds = true",
            "pipeline.timeout_seconds: timeout_seconds must be a number, not True "
            "(bool).",
        ),
        (
            "timeout_seconds = 20",
            "timeout_seconds = 0",
            "pipeline.timeout_seconds: timeout_seconds=0 must be above 0.",
        ),
        (
            "timeout_seconds = 20",
            'on_partial_batch = "keep"',
            "pipeline.on_partial_batch: on_partial_batch='keep' is not one of drop, "
            "pad, error.",
        ),
        (
            "timeout_seconds = 20",
            'key = "user/history"',
            "pipeline.key: 'user/history' is also the key of an input; give the "
            "buffers a key of their own.",
        ),
        (
            'kind = "headroom"',
            'kind = "headrom"',
            "limits.growth.kind: kind='headrom' is not one of exact, headroom, "
            "geometric.",
        ),
        (
            "factor = 2",
            "factor = nan",
            "limits.growth.factor: factor=nan must be from 1 to 1024; buffers are as "
            "many times larger than what is needed.",
        ),
        (
            "[limits.growth]",
            "[limits]\ngrowth = 3\n[source.x]",
            "limits.growth: must be a section of keys, not 3.",
        ),
        (
            'kind = "synthetic"',
            'kind = "sinthetic"',
            "source.kind: 'sinthetic' is not known; choose one of synthetic, parquet, "
            "tfrecord, criteo_tsv, python.",
        ),
        (
            "num_records = 1000",
            "num_record = 1000",
            "source.num_record: there is no such key; did you mean 'num_records'?",
        ),
        (
            "num_records = 1000",
            "epochs = -1",
            "source.epochs: epochs=-1 must be 0 or more.",
        ),
        (
            "history = [0, 5]",
            "histery = [0, 5]",
            "source.ids_per_sample.histery: there is no feature 'histery'; did you "
            "mean 'history'?",
        ),
        (
            "history = [0, 5]",
            "history = [5, 0]",
            "source.ids_per_sample: ids_per_sample.history[1]=0 must be from 5 to "
            "65536.",
        ),
        (
            "after = 10",
            "after = -1",
            "source.skew.after: after=-1 must be 0 or more.",
        ),
        (
            "hidden = [16]",
            "hidden = [16, 0]",
            "train.hidden: hidden[1]=0 must be 1 or more.",
        ),
        (
            'dense = ["dense"]',
            'dense = "dense"',
            "train.dense: dense must be a list of strings, not 'dense'.",
        ),
        (
            'combiner = "mean"',
            'combiner = "avg"',
            "table[0].combiner: table 'item': combiner='avg' is not one of sum, mean, "
            "sqrtn.",
        ),
        (
            'combiner = "mean"',
            'combinr = "mean"',
            "table[0].combinr: there is no such key; did you mean 'combiner'?",
        ),
        (
            "vocabulary_size = 10\n",
            "vocabulary_size = 2147483648\n",
            "table[1].vocabulary_size: table 'tag': vocabulary_size=2147483648 is out "
            "of range; it must be from 1 to 2147483647.",
        ),
        (
            "vocabulary_size = 10\n",
            "",
            "table[1].vocabulary_size: is missing.",
        ),
        (
            'table = "tag"',
            'table = "tags"',
            "feature[1].table: feature 'tags': there is no table 'tags'; did you mean "
            "'tag'?",
        ),
        (
            'name = "tags"',
            'name = "history"\non_invalid_id = "clip"',
            "feature[1].name: 'history' is also the name of feature[0] (table 'item' "
            "and 'tag'; ids 'user/history' and None; weights 'user/history_weights' "
            "and None; on_invalid_id None and 'clip'); give every feature a name of "
            "its own.",
        ),
        (
            'name = "tags"',
            'name = "tags"\non_invalid_id = "ignore"',
            "feature[1].on_invalid_id: feature 'tags': on_invalid_id='ignore' is not "
            "one of error, drop, clip, mod.",
        ),
        (
            'table = "tag"',
            'table = ["tag"]',
            "feature[1].table: feature 'tags': table must be a non-empty string, not "
            "['tag'].",
        ),
        (
            "[train]",
            "[trian]",
            "trian: there is no such section; did you mean 'train'?",
        ),
        (
            '[[table]]\nname = "item"',
            '[[table]]\nname = "item"\nstack = "s"\n[[table]]\nname = "extra"\n'
            "vocabulary_size = 5\nembedding_dim = 8\n[[table]]\nname = 'item2'",
            "table[0].vocabulary_size: is missing.",
        ),
    ],
)
def test_an_error_names_path_value_and_fix(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert old in GOOD
    assert expected in errors_of(tmp_path, GOOD.replace(old, new, 1))


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    text = (
        GOOD.replace('combiner = "mean"', 'combiner = "avg"\ncolor = 1')
        .replace("steps = 7", 'steps = "many"')
        .replace('table = "tag"', 'table = "tug"')
        .replace("num_records = 1000", "num_records = 0")
    )
    lines = errors_of(tmp_path, text, "pipeline.window=0", "table[7].name=x")
    assert [line.split(": ")[0] for line in lines] == [
        "--set table[7].name=x",
        "pipeline.window (from --set pipeline.window=0)",
        "source.num_records",
        "train.steps",
        "table[0].color",
        "table[0].combiner",
        "feature[1].table",
        "table[1].name",
    ]
    assert lines[-1] == (
        "table[1].name: table 'tag' is read by no feature; add a feature for it or "
        "remove the table."
    )


def test_one_table_name_with_two_definitions_names_both_values(tmp_path: Path) -> None:
    text = GOOD.replace('name = "tag"', 'name = "item"').replace(
        'table = "tag"', 'table = "item"'
    )
    assert errors_of(tmp_path, text) == [
        "table[1].name: 'item' is also the name of table[0] (vocabulary_size 1000 and "
        "10; embedding_dim 16 and 8; combiner 'mean' and None); give every table a "
        "name of its own."
    ]


def test_missing_sections_are_named(tmp_path: Path) -> None:
    assert errors_of(tmp_path, "") == [
        "topology: section [topology] is missing.",
        "pipeline: section [pipeline] is missing.",
        "table: section [[table]] is missing.",
        "feature: section [[feature]] is missing.",
    ]


def test_sections_of_the_wrong_kind_are_named(tmp_path: Path) -> None:
    lines = errors_of(
        tmp_path,
        "train = 3\n[topology]\nnum_sc_per_device = 1\n[pipeline]\nbatch_size = 1\n"
        "[table]\nname = 'a'\n[[feature]]\nname = 'a'\ntable = 'a'\n",
    )
    assert lines == [
        "train: must be a section of keys, not 3.",
        "table: write [[table]] with two brackets, once for each.",
    ]


def test_tables_of_one_stack_must_agree_also_without_device_counts(
    tmp_path: Path,
) -> None:
    text = (
        GOOD.replace("global_device_count = 8\n", "")
        .replace('name = "item"', 'name = "item"\nstack = "s"')
        .replace('name = "tag"', 'name = "tag"\nstack = "s"')
    )
    (line,) = errors_of(tmp_path, text)
    assert "stack 's'" in line
    assert "differ in embedding_dim rounded up to 8 (16 and 8)" in line


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    def text_of(path: Path) -> str:
        with pytest.raises(ConfigError) as info:
            load_config(path)
        text = str(info.value)
        assert text.startswith(f"{path}: there is no such file; ")
        return text.removeprefix(f"{path}: there is no such file; ")

    assert text_of(tmp_path / "a.toml") == f"{tmp_path} holds no .toml file."
    elsewhere = tmp_path / "conf"
    none = f"there is no folder {elsewhere} either"
    assert text_of(elsewhere / "a.toml") == f"{none}."
    (tmp_path / "configs").mkdir()
    for name in ("small.toml", "large.toml"):
        (tmp_path / "configs" / name).write_text(GOOD)
    there = "did you mean 'configs/small.toml'?"
    assert text_of(tmp_path / "small.toml") == there
    assert text_of(tmp_path / "smal.toml") == there
    assert text_of(elsewhere / "small.toml") == f"{none}; in {tmp_path}: {there}"
    known = "known: large.toml, small.toml."
    assert text_of(tmp_path / "configs" / "unlike_any") == known


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("limits.factor", "limits.growth.factor"),
        ("limits.max_ids_cap", "limits.stack.NAME.max_ids_cap"),
        ("pipeline.combiner", "table.NAME.combiner"),
        ("table.item.padding_id", "feature.NAME.padding_id"),
        ("limits.growth.window", "pipeline.window"),
    ],
)
def test_a_key_of_another_section_is_named_with_its_path(
    tmp_path: Path, path: str, meant: str
) -> None:
    (line,) = errors_of(tmp_path, GOOD, f"{path}=1")
    assert f"there is no such key; did you mean {meant!r}?" in line


def test_unreadable_files(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=r"there is no such file; did you mean 'job"):
        load_config(tmp_path / "jib.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "bad.toml").write_text("[pipeline\n")
    with pytest.raises(ConfigError, match=r"no valid TOML: .*line 1"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes("# Grün".encode("latin-1"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "latin.toml")


def test_criteo_features_must_fit_the_format(tmp_path: Path) -> None:
    text = """
[topology]
num_sc_per_device = 2
[pipeline]
batch_size = 16
[source]
kind = "criteo_tsv"
path = "train.txt"
[[table]]
name = "a"
vocabulary_size = 8
embedding_dim = 8
[[table]]
name = "b"
vocabulary_size = 16
embedding_dim = 8
[[feature]]
name = "C1"
table = "a"
[[feature]]
name = "again"
table = "b"
ids = "C1"
[[feature]]
name = "C27"
table = "a"
weights = "w"
"""
    assert errors_of(tmp_path, text) == [
        "feature[1].ids: features 'C1' and 'again' both read 'C1', but hash it "
        "differently; set hash = true on both.",
        "feature[2].ids: feature 'C27': the categories of criteo_tsv are C1 to C26, "
        "not 'C27'.",
        "feature[2].weights: feature 'C27': criteo_tsv has no weights; remove the key.",
    ]


CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_of_the_project_are_right(path: Path) -> None:
    config = load_config(path)
    assert config.source is not None
    topology = Topology(
        global_device_count=4, local_device_count=2, num_sc_per_device=2
    )
    layout = config.layout(topology)
    assert {feature.name for feature in layout.features} == {
        feature.name for feature in config.features
    }


def test_there_are_the_configurations_that_the_readme_names() -> None:
    assert {path.stem for path in CONFIGS} >= {
        "criteo_kaggle",
        "multi_host",
        "parquet_sessions",
        "quickstart",
    }
