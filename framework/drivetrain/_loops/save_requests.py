"""Checkpoints that are asked for: written, or gone back to, once all hooks of the event are through."""

from __future__ import annotations

from collections.abc import Callable


class SaveRequests:
    """What waits to be written.

    Hooks only ask, alike on every rank. The loop writes after the last hook of the event, so that the state is whole,
    and at the end of an open window, whose gradients no checkpoint holds. Who goes back writes nothing before.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        """In the order they were asked for; the loop looks whether there are any."""
        self.back: Callable[[], None] | None = None
        """Loads an earlier checkpoint: for the loop to call once it has let go of the epoch's data."""

    def ask(self, save: Callable[[], None]) -> None:
        """Call ``save`` at the next moment at which a run could be resumed."""
        self.waiting.append(save)

    def go_back(self, load: Callable[[], None]) -> None:
        """Leave the epoch at the next moment at which a run could be resumed, and go on from what ``load`` loads."""
        self.back = load
        self.waiting.append(load)  # where the loop looks

    def run(self) -> None:
        """Write all that waits."""
        waiting = self.waiting[:]
        self.waiting.clear()
        if self.back is not None:
            return
        for save in waiting:
            save()
