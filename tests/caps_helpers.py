"""A job, and limits files with caps as ``rehearse --find-caps`` writes them."""

import json

from grain_sparsecore.chips import FoundFor
from grain_sparsecore.limits import Limits
from grain_sparsecore.limits_file import LimitsFile
from grain_sparsecore.rehearse import Caps, with_caps

JOB = """
[topology]
num_sc_per_device = 2
global_device_count = 4
local_device_count = 4

[pipeline]
batch_size = 64
window = 2

[source]
kind = "synthetic"
num_records = 1000

[[table]]
name = "item"
vocabulary_size = 500
embedding_dim = 8

[[feature]]
name = "item"
table = "item"
"""


V6E = FoundFor(topology="v6e:2x2", device_kind="TPU v6 lite", libtpu="0.0.42.1")
# As many SparseCores, and other memories.
TPU7X = FoundFor(topology="tpu7x:2x1x1", device_kind="TPU7x", libtpu="0.0.50")


def write_caps(path, layout, ids, unique, found_for=V6E):
    """As ``rehearse --find-caps`` does."""
    LimitsFile.of(Limits.start(layout), layout=layout).save(path)
    cap = Caps(
        max_ids_per_partition=ids,
        max_unique_ids_per_partition=unique,
        compiled=1,
        refused=0,
        cached=0,
        seconds=0.0,
        reason="",
    )
    contents = with_caps(json.loads(path.read_text()), {"item": cap}, found_for)
    path.write_text(json.dumps(contents))


def forget_the_chip(path):
    """As files of an earlier release are."""
    contents = json.loads(path.read_text())
    del contents["caps_found_for"]
    path.write_text(json.dumps(contents))
