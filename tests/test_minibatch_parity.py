"""Bit-for-bit comparison with jax-tpu-embedding where it splits batches."""

import dataclasses
import functools
import socket
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from jax_tpu_embedding.sparsecore.lib.core import pybind_input_preprocessing
from jax_tpu_embedding.sparsecore.lib.nn import embedding

from grain_sparsecore.buffers import PartitionedBatch, SparseCoreInput
from grain_sparsecore.kernels import KERNEL_VARIABLE, KERNELS
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.minibatch import (
    Split,
    bucketed,
    leave_out,
    minibatch_count,
    needed_bits,
    slot_buckets,
    split_needs,
)
from grain_sparsecore.partition import (
    partition_batch,
    partition_counts,
    required_per_sc,
)
from grain_sparsecore.repartition import repartition
from grain_sparsecore.specs import round_up
from grain_sparsecore.stacking import ALIGNMENT, StackedLayout
from tests.strategies import Case, random_features, random_layout
from tests.test_parity import peer_input, peer_specs

T = TypeVar("T")

# Random batches are compared in this many tests of this many batches each; a batch of
# two or four hosts counts once.
TESTS, BATCHES = 30, 10
MOST_HOSTS = 4


@dataclasses.dataclass
class Round:
    """One batch on every host of a job, how it is split, and the limits for it."""

    cases: list[Case]
    batches: list[PartitionedBatch]
    limits: Limits
    overfull: bool

    @property
    def layout(self) -> StackedLayout:
        return self.cases[0].layout

    @property
    def minibatches(self) -> int:
        return minibatch_count(self.batches[0].split.bits)


def random_round(rng: np.random.Generator) -> Round:
    layout = random_layout(rng, max_partitions=128)
    while layout.topology.num_hosts > MOST_HOSTS:
        layout = random_layout(rng, max_partitions=128)
    most = int(rng.choice([8, 60, 400]))
    cases = [
        Case(layout, random_features(rng, layout, max_ids=most))
        for _ in range(layout.topology.num_hosts)
    ]
    batches = [
        partition_batch(
            case.features,
            layout,
            counters=case.counters,
            num_samples=layout.batch_size,
        )
        for case in cases
    ]
    stats = np.max([b.stats for b in batches], axis=0)
    least = float(rng.choice([0.01, 0.1, 0.5, 1]))
    caps = np.exp(rng.uniform(np.log(least), 0, stats[:, :2].shape)) * stats[:, :2]
    caps = np.maximum(np.ceil(caps).astype(np.int64), 1)
    return split_round(cases, batches, caps)


def split_round(
    cases: list[Case], batches: list[PartitionedBatch], caps: np.ndarray
) -> Round:
    """Agrees as stage 2 does, by hand."""
    layout = cases[0].layout
    if all((b.stats[:, :2] <= caps).all() for b in batches):
        batches = [dataclasses.replace(b, split=Split.none()) for b in batches]
        sizes = [[split_free_size(b, layout)] for b in batches]
        overfull = False
    else:
        buckets = [slot_buckets(b, layout) for b in batches]
        every = [
            needed_bits(b, found, caps, layout)
            for b, found in zip(batches, buckets, strict=True)
        ]
        bits = np.max(every, axis=0)
        overfull = False
        kept = []
        for batch, found in zip(batches, buckets, strict=True):
            for stack, cap in zip(layout.stacks, caps, strict=True):
                full = bucketed(batch, found, stack, layout)
                most = [full.counts.max(), full.unique.max()]
                overfull |= bool((most > cap).any())
            found, _ = leave_out(batch, found, caps, layout)
            kept.append(dataclasses.replace(batch, split=Split(bits, found)))
        batches = kept
        sizes = [
            [
                [
                    split_needs(bucketed(b, b.split.buckets, s, layout), bits, layout)[
                        2
                    ]
                    for s in layout.stacks
                ]
            ]
            for b in batches
        ]
    unit = ALIGNMENT * layout.topology.num_sc_per_device
    limits = {
        name: StackLimits(
            max_ids_per_partition=int(cap[0]),
            max_unique_ids_per_partition=int(cap[1]),
            buffer_size_per_device=round_up(max(int(size), 1), unit),
        )
        for name, cap, size in zip(
            layout.stack_names, caps, np.max(sizes, axis=(0, 1)), strict=True
        )
    }
    return Round(cases, batches, Limits(limits), overfull)


def split_free_size(batch: PartitionedBatch, layout: StackedLayout) -> np.ndarray:
    """Slots of the fullest device where nothing is split, [T]."""
    per_sc = required_per_sc(batch, layout)
    devices = layout.topology.local_device_count
    return per_sc.reshape(len(per_sc), devices, -1).sum(axis=2).max(axis=1)


