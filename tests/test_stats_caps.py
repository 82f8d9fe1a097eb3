"""Caps of the configuration: shown by stats, kept to by the limits of a rehearsal."""

import json
from pathlib import Path

import pytest

from grain_sparsecore import cli
from grain_sparsecore.config import load_config
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import LimitsFile
from grain_sparsecore.overflow import StackCaps
from grain_sparsecore.rehearse import sample_limits
from grain_sparsecore.stacking import theoretical_buffer_size
from tests.test_reporting import CONFIG

CAP = "limits.stack.item.max_ids_cap"


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def stats(config_path: Path, capsys, *settings: str) -> tuple[dict, list[str]]:
    result = config_path.with_name("stats.json")
    # Exact needs of 64 samples: far steps of growth are easy to tell from them.
    growth = "limits.growth={kind='headroom', step=64, factor=1.0}"
    arguments = ["stats", str(config_path), "--batches=4", f"--json={result}"]
    assert cli.main([*arguments, "--set", growth, *settings]) == 0
    return json.loads(result.read_text())["stacks"], capsys.readouterr().out.split("\n")


def test_growth_ends_at_a_cap_that_is_shown_beside_it(config_path, capsys):
    plain, lines = stats(config_path, capsys)
    need = plain["item"]["largest"]["max_ids_per_partition"]
    assert plain["item"]["suggested"]["max_ids_per_partition"] == 64 > need + 1
    assert set(plain["item"]["cap"].values()) == {None}
    assert "stack  ids/partition  unique  slots/device" in lines
    found, lines = stats(config_path, capsys, f"{CAP}={need + 1}")
    assert found["item"]["cap"] == {
        "max_ids_per_partition": need + 1,
        "max_unique_ids_per_partition": None,
        "buffer_size_per_device": None,
    }
    assert found["item"]["suggested"]["max_ids_per_partition"] == need + 1
    table = lines[lines.index("suggested limits") + 1 :]
    assert table[0].split() == (
        ["stack", "ids/partition", "cap", "unique", "cap", "slots/device", "cap"]
    )
    assert table[1].split()[:3] == ["item", str(need + 1), str(need + 1)]
    assert table[2].split()[:3] == ["word", "64", "-"]
    assert not any("but its cap is" in line for line in lines)


@pytest.mark.parametrize(
    ("on_overflow", "what"),
    [
        ("error", "a job ends with an error there"),
        ("drop", "a job drops what is above it"),
        ("minibatch", "a job splits such a batch"),
    ],
)
def test_needs_above_a_cap_are_said_with_what_becomes_of_them(
    on_overflow, what, config_path, capsys
):
    found, lines = stats(
        config_path, capsys, f"{CAP}=2", f"limits.on_overflow={on_overflow}"
    )
    need = found["item"]["largest"]["max_ids_per_partition"]
    assert found["item"]["suggested"]["max_ids_per_partition"] == need > 2
    assert (
        f"stack 'item': a batch needs max_ids_per_partition={need}, but its cap is 2 "
        f'({CAP}); {what} (limits.on_overflow = "{on_overflow}")'
    ) in lines


def test_a_cap_of_the_buffer_splits_nothing(config_path, capsys):
    _, lines = stats(
        config_path,
        capsys,
        "limits.stack.item.buffer_cap_bytes=192",
        "limits.on_overflow=minibatch",
    )
    (line,) = [line for line in lines if "but its cap is" in line]
    assert "but its cap is 16 (limits.stack.item.buffer_cap_bytes); a job ends" in line


def test_caps_of_a_file_are_named_with_the_file(config_path, tmp_path, capsys):
    layout = load_config(config_path).layout()
    path = tmp_path / "caps.json"
    LimitsFile.of(
        Limits.start(layout), layout=layout, caps={"item": StackCaps(max_ids_cap=2)}
    ).save(path)
    _, lines = stats(config_path, capsys, f"limits.file={path}")
    assert any("its cap is 2 (limits file" in line for line in lines)


@pytest.mark.parametrize("on_overflow", ["error", "drop", "minibatch"])
@pytest.mark.parametrize("cap", [2, 40])
def test_a_rehearsal_stays_at_or_below_the_caps(cap, on_overflow, config_path):
    growth = "limits.growth={kind='headroom', step=64, factor=1.0}"
    plain = load_config(config_path, overrides=[growth])
    config = load_config(
        config_path,
        overrides=[growth, f"{CAP}={cap}", f"limits.on_overflow={on_overflow}"],
    )
    layout = config.layout()
    free = sample_limits(plain, layout, 4, topology="v6e:2x2")
    limits = sample_limits(config, layout, 4, topology="v6e:2x2")
    assert free["item"].max_ids_per_partition == 64
    assert limits["item"].max_ids_per_partition == cap
    assert limits["word"] == free["word"]
    if on_overflow != "minibatch":
        # No more slots than that many ids can fill, as in a job.
        most = theoretical_buffer_size(cap, layout.topology)
        assert limits["item"].buffer_size_per_device <= most
