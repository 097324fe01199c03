"""Hooks' requests to write a checkpoint or to roll back to one, which are carried out after all hooks of the event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SaveRequests:
    """The pending requests of a run.

    Hooks request a checkpoint on every rank. The loop writes it after the last hook of the event, so that the state is
    complete, and not within a window, because checkpoints contain no gradients. A rollback cancels pending checkpoints.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        """The requests in the order in which they were made. The loop checks whether there are any requests."""
        self.rollback: Callable[[], None] | None = None
        """Loads an earlier checkpoint. The loop calls the function after leaving the epoch. None without a request."""
        self.in_epoch = False
        """Whether an epoch's batches are read, or its end is processed: a save then has to wait, because some hooks of
        the current event, or parts of the current step, have run and others have not."""

    def ask(self, save: Callable[[], None]) -> None:
        """Request that ``save`` is called at the next point at which a run can be resumed."""
        self.waiting.append(save)

    def roll_back(self, load: Callable[[], None]) -> None:
        """Request a rollback at the next point at which a run can be resumed: leave the epoch and call ``load``."""
        self.rollback = load
        self.waiting.append(load)  # makes the loop call `run`

    def run(self) -> None:
        """Write the requested checkpoints, unless a rollback was requested."""
        waiting = self.waiting[:]
        self.waiting.clear()
        if self.rollback is not None:
            return
        with self.at_resumable_point():
            for save in waiting:
                save()

    @contextmanager
    def at_resumable_point(self) -> Iterator[None]:
        """Let saves be written at once within the block, because a run can be resumed from the current state."""
        in_epoch, self.in_epoch = self.in_epoch, False
        try:
            yield
        finally:
            self.in_epoch = in_epoch
