"""EarlyStopping: ends training when a monitored value stops improving."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drivetrain._config.argument_checks import check_choice, check_count, check_types
from drivetrain.callback import Callback
from drivetrain.callbacks._monitored_value import acts_at_epoch_end, missing_value

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule
    from drivetrain.run_context import RunContext

_MODES = ("min", "max")


@dataclass(eq=False, repr=False)
class EarlyStopping(Callback):
    """Stops training when ``monitor`` has not improved for ``patience`` checks.

    All ranks decide from the same number. A value that differs between ranks, because it was logged in a step or with
    ``sync_dist=False``, is averaged over the ranks that logged it.

    Args:
        monitor: the name of a logged value.
        min_delta: the minimum change that counts as an improvement. The sign of ``min_delta`` is ignored.
        patience: the number of checks without improvement after which to stop. A check is made per epoch or validation.
        verbose: whether to print each improvement and the reason for stopping.
        mode: "min" if lower values are better, "max" if higher values are better.
        strict: whether a missing value is an error. If False, the check is skipped, with one warning.
        check_finite: whether to stop at NaN or infinity.
        stopping_threshold: a value; training stops as soon as the monitored value is better.
        divergence_threshold: a value; training stops as soon as the monitored value is worse.
        check_on_train_epoch_end: whether to check at the end of a training epoch (True) or at the end of a validation
            (False). None chooses the epoch's end if validation runs once per epoch or not at all, and the validation's
            end otherwise.

    Attributes:
        wait_count: checks since the last improvement.
        best_score: the best value so far.
        stopped_epoch: the epoch in which training was stopped; 0 if this callback did not stop training.
        stopping_reason: why training was stopped; None if this callback did not stop training.

    Raises:
        ConfigurationError: ``monitor``, ``mode`` or ``patience`` is invalid; during the run, if ``monitor`` was not
            logged.
    """

    shown_as = "early_stopping_callback"
    priority = -10  # after the module's hook has logged, before checkpoints and the progress bar

    _key_arguments = (
        "monitor",
        "mode",
        "min_delta",
        "patience",
        "stopping_threshold",
        "divergence_threshold",
        "check_on_train_epoch_end",
    )
    _saved_attributes = ("wait_count", "best_score", "stopped_epoch", "stopping_reason", "_checked_at")

    monitor: str
    min_delta: float = 0.0
    patience: int = 3
    verbose: bool = False
    mode: str = "min"
    strict: bool = True
    check_finite: bool = True
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_on_train_epoch_end: bool | None = None

    def __post_init__(self) -> None:
        check_types(EarlyStopping, vars(self))
        check_choice("EarlyStopping", "mode", self.mode, _MODES, "the direction in which the monitored value improves")
        check_count("EarlyStopping", "patience", self.patience, 0, "a number of checks without improvement")
        self.min_delta = abs(self.min_delta)
        self.patience = int(self.patience)  # An int, because a NumPy integer would change `state_key`.
        self._at_epoch_end = True
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self.wait_count = 0
        self.best_score = math.inf if self.mode == "min" else -math.inf
        self.stopped_epoch = 0
        self.stopping_reason: str | None = None
        self._checked_at: int | None = None  # the global step of the value that was last checked

    @property
    def monitors(self) -> Mapping[str, str]:
        """The logged value ``monitor``, which is required if ``strict`` is set."""
        return {self.monitor: f"{type(self).__name__}(monitor={self.monitor!r})"} if self.strict else {}

    def reason_for_ending(self, state_dict: Mapping[str, Any]) -> str | None:
        """Return the saved reason for stopping."""
        reason: str | None = state_dict.get("stopping_reason")
        return reason

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        """Reset the state before a fit. The state of a checkpoint is loaded after this hook."""
        if stage == "fit":
            self._reset()

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        """Determine whether to check at the end of epochs or of validations."""
        self._at_epoch_end = acts_at_epoch_end(trainer, self.check_on_train_epoch_end)
        if self.stopping_reason is not None:  # the resumed run had not reached min_epochs or min_steps
            trainer.stop_unless_withdrawn(self, f"EarlyStopping: {self.stopping_reason}")

    def on_train_epoch_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Check the monitored value, if checks are made at the end of epochs."""
        if self._at_epoch_end:
            self._check(trainer)

    def on_validation_end(self, trainer: RunContext, module: TrainModule) -> None:
        """Check the monitored value, if checks are made at the end of validations."""
        if trainer.state == "fitting" and not self._at_epoch_end and not trainer.sanity_checking:
            self._check(trainer)

    def _check(self, trainer: RunContext) -> None:
        value = trainer.metrics.agreed(self.monitor)
        if value is None:
            self._handle_missing_value(trainer)
            return
        logged_at = trainer.metrics.logged_at(self.monitor)
        if logged_at is not None and logged_at == self._checked_at:
            return  # the value was not logged since the last check
        self._checked_at = logged_at
        reason = self._evaluate(value)
        # Before min_epochs and min_steps are reached, a later check may withdraw the request.
        trainer.stop_unless_withdrawn(self, None if reason is None else f"EarlyStopping: {reason}")
        self.stopping_reason = reason
        self.stopped_epoch = 0 if reason is None else trainer.current_epoch
        if reason is not None:
            if self.verbose:
                trainer.print(f"EarlyStopping: {reason}")
        elif self.verbose and self.wait_count == 0:
            trainer.print(f"EarlyStopping: {self.monitor} improved to {value:.6g}")

    def _evaluate(self, value: float) -> str | None:
        """Update the state with a value, and return the reason to stop, or None to continue."""
        if self.check_finite and not math.isfinite(value):
            return f"{self.monitor} is {value}, which is not finite"
        if self.stopping_threshold is not None and self._is_better(value, self.stopping_threshold):
            return f"{self.monitor} = {value:.6g} is better than the stopping threshold {self.stopping_threshold:.6g}"
        if self.divergence_threshold is not None and self._is_better(-value, -self.divergence_threshold):
            return (
                f"{self.monitor} = {value:.6g} is worse than the divergence threshold {self.divergence_threshold:.6g}"
            )
        if self._is_better(value, self.best_score, self.min_delta):
            self.best_score = value
            self.wait_count = 0
            return None
        self.wait_count += 1
        if self.wait_count < self.patience:
            return None
        return (
            f"{self.monitor} did not improve on {self.best_score:.6g} by more than {self.min_delta:.6g} "
            f"in the last {self.wait_count} checks"
        )

    def _is_better(self, value: float, other: float, margin: float = 0.0) -> bool:
        return value + margin < other if self.mode == "min" else value - margin > other

    def _handle_missing_value(self, trainer: RunContext) -> None:
        monitored_by = f"EarlyStopping(monitor={self.monitor!r})"
        checked = "training epoch" if self._at_epoch_end else "validation"
        when = f"before the end of a {checked}, set check_on_train_epoch_end to when it is logged, pass strict=False"
        error = missing_value(trainer, monitored_by, self.monitor, when)
        if self.strict:
            raise error
        if not self._warned:
            self._warned = True
            if trainer.is_global_zero:
                text = f"{error.what} The check is skipped (strict=False): {error.why}."
                warnings.warn(text, RuntimeWarning, stacklevel=2)
