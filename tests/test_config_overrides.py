"""--set: single settings from the command line."""

from pathlib import Path

import pytest

from grain_sparsecore.config import (
    load_config,
)
from tests.config_files import GOOD, errors_of, write


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("pipeline.window=16", "pipeline.window", 16),
        ("limits.window=16", "pipeline.window", 16),
        ("pipeline.timeout_seconds = 1.5", "pipeline.timeout_seconds", 1.5),
        ("pipeline.name=eval", "pipeline.name", "eval"),
        ('pipeline.name="16"', "pipeline.name", "16"),
        ("pipeline.name=a=b", "pipeline.name", "a=b"),
        ("pipeline.name=2024-01-31", "pipeline.name", "2024-01-31"),
        ("limits.growth.kind=exact", "limits.growth.kind", "exact"),
        ("train.hidden=[8, 4]", "train.hidden", (8, 4)),
        ("train.hidden[0]=5", "train.hidden", (5,)),
        ("train.dense=[]", "train.dense", ()),
        ("source.shuffle=false", "source.shuffle", False),
        ("source.zipf=0", "source.options.zipf", 0.0),
        ("topology.rotation=3", "topology.rotation", 3),
    ],
)
def test_overrides(tmp_path: Path, override: str, path: str, value: object) -> None:
    config = load_config(write(tmp_path, GOOD), overrides=[override])
    found = config
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize("step", ["[1]", ".tag", '."tag"'])
def test_overrides_of_list_entries(tmp_path: Path, step: str) -> None:
    config = load_config(
        write(tmp_path, GOOD), overrides=[f"table{step}.embedding_dim=24"]
    )
    assert [table.embedding_dim for table in config.tables] == [16, 24]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("pipeline.window", "write path=value, for example pipeline.window=16"),
        ("=3", "write path=value"),
        ("table.itm.combiner=sum", "there is no table 'itm'; did you mean 'item'?"),
        (
            "table[2].combiner=sum",
            "there is no table[2]; the file has 2, counted from 0.",
        ),
        ("pipeline.window.x=1", "pipeline.window is 4; it has no 'x'."),
        ("pipeline.window[x]=1", "cannot read '[x]'."),
        (
            "pipline.window=3",
            "pipline (from --set pipline.window=3): there is no such section; did you "
            "mean 'pipeline'?",
        ),
        (
            "pipeline.windw=3",
            "pipeline.windw (from --set pipeline.windw=3): there is no such key; did "
            "you mean 'window'?",
        ),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, expected: str) -> None:
    (line,) = errors_of(tmp_path, GOOD, override)
    assert expected in line
    assert f"--set {override}" in line


def test_the_window_is_one_setting_under_two_names(tmp_path: Path) -> None:
    text = GOOD.replace("window = 4\n", "").replace(
        "[limits.growth]", "[limits]\nwindow = 5\n[limits.growth]"
    )
    assert load_config(write(tmp_path, text)).pipeline.window == 5
    both = GOOD.replace("[limits.growth]", "[limits]\nwindow = 5\n[limits.growth]")
    assert errors_of(tmp_path, both) == [
        "limits.window: limits.window=5 and pipeline.window=4 are one setting; keep "
        "the second."
    ]
    config = load_config(write(tmp_path, both), overrides=["pipeline.window=6"])
    assert config.pipeline.window == 6


def test_a_name_where_there_are_none(tmp_path: Path) -> None:
    lines = errors_of(tmp_path, GOOD, "table=[]", "table.item.combiner=sum")
    assert lines[0] == (
        "--set table.item.combiner=sum: there is no table 'item'; there is none at all."
    )
