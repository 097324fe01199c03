"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._loops.save_requests import SaveRequests
from drivetrain.checkpoint._format import StagedCheckpoint, commit


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread; a further one waits for it.

    What is written is the state at the call, which was copied by then. A failure is raised at the next moment at
    which a checkpoint could be written, which is within a step, or by `finish`.

    Args:
        control: between the ranks; the threads talk over a twin of it.
        saves: where a failure is brought to the loop's attention.
    """

    def __init__(self, control: ControlPlane, saves: SaveRequests) -> None:
        self._control = control
        self._saves = saves
        self._twin: ControlPlane | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, path: str, staged: StagedCheckpoint, then: Callable[[], None]) -> None:
        """Write what was staged, and call ``then`` once it is whole. Collective, and the thread's work is too."""
        self.finish()
        if self._twin is None:
            self._twin = self._control.clone()
        clone = self._twin

        def write() -> None:
            try:
                commit(path, staged, clone)
                then()
            except BaseException as error:
                self._failure = error
                self._saves.ask(self._raise)

        # Not a daemon: a process that ends all the same waits for what is being written.
        self._thread = threading.Thread(target=write, name="checkpoint-write")
        self._thread.start()

    def finish(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it could not be.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self._raise()

    def abandon(self) -> None:
        """Wait, and keep to itself what went wrong: something else did already."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self._failure = None

    def _raise(self) -> Any:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
