"""A right configuration file, to be made wrong in tests."""

from pathlib import Path

import pytest

from grain_sparsecore.config import load_config
from grain_sparsecore.errors import ConfigError

GOOD = """
[topology]
num_sc_per_device = 4
global_device_count = 8
local_device_count = 4

[pipeline]
batch_size = 64  # samples per host
window = 4
timeout_seconds = 20

[limits.growth]
kind = "headroom"
factor = 2

[source]
kind = "synthetic"
num_records = 1000
ids_per_sample = { history = [0, 5], tags = 3 }
skew = { host = 1, after = 10, stride = 8 }

[train]
steps = 7
dense = ["dense"]
hidden = [16]

[[table]]
name = "item"
vocabulary_size = 1000
embedding_dim = 16
combiner = "mean"

[[table]]
name = "tag"
vocabulary_size = 10
embedding_dim = 8

[[feature]]
name = "history"
table = "item"
ids = "user/history"
weights = "user/history_weights"

[[feature]]
name = "tags"
table = "tag"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def errors_of(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides=overrides)
    first, *lines = str(caught.value).splitlines()
    count = len(lines)
    assert first == f"{tmp_path / 'job.toml'}: {count} error{'s' * (count > 1)}:"
    return [line.strip() for line in lines]
