"""Batches of real hosts that are split where only one of them needs it."""

import hashlib
from typing import Any

import numpy as np
import pytest

from grain_sparsecore.coordination import process_reducer
from grain_sparsecore.overflow import OverflowPolicy, StackCaps
from grain_sparsecore.testing import TestHost, run_hosts
from tests.minibatch_helpers import check_lookup, layout_of, pipeline, rows_with

WINDOW = 4

# Clicks of the first sample on one partition, by batch: host 1 is above the cap of 10
# in the second batch, and nobody else is at any time.
NORMAL = (4, 5, 6, 7, 8)
ABOVE = (4, 70, 6, 7, 8)


def one_host_overflows(host: TestHost) -> dict[str, Any]:
    layout = layout_of(host.count)
    needs = ABOVE if host.index == 1 else NORMAL
    raw = [rows_with(n, seed=host.index) for n in needs]
    # Three hosts are no topology of a TPU, so the hosts are told, not checked.
    iterator = iter(pipeline(raw, process_reducer(), layout=layout, window=WINDOW))
    batches = [element["sparsecore"] for element in iterator]
    for batch, ids in zip(batches, raw, strict=True):
        check_lookup(batch, ids, layout)
    return {
        "minibatches": [b.num_minibatches.tolist() for b in batches],
        "limits": [b.limits.to_plain() for b in batches],
        "drops": [b.drops is not None for b in batches],
        "entries": [
            {name: int(np.isfinite(gains).sum()) for name, gains in b.gains.items()}
            for b in batches
        ],
        "given": [
            {
                "item": sum(np.size(v) for f in ("clicks", "views") for v in ids[f]),
                "user": ids["user"].size,
            }
            for ids in raw
        ],
        "digest": hashlib.sha256(
            b"".join(b.row_pointers["item"].tobytes() for b in batches)
        ).hexdigest(),
        "rounds": iterator.coordinator._connect().rounds,
    }


def one_host_is_too_full(host: TestHost) -> str:
    layout = layout_of(host.count)
    overflow = OverflowPolicy(
        on_overflow="minibatch", caps={"item": StackCaps(max_ids_cap=6)}
    )
    rows = rows_with(1)
    if host.index == 1:
        for i in range(8):
            rows["clicks"][i] = np.array([16])
            rows["views"][i] = np.array([16])
    iterator = iter(
        pipeline(
            [rows_with(1), rows],
            process_reducer(),
            layout=layout,
            overflow=overflow,
            window=1,
        )
    )
    next(iterator)
    try:
        next(iterator)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def both(host: TestHost) -> dict[str, Any]:
    return {"overflow": one_host_overflows(host), "full": one_host_is_too_full(host)}


@pytest.fixture(scope="module", params=[2, 3])
def job(request):
    return [r.value for r in run_hosts(both, hosts=request.param, timeout_seconds=120)]


def test_all_hosts_split_the_batch_of_one_alike(job):
    hosts = [host["overflow"] for host in job]
    for host in hosts:
        assert host["minibatches"] == hosts[0]["minibatches"]
        assert host["limits"] == hosts[0]["limits"]
        counts = [k for (k,) in host["minibatches"]]
        assert [k > 1 for k in counts] == [False, True, False, False, False]
        # A minibatch holds 10 ids of a partition, and 70 had to go in.
        assert counts[1] >= 7
        assert host["limits"][-1]["item"]["max_ids_per_partition"] == 10
    assert len({host["digest"] for host in hosts}) == len(hosts)


def test_no_id_is_dropped(job):
    for host in (h["overflow"] for h in job):
        assert not any(host["drops"])
        assert host["entries"] == host["given"]


def test_only_the_window_with_a_split_takes_more_rounds(job):
    for host in (h["overflow"] for h in job):
        # Handshake, and two windows; bits and needs of the first of them.
        assert host["rounds"] == 1 + 2 + 2


def test_all_hosts_stop_where_a_bucket_of_one_is_too_full(job):
    texts = {host["full"] for host in job}
    (text,) = texts
    assert text.startswith(
        "LimitsExceededError: pipeline 'train': stack 'item': host 1 needs "
        "max_ids_per_partition=8 in step 1, but max_ids_cap allows 6 even for a single "
        "one of the 64 buckets"
    )
