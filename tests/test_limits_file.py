import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from grain_sparsecore.atomic import write_atomically
from grain_sparsecore.errors import ConfigError
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.limits_file import LimitsFile, is_limits_file, load_limits
from grain_sparsecore.limits_fit import (
    adapt_limits,
    differences,
    fingerprint,
    made_for,
    merge_limits,
)
from grain_sparsecore.specs import FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import make_layout


def layout_of(
    names="AB",
    *,
    devices=4,
    hosts=1,
    sc=2,
    batch_size=64,
    vocabulary=1000,
    stack=None,
    features=None,
    **options,
):
    return make_layout(
        [
            TableSpec(
                name=n,
                vocabulary_size=vocabulary,
                embedding_dim=8,
                stack=stack,
                **options,
            )
            for n in names
        ],
        [FeatureSpec(name=n, table=n) for n in names]
        + [FeatureSpec(name=n, table=t) for n, t in (features or {}).items()],
        topology=Topology(
            global_device_count=devices,
            local_device_count=devices // hosts,
            num_sc_per_device=sc,
        ),
        batch_size=batch_size,
    )


def limits_of(ids, unique, size):
    return StackLimits(
        max_ids_per_partition=ids,
        max_unique_ids_per_partition=unique,
        buffer_size_per_device=size,
    )


LIMITS = Limits({"A": limits_of(24, 20, 320), "B": limits_of(8, 4, 64)})


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "limits.json"
    LimitsFile.of(LIMITS, layout=layout_of(), origin={"command": "plan"}).save(path)
    return path


def edited(path, **changes):
    plain = json.loads(path.read_text())
    plain.update(changes)
    path.write_text(json.dumps(plain))


def test_what_is_saved_is_loaded(saved):
    assert load_limits(saved, layout=layout_of()) == LIMITS
    file = LimitsFile.load(saved)
    assert file.origin == {"command": "plan"}
    assert file.made_for == made_for(layout_of())
    # People read and diff these files.
    plain = json.loads(saved.read_text())
    assert plain["limits"]["A"]["max_ids_per_partition"] == 24
    assert plain["fingerprint"] == fingerprint(file.made_for)


def test_limits_never_go_below_the_start(saved):
    layout = layout_of(max_ids_per_partition=16, max_unique_ids_per_partition=16)
    assert load_limits(saved, layout=layout) == Limits(
        {"A": limits_of(24, 20, 320), "B": limits_of(16, 16, 64)}
    )


def test_only_what_moves_ids_matters(saved):
    # Two hosts with half the batch each, other dimensions: the same SparseCores see
    # the same ids.
    other = layout_of(hosts=2, batch_size=32)
    assert load_limits(saved, layout=other) == LIMITS
    assert made_for(layout_of("AB")) == made_for(layout_of("BA"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"devices": 8, "batch_size": 128},
            "topology.num_partitions: 8 in the file, 16 here",
        ),
        ({"batch_size": 128}, "topology.samples_per_sc: 8 in the file, 16 here"),
        (
            {"vocabulary": 1001},
            "stacks.A.tables.A.vocabulary_size: 1000 in the file, 1001 here",
        ),
        ({"names": "AC"}, "stacks.B: only in the file; stacks.C: not in the file"),
        ({"features": {"c": "A"}}, "stacks.A.features.c: not in the file"),
        ({"stack": "all"}, "stacks.all: not in the file"),
    ],
)
def test_another_layout_is_refused_with_the_difference(saved, changes, message):
    with pytest.raises(ConfigError) as error:
        load_limits(saved, layout=layout_of(**changes))
    assert message in str(error.value)
    assert str(saved) in str(error.value)
    assert "plan" in str(error.value)
    assert "limits.adapt = true (of the command limits: --adapt)" in str(error.value)


def test_many_differences_are_counted(saved):
    with pytest.raises(ConfigError, match=r"; and 2 more\. Make a new one"):
        load_limits(saved, layout=layout_of("CDEFGHIJ"))


def test_differences_of_different_kinds():
    assert differences({"a": {"b": 1}}, {"a": 2}) == ["a: {'b': 1} in the file, 2 here"]
    assert differences({"a": {"b": 1}}, {"a": {"b": 1}}) == []


