"""RunFolder: the folder of a run on every rank, and on rank 0 the run's record in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

# The code that writes records is imported only when it is used, because many runs have no folder.
if TYPE_CHECKING:
    from drivetrain._engine.run_recorder import RunRecorder
    from drivetrain.checkpoint._format import CheckpointMetadata


CKPT_PATH_KEYWORDS = ("last", "best", "auto")
"""The values of ``ckpt_path`` that are not paths."""


class StartDecision(NamedTuple):
    """How a run begins, as rank 0 decides it for all ranks.

    Attributes:
        path: the checkpoint that the run starts from; None for a fresh start.
        folder: the run's folder, or None.
        id: the run's identifier, or "".
        continues_run: whether the run continues in the folder of the run that wrote the checkpoint.
        parent: the identifier of the run that wrote the checkpoint, or "".
        versions: the versions of the loggers, in their order.
        skipped: a sentence about the runs that were passed over in the search for a checkpoint, or "".
        problem: the what, why and fix of an error that prevents the run. The other fields then have their defaults.
    """

    path: str | None = None
    folder: str | None = None
    id: str = ""
    continues_run: bool = False
    parent: str = ""
    versions: tuple[str, ...] = ()
    skipped: str = ""
    problem: tuple[str, str, str] | None = None


class RunFolder:
    """The folder of one run.

    Args:
        before: the folder of the last run of the same `Fit`.
    """

    def __init__(self, before: RunFolder | None = None) -> None:
        self.path: str | None = None
        """The path or URL of the folder; None if the run has no folder."""
        self.id = ""
        """The identifier of the run; "" if the run has no folder."""
        self.name = ""
        """The first logger's name, which runs of one experiment share."""
        self.rewinds_to: int | None = None
        """The optimizer step after which existing log rows are dropped; None if the run has a new folder."""
        self.recorder: RunRecorder | None = None
        """Writes the run's record; None on other ranks than rank 0, and if the run has no folder."""
        self.is_of_fit = False
        """Whether a fit has written to the folder."""
        self.before = before
        """The folder of the last run of the same `Fit`, until this run has its own folder."""
        self._is_shared = False

    def join(self, other: RunFolder) -> None:
        """Use the folder of the last run. This evaluation then only adds an entry to the last run's record."""
        self.adopt(other)
        self._is_shared = True

    def adopt(self, other: RunFolder) -> None:
        """Use the folder of another run, such as one that took place in other processes."""
        self.path, self.id, self.name = other.path, other.id, other.name
        self.is_of_fit, self.recorder = other.is_of_fit, other.recorder

    def note_start(
        self, metadata: CheckpointMetadata | None, path: str | None, parent: str, continues_run: bool
    ) -> None:
        """Record which checkpoint the run starts from.

        Args:
            metadata: the checkpoint's metadata; None for a fresh start.
            path: the checkpoint's path; None for a fresh start.
            parent: the identifier of the run that wrote the checkpoint; "" for none.
            continues_run: whether the run continues in the folder of the run that wrote the checkpoint.
        """
        step = None if metadata is None else int(metadata.progress["global_step"])
        self.rewinds_to = None if not continues_run else -1 if step is None else step
        if self.recorder is not None:
            self.recorder.note_start(
                path, "" if metadata is None else metadata.identifier, step or 0, parent, continues_run
            )

    def note_training(self, data: Mapping[str, Any], seed: int, batch_size: int | None) -> None:
        """Record the training data as training begins."""
        if self.recorder is not None:
            self.recorder.note_training(data, seed, batch_size)

    def note_checkpoint(self, path: str, metadata: CheckpointMetadata) -> None:
        """Record a completed checkpoint."""
        if self.recorder is not None:
            self.recorder.note_checkpoint(path, metadata)

    def note_removal(self, identifier: str) -> None:
        """Record that a checkpoint was deleted."""
        if self.recorder is not None:
            self.recorder.note_removal(identifier)

    def note(self, kind: str, text: str, step: int) -> None:
        """Record an event after optimizer step ``step``."""
        if self.recorder is not None:
            self.recorder.note(kind, text, step)

    def end(self, status: str, why: str, step: int) -> None:
        """Record how the run ended.

        Args:
            status: "finished", "interrupted" or "failed".
            why: the reason, as text.
            step: the number of optimizer steps made.
        """
        if self.recorder is None:
            return
        if self._is_shared:
            self.recorder.note("evaluated", f"{status}: {why}" if why else status, step)
        else:
            self.recorder.end(status, why, step)

    def __getstate__(self) -> dict[str, Any]:
        # The recorder belongs to the process that created it.
        return self.__dict__ | {"recorder": None, "before": None}