def on_hosts(hosts: int, call: Callable[[int], T]) -> list[T]:
    """Calls ``call(host)`` on one thread for each host."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(host: int) -> None:
        try:
            results[host] = call(host)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(h,)) for h in range(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a host hangs"
    if errors:
        raise errors[0]
    return [results[h] for h in range(hosts)]


class PeerHosts:
    """The peer's own agreement between hosts, here threads of one process."""

    def __init__(self, hosts: int) -> None:
        sockets = [socket.socket() for _ in range(hosts)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        # Each node runs the server of its host, and must live as long as it is used.
        self._nodes = [
            pybind_input_preprocessing.MinibatchingNode(
                host,
                hosts,
                [f"127.0.0.1:{p}" for p in ports if p != ports[host]],
                ports[host],
            )
            for host in range(hosts)
        ]
        self.interfaces = [node.get_all_reduce_interface() for node in self._nodes]
        self._number = 0

    def next_number(self) -> int:
        self._number += 1
        return self._number


@functools.cache
def peer_hosts(hosts: int) -> PeerHosts:
    return PeerHosts(hosts)


def run_peer(given: Round) -> list[tuple[Any, Any]]:
    hosts = len(given.cases)
    topology = given.layout.topology
    group = peer_hosts(hosts) if hosts > 1 else None
    number = group.next_number() if group else 0

    def run(host: int) -> tuple[Any, Any]:
        case = given.cases[host]
        ids, weights = peer_input(case)
        weighted = any(f.weights is not None for f in case.features)
        return embedding.preprocess_sparse_dense_matmul_input(
            ids,
            weights if weighted else None,
            peer_specs(given.layout, given.limits, case),
            local_device_count=topology.local_device_count,
            global_device_count=topology.global_device_count,
            num_sc_per_device=topology.num_sc_per_device,
            has_leading_dimension=True,
            allow_id_dropping=given.overfull,
            batch_number=number,
            enable_minibatching=True,
            all_reduce_interface=group.interfaces[host] if group else None,
        )

    return on_hosts(hosts, run)


def check_against_peer(given: Round) -> None:
    layout = given.layout
    for (peer, stats), batch in zip(run_peer(given), given.batches, strict=True):
        ours = repartition(batch, given.limits, layout)
        check_stats(stats, batch, layout)
        np.testing.assert_array_equal(
            peer.num_minibatches.ravel(), ours.num_minibatches
        )
        for name in layout.stack_names:
            check_buffers(peer, ours, name, layout)


def check_stats(stats: Any, batch: PartitionedBatch, layout: StackedLayout) -> None:
    topology = layout.topology
    slots = required_per_sc(batch, layout)
    by_device = (topology.local_device_count, topology.num_sc_per_device, -1)
    for stack, (count, unique) in zip(
        layout.stacks, partition_counts(batch, layout), strict=True
    ):
        for want, got in (
            (stats.max_ids_per_partition, count.reshape(by_device).max(axis=1)),
            (stats.max_unique_ids_per_partition, unique.reshape(by_device).max(axis=1)),
            (stats.required_buffer_size_per_sc, slots[stack.index]),
        ):
            np.testing.assert_array_equal(
                np.ravel(want[stack.name]), got.ravel(), stack.name
            )


def check_buffers(
    peer: Any, ours: SparseCoreInput, name: str, layout: StackedLayout
) -> None:
    topology = layout.topology
    width = layout.row_pointers_per_sc
    used = topology.num_sc_per_device * int(ours.num_minibatches[0]) * width
    want, got = peer.lhs_row_pointers[name], ours.row_pointers[name]
    assert want.dtype == got.dtype == np.int32
    assert (
        want.shape
        == got.shape
        == (
            topology.local_device_count,
            64 * topology.num_sc_per_device * width,
        )
    )
    np.testing.assert_array_equal(want[:, :used], got[:, :used], name)
    ends = round_up_all(got[:, used - width + topology.num_partitions - 1])
    # What the peer leaves undefined is empty in ours.
    assert (got[:, used:] == ends[:, None]).all()
    defined = np.arange(ours.gains[name].shape[1]) < ends[:, None]
    for want, got in (
        (peer.lhs_embedding_ids[name], ours.embedding_ids[name]),
        (peer.lhs_sample_ids[name], ours.sample_ids[name]),
    ):
        assert want.dtype == got.dtype == np.int32
        np.testing.assert_array_equal(want[defined], got[defined], name)
        assert (got[~defined] == 2**31 - 1).all()
    want, got = peer.lhs_gains[name], ours.gains[name]
    assert want.dtype == got.dtype == np.float32
    nan = np.isnan(got)
    assert nan[~defined].all()
    np.testing.assert_array_equal(np.isnan(want)[defined], nan[defined], name)
    compared = defined & ~nan
    np.testing.assert_array_equal(
        want[compared].view(np.int32), got[compared].view(np.int32), name
    )


def round_up_all(ends: np.ndarray) -> np.ndarray:
    return -(-ends // ALIGNMENT) * ALIGNMENT


def rounds(number: int) -> Sequence[Round]:
    rng = np.random.default_rng(zlib.crc32(b"minibatch") + number)
    return [random_round(rng) for _ in range(BATCHES)]


@pytest.mark.parametrize("number", range(TESTS))
def test_random_batches_equal_the_peer_bit_for_bit(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNEL_VARIABLE, KERNELS[number % len(KERNELS)])
    for given in rounds(number):
        check_against_peer(given)


def test_random_batches_cover_every_kind() -> None:
    found = [given for number in range(TESTS) for given in rounds(number)]
    counts = {given.minibatches for given in found}
    assert {1, 2, 3, 64} <= counts
    assert len(counts) > 25
    assert {len(given.cases) for given in found} == {1, 2, 4}
    assert {given.layout.topology.num_partitions for given in found} >= {
        2,
        4,
        8,
        32,
        128,
    }
    split = [given for given in found if given.minibatches > 1]
    assert {given.overfull for given in split} == {False, True}
    assert {len(given.cases) > 1 for given in split} == {False, True}
    assert any(len(given.layout.stacks) > 1 for given in split)
    # Hosts that need no split follow those that do.
    assert any(
        (batch.stats[:, :2] <= given.limits.to_array()[:, :2]).all()
        for given in split
        for batch in given.batches
    )
