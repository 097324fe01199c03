"""When validation runs within training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from drivetrain._loops.progress import Progress
from drivetrain._loops.stopping import StopRequest
from drivetrain._metrics import MetricStore
from drivetrain.errors import ConfigurationError

logger = logging.getLogger("drivetrain")


class ValidationPlan:
    """Knows after which micro-batches to validate.

    Args:
        validate: runs validation; None where there is nothing to validate.
        interval: an int counts micro-batches, a float is a part of an epoch; None validates at an epoch's end.
        every_n_epochs: validate in every n-th epoch only; None lets ``interval`` count on over epochs.
        length: micro-batches that an epoch should have; None where nothing says.
        stop: asked after a validation run, at which early stopping may have made up its mind.
        metrics: goes back to training afterwards.
        tells: whether this rank says what is amiss.
        changes: whether epochs have other data later, and other lengths.

    Raises:
        ConfigurationError: the interval does not fit the epoch.
    """

    def __init__(
        self,
        validate: Callable[[], object] | None,
        interval: int | float | None,
        every_n_epochs: int | None,
        length: int | None,
        stop: StopRequest,
        metrics: MetricStore,
        tells: bool,
        changes: bool,
    ) -> None:
        self._wanted = interval
        self._every_n_epochs = every_n_epochs
        self._stop = stop
        self._metrics = metrics
        self._is_part = isinstance(interval, float)
        self._tells = tells
        self._said_longer = False
        if changes:  # a run may go on within an epoch that is shorter than its first one
            self.renew(validate, length)
        else:
            self._set(validate, length, _in_micro_batches(interval, every_n_epochs, length) if validate else None)
        self._due = False
        self._progress: Progress | None = None
        self._ran_at = -1
        self.next_at = -1
        """The count of the epoch's micro-batches after which to call `run`; -1 for never."""

    def renew(self, validate: Callable[[], object] | None, length: int | None) -> None:
        """Go by other data from here on, between two epochs. An interval that has become too long is the epoch's."""
        wanted = self._wanted
        if validate is not None and self._every_n_epochs is not None and type(wanted) is int and length is not None:
            if wanted > length and self._tells and not self._said_longer:
                self._said_longer = True
                logger.warning(
                    "val_check_interval=%d is more than the %d micro-batches that an epoch has by now: validation runs "
                    "at its end. Said once.",
                    wanted,
                    length,
                )
            wanted = min(wanted, length)
        interval = None if validate is None else _in_micro_batches(wanted, self._every_n_epochs, length)
        self._set(validate, length, interval)

    def _set(self, validate: Callable[[], object] | None, length: int | None, interval: int | None) -> None:
        self._validate = validate
        self._interval = interval
        self._tells_short = self._tells and length is None
        self._length = length

    def begin_epoch(self, progress: Progress) -> None:
        """Look ahead into the epoch that starts or goes on."""
        self.next_at = -1
        self._progress = progress
        every = self._every_n_epochs
        self._due = self._validate is not None and (every is None or (progress.epoch + 1) % every == 0)
        if self._due:
            self._look_ahead(progress)

    def state_dict(self) -> dict[str, int]:
        """Return when validation ran last, and when it comes next within this epoch."""
        return {"ran_at": self._ran_at, "next_at": self.next_at}

    def load_state_dict(self, state: Mapping[str, int], progress: Progress) -> None:
        """Take back what `state_dict` returned, after `begin_epoch`: a validation that was due is still due."""
        self._ran_at = state["ran_at"]
        if self.next_at != -1:
            self._look_ahead(progress)  # past what ran within the window that the saved run left
        if self.next_at != -1 and state["next_at"] == progress.batch_idx:
            self.next_at = state["next_at"]

    def run(self) -> None:
        """Validate now, within an epoch. All ranks may leave before its end: see the stop request."""
        assert self._validate is not None
        assert self._progress is not None
        before, self._ran_at = self._ran_at, self._progress.micro_batches
        try:
            self._validate()
        except BaseException:
            self._ran_at = before  # it has not ended, and is still due
            raise
        self._metrics.enter("train", reset=False)
        if self._stop.leaving:
            self._ran_at = before
            return
        self._stop.agree_anew("the end of a validation run")
        self._look_ahead(self._progress)

    def run_at_epoch_end(self, stopping: bool, data_over: bool) -> None:
        """Validate after an epoch's data, or as the run stops early, if it is due then."""
        assert self._progress is not None
        if data_over and self._tells_short and self._due:
            self._tell_short(self._progress)
        due = self._due and (self._interval is None or stopping or self._is_missed())
        # A stop that this very validation asked for is no reason for another one.
        if due and self._ran_at != self._progress.micro_batches:
            self.run()

    def _tell_short(self, progress: Progress) -> None:
        """Say once that an epoch, whose length nobody knew before, was too short for its interval."""
        if self._every_n_epochs is None or self._interval is None or self.next_at != self._interval:
            return
        self._tells_short = False
        logger.warning(
            "Epoch %d ended after %d micro-batches without a validation: val_check_interval=%d counts them anew "
            "in each epoch, and nothing told before how many there are. Lower it, or set check_val_every_n_epoch=None "
            "to count on over epochs; val_check_interval=1.0 validates at the end of each. Said once.",
            progress.epoch,
            progress.batch_idx,
            self._interval,
        )

    def _look_ahead(self, progress: Progress) -> None:
        if self._interval is not None:
            done = progress.micro_batches if self._every_n_epochs is None else progress.batch_idx
            ahead = self._interval - done % self._interval
            while progress.micro_batches + ahead <= self._ran_at:
                ahead += self._interval
            self.next_at = progress.batch_idx + ahead

    def _is_missed(self) -> bool:
        """Whether the data ended before a validation to which, by its length, the epoch would have come."""
        if self._every_n_epochs is None:  # it counts on into the next epoch, where it comes
            return False
        if self._length is None or not -1 < self.next_at <= self._length:
            return False
        # What counts micro-batches has had those that there are, unless it had none.
        return self._is_part or self.next_at == self._interval


def renumbered(state: Mapping[str, int], before: int, now: int) -> dict[str, int]:
    """Return a plan's state where an epoch's micro-batches are counted anew: what was batch ``before`` is ``now``.

    A validation that was due is still due, and one that was over is not run again; the next ones come by the new count.
    """
    return {**state, "next_at": now if state["next_at"] == before else -1}


def _in_micro_batches(interval: int | float | None, every_n_epochs: int | None, length: int | None) -> int | None:
    if interval is None or (isinstance(interval, float) and interval == 1.0):
        return None
    if isinstance(interval, float):
        if length is None:
            raise ConfigurationError(
                f"val_check_interval={interval} with a training loader of unknown length.",
                "a part of an epoch can only be taken where the epoch's length is known.",
                "give the number of micro-batches as an int, or 1.0 for the end of an epoch.",
            )
        return max(1, int(length * interval))
    if every_n_epochs is not None and length is not None and interval > length:
        raise ConfigurationError(
            f"val_check_interval={interval} is more than the {length} micro-batches of an epoch.",
            "validation would never run.",
            "lower it, or set check_val_every_n_epoch=None to count on over epochs.",
        )
    return interval
