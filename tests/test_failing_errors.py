"""What is kept of a failing batch, and how its error reaches the user."""

import errno
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from grain_sparsecore.errors import InputError
from grain_sparsecore.failing import FailingBatch, kept_notes
from grain_sparsecore.failing.keep import MOST_FILES
from grain_sparsecore.pipeline.compute import ComputeInputStats
from tests.failing_helpers import fail, failing_layout, kept_file


class TestTheErrorItself:
    def test_type_text_and_pickling_stay_and_a_note_names_the_file(self, tmp_path):
        stage = ComputeInputStats(failing_layout(), dump_failing=tmp_path)
        error = fail({"f": [[64]]}, stage)
        assert type(error) is InputError
        assert len(error.args) == 1
        again = pickle.loads(pickle.dumps(error))
        assert kept_notes(again) == kept_notes(error)
        (path,) = tmp_path.iterdir()
        assert kept_notes(error) == [
            f"The failing batch is kept in '{path}'; to see the error again: "
            f"python -m grain_sparsecore replay '{path}'"
        ]

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
    def test_a_disk_that_cannot_be_written_hides_nothing(
        self, tmp_path, monkeypatch, number
    ):
        def full(*args):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", full)
        error = fail(
            {"f": [[64]]}, ComputeInputStats(failing_layout(), dump_failing=tmp_path)
        )
        assert "id 64 of sample 0" in str(error)
        (note,) = kept_notes(error)
        assert f"could not be kept in '{tmp_path}': " in note
        assert os.strerror(number) in note
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_is_a_file_hides_nothing(self, tmp_path):
        file = tmp_path / "file"
        file.touch()
        error = fail(
            {"f": [[64]]}, ComputeInputStats(failing_layout(), dump_failing=file)
        )
        assert "id 64 of sample 0" in str(error)
        assert "could not be kept in" in kept_notes(error)[0]
        assert "FileExistsError" in kept_notes(error)[0]

    def test_what_has_no_form_in_a_file_hides_nothing(self, tmp_path):
        circle: list[Any] = [1]
        circle.append(circle)
        stage = ComputeInputStats(failing_layout(), dump_failing=tmp_path)
        error = fail({"f": [[64]], "rest": circle}, stage)
        assert "id 64 of sample 0" in str(error)
        assert "could not be kept" in kept_notes(error)[0]
        assert "RecursionError" in kept_notes(error)[0]

    def test_a_repr_that_raises_is_worded(self, tmp_path):
        class Shy:
            def __repr__(self):
                raise RuntimeError("no")

        stage = ComputeInputStats(failing_layout(), dump_failing=tmp_path)
        error = fail({"f": [[64]], "rest": Shy()}, stage)
        batch = FailingBatch.load(kept_file(error))
        assert repr(batch.element["rest"]) == "<Shy whose repr raises RuntimeError>"


class TestTheNumberOfFiles:
    def test_the_same_batch_is_one_file(self, tmp_path):
        stage = ComputeInputStats(failing_layout(), dump_failing=tmp_path)
        names = {kept_file(fail({"f": [[64]]}, stage)) for _ in range(3)}
        assert names == set(tmp_path.iterdir())
        assert len(names) == 1

    def test_a_folder_is_filled_no_further(self, tmp_path):
        stage = ComputeInputStats(failing_layout(), dump_failing=tmp_path)
        errors = [fail({"f": [[64 + i]]}, stage) for i in range(MOST_FILES + 2)]
        assert len(list(tmp_path.iterdir())) == MOST_FILES
        assert all(" is kept in " in kept_notes(e)[0] for e in errors[:MOST_FILES])
        for error in errors[MOST_FILES:]:
            assert f"is not kept: '{tmp_path}' holds 16 files" in kept_notes(error)[0]
        assert " is kept in " in kept_notes(fail({"f": [[64]]}, stage))[0]

    def test_a_kill_while_writing_leaves_no_half_file(self, tmp_path):
        code = f"""
            import os, signal
            import numpy as np
            from grain_sparsecore.pipeline.compute import ComputeInputStats
            from tests.failing_helpers import failing_layout
            os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
            stage = ComputeInputStats(failing_layout(), dump_failing={str(tmp_path)!r})
            stage.map({{"f": np.array([64])}})
        """
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            timeout=300,
        )
        assert result.returncode == -signal.SIGKILL
        assert list(tmp_path.glob("failing-*")) == []
        assert len(list(tmp_path.iterdir())) == 1  # hidden, and counted


def _bad_batch(index: int) -> dict[str, Any]:
    last = 64 + index if index >= 4 else 1
    return {"f": np.array([1, 2, 3, last], np.uint64), "label": np.zeros(4)}


class TestWorkers:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_note_comes_out_of_a_worker_process(self, tmp_path, workers):
        stage = ComputeInputStats(failing_layout(), dump_failing=tmp_path)
        batches = grain.MapDataset.range(8).map(_bad_batch).map(stage)
        stream = batches.to_iter_dataset().mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=1)
        )
        iterator = iter(stream)
        for _ in range(4):
            assert next(iterator)["sparsecore"].num_valid_samples.tolist() == [4]
        with pytest.raises(InputError, match="id 68 of sample 3") as info:
            next(iterator)
        iterator.close()
        batch = FailingBatch.load(kept_file(info.value))
        assert batch.element["f"].tolist() == [1, 2, 3, 68]
        assert batch.element["f"].dtype == np.uint64
        assert batch.origin["pid"] != os.getpid()
        # Batches that were read ahead may have failed, too.
        assert 1 <= len(list(tmp_path.iterdir())) <= 4

    def test_many_processes_that_fail_at_once_do_not_clash(self, tmp_path):
        code = f"""
            import sys
            import numpy as np
            from grain_sparsecore.pipeline.compute import ComputeInputStats
            from tests.failing_helpers import failing_layout
            stage = ComputeInputStats(failing_layout(), dump_failing={str(tmp_path)!r})
            print(flush=True)
            sys.stdin.read()
            for i in range(64, 64 + 6):
                try:
                    stage.map({{"f": np.array([i])}})
                except ValueError as error:
                    print(error.__notes__[0])
        """
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code)],
                cwd=Path(__file__).parent.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for process in processes:
            assert process.stdout.readline() == "\n"
        for process in processes:
            process.stdin.close()
        for process in processes:
            lines = process.stdout.read().splitlines()
            process.stdout.close()
            assert process.wait(timeout=300) == 0
            assert sum(" is kept in " in line for line in lines) == 6
        files = list(tmp_path.iterdir())
        assert len(files) == 6
        ids = {int(FailingBatch.load(file).element["f"][0]) for file in files}
        assert ids == set(range(64, 70))
