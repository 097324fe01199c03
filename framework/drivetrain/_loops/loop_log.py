"""LoopLog: reduces what the steps of a loop have logged, and sends it to the loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drivetrain._loops.data_checks import Lengths
from drivetrain._metrics import MetricStore
from drivetrain._run_state import Progress


@dataclass(eq=False)
class LoopLog:
    """What a loop sends out: values to the loggers, counts to the lines of progress, and warnings of wrong lengths.

    Attributes:
        metrics: the logged values.
        lengths: collects loaders whose length proved wrong.
        send: sends a dict of numbers to the loggers; None without loggers.
        write_progress: called with the number of micro-batches of the epoch, or of all evaluated loaders, done.
        every: optimizer steps, or micro-batches of an evaluation, between two flushes; 0 for no flush within an epoch.
            Training's step values are then not sent at all.
    """

    metrics: MetricStore
    lengths: Lengths
    send: Callable[[Mapping[str, Tensor | float]], None] | None
    write_progress: Sequence[Callable[[int], None]]
    every: int

    flushed_at: int = field(default=0, init=False)
    """The number of the run's micro-batches after which step values were last reduced."""

    def flush_steps(self, progress: Progress) -> None:
        """Reduce the step values and send them. Collective."""
        self.reduce_steps(progress)
        if self.send is not None:
            self.send(self.metrics.flush_steps())
        self.report(progress.batch_idx)

    def reduce_steps(self, progress: Progress) -> None:
        """Reduce the step values over ranks. Collective."""
        self.flushed_at = progress.micro_batches
        self.metrics.reduce_steps()

    def report(self, done: int) -> None:
        """Report that ``done`` micro-batches are done."""
        for write in self.write_progress:
            write(done)

    def reduce_epoch(self, purpose: str) -> dict[str, Tensor]:
        """Return the epoch's values by name, reduced over ranks, and warn about wrong lengths. Collective."""
        results, ranks = self.metrics.reduce_epoch(purpose, self.lengths.has_mismatch)
        self.lengths.warn_together(ranks)
        return results

    def flush_epoch(self, results: Mapping[str, Tensor | float]) -> None:
        """Send the epoch's values, and the step values that were not sent yet."""
        if self.send is None:
            return
        values = self.metrics.flush_steps() if self.every or self.metrics.stage != "train" else {}
        names = {entry.epoch_name for entry in self.metrics.entries.values() if entry.logger and entry.on_epoch}
        values.update({name: float(value) for name, value in results.items() if name in names})
        if values:
            self.send(values)
