"""Links, pipes and folders in the place of a file that is replaced as a whole."""

import os
import socket

import pytest

from grain_sparsecore.atomic import atomic_target, special_kind, write_atomically
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits_file import LimitsFile, is_limits_file
from grain_sparsecore.warm_start import load_start_limits
from tests.report_helpers import example_layout


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    target, link = folder / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(os.path.join("kept", "target.json"))
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    target.unlink()
    # A link that leads nowhere yet.
    write_atomically(link, b"newer")
    assert link.is_symlink()
    assert target.read_text() == "newer"
    assert os.listdir(folder) == ["target.json"]


def test_a_pipe_a_folder_and_a_socket_are_not_replaced(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        # A short name: that of a socket may have 108 bytes.
        server.bind("socket")
        for name in ("pipe", "folder", "socket"):
            assert special_kind(tmp_path / name) == name
            with pytest.raises(OSError, match=f"it is a {name}, not a regular file"):
                write_atomically(tmp_path / name, b"x")
            assert special_kind(tmp_path / name) == name
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(OSError, match="it is a pipe"):
        atomic_target(tmp_path / "link")


def test_limits_are_not_read_from_a_pipe(tmp_path):
    # Reading it would wait for ever, as a device may have no end.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not is_limits_file(pipe)
    with pytest.raises(ConfigError, match=r"cannot be read: .*it is a pipe"):
        LimitsFile.load(pipe)
    with pytest.raises(ConfigError, match=r"cannot be read: .*it is a pipe"):
        load_start_limits([pipe], layout=example_layout())
