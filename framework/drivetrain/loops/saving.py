"""Checkpoints that are asked for: written once all hooks of the event are through, and never within a window."""

from __future__ import annotations

from collections.abc import Callable


class SaveRequests:
    """What waits to be written.

    Hooks only ask, alike on every rank. The loop writes after the last hook of the event, so that the state is whole,
    and at the end of an open window, whose gradients no checkpoint holds.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        """In the order they were asked for; the loop looks whether there are any."""

    def ask(self, save: Callable[[], None]) -> None:
        """Call ``save`` at the next moment at which a run could be resumed."""
        self.waiting.append(save)

    def run(self) -> None:
        """Write all that waits."""
        waiting = self.waiting[:]
        self.waiting.clear()
        for save in waiting:
            save()
