"""What else knows of minibatches: training, metrics, report, program."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from jax_tpu_embedding.sparsecore.lib.nn import embedding

from grain_sparsecore.cli.output import format_summary
from grain_sparsecore.config import Config, load_config
from grain_sparsecore.errors import InputError, LimitsExceededError
from grain_sparsecore.interop.keras_rs import to_keras_rs
from grain_sparsecore.limits import Limits, StackLimits
from grain_sparsecore.metrics import JsonLinesWriter, is_minibatched, segment_counts
from grain_sparsecore.pipeline.splitting import SplitTotals
from grain_sparsecore.plan import plan
from grain_sparsecore.program import Program, buffer_shapes, lower, program_fingerprint
from grain_sparsecore.rehearse import Compiler, rehearse, sample_limits
from grain_sparsecore.report.figures import all_figures
from grain_sparsecore.report.page import report_html
from grain_sparsecore.report.plan_page import plan_record
from grain_sparsecore.report.record import RunRecord
from grain_sparsecore.report.recorder import RunRecorder
from grain_sparsecore.stats import buffer_bytes_per_device
from grain_sparsecore.summary import MinibatchSummary
from grain_sparsecore.train import train
from grain_sparsecore.watching import RunWatcher
from tests.minibatch_helpers import layout_of, pipeline, rows_with

CONFIG = """
[topology]
num_sc_per_device = 2

[pipeline]
batch_size = 64
window = 2

[source]
kind = "synthetic"
num_records = 2000
ids_per_sample = { words = 40 }
dense = 1

[train]
dense = ["dense"]
hidden = [4]

[[table]]
name = "word"
vocabulary_size = 5000
embedding_dim = 8

[[feature]]
name = "words"
table = "word"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(CONFIG)
    return tmp_path / "job.toml"


def minibatched(path: Path, cap: int, **limits) -> Config:
    settings = {"on_overflow": "minibatch", **limits}
    return load_config(
        path,
        overrides=[
            f"limits.stack.word.max_ids_cap={cap}",
            *(f"limits.{key}={value}" for key, value in settings.items()),
        ],
    )


def test_a_job_with_minibatches_learns_what_it_would_without(path: Path):
    whole = train(load_config(path), steps=6)
    assert whole.minibatches == MinibatchSummary(batches={1: 6})
    config = minibatched(path, 8)
    metrics = path.with_name("metrics.jsonl")
    watcher = RunWatcher(config.layout(), record=True, writer=JsonLinesWriter(metrics))
    split = train(config, steps=6, watcher=watcher)
    record = watcher.finish(split, title="t", config=config)
    assert record is not None
    assert split.dropped_ids == 0
    assert split.limits["word"].max_ids_per_partition == 8
    np.testing.assert_allclose(
        [split.loss_first, split.loss_last],
        [whole.loss_first, whole.loss_last],
        rtol=1e-6,
    )
    # Found in summary, JSON, text, metrics and report.
    found = split.minibatches
    assert sum(found.batches.values()) == 6
    assert found.share_split == 1
    most = max(found.batches)
    assert most > 2
    # Row pointers of 2 SparseCores and 16 partitions, 63 times more, and slots.
    assert found.extra_buffer_bytes > 2 * 16 * 4 * 63
    assert json.loads(split.to_json())["minibatches"] == {
        "batches": {str(k): n for k, n in found.batches.items()},
        "share_split": 1.0,
        "extra_buffer_bytes": found.extra_buffer_bytes,
    }
    assert f"batches split      100.0% (up to {most} minibatches; " in (
        format_summary(split)
    )
    assert "batches split" not in format_summary(whole)
    *steps, last = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert last == {
        "step": 6,
        "minibatches/share_split": 1.0,
        "minibatches/extra_buffer_bytes": found.extra_buffer_bytes,
    }
    counts = [step["minibatches"] for step in steps]
    assert sorted(counts) == sorted(
        k for k, n in found.batches.items() for _ in range(n)
    )
    assert record.minibatches.y() == counts
    facts = dict(record.facts)
    assert facts["batches split"] == f"100%, up to {most} parts"
    assert facts["minibatches cost"].endswith(" KiB per device")
    assert "Minibatches per batch" in report_html(record)


def test_the_cost_is_row_pointers_and_slots():
    layout = layout_of(2)
    totals = SplitTotals()
    totals.batches.update({1: 3, 5: 1})
    totals.extra_slots = 7
    # 2 stacks, 2 SparseCores, 8 row pointers for each of 63 more minibatches.
    pointers = 2 * 2 * 8 * 63 * 4
    assert MinibatchSummary.of(totals, layout, minibatching=True) == MinibatchSummary(
        batches={1: 3, 5: 1},
        share_split=0.25,
        extra_buffer_bytes=pointers + 7 * 12,
    )
    plain = MinibatchSummary.of(totals, layout, minibatching=False)
    assert plain.extra_buffer_bytes == 0


def test_a_job_whose_buckets_are_too_full_stops_or_drops(path: Path):
    with pytest.raises(LimitsExceededError, match="single one of the 64 buckets"):
        train(minibatched(path, 2), steps=6)
    summary = train(minibatched(path, 2, on_full_bucket="drop"), steps=6)
    assert summary.steps == 6
    assert 0 < summary.dropped_ids < 6 * 64 * 40 // 2


