"""The schedule of validation within training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

from drivetrain._loops.stopping import StopRequest
from drivetrain._metrics import MetricStore
from drivetrain._run_state import Progress
from drivetrain.errors import ConfigurationError


@dataclass(eq=False)
class ValidationPlan:
    """Decides after which micro-batches to validate, and runs the validation.

    Attributes:
        validate: runs a validation; None if there is no validation data.
        requested_interval: an int is a number of micro-batches, a float a fraction of an epoch; None for the end of an
            epoch.
        every_n_epochs: n, to validate in every n-th epoch only; None to let the interval count across epochs.
        length: the number of micro-batches of an epoch; None if the number is unknown.
        progress: the counters.
        stop: the requests to stop. Ranks exchange them after a validation, which may make early stopping request one.
        metrics: the logged values; `run` switches them back to the training stage after a validation.
        reloads: whether later epochs may have other data, and so another length.

    Raises:
        ConfigurationError: the interval is longer than an epoch, or it is a fraction and the length is unknown.
    """

    validate: Callable[[], object] | None
    requested_interval: int | float | None
    every_n_epochs: int | None
    length: int | None
    progress: Progress
    stop: StopRequest
    metrics: MetricStore
    reloads: InitVar[bool]

    last_run_at: int = field(default=-1, init=False)
    """The number of the run's micro-batches after which `run` was last called; -1 for none."""
    next_at: int = field(default=-1, init=False)
    """The number of the epoch's micro-batches after which to call `run`; -1 for none."""

    def __post_init__(self, reloads: bool) -> None:
        self._validates_this_epoch = False
        self.renew(self.validate, self.length)
        interval = self.requested_interval
        # With other loaders, the epoch in which a run is resumed may be shorter than the first one.
        if isinstance(interval, int) and self._interval not in (None, interval) and not reloads:
            raise ConfigurationError(
                f"val_check_interval={interval} is more than the {self.length} micro-batches of an epoch.",
                "validation would never run.",
                "lower val_check_interval, or set check_val_every_n_epoch=None to count across epochs.",
            )

    def renew(self, validate: Callable[[], object] | None, length: int | None) -> None:
        """Use other data from the next epoch on. An interval longer than the epoch is shortened to its length."""
        self.validate, self.length = validate, length
        self._interval = None if validate is None else self._in_micro_batches(length)

    def _in_micro_batches(self, length: int | None) -> int | None:
        interval = self.requested_interval
        if interval is None or (isinstance(interval, float) and interval == 1.0):
            return None
        if isinstance(interval, int):
            return interval if self.every_n_epochs is None or length is None else min(interval, length)
        if length is None:
            raise ConfigurationError(
                f"val_check_interval={interval} with a training loader of unknown length.",
                "a fraction of an epoch needs the epoch's length.",
                "give the number of micro-batches as an int, or 1.0 for the end of an epoch.",
            )
        return max(1, int(length * interval))

    def resize(self, length: int | None) -> None:
        """Use another length from this epoch on, which begins or is resumed."""
        self.renew(self.validate, length)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Schedule the first validation of an epoch that begins or is resumed."""
        self.next_at = -1
        every = self.every_n_epochs
        is_epoch_to_validate = every is None or (self.progress.epoch + 1) % every == 0
        self._validates_this_epoch = self.validate is not None and is_epoch_to_validate
        if self._validates_this_epoch:
            self._schedule_next()

    def resume(self, last_run_at: int, is_due: bool) -> None:
        """Restore `last_run_at`, and whether `run` is to be called before the next micro-batch, after `begin_epoch`."""
        self.last_run_at = last_run_at
        if self.next_at != -1:
            self._schedule_next()  # skips a validation that ran within the open window
        if self.next_at != -1 and is_due:
            self.next_at = self.progress.batch_idx

    def run(self) -> None:
        """Validate now, within an epoch. A preemption may end the validation early, on all ranks."""
        assert self.validate is not None
        last_run, self.last_run_at = self.last_run_at, self.progress.micro_batches
        try:
            self.validate()
        except BaseException:
            self.last_run_at = last_run  # the validation did not finish, and is still due
            raise
        self.metrics.enter("train", reset=False)
        if self.stop.preempted:
            self.last_run_at = last_run
            return
        self.stop.agree("the end of a validation run")
        self._schedule_next()

    def run_at_epoch_end(self, stopping: bool) -> None:
        """Validate at an epoch's end if a validation is due. ``stopping``: whether the run ends within the epoch."""
        due = self._validates_this_epoch and (self._interval is None or stopping or self._is_missed())
        # A stop that was requested in a validation does not repeat that validation.
        if due and self.last_run_at != self.progress.micro_batches:
            self.run()

    def _schedule_next(self) -> None:
        progress = self.progress
        if self._interval is not None:
            position = progress.micro_batches if self.every_n_epochs is None else progress.batch_idx
            remaining = self._interval - position % self._interval
            while progress.micro_batches + remaining <= self.last_run_at:
                remaining += self._interval
            self.next_at = progress.batch_idx + remaining

    def _is_missed(self) -> bool:
        """Return whether the data ended before a validation that was due according to the epoch's length."""
        if self.every_n_epochs is None:  # the interval counts across epochs, so validation runs in the next epoch
            return False
        if self.length is None or not -1 < self.next_at <= self.length:
            return False
        # An interval in micro-batches is missed only if no validation ran in this epoch.
        return isinstance(self.requested_interval, float) or self.next_at == self._interval
