"""Timer: measures the time spent in each stage, and stops training after a given time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drivetrain._config.argument_checks import check_choice
from drivetrain._config.arguments import parse_duration
from drivetrain.callback import Callback

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_INTERVALS = ("step", "epoch")
_STAGES = ("train", "validate", "test")


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
        self._spent_seconds = dict.fromkeys(_STAGES, 0.0)
        self._running_since: dict[str, float] = {}  # in seconds of `time.monotonic`, for stages that are running
        self._started: dict[str, float] = {}  # in seconds of `time.time`
        self._ended: dict[str, float] = {}  # in seconds of `time.time`
        self._deadline = float("inf")
        self._fitting = False

    @property
    def state_key(self) -> str:
        """The class name, the duration and the interval."""
        settings = {"duration": None if self.duration is None else self._limit_seconds, "interval": self.interval}
        return f"{type(self).__qualname__}{settings!r}"

    # The measured times

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in "train", "validate" or "test", including earlier runs that were resumed."""
        check_choice("time_elapsed", "stage", stage, _STAGES, "what the timer measures")
        since = self._running_since.get(stage)
        return self._spent_seconds[stage] + (time.monotonic() - since if since is not None else 0.0)

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining seconds; None without a duration."""
        return None if self.duration is None else self._limit_seconds - self.time_elapsed(stage)

    def start_time(self, stage: str = "train") -> float | None:
        """Return when the stage started, in seconds of `time.time`; None if the stage has not started."""
        check_choice("start_time", "stage", stage, _STAGES, "what the timer measures")
        return self._started.get(stage)

    def end_time(self, stage: str = "train") -> float | None:
        """Return when the stage ended, in seconds of `time.time`; None if the stage has not ended."""
        check_choice("end_time", "stage", stage, _STAGES, "what the timer measures")
        return self._ended.get(stage)

    # Hooks and state

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Reset the times before a fit. Time of validations within `fit` also counts as training time."""
        self._fitting = stage == "fit"
        if self._fitting:
            self._spent_seconds = dict.fromkeys(
                self._spent_seconds, 0.0
            )  # The times of a checkpoint are loaded after this hook.

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Stop clocks that are still running after a failure."""
        for running in list(self._running_since):
            self._stop(running)

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start the clock of training, and stop training immediately if a resumed run has no time left."""
        self._start("train")
        self._deadline = self._running_since["train"] + self._limit_seconds - self._spent_seconds["train"]
        self._check(trainer)

    def on_train_batch_end(
        self, trainer: RunContext, module: TrainModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """With ``interval="step"``, stop training if the time is up."""
        if self.interval == "step" and time.monotonic() >= self._deadline:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Stop training if the time is up."""
        self._check(trainer)

    def on_train_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Stop the clock of training."""
        self._stop("train")

    def on_validation_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start the clock of validation."""
        if not trainer.sanity_checking:
            self._start("validate")

    def on_validation_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Stop the clock of validation."""
        self._stop("validate")

    def on_test_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Start the clock of testing."""
        self._start("test")

    def on_test_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Stop the clock of testing."""
        self._stop("test")

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds spent in each stage."""
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the seconds that the resumed run has spent in each stage."""
        self._spent_seconds |= {stage: float(spent) for stage, spent in state_dict["time_elapsed"].items()}

    def _check(self, trainer: RunContext) -> None:
        if time.monotonic() < self._deadline or trainer.should_stop:
            return
        trainer.request_stop(f"Timer: the time of {self.duration} is up")
        if self.verbose:
            trainer.print(
                f"Timer: the time of {self.duration} is up after {timedelta(seconds=int(self.time_elapsed()))}"
            )

    def _start(self, stage: str) -> None:
        self._started.setdefault(stage, time.time())
        self._running_since[stage] = time.monotonic()
        self._ended.pop(stage, None)

    def _stop(self, stage: str) -> None:
        if stage in self._running_since:
            self._spent_seconds[stage] = self.time_elapsed(stage)
            del self._running_since[stage]
            self._ended[stage] = time.time()
