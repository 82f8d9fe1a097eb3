"""Watches a run on host 0: scalars for other systems, and a record for a page."""

from typing import TYPE_CHECKING

from grain_sparsecore.buffers import SparseCoreInput
from grain_sparsecore.config import Config
from grain_sparsecore.metrics import MetricWriter, batch_scalars
from grain_sparsecore.report.charts import format_value
from grain_sparsecore.report.record import RunRecord
from grain_sparsecore.report.recorder import RunRecorder
from grain_sparsecore.stacking import StackedLayout

if TYPE_CHECKING:
    from grain_sparsecore.summary import TrainSummary


class RunWatcher:
    """Sees every batch and every step of a run.

    Args:
        layout: The stacks.
        record: Whether to keep a record for a report; costs a pass over each batch.
        writer: Where scalars go; None for nowhere.
    """

    def __init__(
        self,
        layout: StackedLayout,
        *,
        record: bool = False,
        writer: MetricWriter | None = None,
    ) -> None:
        self._layout = layout
        self._recorder = None
        if record:
            empty = RunRecord(command="train", title="")
            self._recorder = RunRecorder(empty, layout=layout)
        self._writer = writer
        # Of batches whose step has not ended yet.
        self._scalars: dict[int, dict[str, float]] = {}

    def add_batch(
        self, step: int, buffers: SparseCoreInput, *, coordination_seconds: float | None
    ) -> None:
        """A batch came out of the pipeline.

        Args:
            step: Its number, from 1.
            buffers: The batch of this host.
            coordination_seconds: Duration of the round of agreement that came before
                it; None where there was none.
        """
        if self._recorder is not None:
            self._recorder.add_batch(step, buffers)
            if coordination_seconds is not None:
                record = self._recorder.record
                record.coordination_seconds.add(step, coordination_seconds)
        if self._writer is not None:
            scalars = batch_scalars(buffers, layout=self._layout)
            if coordination_seconds is not None:
                scalars["coordination_seconds"] = coordination_seconds
            self._scalars[step] = scalars

    def add_step(
        self, step: int, *, loss: float, seconds: float | None, wait_seconds: float
    ) -> None:
        """A step ended.

        Args:
            step: Its number, from 1.
            loss: Of the step.
            seconds: From the end of the step before; None for the first, which
                compiles.
            wait_seconds: Of it, waiting for input.
        """
        if self._recorder is not None:
            record = self._recorder.record
            record.loss.add(step, loss)
            if seconds is not None:
                record.step_seconds.add(step, (seconds, min(wait_seconds, seconds)))
        if self._writer is not None:
            scalars = {"loss": loss, **self._scalars.pop(step, {})}
            if seconds is not None:
                scalars["step_seconds"] = seconds
                scalars["input_wait_seconds"] = min(wait_seconds, seconds)
            self._writer.write_scalars(step, scalars)

    def finish(
        self, summary: "TrainSummary", *, title: str, config: Config
    ) -> RunRecord | None:
        """The record, where one was kept; closes the writer."""
        split = summary.minibatches
        if self._writer is not None:
            if split.extra_buffer_bytes:
                self._writer.write_scalars(
                    summary.steps,
                    {
                        "minibatches/share_split": split.share_split,
                        "minibatches/extra_buffer_bytes": split.extra_buffer_bytes,
                    },
                )
            self._writer.close()
        if self._recorder is None:
            return None
        record = self._recorder.finish()
        record.title = title
        record.config = config.canonical()
        record.facts = [
            ("steps", f"{summary.steps:,}"),
            ("hosts", str(summary.hosts)),
            ("examples per second", f"{summary.examples_per_second:,.0f}"),
            ("loss", f"{summary.loss_first:.4f} → {summary.loss_last:.4f}"),
            ("limit changes", str(summary.limit_changes)),
            ("recompiles", str(summary.recompiles)),
            ("input wait", format_value(summary.input_wait_fraction, "percent")),
            ("ids dropped", f"{summary.dropped_ids:,}"),
        ]
        if split.extra_buffer_bytes:
            share = format_value(split.share_split, "percent")
            most = max(split.batches, default=1)
            record.facts += [
                ("batches split", f"{share}, up to {most} parts"),
                (
                    "minibatches cost",
                    f"{format_value(split.extra_buffer_bytes, 'bytes')} per device",
                ),
            ]
        if summary.hosts > 1:
            record.notes.append(
                "Limits are those of all hosts. What batches needed, counters, drops "
                "and times are those of host 0."
            )
        return record
