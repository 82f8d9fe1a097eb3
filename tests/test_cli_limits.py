"""``limits``: merge, adapt and convert files of limits."""

import json

import pytest

from grain_sparsecore import cli
from grain_sparsecore.config import load_config
from grain_sparsecore.fdo import import_fdo
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.limits_file import LimitsFile, load_limits
from grain_sparsecore.specs import Topology
from tests.planned_jobs import CONFIG


def limits_of(ids, unique, size):
    return StackLimits(
        max_ids_per_partition=ids,
        max_unique_ids_per_partition=unique,
        buffer_size_per_device=size,
    )


@pytest.fixture
def path(tmp_path):
    (tmp_path / "job.toml").write_text(CONFIG)
    return tmp_path / "job.toml"


def layout_of(path, chips=4):
    topology = Topology(
        global_device_count=chips, local_device_count=2, num_sc_per_device=2
    )
    return load_config(path).layout(topology)


@pytest.fixture
def files(path, tmp_path):
    """Two files, each with the higher number of another stack."""
    paths = []
    for name, ids in (("a", (16, 8)), ("b", (8, 24))):
        limits = Limits(
            {
                "item": limits_of(ids[0], 8, 64),
                "small": limits_of(ids[1], 8, 64),
            }
        )
        paths.append(tmp_path / f"{name}.json")
        LimitsFile.of(limits, layout=layout_of(path)).save(paths[-1])
    return [str(p) for p in paths]


MERGED = Limits({"item": limits_of(16, 8, 64), "small": limits_of(24, 8, 64)})
OPTIONS = ["--chips=4", "--devices-per-host=2"]


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_files_are_merged_and_converted_there_and_back(
    path, files, tmp_path, capsys, kind
):
    out = tmp_path / "merged.json"
    arguments = ["limits", str(path), *files, *OPTIONS, f"--limits={out}"]
    arguments += [f"--fdo={tmp_path / 'fdo'}", f"--fdo-format={kind}"]
    assert cli.main(arguments) == 0
    assert "2 hosts * 2 devices" in capsys.readouterr().out
    layout = layout_of(path)
    assert load_limits(out, layout=layout) == MERGED
    assert json.loads(out.read_text())["origin"]["files"] == files
    assert import_fdo(tmp_path / "fdo", layout=layout).limits == MERGED
    back = tmp_path / "back.json"
    arguments = ["limits", str(path), str(tmp_path / "fdo"), *OPTIONS]
    assert cli.main([*arguments, f"--limits={back}"]) == 0
    assert load_limits(back, layout=layout) == MERGED


def test_other_devices_need_adapt(path, files, tmp_path, capsys):
    arguments = ["limits", str(path), *files, "--chips=2", "--devices-per-host=2"]
    assert cli.main(arguments) == 2
    assert "num_partitions: 8 in the file, 4 here" in capsys.readouterr().err
    out = tmp_path / "adapted.json"
    assert cli.main([*arguments, "--adapt", f"--limits={out}"]) == 0
    adapted = load_limits(out, layout=layout_of(path, chips=2))
    # Half the partitions: two old ones meet in each new one.
    assert adapted["item"].max_ids_per_partition == 32
