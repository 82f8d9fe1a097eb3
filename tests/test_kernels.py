import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from numba.core import caching

from grain_sparsecore import kernels
from grain_sparsecore.errors import ConfigError, MissingExtraError
from grain_sparsecore.features import COUNTERS, read_features
from grain_sparsecore.kernels import (
    KERNEL_VARIABLE,
    Kernel,
    active_kernel,
    chunks,
    fast,
    keys,
    load_kernel,
    numba_tools,
    numpy_kernels,
    sorting,
)
from grain_sparsecore.kernels.partitioned import Partitioned
from grain_sparsecore.specs import Combiner, FeatureSpec, TableSpec, Topology
from grain_sparsecore.stacking import INT32_MAX, make_layout
from tests import reference
from tests.strategies import Case, random_case

SEEDS = range(20)


def assert_equal(one: Partitioned, two: Partitioned) -> None:
    for name, first, second in zip(one._fields, one, two, strict=True):
        assert first.dtype == second.dtype
        bits = first.view(np.int32), second.view(np.int32)
        np.testing.assert_array_equal(*bits, err_msg=name)


def check(case: Case, kernel: Kernel) -> None:
    assert_equal(
        numpy_kernels.partition(case.features, case.layout),
        kernel(case.features, case.layout),
    )


@pytest.mark.parametrize("seed", range(100, 200))
def test_kernels_agree_bit_for_bit(seed: int) -> None:
    check(random_case(np.random.default_rng(seed), max_ids=70), fast.partition)


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_of_any_size_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(np.random.default_rng(seed))
    expected = numpy_kernels.partition(case.features, case.layout)
    monkeypatch.setattr(chunks, "CHUNK_IDS", 20)
    assert_equal(expected, numpy_kernels.partition(case.features, case.layout))


