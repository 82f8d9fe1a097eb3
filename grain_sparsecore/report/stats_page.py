"""The report of ``stats``: the batches of one host, with limits that follow them."""

from grain_sparsecore.buffers import PartitionedBatch
from grain_sparsecore.config import Config
from grain_sparsecore.limits import Limits, grow_limits
from grain_sparsecore.repartition import repartition
from grain_sparsecore.report.record import RunRecord
from grain_sparsecore.report.recorder import RunRecorder
from grain_sparsecore.stacking import StackedLayout
from grain_sparsecore.stats import ObservedStats


class StatsRecord:
    """Looks at the batches that ``stats`` measures.

    Limits follow each batch on its own, as with a window of one and no other host.

    Args:
        layout: The stacks.
        config: The job.
    """

    def __init__(self, layout: StackedLayout, config: Config) -> None:
        self._layout = layout
        self._config = config
        self._limits = Limits.start(layout)
        self._recorder = RunRecorder(
            RunRecord(command="stats", title=""), layout=layout
        )
        self._step = 0

    def add(self, batch: PartitionedBatch) -> None:
        """Looks at one batch."""
        self._limits = grow_limits(
            self._limits,
            batch.stats,
            layout=self._layout,
            policy=self._config.limits.growth,
        )
        buffers = repartition(batch, self._limits, self._layout)
        self._recorder.add_batch(self._step, buffers)
        self._step += 1

    def finish(self, observed: ObservedStats, *, title: str) -> RunRecord:
        """The record of all of them."""
        record = self._recorder.finish()
        record.title = title
        record.config = self._config.canonical()
        record.facts = [
            ("batches", str(observed.batches)),
            ("samples per batch", f"{self._layout.batch_size:,}"),
            ("hosts", str(self._layout.topology.num_hosts)),
            ("limit changes", str(max(s.changes for s in record.stacks))),
        ]
        record.notes.append(
            "Batches of the first host; limits follow every batch on its own."
        )
        return record
