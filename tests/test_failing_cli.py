"""``--dump-failing`` and ``replay`` on the command line."""

import re
from pathlib import Path

import grain
import numpy as np
import pytest

from grain_sparsecore import cli
from grain_sparsecore.cli import train as train_command
from grain_sparsecore.config import load_config
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.failing import FailingBatch
from tests.feature_forms import layout_of

CONFIG = """
[topology]
num_sc_per_device = 2

[pipeline]
batch_size = 16
window = 2

[source]
kind = "python"
function = "tests.test_failing_cli:records"
shuffle = false

[train]
steps = 6
hidden = [8]

[[table]]
name = "t"
vocabulary_size = 64
embedding_dim = 4

[[feature]]
name = "f"
table = "t"
weights = "w"
"""


class _Records:
    """Samples of which the 37th is wrong."""

    def __init__(self, wrong: str) -> None:
        self._wrong = wrong

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        ids = np.arange(index % 3, dtype=np.uint64)
        label = np.float32(0)
        if index == 37 and self._wrong == "id":
            ids = np.array([2**63 + 5], np.uint64)
        if index == 37 and self._wrong == "label":
            label = np.float32("nan")
        return {"f": ids, "w": ids.astype(np.float32), "label": label}

    def __repr__(self) -> str:
        return "_Records()"


def records(wrong: str = "id") -> grain.MapDataset:
    return grain.MapDataset.source(_Records(wrong))


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return str(path)


ERROR = (
    "grain-sparsecore: feature 'f' (table 't'), ids 'f': id 9223372036854775813 of "
    "sample 5, position 0, is at or above vocabulary_size=64; legal ids are 0 to 63. "
)


def note_of(output: str) -> Path:
    (line,) = [x for x in output.splitlines() if "The failing batch" in x]
    match = re.fullmatch(
        r"grain-sparsecore: The failing batch is kept in '(.*)'; to see the error "
        r"again: python -m grain_sparsecore replay '\1'",
        line,
    )
    assert match is not None, line
    return Path(match.group(1))


@pytest.mark.parametrize(
    "options",
    [
        ["stats", "--set", "pipeline.read_ahead=1"],
        ["train"],
        ["train", "--set", "pipeline.workers=1"],
    ],
    ids=lambda options: " ".join(options),
)
def test_a_job_keeps_its_failing_batch_and_replay_fails_alike(
    config_path, tmp_path, capsys, options
):
    command, *others = options
    folder = tmp_path / "new" / "kept"
    code = cli.main([command, config_path, "--dump-failing", str(folder), *others])
    errors = capsys.readouterr().err
    assert code == 1
    assert errors.startswith(ERROR)
    path = note_of(errors)
    assert list(folder.iterdir()) == [path]

    assert cli.main(["replay", str(path)]) == 1
    output = capsys.readouterr()
    assert output.err.splitlines() == errors.splitlines()[:1]
    lines = output.out.splitlines()
    assert lines[0].startswith(f"{path}: 1 host * ")
    assert re.match(r"kept with host .*, pid \d+, time 20\d\d-.*, numpy \d", lines[1])
    assert lines[2:] == ["the same error as then, grain_sparsecore.errors.InputError"]


LABEL_ERROR = (
    "grain-sparsecore: train.label 'label': sample 5 has nan; labels are numbers from "
    "0 to 1."
)


def test_a_wrong_label_is_kept_too(config_path, tmp_path, capsys):
    code = cli.main(
        ["train", config_path, "--dump-failing", str(tmp_path / "kept")]
        + ["--set", "source.args={wrong='label'}"]
    )
    errors = capsys.readouterr().err
    assert code == 1
    assert errors.splitlines()[0] == LABEL_ERROR
    path = note_of(errors)
    assert FailingBatch.load(path).columns == ("label", ())
    assert cli.main(["replay", str(path)]) == 1
    output = capsys.readouterr()
    assert output.err.splitlines() == [LABEL_ERROR]
    assert "the same error as then" in output.out


def test_a_missing_column_is_kept_too(config_path, tmp_path, capsys):
    code = cli.main(
        ["train", config_path, "--dump-failing", str(tmp_path / "kept")]
        + ["--set", "feature.f.weights=v", "train.dense=['d']"]
    )
    errors = capsys.readouterr().err
    assert code == 1
    assert "the batch lacks 'v'" in errors
    batch = FailingBatch.load(note_of(errors))
    assert batch.columns == ("label", ("d",))
    assert sorted(batch.element) == ["f", "label", "w"]


def test_replay_takes_the_columns_first(tmp_path, capsys):
    element = {"f": np.arange(4), "label": np.zeros(4)}
    path = _kept(tmp_path, element, "an old defect", columns=("label", ()))
    assert cli.main(["replay", path]) == 0
    assert "the batch is fine now" in capsys.readouterr().out
    path = _kept(tmp_path, {**element, "f": [[64]]}, "x", columns=("label", ()))
    assert cli.main(["replay", path]) == 1
    assert "id 64 of sample 0" in capsys.readouterr().err


