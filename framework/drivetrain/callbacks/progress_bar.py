"""ProgressBar: how far the run is, on one line of the terminal that needs no package."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from drivetrain.callback import Callback
from drivetrain.callbacks._latest import LatestNumbers
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_BAR_WIDTH = 24

_now = time.monotonic


class Phase:
    """What is being counted: an epoch's micro-batches, a validation, a test, a prediction."""

    __slots__ = ("counted", "done", "paused", "started", "title", "total")

    def __init__(self, title: str, total: int | None, started: float) -> None:
        self.title = title
        self.total = total
        self.done = 0  # position, which a resumed epoch begins above 0
        self.counted = 0  # seen by this phase
        self.started = started
        self.paused = 0.0

    def elapsed(self, now: float) -> float:
        """Seconds since the start, without what a validation took in between."""
        return max(now - self.started - self.paused, 0.0)

    def rate(self, now: float) -> float:
        """Micro-batches a second, 0 where nothing can be said yet."""
        elapsed = self.elapsed(now)
        return self.counted / elapsed if elapsed > 0 else 0.0


class ProgressBar(Callback):
    """Shows progress, speed and the metrics logged with ``prog_bar=True``, on rank 0.

    On a terminal one line is rewritten, by the clock (``refresh_rate`` times a second) and not by the step: between
    two refreshes a step costs one comparison, and metrics are read off the device at a refresh only. Where the output
    is no terminal (a file, a pipe, a notebook), one line is printed at the end of each epoch and evaluation.

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
        self._live = False  # a terminal, and this is rank 0
        self._speaks = False  # rank 0
        self._training: Phase | None = None
        self._phase: Phase | None = None
        self._next_refresh = 0.0
        self._drawn = 0  # characters of the line on the terminal

    # What a subclass draws with

    @property
    def stream(self) -> TextIO:
        """Where the bar writes."""
        return self._stream if self._stream is not None else sys.stdout

    def is_terminal(self) -> bool:
        """True where a line can be rewritten."""
        return bool(self.stream.isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")

    def draw(self, phase: Phase, metrics: Mapping[str, float], now: float) -> None:
        """Show ``phase`` as of ``now`` (seconds of `time.monotonic`); called at a refresh."""
        width = shutil.get_terminal_size().columns - 1
        line = _line(phase, metrics, now)[:width]
        self.stream.write("\r" + line.ljust(self._drawn))
        self.stream.flush()
        self._drawn = len(line)

    def close(self) -> None:
        """Leave the terminal as a following line of output needs it."""
        if self._drawn:
            self.stream.write("\r" + " " * self._drawn + "\r")
            self.stream.flush()
            self._drawn = 0

    def write(self, text: str) -> None:
        """Print ``text`` on a line of its own, above the bar where one is shown."""
        ProgressBar.close(self)
        self.stream.write(text + "\n")
        self.stream.flush()
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

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Take the bar down, also after a failure."""
        if self._live:
            self.close()
        self._live = self._speaks = False
        self._training = self._phase = None

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin the count of an epoch that is resumed in its middle and has no start of its own."""
        self.on_train_epoch_start(trainer, module)

    def on_train_epoch_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Begin an epoch's count."""
        last = f"/{trainer.max_epochs}" if trainer.max_epochs not in (None, -1) else ""
        self._training = Phase(f"Epoch {trainer.current_epoch + 1}{last}", _count(_to_come(trainer)), _now())
        self._show(self._training)

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Count, and refresh when it is time."""
        phase = self._training
        if phase is not None:
            phase.done = batch_idx + 1
            phase.counted += 1
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

    # In common

    def _show(self, phase: Phase | None) -> None:
        self._phase = phase
        self._next_refresh = 0.0

    def _advance(self, trainer: RunContext) -> None:
        phase = self._phase
        if phase is not None:
            phase.done += 1
            phase.counted += 1
        if self._live and _now() >= self._next_refresh:
            self._refresh(trainer)

    def _refresh(self, trainer: RunContext) -> None:
        phase, now = self._phase, _now()
        if phase is not None:
            self.draw(phase, self._latest.read(trainer.progress_bar_metrics), now)
        # The pause begins after the drawing, so that a slow terminal cannot take up the whole run.
        self._next_refresh = _now() + self._pause

    def _conclude(self, trainer: RunContext, phase: Phase | None) -> None:
        self._phase = None
        if not self._speaks or phase is None:
            return
        if self._live:
            self.close()
        now = _now()
        metrics = self._latest.read(trainer.progress_bar_metrics, wait=True)
        self.write(summary_line(phase, metrics, now))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stream": None, "_phase": None, "_training": None}


def summary_line(phase: Phase, metrics: Mapping[str, float], now: float) -> str:
    """The line that an epoch or evaluation leaves behind."""
    parts = [clock(phase.elapsed(now))]
    if phase.counted:  # an evaluation of unknown length may not have been counted
        parts = [f"{phase.done} batches", *parts, speed(phase.rate(now))]
    return f"{phase.title}: " + ", ".join([*parts, *(f"{name}={number(value)}" for name, value in metrics.items())])


def clock(seconds: float) -> str:
    """``seconds`` as ``m:ss`` or ``h:mm:ss``."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def speed(rate: float) -> str:
    """Micro-batches a second, or seconds a micro-batch where that reads better."""
    return f"{1 / rate:.2f} s/it" if 0 < rate < 1 else f"{rate:.1f} it/s"


def number(value: float) -> str:
    """A metric in four significant digits."""
    return f"{value:.0f}" if math.isfinite(value) and value == int(value) and abs(value) < 1e6 else f"{value:.4g}"


def _line(phase: Phase, metrics: Mapping[str, float], now: float) -> str:
    rate, parts = phase.rate(now), [phase.title]
    if phase.total and phase.done <= phase.total:  # else the length it was reckoned with is proven wrong
        filled = min(_BAR_WIDTH, _BAR_WIDTH * phase.done // phase.total)
        parts.append(f"|{'#' * filled}{'-' * (_BAR_WIDTH - filled)}| {phase.done}/{phase.total}")
        left = f"<{clock((phase.total - phase.done) / rate)}" if rate > 0 else ""
    else:
        parts.append(f"{phase.done}")
        left = ""
    parts.append(f"[{clock(phase.elapsed(now))}{left}, {speed(rate)}]")
    return " ".join([*parts, *(f"{name}={number(value)}" for name, value in metrics.items())])


def _to_come(trainer: RunContext) -> int | float:
    """Micro-batches of the epoch, up to where ``max_steps`` ends it."""
    if trainer.max_steps < 0:
        return trainer.num_training_batches
    left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    return min(trainer.num_training_batches, trainer.batch_idx + left)


def _count(total: float) -> int | None:
    return None if math.isinf(total) else int(total)
