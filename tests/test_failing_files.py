"""Files that are no failing batch: clear errors, and no code is run."""

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from grain_sparsecore.errors import ConfigError, MissingExtraError
from grain_sparsecore.failing import FailingBatch
from tests.failing_helpers import saved


class _Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return (Path.touch, (self._path,))


def _members(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        return dict(archive)


def _edited(path: Path, edit) -> Path:
    """The file with its description changed."""
    members = _members(path)
    plain = json.loads(members["batch"].tobytes())
    edit(plain)
    members["batch"] = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    np.savez(path, **members)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as info:
        FailingBatch.load(path)
    text = str(info.value)
    assert text.startswith(f"replay file '{path}'")
    return text


class TestFilesThatAreNoBatch:
    def test_no_file(self, tmp_path):
        assert "does not exist; train and stats write one" in refused(tmp_path / "no")
        assert "cannot be read" in refused(tmp_path)

    @pytest.mark.parametrize(
        "data", [b"", b"PK\3\4", b"\x80\4K\1.", b'{"format": "x"}', b"\0" * 1000]
    )
    def test_another_kind_of_file(self, tmp_path, data):
        path = tmp_path / "file"
        path.write_bytes(data)
        assert "is not a file of --dump-failing, or is damaged" in refused(path)

    def test_another_npz(self, tmp_path):
        path = tmp_path / "other.npz"
        np.savez(path, a=np.arange(3))
        assert "KeyError: 'batch'" in refused(path)
        np.savez(path, batch=np.frombuffer(b'{"a": 1}', np.uint8))
        assert "is not a file of --dump-failing" in refused(path)
        np.savez(path, batch=np.frombuffer(b"[" * 100_000, np.uint8))
        assert "RecursionError" in refused(path)

    def test_a_pickle_is_not_run(self, tmp_path):
        mark = tmp_path / "ran"
        path = saved(tmp_path, {"f": [[1]]})
        members = _members(path)
        members["pool_0"] = np.array([_Payload(mark)], object)
        np.savez(path, allow_pickle=True, **members)
        assert "Object arrays cannot be loaded" in refused(path)
        path.write_bytes(pickle.dumps(_Payload(mark)))
        assert "is not a file of --dump-failing" in refused(path)
        np.save(tmp_path / "array.npy", np.array([_Payload(mark)], object))
        assert "is not a file of --dump-failing" in refused(tmp_path / "array.npy")
        assert not mark.exists()

    def test_a_compressed_archive_could_be_of_any_size(self, tmp_path):
        path = saved(tmp_path, {"f": np.arange(4)})
        np.savez_compressed(path, **_members(path))
        assert "a member of the archive is compressed" in refused(path)

    def test_every_cut_is_found(self, tmp_path):
        path = saved(tmp_path, {"f": [np.arange(3), np.arange(2)], "w": ["a"]})
        data = path.read_bytes()
        for size in range(0, len(data), 41):
            path.write_bytes(data[:size])
            assert "or is damaged" in refused(path)

    def test_every_changed_byte_is_found_or_changes_nothing(self, tmp_path):
        path = saved(tmp_path, {"f": np.arange(4), "w": ["a"]})
        data = path.read_bytes()
        found = 0
        for at in range(0, len(data), 23):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            try:
                batch = FailingBatch.load(path)
            except ConfigError:
                found += 1
            else:  # dates and attributes of the archive, which nobody reads
                assert batch.element["f"].tolist() == [0, 1, 2, 3]
                assert batch.element["w"] == ["a"]
        assert found > len(data) // 23 * 0.8

    @pytest.mark.parametrize("version", [0, 2, "1", None])
    def test_another_version(self, tmp_path, version):
        path = saved(tmp_path, {"f": [[1]]})
        _edited(path, lambda plain: plain.update(version=version))
        assert f"of version {version!r}; this release reads" in refused(path)

    @pytest.mark.parametrize(
        ("edit", "part"),
        [
            (lambda p: p["layout"].update(batch_size=6), "has fingerprint"),
            (
                lambda p: p["layout"].update(batch_size=5),
                "nearest legal sizes: 4 and 6",
            ),
            (lambda p: p["layout"].pop("topology"), "KeyError: 'topology'"),
            (lambda p: p["layout"]["topology"].update(x=1), "TypeError"),
            (lambda p: p["layout"]["stacks"][0].update(tables=[]), "IndexError"),
            (lambda p: p.update(key=3), "must be texts"),
            (lambda p: p.update(columns=["label", [3]]), "must be texts"),
            (lambda p: p.update(error="x"), "ValueError"),
            (lambda p: p.update(cut_above={"other": {}}), "TypeError"),
            (lambda p: p.update(element={"pickle": "gAR9lC4="}), "no form 'pickle'"),
            (lambda p: p.update(element=[1]), "outside a form"),
            (lambda p: p.update(element={}), "ValueError"),
            (
                lambda p: p.update(element={"array": [0, 3, [2], "C", ""]}),
                "2 values at",
            ),
            (
                lambda p: p.update(element={"array": [0, -1, [1], "C", ""]}),
                "1 values at",
            ),
            (lambda p: p.update(element={"array": [0, 0, [-1], "C", ""]}), "no shape"),
            (lambda p: p.update(element={"array": [0, 0, ["a"], "C", ""]}), "no shape"),
            (lambda p: p.update(element={"array": [9, 0, [1], "C", ""]}), "KeyError"),
            (lambda p: p.update(element={"array": [0, 0, [1], "X", ""]}), "order"),
            (
                lambda p: p.update(element={"array": [0, 0, [1], "C", "__doc__"]}),
                "'__doc__' is no dtype",
            ),
            (
                lambda p: p.update(element={"named": [["__class__"], [1]]}),
                "are no fields",
            ),
            (lambda p: p.update(element={"named": [["a", "a"], [1, 2]]}), "no fields"),
            (
                lambda p: p.update(element={"parts": ["X", {"__del__": 1}]}),
                "are no parts",
            ),
            (lambda p: p.update(element={"arrow": [False, [0, 0, [4], "C", ""]]}), "("),
            (lambda p: p.update(element={"bytes": "%%%"}), "Error"),
            (lambda p: p.update(element={"dict": [[{"list": []}, 1]]}), "unhashable"),
        ],
    )
    def test_a_description_that_makes_no_sense(self, tmp_path, edit, part):
        path = saved(tmp_path, {"f": np.arange(4)})
        text = refused(_edited(path, edit))
        assert "does not hold a batch that this release can read" in text
        assert part in text

    def test_arrow_without_pyarrow(self, tmp_path, monkeypatch):
        path = saved(tmp_path, {"f": pa.array([1])})
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(MissingExtraError, match=r"grain_sparsecore\[parquet\]"):
            FailingBatch.load(path)