def test_the_configuration_can_say_it_as_well(config_path, tmp_path, capsys):
    folder = tmp_path / "kept"
    code = cli.main(["stats", config_path, "--set", f"pipeline.dump_failing={folder}"])
    assert code == 1
    assert note_of(capsys.readouterr().err).parent == folder


def test_without_the_option_nothing_is_written(config_path, tmp_path, capsys):
    before = set(tmp_path.iterdir())
    assert cli.main(["stats", config_path]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(ERROR)
    assert "The failing batch" not in errors
    assert set(tmp_path.iterdir()) == before


def test_local_processes_are_told(config_path, tmp_path, monkeypatch):
    started = []

    def launch(arguments, **kwargs):
        started.append(arguments)
        return 0

    monkeypatch.setattr(train_command, "launch", launch)
    folder = tmp_path / "kept"
    cli.main(["train", config_path, "--processes", "2", "--dump-failing", str(folder)])
    assert started == [["train", config_path, "--dump-failing", str(folder)]]


@pytest.mark.parametrize("command", ["train", "stats"])
def test_a_folder_that_cannot_be_made_is_said_at_once(
    command, config_path, tmp_path, capsys
):
    for folder in (config_path, f"{config_path}/below"):
        assert cli.main([command, config_path, "--dump-failing", folder]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith(f"grain-sparsecore: --dump-failing {folder}: cannot ")
        assert errors.endswith("name a folder, or where one can be made.\n")
    assert list(tmp_path.iterdir()) == [Path(config_path)]


@pytest.mark.parametrize("value", ["3", '""', "true"])
def test_the_configuration_wants_a_path(config_path, value):
    with pytest.raises(ConfigError, match=r"pipeline\.dump_failing") as info:
        load_config(config_path, overrides=[f"pipeline.dump_failing={value}"])
    assert "dump_failing must be" in str(info.value)


def _kept(tmp_path: Path, element, error_text: str, **fields) -> str:
    batch = FailingBatch(
        element=element,
        layout=layout_of(),
        key="sparsecore",
        cut_above=None,
        error_type="builtins.ValueError",
        error_text=error_text,
        origin={"host": "elsewhere"},
        **fields,
    )
    path = tmp_path / "batch.npz"
    path.write_bytes(batch.to_bytes()[1])
    return str(path)


def test_replay_says_that_a_batch_is_fine_now(tmp_path, capsys):
    path = _kept(tmp_path, {"f": np.arange(4)}, "an old defect")
    assert cli.main(["replay", path]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.splitlines() == [
        f"{path}: 1 host * 1 device * 2 SparseCores = 2 partitions; a batch has 4 "
        "samples per host, 4 in all",
        "kept with host elsewhere",
        "the batch is fine now; then it was builtins.ValueError: an old defect",
    ]


def test_replay_goes_on_behind_a_file_that_fails(tmp_path, capsys):
    fine = _kept(tmp_path, {"f": np.arange(4)}, "an old defect")
    (tmp_path / "other").mkdir()
    bad = _kept(tmp_path / "other", {"f": {64}}, "an old defect")
    absent = str(tmp_path / "absent")
    assert cli.main(["replay", fine, fine]) == 0
    capsys.readouterr()
    assert cli.main(["replay", bad, fine]) == 1
    output = capsys.readouterr()
    starts = [x for x in output.out.splitlines() if "1 host * " in x]
    assert [x.partition(": ")[0] for x in starts] == [bad, fine]
    assert "the batch is fine now" in output.out.splitlines()[-1]
    (line,) = output.err.splitlines()
    assert "a set is no array" in line
    assert cli.main(["replay", absent, bad, fine]) == 2
    output = capsys.readouterr()
    assert len(output.err.splitlines()) == 2
    assert "the batch is fine now" in output.out


def test_replay_says_that_the_error_is_another(tmp_path, capsys):
    path = _kept(tmp_path, {"f": {64}}, "an old defect")
    assert cli.main(["replay", path]) == 1
    output = capsys.readouterr()
    assert "a set is no array" in output.err
    assert output.out.splitlines()[2:] == [
        "stand-ins for what could not be kept: set",
        "another error than then, grain_sparsecore.errors.InputTypeError",
        "then it was builtins.ValueError: an old defect",
    ]


def test_replay_of_a_defect_shows_its_traceback(tmp_path, capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise IndexError("a defect")

    monkeypatch.setattr("grain_sparsecore.pipeline.compute.partition_batch", broken)
    path = _kept(tmp_path, {"f": np.arange(4)}, "an old defect")
    assert cli.main(["replay", path]) == 1
    assert capsys.readouterr().err.endswith("IndexError: a defect\n")


@pytest.mark.parametrize("data", [None, b"", b"\x80\4K\1.", b"PK\3\4 and so on"])
def test_replay_of_another_file_ends_with_2(tmp_path, capsys, data):
    path = tmp_path / "file"
    if data is not None:
        path.write_bytes(data)
    assert cli.main(["replay", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith(f"grain-sparsecore: replay file '{path}' ")