def test_merge_takes_the_maximum_of_every_number(tmp_path):
    more = Limits({"A": limits_of(9, 21, 96), "C": limits_of(1, 1, 16)})
    assert merge_limits([LIMITS, more]) == Limits(
        {
            "A": limits_of(24, 21, 320),
            "B": limits_of(8, 4, 64),
            "C": limits_of(1, 1, 16),
        }
    )
    layout = layout_of()
    paths = []
    for i, limits in enumerate(
        [LIMITS, Limits({"A": limits_of(32, 1, 320), "B": limits_of(1, 1, 128)})]
    ):
        paths.append(tmp_path / f"{i}.json")
        LimitsFile.of(limits, layout=layout).save(paths[-1])
    assert load_limits(paths, layout=layout) == Limits(
        {"A": limits_of(32, 20, 320), "B": limits_of(8, 4, 128)}
    )


def stats_of(tables, layout, rows):
    """Maxima over all SparseCores of ``rows``: one list of ids per sample, table."""
    partitions = layout.topology.num_partitions
    per_sc = layout.samples_per_sc_per_feature
    result = {}
    for stack in layout.stacks:
        ids = unique = slots = 0
        for first in range(0, len(rows), per_sc):
            entries = {
                ((i + f.col_shift) % partitions, f.table.name, i, sample)
                for f in stack.features
                for sample in range(first, first + per_sc)
                for i in rows[sample][tables.index(f.table.name)]
            }
            count = np.bincount([e[0] for e in entries], minlength=partitions)
            distinct = np.bincount([e[0] for e in {e[:3] for e in entries}])
            ids, unique = max(ids, count.max()), max(unique, distinct.max())
            slots = max(slots, int(((count + 7) // 8 * 8).sum()))
        result[stack.name] = limits_of(
            int(ids), int(unique), slots * layout.topology.num_sc_per_device
        )
    return Limits(result)


@pytest.mark.parametrize("stack", [None, "both"])
@pytest.mark.parametrize("skew", ["hot", "uniform"])
def test_adapted_limits_bound_the_same_samples_elsewhere(stack, skew):
    rng = np.random.default_rng(3)
    rows = [
        [
            (rng.zipf(1.3, 6) if skew == "hot" else rng.integers(0, 500, 6)) % 500
            for _ in "AB"
        ]
        for _ in range(240)
    ]
    shapes = [
        {"devices": d, "sc": s, "batch_size": n * d * s}
        for d, s in ((1, 2), (2, 2), (2, 4), (8, 2))
        for n in (5, 10, 15)
    ]
    made = [layout_of("AB", vocabulary=500, stack=stack, **shape) for shape in shapes]
    stats = [stats_of("AB", layout, rows) for layout in made]
    for layout, limits in zip(made, stats, strict=True):
        then = made_for(layout)
        for other, needed in zip(made, stats, strict=True):
            bound = adapt_limits(limits, made_for_then=then, layout=other)
            assert (bound.to_array() >= needed.to_array()).all(), (layout, other)
            for value in bound.values():
                unit = 8 * other.topology.num_sc_per_device
                assert value.buffer_size_per_device % unit == 0
        assert adapt_limits(limits, made_for_then=then, layout=layout) == limits


def test_adapting_keeps_what_it_can(saved):
    layout = layout_of("AC", devices=2, batch_size=32, max_ids_per_partition=3)
    adapted = load_limits(saved, layout=layout, adapt=True)
    # Half the partitions: two old ones meet in a new one. C is new, B is gone.
    assert adapted == Limits({"A": limits_of(48, 40, 320), "C": limits_of(3, 1, 16)})


def test_adapting_stops_at_int32(tmp_path):
    path = tmp_path / "big.json"
    layout = layout_of("A", devices=64, sc=4, batch_size=256)
    big = Limits({"A": limits_of(2_000_000, 2_000_000, 2**31 - 32)})
    LimitsFile.of(big, layout=layout).save(path)
    other = layout_of("A", devices=256, sc=4, batch_size=4096)
    adapted = load_limits(path, layout=other, adapt=True)["A"]
    assert adapted.max_ids_per_partition == 524_280
    assert adapted.max_unique_ids_per_partition == 524_280
    assert adapted.buffer_size_per_device == 524_280 * 4 * 1024


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match=r"nope.json' does not exist; .* --limits"):
        LimitsFile.load(tmp_path / "nope.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "no limits file"),
        ('{"format": "other"}', "no limits file"),
        ("\xff", "is not JSON"),
        pytest.param("1" * 5000, "is not JSON", id="digits"),
        pytest.param("[" * 200_000, "is not JSON", id="depth"),
        ('{"format": "grain_sparsecore limits", "version": 9}', "has version 9"),
        ('{"format": "grain_sparsecore limits", "version": 1}', "lacks 'limits' or"),
    ],
)
def test_what_is_no_limits_file(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        LimitsFile.load(path)
    assert is_limits_file(path) == ("version" in text)


def test_a_directory_is_no_limits_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        LimitsFile.load(tmp_path)


def whole(ids=8, unique=8, size=64):
    return {
        "max_ids_per_partition": ids,
        "max_unique_ids_per_partition": unique,
        "buffer_size_per_device": size,
    }


@pytest.mark.parametrize(
    ("stacks", "message"),
    [
        ({"A": whole(ids=0), "B": whole()}, r"\['A'\].max_ids_per_partition is 0"),
        ({"A": whole(), "B": whole(size=True)}, "buffer_size_per_device is True"),
        ({"A": whole(), "B": whole(unique=2**31)}, "is 2147483648; .* to 2147483647"),
        ({"A": whole(), "B": whole(ids=1.5)}, "is 1.5"),
        ({"A": whole(), "B": {}}, r"\['B'\] must have exactly the keys max_ids"),
        ({"A": whole(), "B": whole(size=72)}, "=72 must be a multiple of 16"),
        ({"A": whole(), "B": whole(size=144)}, "at most 128, which"),
        ({"A": whole(ids=134_217_721), "B": whole()}, "=134217721 is above 134217720"),
        ({"A": whole()}, r"'limits' has the stacks \['A'\], 'made_for' has \['A', 'B'"),
    ],
)
def test_impossible_numbers_are_refused(saved, stacks, message):
    edited(saved, limits=stacks)
    with pytest.raises(ConfigError, match=message) as error:
        load_limits(saved, layout=layout_of())
    assert str(saved) in str(error.value)


def test_an_edited_origin_of_the_numbers_is_noticed(saved):
    what = made_for(layout_of(vocabulary=7))
    edited(saved, made_for=what)
    with pytest.raises(ConfigError, match="'made_for' was edited"):
        LimitsFile.load(saved)
    del what["topology"]["num_partitions"]
    edited(saved, made_for=what, fingerprint=fingerprint(what))
    with pytest.raises(ConfigError, match="lacks 'num_partitions'"):
        LimitsFile.load(saved)
    what["topology"]["num_partitions"] = 0
    edited(saved, made_for=what, fingerprint=fingerprint(what))
    with pytest.raises(ConfigError, match="no positive integer"):
        LimitsFile.load(saved)


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "limits.json"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_readable_by_others_as_the_umask_says(tmp_path):
    old = os.umask(0o027)
    try:
        write_atomically(tmp_path / "f", b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640


def run_child(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("call", ["write", "flush", "fsync", "chmod", "replace"])
def test_killed_at_each_step_the_old_file_is_intact(saved, call):
    before = saved.read_bytes()
    child = run_child(
        """
        import io, os, signal, sys
        from grain_sparsecore.atomic import write_atomically

        path, call = sys.argv[1:]
        die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        if call in ("write", "flush"):
            real = os.fdopen

            class Dying:
                def __init__(self, file): self.file = file
                def __enter__(self): return self
                def __exit__(self, *_): self.file.close()
                def write(self, data):
                    self.file.write(data[: len(data) // 2])
                    self.file.flush()
                    if call == "write": die()
                    self.file.write(data[len(data) // 2 :])
                flush = die

            os.fdopen = lambda *a: Dying(real(*a))
        else:
            setattr(os, call, die)
        write_atomically(path, b"new " * 100_000)
        """,
        saved,
        call,
    )
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert saved.read_bytes() == before
    assert load_limits(saved, layout=layout_of()) == LIMITS


def test_killed_at_any_time_the_file_is_whole(tmp_path):
    path = tmp_path / "limits.json"
    code = """
        import itertools, sys
        from grain_sparsecore.atomic import write_atomically

        for i in itertools.count():
            write_atomically(sys.argv[1], b"%d\\n" % (i % 10) * 200_000)
            if i == 0:
                print("started", flush=True)
        """
    rng = np.random.default_rng(0)
    for _ in range(4):
        child = run_child(code, path)
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        time.sleep(rng.uniform(0, 0.05))
        child.kill()
        child.communicate(timeout=60)
        lines = path.read_bytes().split(b"\n")
        assert len(lines) == 200_001
        assert len(set(lines[:-1])) == 1
