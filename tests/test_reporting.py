"""The files that train and stats leave: a page, pictures, limits, scalars."""

import argparse
import json
from pathlib import Path

import pytest

from grain_sparsecore import cli
from grain_sparsecore.cli.reporting import forwarded
from grain_sparsecore.cli.train import _arguments_of_each, add_parser
from grain_sparsecore.config import load_config
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import load_limits
from grain_sparsecore.report.figures import all_figures
from grain_sparsecore.summary import TrainSummary
from grain_sparsecore.watching import RunWatcher
from tests.report_helpers import example_layout

CONFIG = """
[topology]
num_sc_per_device = 2

[pipeline]
batch_size = 64
window = 2

[source]
kind = "synthetic"
num_records = 5000
ids_per_sample = { words = [0, 5] }

[train]
steps = 6

[[table]]
name = "item"
vocabulary_size = 160
embedding_dim = 4

[[table]]
name = "word"
vocabulary_size = 50
embedding_dim = 4

[[feature]]
name = "item"
table = "item"

[[feature]]
name = "words"
table = "word"
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path


def test_train_leaves_a_page_pictures_limits_and_scalars(config_path, tmp_path, capsys):
    arguments = [
        "train",
        str(config_path),
        f"--report={tmp_path / 'r.html'}",
        f"--plot={tmp_path / 'plots'}",
        f"--limits={tmp_path / 'limits.json'}",
        f"--metrics={tmp_path / 'm.jsonl'}",
        f"--tensorboard={tmp_path / 'tb'}",
        f"--json={tmp_path / 'summary.json'}",
    ]
    assert cli.main(arguments) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    text = (tmp_path / "r.html").read_text()
    for key in ("loss", "step-time", "padding-waste", "limits-item", "skew-word"):
        assert f'id="{key}"' in text
        assert (tmp_path / "plots" / f"{key}.png").exists()
    assert "pipeline.batch_size = 64" in text
    layout = load_config(config_path).layout()
    limits = load_limits(tmp_path / "limits.json", layout=layout)
    assert limits.to_plain() == summary["limits"]
    lines = [
        json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[0]["loss"] == pytest.approx(summary["loss_first"])
    # The first step compiles: its time would say nothing.
    assert "step_seconds" not in lines[0]
    assert all(
        0 <= line["input_wait_seconds"] <= line["step_seconds"] for line in lines[1:]
    )
    # One round for each window of two batches.
    assert [i for i, line in enumerate(lines) if "coordination_seconds" in line] == [
        0,
        2,
        4,
    ]
    assert lines[-1]["limits/item/max_ids_per_partition"] == (
        limits["item"].max_ids_per_partition
    )
    assert len(list((tmp_path / "tb").iterdir())) == 1
    # The file is where the next job starts.
    arguments = ["train", str(config_path), f"--json={tmp_path / 'again.json'}"]
    assert cli.main([*arguments, f"--set=limits.file={tmp_path / 'limits.json'}"]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert (again["limit_changes"], again["recompiles"]) == (0, 0)
    assert again["batch_digest"] != []
    capsys.readouterr()


def test_stats_leaves_a_page_and_limits(config_path, tmp_path, capsys):
    arguments = [
        "stats",
        str(config_path),
        "--batches=4",
        f"--report={tmp_path / 'r.html'}",
        f"--limits={tmp_path / 'limits.json'}",
        f"--json={tmp_path / 'stats.json'}",
    ]
    assert cli.main(arguments) == 0
    capsys.readouterr()
    stats = json.loads((tmp_path / "stats.json").read_text())
    layout = load_config(config_path).layout()
    limits = load_limits(tmp_path / "limits.json", layout=layout)
    suggested = {name: s["suggested"] for name, s in stats["stacks"].items()}
    assert limits.to_plain() == suggested
    text = (tmp_path / "r.html").read_text()
    assert "Batches of the first host" in text
    assert 'id="partitions-item"' in text


@pytest.mark.parametrize("command", ["train", "stats"])
def test_files_that_cannot_be_written_are_refused_first(
    command, config_path, tmp_path, capsys
):
    assert cli.main([command, str(config_path), "--report", str(tmp_path)]) == 2
    assert f"--report {tmp_path}: is a folder" in capsys.readouterr().err
    missing = tmp_path / "no" / "limits.json"
    assert cli.main([command, str(config_path), "--limits", str(missing)]) == 2
    assert "its folder does not exist" in capsys.readouterr().err


def test_every_process_gets_the_options():
    options = ["--limits", "l.json", "--report", "r.html", "--tensorboard", "tb"]
    given = ["train", "c.toml", "--steps", "3", *options]
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(given)
    assert forwarded(args) == options
    assert _arguments_of_each(args) == given


class Written:
    """A writer like those of clu."""

    def __init__(self):
        self.steps, self.closed = {}, False

    def write_scalars(self, step, scalars):
        self.steps[step] = dict(scalars)

    def flush(self):
        pass

    def close(self):
        self.closed = True


def test_a_watcher_of_several_hosts_says_whose_numbers_they_are(config_path):
    layout = example_layout()
    writer = Written()
    watcher = RunWatcher(layout, record=True, writer=writer)
    watcher.add_step(1, loss=0.5, seconds=None, wait_seconds=0)
    watcher.add_step(2, loss=0.25, seconds=2.0, wait_seconds=3.0)
    assert writer.steps == {
        1: {"loss": 0.5},
        # Waiting began before the step did.
        2: {"loss": 0.25, "step_seconds": 2.0, "input_wait_seconds": 2.0},
    }
    summary = TrainSummary(
        steps=2,
        hosts=2,
        examples_per_second=10.0,
        loss_first=0.5,
        loss_last=0.25,
        limits=Limits.start(layout),
        limit_changes=0,
        recompiles=0,
        dropped_ids=7,
        input_wait_fraction=0.5,
        batch_digest=("a", "b"),
    )
    record = watcher.finish(summary, title="t", config=load_config(config_path))
    assert writer.closed
    assert record is not None
    assert "those of host 0" in record.notes[0]
    assert ("ids dropped", "7") in record.facts
    assert {f.key for f in all_figures(record)} == {"loss", "step-time"}
    quiet = RunWatcher(layout)
    quiet.add_step(1, loss=0.5, seconds=None, wait_seconds=0)
    assert quiet.finish(summary, title="t", config=load_config(config_path)) is None