@pytest.mark.parametrize("seed", SEEDS)
def test_ids_too_wide_for_a_numpy_key_agree(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(np.random.default_rng(seed))
    expected = numpy_kernels.partition(case.features, case.layout)
    # Not the narrow keys, which few of these ids need more than.
    monkeypatch.setattr(keys, "_MOST_NARROW_BITS", 0)
    assert_equal(expected, numpy_kernels.partition(case.features, case.layout))
    # Nothing fits next to it, so every chunk sorts by ranks of embedding ids.
    monkeypatch.setattr(keys, "_DIRECT_KEY_BITS", 8)
    assert_equal(expected, numpy_kernels.partition(case.features, case.layout))


@pytest.mark.parametrize("dense", [0, 1e9])
@pytest.mark.parametrize("seed", SEEDS)
def test_entries_fetched_and_sent_to_used_memory_agree(
    dense: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def used_slots(count: int) -> tuple[np.ndarray, ...]:
        slots = np.full((3, count), 77, np.int32)
        return slots[0], slots[1], slots[2].view(np.float32)

    case = random_case(np.random.default_rng(seed))
    expected = fast.partition(case.features, case.layout)
    monkeypatch.setattr(numpy_kernels, "_DENSE", dense)
    monkeypatch.setattr(numpy_kernels, "empty_slots", used_slots)
    monkeypatch.setattr(chunks, "CHUNK_IDS", 100)
    assert_equal(expected, numpy_kernels.partition(case.features, case.layout))


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_of_every_width_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(np.random.default_rng(seed))
    for name, bits in (("_NARROW_BITS", 0), ("_WIDE_BITS", 0)):
        # First all keys wide; then too wide, which numpy takes over.
        monkeypatch.setattr(fast, name, bits)
        check(case, fast.partition)


@pytest.mark.parametrize("sorts_itself", [True, False])
def test_keys_in_buckets_agree(
    sorts_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucketed = 0
    sort_batch = fast.nk.sort_batch

    def count(stacks: np.ndarray, *args: object) -> int:
        nonlocal bucketed
        bucketed += stacks[:, fast.nk.BUCKET_BITS].any()
        return sort_batch(stacks, *args)

    monkeypatch.setattr(fast.nk, "sort_batch", count)
    monkeypatch.setattr(fast, "_MANY_KEYS", 0)
    if sorts_itself:
        monkeypatch.setattr(fast, "sort_function", lambda dtype: 0)
    for seed in range(40):
        case = random_case(np.random.default_rng(seed), max_ids=70)
        # From too few bits for buckets to enough for none.
        for bits in range(6, 24, 2):
            monkeypatch.setattr(fast, "_NARROW_BITS", bits)
            check(case, fast.partition)
    assert bucketed > 40


@pytest.mark.parametrize("seed", SEEDS)
def test_sorting_without_numpys_function_agrees(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "sort_function", lambda dtype: 0)
    check(random_case(np.random.default_rng(seed)), fast.partition)


def test_numpys_sort_function_is_found() -> None:
    assert sorting.sort_function("uint32")
    assert sorting.sort_function("int64")


def test_large_batches_agree() -> None:
    # Runs long enough for every shortcut, and more ids than one chunk.
    rng = np.random.default_rng(0)
    for _ in range(10):
        case = random_case(rng, max_partitions=8, max_ids=3000)
        check(case, fast.partition)


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
@pytest.mark.parametrize("seed", SEEDS)
def test_gains_of_extreme_weights_are_finite(seed: int, combiner: Combiner) -> None:
    rng = np.random.default_rng(seed)
    extremes = [0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, 2e19, -2e19, 2.0**-75]
    layout = make_layout(
        [
            TableSpec(
                name="t", vocabulary_size=10_000, embedding_dim=8, combiner=combiner
            )
        ],
        [FeatureSpec(name="f", table="t", ids="f", weights="w")],
        topology=Topology(
            global_device_count=2, local_device_count=1, num_sc_per_device=2
        ),
        batch_size=32,
    )
    lengths = rng.integers(0, 6, 32)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    # No id twice in a sample: then a gain is one quotient, and no sum of several.
    ids = np.arange(splits[-1], dtype=np.int32)
    weights = rng.choice(extremes, splits[-1]).astype(np.float32)
    element = {
        "f": {"values": ids, "row_splits": splits},
        "w": {"values": weights, "row_splits": splits},
    }
    features, counters, _ = read_features(element, layout)
    by_numpy = numpy_kernels.partition(features, layout)
    assert_equal(by_numpy, fast.partition(features, layout))
    assert np.isfinite(by_numpy.gains[by_numpy.sample_ids < INT32_MAX]).all()
    rows = [weights[a:b] for a, b in itertools.pairwise(splits)]
    gains = [reference.row_gains(len(w), list(w), combiner) for w in rows]
    expected = np.array([gain for row in gains for gain in row], np.float32)
    real = by_numpy.sample_ids < INT32_MAX
    np.testing.assert_array_equal(np.sort(by_numpy.gains[real]), np.sort(expected))
    zeroed = counters[0, COUNTERS.index("zero_weight_rows")]
    all_zero = sum(bool(row) and not any(row) for row in gains)
    # Every row that was made 0 is all 0, and so is one of vanishing quotients.
    assert 0 < zeroed <= all_zero


def test_fastest_kernel_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KERNEL_VARIABLE, raising=False)
    assert active_kernel() is fast.partition
    monkeypatch.setenv(KERNEL_VARIABLE, "numpy")
    assert active_kernel() is numpy_kernels.partition
    monkeypatch.setenv(KERNEL_VARIABLE, "fast")
    assert active_kernel() is fast.partition


def test_unknown_kernel_names_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_VARIABLE, "cuda")
    with pytest.raises(ConfigError) as error:
        active_kernel()
    assert "GRAIN_SPARSECORE_KERNEL='cuda' is not one of numpy, fast" in str(
        error.value
    )


def hide_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("fast", "numba_kernels"):
        monkeypatch.delitem(sys.modules, f"grain_sparsecore.kernels.{name}")
        monkeypatch.delattr(kernels, name)


def test_without_numba_numpy_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_numba(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load_kernel.__wrapped__("") is numpy_kernels.partition
    with pytest.raises(MissingExtraError) as error:
        load_kernel.__wrapped__("fast")
    assert "GRAIN_SPARSECORE_KERNEL=fast needs numba" in str(error.value)
    assert "pip install 'grain_sparsecore[fast]', or set it to numpy." in str(
        error.value
    )


def test_broken_numba_is_reported_once_and_numpy_sorts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_numba(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
    assert load_kernel.__wrapped__("") is numpy_kernels.partition
    assert "numba is installed but cannot be imported" in caplog.text


_MODULE = """
from grain_sparsecore.kernels import numba_tools


@numba_tools.compiled
def double(x):
    return x + x


assert double(21) == 42
"""


def test_processes_may_fill_the_cache_together(tmp_path: pathlib.Path) -> None:
    # Compiled the way the kernel is, but in a moment.
    (tmp_path / "doubling.py").write_text(_MODULE)
    root = pathlib.Path(__file__).parent.parent
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)]),
    }

    def run(count: int) -> dict[str, int]:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", "import doubling"],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
        found = (tmp_path / "cache").rglob("*.nb*")
        return {path.name: path.stat().st_mtime_ns for path in found}

    written = run(3)
    assert len(written) >= 2
    # A process that comes later compiles nothing.
    assert run(1) == written


def test_read_only_folders_only_cost_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # numba then finds no folder to cache in, and raises when it decorates.
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert numba_tools.compiled(lambda x: x + 1)(1) == 2
