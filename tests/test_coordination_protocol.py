"""The protocol as plain functions: many hosts in lock-step in one thread."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sparsecore.coordination.frames import (
    FRAME_SIZE,
    NOTHING,
    PAYLOAD_SIZE,
    Kind,
    Tag,
    exchange,
    hash31,
    share_bytes,
)
from grain_sparsecore.coordination.protocol import (
    Host,
    WindowReport,
    agree_on_window,
    handshake,
)
from grain_sparsecore.errors import CoordinationError, HostMismatchError

TAG = Tag(name="train", kind=Kind.WINDOW)


def lock_step(exchanges):
    """Runs one exchange per host; the result, or the exception, of each."""
    results = [None] * len(exchanges)
    frames = {h: next(e) for h, e in enumerate(exchanges)}
    while frames:
        assert len(frames) == len(exchanges), "a host left the others alone"
        agreed = np.max(list(frames.values()), axis=0)
        assert agreed.shape == (FRAME_SIZE,)
        assert agreed.dtype == np.int32
        frames = {}
        for host, running in enumerate(exchanges):
            try:
                frames[host] = running.send(agreed.copy())
            except StopIteration as stop:
                results[host] = stop.value
            except Exception as error:
                results[host] = error
    return results


@pytest.mark.parametrize("size", [1, 3, PAYLOAD_SIZE, PAYLOAD_SIZE + 1, 3000])
def test_an_exchange_is_the_maximum_for_any_size(size):
    rng = np.random.default_rng(size)
    vectors = rng.integers(-(2**31) + 1, 2**31 - 1, (3, size), np.int32)
    for result in lock_step([exchange(TAG, v) for v in vectors]):
        np.testing.assert_array_equal(result, vectors.max(axis=0))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 3 * PAYLOAD_SIZE, 10_000])
def test_bytes_come_from_the_one_host_that_has_them(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    hosts = [share_bytes(TAG, data if host == 1 else None) for host in range(3)]
    assert lock_step(hosts) == [data] * 3


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Tag(name="eval", kind=Kind.WINDOW), "another host advanced another pipeline"),
        (Tag(name="train", kind=Kind.HANDSHAKE), "round of kind HANDSHAKE, another in"),
        (Tag(name="train", kind=Kind.WINDOW, start=4), "different steps, from 0 to 4"),
        (
            Tag(name="train", kind=Kind.WINDOW, start=0, position=2),
            "different steps, from 0 to 2 (windows start at 0 to 0)",
        ),
        (Tag(name="train", kind=Kind.WINDOW, limits=7), "with different limits"),
    ],
)
def test_hosts_out_of_step_all_raise(other, text):
    words = np.zeros(3, np.int32)
    for error in lock_step([exchange(TAG, words), exchange(other, words)]):
        assert isinstance(error, HostMismatchError)
        assert text in str(error)


def test_hosts_in_different_frames_of_a_round_all_raise():
    one, two = exchange(TAG, np.zeros(5000, np.int32)), exchange(TAG, np.zeros(1))
    first = np.maximum(next(one), next(two))
    second = one.send(first)
    third = exchange(TAG, np.zeros(1, np.int32))
    with pytest.raises(HostMismatchError, match="different frames of one round, 0 to"):
        one.send(np.maximum(second, next(third)))


def test_hosts_with_another_protocol_version_all_raise(monkeypatch):
    other = exchange(TAG, np.zeros(1, np.int32))
    monkeypatch.setattr("grain_sparsecore.coordination.frames.PROTOCOL_VERSION", 2)
    theirs = next(other)
    monkeypatch.undo()
    mine = exchange(TAG, np.zeros(1, np.int32))
    with pytest.raises(HostMismatchError, match="protocol 1 and 2; this host: 1"):
        mine.send(np.maximum(next(mine), theirs))


def shake(configurations, *, indices=None, nonces=None):
    count = len(configurations)
    indices = indices or range(count)
    return lock_step(
        [
            handshake(
                name="train",
                configuration=c,
                host=Host(index=i, count=count),
                nonce=100 + at if nonces is None else nonces[at],
            )
            for at, (i, c) in enumerate(zip(indices, configurations, strict=True))
        ]
    )


@pytest.mark.parametrize("hosts", [1, 2, 5, 400])
def test_equal_configurations_share_a_session(hosts):
    assert shake([{"a": 1, "b": {"c": 2}}] * hosts) == [100] * hosts


def test_the_order_of_keys_is_no_difference():
    assert shake([{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == [100, 100]


def test_a_difference_names_hosts_keys_and_both_values():
    usual = {"window": 8, "tables": {"item": {"dim": 8}}}
    other = {"window": 8, "tables": {"item": {"dim": 16}, "user": {"dim": 8}}}
    results = shake([other, usual, usual, other])
    for index, error in enumerate(results):
        assert isinstance(error, HostMismatchError)
        assert (
            "hosts 1 and 2 differ: tables.item.dim is 16 on hosts 0 and 3 and 8 on "
            "hosts 1 and 2; tables.user is present on hosts 0 and 3 and absent on "
            f"hosts 1 and 2. Start all hosts with the same one (this is host {index})."
        ) in str(error)


def test_many_differences_are_counted_not_listed():
    results = shake([{f"k{i:02}": host for i in range(30)} for host in range(6)])
    for error in results:
        assert "k04 is 0 on host 0 and 1 on host 1; 25 more keys differ" in str(error)
        assert "hosts 4 and 5 differ as well" in str(error)
        assert "k05" not in str(error)


def test_long_configurations_can_be_compared():
    tables = {f"table_{i}": {"vocabulary_size": i} for i in range(3000)}
    changed = {**tables, "table_2999": {"vocabulary_size": 1}}
    for error in shake([{"tables": tables}, {"tables": changed}, {"tables": tables}]):
        assert (
            "host 1 differs: tables.table_2999.vocabulary_size is 2999 on hosts 0 and "
            "2 and 1 on host 1." in str(error)
        )


def test_two_processes_of_one_index_are_named():
    for error in shake([{}, {}, {}], indices=[0, 1, 1]):
        assert isinstance(error, HostMismatchError)
        assert "two processes claim to be host 1, and none is host 2 of 3" in str(error)


def test_hashes_are_stable_non_negative_int32():
    assert hash31(b"") == 0x63B0C442
    assert all(0 <= hash31(bytes([i])) < 2**31 for i in range(256))


# One host's data: how many batches, what each needs, and where reading fails.
hosts_data = st.lists(
    st.tuples(
        st.lists(st.integers(0, 50), max_size=9),
        st.one_of(st.none(), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=5,
)


def expected_end(data, policy):
    """Steps all hosts hand on, and the host that fails then, by a window of one."""
    lengths = [len(needs) for needs, _ in data]
    end = max(lengths) if policy == "pad" else min(lengths)
    failures = [
        (at, -host)
        for host, (needs, at) in enumerate(data)
        if at is not None and at <= len(needs)
    ]
    # A host that fails has no end of data of its own.
    if failures:
        lengths = [
            10**6 if (at is not None and at <= len(needs)) else len(needs)
            for needs, at in data
        ]
        end = max(lengths) if policy == "pad" else min(lengths)
        at, host = min(failures)
        if at <= end:
            return at, -host
    return end, None


@settings(max_examples=200)
@given(hosts_data, st.integers(1, 11), st.sampled_from(["stop", "pad"]))
def test_hosts_end_alike_whatever_the_window(data, window, policy):
    count = len(data)
    start = 0
    handed_on = []
    while True:
        reports = []
        for needs, at in data:
            limit = len(needs) if at is None else min(len(needs), at)
            read = needs[start : min(limit, start + window)]
            fails = at is not None and at <= len(needs) and at - start < window
            reports.append(
                WindowReport(
                    stats=np.array(read, np.int32).reshape(-1, 1, 1),
                    failure="broken" if fails else None,
                    structure=lambda: b"structure",
                )
            )
        outcomes = lock_step(
            [
                agree_on_window(
                    report=report,
                    window=window,
                    on_exhausted=policy,
                    tag=Tag(name="train", kind=Kind.WINDOW, start=start),
                    host=Host(index=host, count=count),
                )
                for host, report in enumerate(reports)
            ]
        )
        first = outcomes[0]
        for outcome in outcomes:
            assert outcome.count == first.count
            assert outcome.stops == first.stops
            assert outcome.failed_host == first.failed_host
            np.testing.assert_array_equal(outcome.needed, first.needed)
        here = [report.stats[: first.count] for report in reports]
        most = max(int(stats.max(initial=0)) for stats in here)
        assert int(first.needed[0, 0]) == most
        handed_on.append(first.count)
        start += window
        if first.stops or first.failed_host is not None:
            break
        assert first.count == window
    if first.failed_host is not None:
        assert first.failure == "broken"
    assert (sum(handed_on), first.failed_host) == expected_end(data, policy)


def report(needs, **options):
    return WindowReport(stats=np.array(needs, np.int32).reshape(-1, 1, 1), **options)


def agree(reports, *, policy="pad", window=4):
    return lock_step(
        [
            agree_on_window(
                report=r,
                window=window,
                on_exhausted=policy,
                tag=TAG,
                host=Host(index=h, count=len(reports)),
            )
            for h, r in enumerate(reports)
        ]
    )


def test_a_structure_travels_only_where_a_host_needs_it():
    full = report([1] * 4, structure=lambda: b"four")
    for outcome in agree([full, report([])]):
        assert outcome.structure == b"four"
    for outcome in agree([full, report([1], structure=lambda: b"one")]):
        assert outcome.structure is None
    for outcome in agree([full, report([])], policy="stop"):
        assert outcome.structure is None


def test_a_structure_that_cannot_be_told_is_an_error_on_all_hosts():
    def fail():
        raise CoordinationError("element['x'] is a Secret")

    for error in agree([report([1] * 4, structure=fail), report([])]):
        assert isinstance(error, CoordinationError)
        assert "element['x'] is a Secret" in str(error)


def test_the_message_of_a_failure_is_cut_at_a_readable_length():
    outcomes = agree([report([1], failure="ä" * 5000), report([1] * 4)])
    for outcome in outcomes:
        assert outcome.failed_host == 0
        assert outcome.count == 1
        assert outcome.failure == "ä" * 1000


def test_what_is_not_said_is_the_neutral_element():
    assert np.maximum(NOTHING, np.int32(-(2**31) + 1)) == -(2**31) + 1