def recorded(overflow_cap: int | None):
    layout = layout_of()
    options = {} if overflow_cap else {"overflow": None}
    recorder = RunRecorder(RunRecord(command="train", title=""), layout=layout)
    batches = [
        e["sparsecore"] for e in pipeline([rows_with(5), rows_with(60)], **options)
    ]
    for step, batch in enumerate(batches):
        recorder.add_batch(step, batch)
    return recorder.finish(), batches


def test_the_record_of_a_split_batch_names_the_same_ids():
    (plain, whole), (split, parts) = recorded(None), recorded(10)
    layout = layout_of()
    assert [is_minibatched(b[0], layout=layout) for b in (whole, parts)] == [
        False,
        True,
    ]
    for one, two in zip(plain.stacks, split.stacks, strict=True):
        assert one.top_ids == two.top_ids
        assert one.rank_shares == two.rank_shares
        assert one.partition_mean == two.partition_mean
        assert one.partition_max == two.partition_max
    assert plain.stacks[0].needed.y() == [8, 60]
    # Entries of the fullest partition of one minibatch.
    assert split.stacks[0].needed.y()[1] <= 10
    assert not len(plain.minibatches)
    assert "minibatches" in {f.key for f in all_figures(split)}
    assert "minibatches" not in {f.key for f in all_figures(plain)}
    counts = segment_counts(parts[1], layout=layout)["item"]
    assert counts.shape == (2, parts[1].num_minibatches[0], 2)


def test_limits_for_a_rehearsal_stay_below_the_caps(path: Path):
    config = minibatched(path, 8)
    layout = config.layout()
    name = "v6e:2x2"
    plain = sample_limits(load_config(path), layout, 4, topology=name)["word"]
    assert plain.max_ids_per_partition > 8
    capped = sample_limits(config, layout, 4, topology=name)["word"]
    assert capped == dataclasses.replace(plain, max_ids_per_partition=8)


def test_keras_rs_gets_no_split_batch():
    (batch,) = [e["sparsecore"] for e in pipeline([rows_with(60)])]
    count = int(batch.num_minibatches[0])
    with pytest.raises(
        InputError, match=f"split into {count} minibatches, and keras-rs has none"
    ):
        to_keras_rs(batch)


def test_the_page_of_a_plan_counts_minibatches(path: Path):
    for cap, full in ((8, False), (2, True)):
        config = minibatched(path, cap)
        topology = config.layout().topology
        plans = plan(config, [topology], batches=2)
        page = report_html(plan_record(plans, title="t", config=config))
        assert "<caption>Minibatches</caption>" in page
        for count, steps in plans[0].minibatches.items():
            assert f'data-head="minibatches per batch">{count}</td>' in page
            assert f'data-head="steps">{steps}</td>' in page
        assert ("a single bucket of ids is above a cap" in page) == full


def program_of(minibatching: bool) -> Program:
    layout = layout_of()
    return Program.of(layout, limits(), minibatching=minibatching)


def limits() -> Limits:
    numbers = StackLimits(
        max_ids_per_partition=10,
        max_unique_ids_per_partition=10,
        buffer_size_per_device=256,
    )
    return Limits(dict.fromkeys(layout_of().stack_names, numbers))


def test_the_program_with_minibatching_is_another_one():
    plain, split = (lower(program_of(m)).as_text() for m in (False, True))
    assert "WithMinibatchingOp" not in plain
    assert "@SparseDenseMatmulWithMinibatchingOp" in split
    assert "@SparseDenseMatmulGradOptimizerUpdateWithMinibatchingOp" in split
    prints = [
        program_fingerprint(limits(), layout_of(), minibatching=m)
        for m in (False, True, True)
    ]
    assert prints[0] != prints[1] == prints[2]
    assert Program.from_plain(program_of(True).to_plain()) == program_of(True)


def test_the_tpu_compiler_takes_the_program(path: Path):
    config = minibatched(path, 8)
    with Compiler(timeout_seconds=120, cache=path.parent) as compiler:
        rehearsal = rehearse(
            config,
            "v6e:2x2",
            compiler=compiler,
            limits=lambda layout: sample_limits(config, layout, 2, topology="v6e:2x2"),
        )
    (row,) = rehearsal.stacks
    assert row.fits, row.reason
    assert row.limits is not None
    assert row.limits.max_ids_per_partition == 8
    # Slots, and row pointers of 2 SparseCores, 64 minibatches and 8 partitions.
    slots = 12 * row.limits.buffer_size_per_device
    assert row.buffer_bytes == slots + 4 * 2 * 64 * 8


def test_the_program_takes_what_the_pipeline_makes():
    layout = layout_of()
    (batch,) = [e["sparsecore"] for e in pipeline([rows_with(60)])]
    program = Program.of(layout, batch.limits, minibatching=True)
    shapes = buffer_shapes(program.stacks, layout.topology, minibatching=True)
    for field in ("row_pointers", "embedding_ids", "sample_ids", "gains"):
        for name, array in getattr(batch, field).items():
            wanted = getattr(shapes, field)[name]
            assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
    assert batch.row_pointers["item"].shape[1] == (
        embedding.compute_row_pointers_size_per_device(
            global_device_count=1, num_sc_per_device=2, enable_minibatching=True
        )
    )
    given = batch.to_jax_tpu_embedding()
    assert given.num_minibatches.tolist() == batch.num_minibatches.tolist()
    assert buffer_bytes_per_device(
        batch.limits["item"], layout, minibatching=True
    ) == sum(
        getattr(batch, field)["item"].nbytes
        for field in ("row_pointers", "embedding_ids", "sample_ids", "gains")
    )
