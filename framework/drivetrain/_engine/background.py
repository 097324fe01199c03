"""Writes checkpoints in the background while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._loops.save_requests import SaveRequests
from drivetrain.checkpoint._format import CheckpointCopy, commit


class BackgroundSaver:
    """Writes one checkpoint at a time in a thread. The next save waits for the thread.

    The state is copied before `save` is called, so training may change the original meanwhile. If writing fails, the
    error is raised at the next point at which a checkpoint could be written, at most one step later, or by `finish`.

    Args:
        control: connects the ranks. The threads communicate over a clone of this control plane.
        saves: the requests through which the training loop raises the error.
    """

    def __init__(self, control: ControlPlane, saves: SaveRequests) -> None:
        self._control = control
        self._saves = saves
        self._clone: ControlPlane | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, path: str, staged: CheckpointCopy, then: Callable[[], None]) -> None:
        """Write the staged checkpoint in a thread, then call ``then`` there. Collective, also in the thread."""
        self.finish()
        if self._clone is None:
            self._clone = self._control.clone()
        clone = self._clone

        def write() -> None:
            try:
                commit(path, staged, clone)
                then()
            except BaseException as error:
                self._failure = error
                self._saves.ask(self._raise)

        # Not a daemon: the interpreter waits at exit until the checkpoint is written.
        self._thread = threading.Thread(target=write, name="checkpoint-write")
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint is written.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        self._join()
        self._raise()

    def abandon(self) -> None:
        """Wait for the thread and discard its error, since the run is already failing with another error."""
        self._join()
        self._failure = None

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _raise(self) -> Any:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
