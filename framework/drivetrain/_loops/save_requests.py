"""Hooks' requests to write a checkpoint or to roll back to one, which are carried out after all hooks of the event."""

from __future__ import annotations

from collections.abc import Callable


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
        for save in waiting:
            save()
