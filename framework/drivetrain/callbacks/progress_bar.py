"""ProgressBar: shows the progress of a run on one line of the terminal, without dependencies."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from torch import Tensor

from drivetrain._config.argument_checks import check_types
from drivetrain._metrics.packing import Readback
from drivetrain._runtime.console import is_terminal, write_output
from drivetrain.callback import Callback
from drivetrain.callbacks._live_lines import LiveLines
from drivetrain.callbacks._progress import Phase, TimeLeft, fit_line, format_metrics, format_time
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_now = time.monotonic

_LINE_INTERVAL = 30.0
"""Minimum seconds between two lines of progress if the output is not a terminal."""


class ProgressBar(Callback):
    """Shows progress, speed, the run's remaining time and the metrics logged with ``prog_bar=True``, on rank 0.

    On a terminal, one line is redrawn ``refresh_rate`` times per second. Between two refreshes, the bar costs each step
    one comparison. Metrics are copied from the device only for a refresh. Other output of this process appears above
    the line. A validation has its own line, with the values that were logged in the validation so far (means over rank
    0's batches).

    If the output is not a terminal (a file, a pipe, a notebook), a line is printed every ``log_every_n_steps``
    optimizer steps (in an evaluation, every ``log_every_n_steps`` micro-batches), but at most every 30 seconds. A line
    is also printed at the end of each epoch and evaluation. The bar does not wait for metrics on a GPU. A line with
    such metrics is printed ``log_every_n_steps`` steps later, with the values of the step that the line names.

    Subclasses change the drawing by overriding `draw`, `close` and `write`.

    Args:
        refresh_rate: refreshes per second, above 0 and at most 10.
        stream: the stream to write to; None is ``sys.stdout`` at the start of the run.

    Raises:
        ConfigurationError: ``refresh_rate`` is out of range.
    """

    shown_as = "progress_bar_callback"
    priority = -100  # after all callbacks that log

    def __init__(self, refresh_rate: float = 10.0, stream: TextIO | None = None) -> None:
        check_types(ProgressBar, locals())
        if not 0 < refresh_rate <= 10:
            raise ConfigurationError(
                f"{type(self).__name__}(refresh_rate={refresh_rate!r})",
                "refresh_rate is in refreshes per second; more than 10 are not readable and slow down the run",
                "give a number above 0 and at most 10",
            )
        self._refresh_interval = 1.0 / refresh_rate
        self._stream = stream
        self._lines: LiveLines | None = None  # the lines that this rank redraws on a terminal
        self._metrics: dict[str, float] = {}  # the newest metrics that have arrived, for the terminal
        self._arriving: list[NamedNumbers] = []  # metrics that are still copied, for the terminal
        self._training: Phase | None = None
        self._phase: Phase | None = None
        self._time_left: TimeLeft | None = None
        self._time_left_in_run = ""
        self._next_refresh = 0.0
        self._next_line = 0.0
        self._pending_line: tuple[str, NamedNumbers] | None = None  # a line whose metrics are still copied

    # Methods that subclasses may override or use

    @property
    def stream(self) -> TextIO:
        """The stream that the bar is written to."""
        return self._stream if self._stream is not None else sys.stdout

    @property
    def remaining_time_text(self) -> str:
        """The remaining time of the whole run as text, "run 1:12 left"; "" outside of training."""
        return self._time_left_in_run

    def is_terminal(self) -> bool:
        """Return whether the stream is a terminal, on which lines can be redrawn."""
        return is_terminal(self.stream)

    def draw(self, phase: Phase, metrics: Mapping[str, float], now: float) -> None:
        """Draw the progress of ``phase``. This method is called at each refresh.

        Args:
            phase: the epoch or evaluation to show.
            metrics: values by name.
            now: seconds of `time.monotonic`.
        """
        if self._lines is not None:
            line = fit_line(phase, metrics, now, self.remaining_time_text, self._lines.width)
            bar = f"|{'#' * line.filled}{'-' * (line.width - line.filled)}| " if line.width else ""
            self._lines.show([f"{line.title} {bar}{line.rest}"[: self._lines.width]])

    def close(self) -> None:
        """Clear the bar, so that other output can follow."""
        if self._lines is not None:
            self._lines.clear()

    def write(self, text: str) -> None:
        """Print ``text`` on its own line, above the bar if there is one."""
        if self._lines is not None:
            self._lines.print(text)
        else:
            write_output(self.stream, text + "\n")
        self._next_refresh = 0.0

    def write_line(self, text: str) -> bool:
        """Print a line of ``trainer.print`` above the bar. The result is always True."""
        self.write(text)
        return True

    # Hooks of training

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Determine whether this rank shows progress, and whether the output is a terminal."""
        self._next_line = _now() + _LINE_INTERVAL
        self._arriving = []
        if trainer.is_global_zero and self.is_terminal():
            self._lines = LiveLines(self.stream)
            if self._stream is None:
                self._lines.guard()

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Clear the bar, also after a failure."""
        if self._lines is not None:
            self.close()
            self._lines.release()
        self._lines = None
        self._training = self._phase = self._time_left = self._pending_line = None
        self._time_left_in_run = ""

    def on_fit_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start to estimate the remaining time of the run."""
        self._time_left = TimeLeft(trainer, _now())

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start an epoch that is resumed midway, for which the engine does not call `on_train_epoch_start`."""
        self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start an epoch."""
        last = f"/{trainer.max_epochs}" if trainer.max_epochs not in (None, -1) else ""
        title = f"Epoch {trainer.current_epoch + 1}{last}"
        self._training = Phase(title, _epoch_batches(trainer), _now(), trainer.batch_idx)
        self._start_phase(self._training)

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Print the final line of the epoch."""
        self._end_phase(trainer, self._training)
        self._training = None

    # Hooks of evaluation and prediction, and the metrics to show

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start a validation, test or prediction."""
        self._start_phase(Phase(*_evaluation(trainer), _now()))

    def on_validation_batch_end(
        self,
        trainer: RunContext,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Advance the bar, and redraw it if a refresh is due."""
        phase = self._phase
        if phase is not None:
            phase.done = batch_idx + 1 if phase is self._training else phase.done + 1
        if self._lines is not None and _now() >= self._next_refresh:
            self._refresh(trainer)

    def on_validation_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Show the epoch again, or print the final line if the evaluation is not part of training."""
        phase, now = self._phase, _now()
        if trainer.sanity_checking or self._training is not None:
            if self._training is not None and phase is not None:
                self._training.paused += now - phase.started
            self._start_phase(self._training)
        else:
            self._end_phase(trainer, phase)

    on_test_start = on_predict_start = on_validation_start
    on_train_batch_end = on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = on_validation_end

    def get_metrics(self, trainer: RunContext, module: TrainModule) -> dict[str, Any]:
        """Return the values to show, by name. Override this method to show other values."""
        is_evaluation = self._phase is not None and self._phase is not self._training
        return {} if is_evaluation else dict(trainer.progress_bar_values)

    # Draw the bar on a terminal

    def _start_phase(self, phase: Phase | None) -> None:
        self._phase = phase
        self._next_refresh = 0.0

    def _refresh(self, trainer: RunContext) -> None:
        phase, now = self._phase, _now()
        if phase is not None:
            self._update_total(trainer, phase)
            self._time_left_in_run = self._remaining_text(trainer, phase, now)
            self.draw(phase, self._latest_metrics(trainer), now)
        # The interval starts after drawing, so that a slow terminal cannot take most of the run's time.
        self._next_refresh = _now() + self._refresh_interval

    def _latest_metrics(self, trainer: RunContext) -> dict[str, float]:
        """Return the newest metrics that have arrived on the host, and start to copy the present ones."""
        values = self.get_metrics(trainer, trainer.lightning_module)
        self._arriving.append(NamedNumbers(values))
        while self._arriving and self._arriving[0].has_arrived:
            self._metrics = self._arriving.pop(0).numbers()
        return {name: number for name, number in self._metrics.items() if name in values}

    def _update_total(self, trainer: RunContext, phase: Phase) -> None:
        """Show the present number of batches, since hooks may change the size of the data after a phase has begun."""
        phase.total = _epoch_batches(trainer) if phase is self._training else _evaluation(trainer)[1]

    def _remaining_text(self, trainer: RunContext, phase: Phase, now: float) -> str:
        if self._time_left is None or phase is not self._training:
            return ""
        seconds = self._time_left.seconds(trainer, now)
        return f"run {'?' if seconds is None else format_time(seconds)} left"

    # Print lines if the output is not a terminal

    def write_progress(self, trainer: RunContext, module: TrainModule, batches: int) -> None:
        """Print a line of progress if one is due and the output is not a terminal."""
        if self._lines is not None or not trainer.is_global_zero:
            return
        self._write_pending_line(wait=False)
        phase, now = self._phase, _now()
        if phase is None or now < self._next_line or self._pending_line is not None:
            return
        phase.done = batches
        self._update_total(trainer, phase)
        self._next_line = now + _LINE_INTERVAL
        columns = [f"{phase.count} batches", *phase.speed(now)]
        if phase is self._training:
            last = f"/{trainer.max_steps}" if trainer.max_steps >= 0 else ""
            columns = [f"step {trainer.global_step}{last}", *columns, self._remaining_text(trainer, phase, now)]
        else:
            seconds = phase.seconds_left(now)
            columns.append(f"{'?' if seconds is None else format_time(seconds)} left")
        self._pending_line = self._line(trainer, phase, columns)
        self._write_pending_line(wait=False)

    def _line(self, trainer: RunContext, phase: Phase, columns: Sequence[str]) -> tuple[str, NamedNumbers]:
        return f"{phase.title}: {', '.join(columns)}", NamedNumbers(self.get_metrics(trainer, trainer.lightning_module))

    def _write_pending_line(self, wait: bool) -> None:
        if self._pending_line is not None and (wait or self._pending_line[1].has_arrived):
            text, metrics = self._pending_line
            self._pending_line = None
            self.write(", ".join([text, *format_metrics(metrics.numbers())]))

    def _end_phase(self, trainer: RunContext, phase: Phase | None) -> None:
        self._phase = None
        if not trainer.is_global_zero or phase is None:
            return
        if self._lines is not None:
            self.close()
        self._write_pending_line(wait=True)
        now = _now()
        columns = [f"{phase.done} batches", *phase.speed(now)] if phase.counted else [format_time(phase.elapsed(now))]
        run = self._remaining_text(trainer, phase, now)
        if run and run != f"run {format_time(0)} left":
            columns.append(run)
        self._pending_line = self._line(trainer, phase, columns)
        self._write_pending_line(wait=True)
        self._next_line = now + _LINE_INTERVAL

    def __getstate__(self) -> dict[str, Any]:
        unpicklable = ("_stream", "_phase", "_training", "_lines", "_arriving", "_pending_line", "_time_left")
        return self.__dict__ | dict.fromkeys(unpicklable)


class ProgressLines(ProgressBar):
    """A `ProgressBar` that prints occasional lines to output that is not a terminal, and does no work in a step.

    The batch hooks of this class are those of `Callback`, which the engine does not call.
    """

    on_train_batch_end = Callback.on_train_batch_end  # type: ignore[assignment]  # ProgressBar has one for all stages
    on_validation_batch_end = Callback.on_validation_batch_end
    on_test_batch_end = Callback.on_test_batch_end
    on_predict_batch_end = Callback.on_predict_batch_end

    def is_terminal(self) -> bool:
        """Return False, so that lines are printed and never redrawn."""
        return False

    def _end_phase(self, trainer: RunContext, phase: Phase | None) -> None:
        if phase is not None:  # The engine counts training; an evaluation that has ended is complete.
            total = 0 if math.isinf(phase.total) else int(phase.total)
            phase.done = trainer.batch_idx if phase is self._training else total
        super()._end_phase(trainer, phase)


class NamedNumbers:
    """Starts to copy values to the host for display.

    Args:
        values: numbers and one-element tensors by name.
    """

    def __init__(self, values: Mapping[str, Tensor | float]) -> None:
        self._names = list(values)
        self._readback = Readback(list(values.values()))

    @property
    def has_arrived(self) -> bool:
        """Whether `numbers` would return without waiting for a device."""
        return self._readback.has_arrived

    def numbers(self) -> dict[str, float]:
        """Return the numbers by name, after waiting for those that have not arrived."""
        return dict(zip(self._names, self._readback.numbers(), strict=True))


def _epoch_batches(trainer: RunContext) -> float:
    """Return the number of micro-batches of the epoch, limited by ``max_steps``; infinite if it is unknown."""
    if trainer.max_steps < 0:
        return trainer.num_training_batches
    window = trainer.accumulate_grad_batches
    window_start = trainer.batch_idx - trainer.batch_idx % window
    return min(trainer.num_training_batches, window_start + (trainer.max_steps - trainer.global_step) * window)


def _evaluation(trainer: RunContext) -> tuple[str, float]:
    """Return the title of the present evaluation, and its number of micro-batches; infinite if it is unknown."""
    if trainer.testing:
        return "Test", sum(trainer.num_test_batches)
    if trainer.predicting:
        return "Prediction", sum(trainer.num_predict_batches)
    return "Sanity check" if trainer.sanity_checking else "Validation", sum(trainer.num_val_batches)
