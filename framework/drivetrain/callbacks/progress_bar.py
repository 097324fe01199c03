"""ProgressBar: how far the run is, on one line of the terminal that needs no package."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from drivetrain._metrics.packing import Readback
from drivetrain._runtime.terminal_output import is_terminal, write_output
from drivetrain.callback import Callback
from drivetrain.callbacks._bar_line import Phase, clock, fitted, in_words, speed
from drivetrain.callbacks._deferred_values import LatestNumbers
from drivetrain.callbacks._live_lines import LiveLines
from drivetrain.callbacks._time_left import TimeLeft
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_now = time.monotonic

_PAUSE = 30.0
"""Seconds between two lines of progress, at least, where the output is no terminal."""


class ProgressBar(Callback):
    """Shows progress, speed, the run's remaining time and the metrics logged with ``prog_bar=True``, on rank 0.

    On a terminal one line is rewritten, by the clock (``refresh_rate`` times a second) and not by the step: between
    two refreshes a step costs one comparison, and metrics are read off the device at a refresh only. What this process
    prints meanwhile stands above it. A validation has a line of its own, with what it has logged so far: means over
    what rank 0 has evaluated.

    Where the output is no terminal (a file, a pipe, a notebook), a line is printed every ``log_every_n_steps``
    optimizer steps (in an evaluation as many micro-batches) or 30 seconds, whichever is later, and one at the end of
    each epoch and evaluation. It does not wait for metrics that are on a GPU, but is printed
    ``log_every_n_steps`` later, as of the step that it names.

    Subclasses draw differently by overriding `draw`, `close` and `write`.

    Args:
        refresh_rate: refreshes a second, above 0 and at most 10.
        stream: where to write; ``None`` is ``sys.stdout`` as it is when the run starts.

    Raises:
        ConfigurationError: ``refresh_rate`` is out of range.
    """

    priority = -100  # sees what everybody logged

    def __init__(self, refresh_rate: float = 10.0, stream: TextIO | None = None) -> None:
        if not 0 < refresh_rate <= 10:
            raise ConfigurationError(
                f"{type(self).__name__}(refresh_rate={refresh_rate!r})",
                "it is a number of refreshes a second; more than 10 cannot be read and cost the run time",
                "give a number above 0 and at most 10",
            )
        self._pause = 1.0 / refresh_rate
        self._stream = stream
        self._latest = LatestNumbers()
        self._lines: LiveLines | None = None
        self._live = False  # a terminal, and this is rank 0
        self._speaks = False  # rank 0
        self._training: Phase | None = None
        self._phase: Phase | None = None
        self._time_left: TimeLeft | None = None
        self._run_left = ""
        self._next_refresh = 0.0
        self._next_line = 0.0
        self._late: _LateLine | None = None

    # What a subclass draws with

    @property
    def stream(self) -> TextIO:
        """Where the bar writes."""
        return self._stream if self._stream is not None else sys.stdout

    @property
    def run_left(self) -> str:
        """What is said of the time that the whole run still takes: "run 1:12 left"; "" outside of training."""
        return self._run_left

    def is_terminal(self) -> bool:
        """True where a line can be rewritten."""
        return is_terminal(self.stream)

    def draw(self, phase: Phase, metrics: Mapping[str, float], now: float) -> None:
        """Show ``phase`` as of ``now`` (seconds of `time.monotonic`); called at a refresh."""
        if self._lines is not None:
            line = fitted(phase, metrics, now, self.run_left, self._lines.width)
            bar = f"|{'#' * line.filled}{'-' * (line.width - line.filled)}| " if line.width else ""
            self._lines.show([f"{line.title} {bar}{line.rest}"[: self._lines.width]])

    def close(self) -> None:
        """Leave the terminal as a following line of output needs it."""
        if self._lines is not None:
            self._lines.clear()

    def write(self, text: str) -> None:
        """Print ``text`` on a line of its own, above the bar where one is shown."""
        if self._lines is not None:
            self._lines.print(text)
        else:
            write_output(self.stream, text + "\n")
        self._next_refresh = 0.0

    def write_line(self, text: str) -> bool:
        """Print ``text`` for ``trainer.print``."""
        self.write(text)
        return True

    # The run

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Decide whether this rank shows anything."""
        self._speaks = trainer.is_global_zero
        self._live = self._speaks and self.is_terminal()
        self._next_line = _now() + _PAUSE
        if self._live:
            self._lines = LiveLines(self.stream)
            if self._stream is None:
                self._lines.guard()

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Take the bar down, also after a failure."""
        if self._lines is not None:
            self.close()
            self._lines.release()
        self._lines = None
        self._live = self._speaks = False
        self._training = self._phase = self._time_left = self._late = None
        self._run_left = ""

    def on_fit_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin with the time that the run may take."""
        self._time_left = TimeLeft(trainer, _now())

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin the count of an epoch that is resumed in its middle and has no start of its own."""
        self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin an epoch's count."""
        last = f"/{trainer.max_epochs}" if trainer.max_epochs not in (None, -1) else ""
        title = f"Epoch {trainer.current_epoch + 1}{last}"
        self._training = Phase(title, _count(_to_come(trainer)), _now(), trainer.batch_idx)
        self._show(self._training)

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Count, and refresh when it is time."""
        phase = self._training
        if phase is not None:
            phase.done = batch_idx + 1
        if self._live and _now() >= self._next_refresh:
            self._refresh(trainer)

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Leave the epoch's line."""
        self._conclude(trainer, self._training)
        self._training = None

    # Evaluation and prediction

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin a validation's count."""
        title = "Sanity check" if trainer.sanity_checking else "Validation"
        self._show(Phase(title, _count(sum(trainer.num_val_batches)), _now()))

    def on_validation_batch_end(
        self,
        trainer: RunContext,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count, and refresh when it is time."""
        self._advance(trainer)

    def on_validation_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Go back to the epoch, whose speed does not count the validation; alone, leave a line."""
        phase, now = self._phase, _now()
        if trainer.sanity_checking or self._training is not None:
            if self._training is not None and phase is not None:
                self._training.paused += now - phase.started
            self._show(self._training)
        else:
            self._conclude(trainer, phase)

    def on_test_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin a test's count."""
        self._show(Phase("Test", _count(sum(trainer.num_test_batches)), _now()))

    def on_test_batch_end(
        self,
        trainer: RunContext,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count, and refresh when it is time."""
        self._advance(trainer)

    def on_test_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Leave the test's line."""
        self._conclude(trainer, self._phase)

    def on_predict_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin a prediction's count."""
        self._show(Phase("Prediction", _count(sum(trainer.num_predict_batches)), _now()))

    def on_predict_batch_end(
        self,
        trainer: RunContext,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count, and refresh when it is time."""
        self._advance(trainer)

    def on_predict_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Leave the prediction's line."""
        self._conclude(trainer, self._phase)

    def get_metrics(self, trainer: RunContext, module: TrainModule) -> dict[str, Any]:
        """Return the values that are shown, by name. Override it to show others, or fewer."""
        evaluates = self._phase is not None and self._phase is not self._training
        return dict(trainer.evaluation_so_far if evaluates else trainer.progress_bar_values)

    # In common

    def _show(self, phase: Phase | None) -> None:
        self._phase = phase
        self._next_refresh = 0.0

    def _advance(self, trainer: RunContext) -> None:
        phase = self._phase
        if phase is not None:
            phase.done += 1
        if self._live and _now() >= self._next_refresh:
            self._refresh(trainer)

    def _refresh(self, trainer: RunContext) -> None:
        phase, now = self._phase, _now()
        if phase is not None:
            self._run_left = self._said_of_the_run(trainer, phase, now)
            self.draw(phase, self._latest.read(self.get_metrics(trainer, trainer.lightning_module)), now)
        # The pause begins after the drawing, so that a slow terminal cannot take up the whole run.
        self._next_refresh = _now() + self._pause

    def _said_of_the_run(self, trainer: RunContext, phase: Phase, now: float) -> str:
        if self._time_left is None or phase is not self._training:
            return ""
        seconds = self._time_left.seconds(trainer, now)
        return f"run {'?' if seconds is None else clock(seconds)} left"

    # Where the output is no terminal

    def write_progress(self, trainer: RunContext, module: TrainModule, batches: int) -> None:
        """Print a line where it is time for one and the output is no terminal."""
        if self._live or not self._speaks:
            return
        if self._late is not None and self._late.has_arrived:
            self._write_late()
        phase, now = self._phase, _now()
        if phase is None or now < self._next_line or self._late is not None:
            return
        phase.done = batches
        self._next_line = now + _PAUSE
        values = self.get_metrics(trainer, trainer.lightning_module)
        parts = [f"{phase.done}/{phase.total}" if phase.is_bounded else f"{phase.done}", "batches"]
        said = [" ".join(parts), clock(phase.elapsed(now)), speed(phase.rate(now))]
        if phase is self._training:
            last = f"/{trainer.max_steps}" if trainer.max_steps >= 0 else ""
            said = [f"step {trainer.global_step}{last}", *said, self._said_of_the_run(trainer, phase, now)]
        else:
            left = phase.left(now)
            said.append(f"{'?' if left is None else clock(left)} left")
        self._late = _LateLine(f"{phase.title}: {', '.join(said)}", values)
        if self._late.has_arrived:
            self._write_late()

    def _write_late(self) -> None:
        if self._late is not None:
            self.write(self._late.text())
            self._late = None

    def _conclude(self, trainer: RunContext, phase: Phase | None) -> None:
        self._phase = None
        if not self._speaks or phase is None:
            return
        if self._live:
            self.close()
        self._write_late()
        now = _now()
        metrics = self._latest.read(self.get_metrics(trainer, trainer.lightning_module), wait=True)
        run = self._said_of_the_run(trainer, phase, now)
        self.write(summary_line(phase, metrics, now, "" if run == f"run {clock(0)} left" else run))
        self._next_line = now + _PAUSE

    def __getstate__(self) -> dict[str, Any]:
        gone = ("_stream", "_phase", "_training", "_lines", "_late", "_time_left")
        return self.__dict__ | dict.fromkeys(gone)


class _LateLine:
    """A line whose metrics are on their way from a device."""

    def __init__(self, text: str, values: Mapping[str, Tensor | float]) -> None:
        self._text = text
        self._names = list(values)
        self._readback = Readback(list(values.values()))

    @property
    def has_arrived(self) -> bool:
        return self._readback.has_arrived

    def text(self) -> str:
        """Return all of it. Waits for metrics that have not arrived."""
        metrics = dict(zip(self._names, self._readback.numbers(), strict=True))
        return ", ".join([self._text, *in_words(metrics)])


def summary_line(phase: Phase, metrics: Mapping[str, float], now: float, run: str = "") -> str:
    """The line that an epoch or evaluation leaves behind.

    Args:
        phase: what is over.
        metrics: by name.
        now: seconds of `time.monotonic`.
        run: what is said of the time that the run still takes; "" for nothing.
    """
    parts = [clock(phase.elapsed(now))]
    if phase.counted:  # an evaluation of unknown length may not have been counted
        parts = [f"{phase.done} batches", *parts, speed(phase.rate(now))]
    return f"{phase.title}: " + ", ".join([*parts, *([run] if run else []), *in_words(metrics)])


def _to_come(trainer: RunContext) -> int | float:
    """Micro-batches of the epoch, up to where ``max_steps`` ends it."""
    if trainer.max_steps < 0:
        return trainer.num_training_batches
    left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    return min(trainer.num_training_batches, trainer.batch_idx + left)


def _count(total: float) -> int | None:
    return None if math.isinf(total) else int(total)
