"""Batches that fail, kept in files."""

from pathlib import Path
from typing import Any

import pytest

from grain_sparsecore.failing import FailingBatch, kept_notes
from grain_sparsecore.pipeline.compute import ComputeInputStats
from grain_sparsecore.specs import FeatureSpec
from tests.feature_forms import layout_of


def failing_layout(**spec):
    return layout_of(FeatureSpec(name="f", table="t", **spec))


def saved(tmp_path: Path, element: Any, layout=None, **fields: Any) -> Path:
    """The file of a batch, whether or not it fails."""
    batch = FailingBatch(
        element=element,
        layout=layout or failing_layout(),
        **{
            "key": "sparsecore",
            "cut_above": None,
            "error_type": "builtins.ValueError",
            "error_text": "then",
            **fields,
        },
    )
    path = tmp_path / "batch.npz"
    path.write_bytes(batch.to_bytes()[1])
    return path


def loaded(tmp_path: Path, element: Any, layout=None) -> Any:
    return FailingBatch.load(saved(tmp_path, element, layout)).element


def fail(element: Any, stage: ComputeInputStats) -> Exception:
    with pytest.raises(Exception) as info:  # noqa: PT011 - compared by the caller
        stage.map(element)
    return info.value


def kept_file(error: BaseException) -> Path:
    (note,) = kept_notes(error)
    assert " is kept in " in note
    return Path(note.split("'")[1])
