"""Timer: measures the time spent in each stage, and stops training after a given time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drivetrain._config.argument_checks import check_choice, parse_duration
from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_INTERVALS = ("step", "epoch")
_STAGES = ("train", "validate", "test")


@dataclass(slots=True)
class _Clock:
    """Measures the time spent in one stage."""

    spent: float = 0.0
    """Seconds up to the last stop, including earlier runs that were resumed."""
    since: float | None = None
    """When the clock was started, in seconds of `time.monotonic`; None if it is stopped."""
    started: float | None = None
    """When the stage first started, in seconds of `time.time`."""
    ended: float | None = None
    """When the stage ended, in seconds of `time.time`."""

    def elapsed(self) -> float:
        return self.spent + (0.0 if self.since is None else time.monotonic() - self.since)

    def start(self) -> None:
        self.since, self.ended = time.monotonic(), None
        self.started = time.time() if self.started is None else self.started

    def stop(self) -> None:
        if self.since is not None:
            self.spent, self.since, self.ended = self.elapsed(), None, time.time()


class Timer(Callback):
    """Measures the time spent in training, validation and test, and stops training after ``duration``.

    In a resumed run, the time that earlier runs have spent counts too. When the time of any rank is up, all ranks stop
    after the same step.

    Args:
        duration: a `timedelta`, keyword arguments of `timedelta` as a dict, ``"DD:HH:MM:SS"``, or None to only measure.
        interval: when to check the time: after each "step", or at the end of each "epoch".
        verbose: whether to print a message when the time is up.

    Raises:
        ConfigurationError: ``duration`` is not a positive duration, or ``interval`` is unknown.
    """

    _key_arguments = ("duration", "interval")

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, float] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        check_choice("Timer", "interval", interval, _INTERVALS, "when the time is checked")
        self.duration = None if duration is None else parse_duration("duration", duration)
        self.interval = interval
        self.verbose = verbose
        self._limit_seconds = self.duration.total_seconds() if self.duration is not None else float("inf")
        self._clocks = {stage: _Clock() for stage in _STAGES}
        self._deadline = float("inf")

    # The measured times

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in "train", "validate" or "test", including earlier runs that were resumed."""
        return self._clocks[stage].elapsed()

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining seconds; None without a duration."""
        return None if self.duration is None else self._limit_seconds - self.time_elapsed(stage)

    def start_time(self, stage: str = "train") -> float | None:
        """Return when the stage started, in seconds of `time.time`; None if the stage has not started."""
        return self._clocks[stage].started

    def end_time(self, stage: str = "train") -> float | None:
        """Return when the stage ended, in seconds of `time.time`; None if the stage has not ended."""
        return self._clocks[stage].ended

    # Hooks and state

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Reset the times before a fit. Time of validations within `fit` also counts as training time."""
        if stage == "fit":  # The times of a checkpoint are loaded after this hook.
            for clock in self._clocks.values():
                clock.spent = 0.0

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Stop clocks that are still running after a failure."""
        for clock in self._clocks.values():
            clock.stop()

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start the clock of training, and stop training immediately if a resumed run has no time left."""
        self._clocks["train"].start()
        self._deadline = time.monotonic() + self._limit_seconds - self.time_elapsed()
        self._check(trainer)

    def on_train_batch_end(self, trainer: RunContext, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """With ``interval="step"``, stop training if the time is up."""
        if self.interval == "step" and time.monotonic() >= self._deadline:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Stop training if the time is up."""
        self._check(trainer)

    def on_train_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Stop the clock of training."""
        self._clocks["train"].stop()

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start the clock of validation."""
        if not trainer.sanity_checking:
            self._clocks["validate"].start()

    def on_validation_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Stop the clock of validation."""
        self._clocks["validate"].stop()

    def on_test_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start the clock of testing."""
        self._clocks["test"].start()

    def on_test_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Stop the clock of testing."""
        self._clocks["test"].stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds spent in each stage."""
        return {"time_elapsed": {stage: clock.elapsed() for stage, clock in self._clocks.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the seconds that the resumed run has spent in each stage."""
        for stage, spent in state_dict["time_elapsed"].items():
            self._clocks[stage].spent = float(spent)

    def _check(self, trainer: RunContext) -> None:
        if time.monotonic() < self._deadline or trainer.should_stop:
            return
        trainer.request_stop(f"Timer: the time of {self.duration} is up")
        if self.verbose:
            trainer.print(
                f"Timer: the time of {self.duration} is up after {timedelta(seconds=int(self.time_elapsed()))}"
            )
