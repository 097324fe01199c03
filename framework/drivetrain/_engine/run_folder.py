"""The folder of a run, as every rank knows it; rank 0 keeps the run's record in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

# What writes records is imported where it is wanted: many runs have no folder.
if TYPE_CHECKING:
    from drivetrain._engine.run_recorder import RunRecorder
    from drivetrain.checkpoint._format import CheckpointMetadata


CHOSEN = ("last", "best", "auto")
"""What `ckpt_path` may be besides a path."""


class Beginning(NamedTuple):
    """What rank 0 tells the others.

    Attributes:
        path: of the checkpoint that the run begins with; None for a fresh start.
        folder: the run's, or None.
        id: the run's, or "".
        went_on: whether it is the folder of the run that wrote the checkpoint.
        parent: the id of the run that wrote the checkpoint, or "".
        versions: of the loggers, in their order.
        problem: an error's what, why and fix, in place of all this.
    """

    path: str | None = None
    folder: str | None = None
    id: str = ""
    went_on: bool = False
    parent: str = ""
    versions: tuple[str, ...] = ()
    problem: tuple[str, str, str] | None = None


class RunFolder:
    """The folder of one run."""

    def __init__(self) -> None:
        self.path: str | None = None
        """The folder, a path or URL; None where the run has none."""
        self.id = ""
        """What tells the run from all others; "" where it has no folder."""
        self.name = ""
        """What runs of one kind are called: the first logger's name."""
        self.rewinds_to: int | None = None
        """The optimizer step after which logs are dropped; None where the run has a folder of its own."""
        self.recorder: RunRecorder | None = None
        """Keeps the record; on rank 0, where there is a folder."""
        self.is_of_fit = False
        """Whether a run has trained there."""
        self.before: RunFolder | None = None
        """That of the last run of the same `Fit`, until this one has begun."""
        self._is_anothers = False

    def join(self, other: RunFolder) -> None:
        """Be the folder of the run before, whose record this one, an evaluation, only adds to."""
        self.be(other)
        self._is_anothers = True

    def be(self, other: RunFolder) -> None:
        """Be the folder of a run that took place in other processes."""
        self.path, self.id, self.name = other.path, other.id, other.name
        self.is_of_fit, self.recorder = other.is_of_fit, other.recorder

    def begins_with(self, metadata: CheckpointMetadata | None, path: str | None, parent: str, went_on: bool) -> None:
        """Note which checkpoint the run begins with.

        Args:
            metadata: what the checkpoint says; None for a fresh start.
            path: where it is.
            parent: the id of the run that wrote it; "" for none.
            went_on: whether it is in the folder of that run.
        """
        step = None if metadata is None else int(metadata.progress["global_step"])
        self.rewinds_to = None if not went_on else -1 if step is None else step
        if self.recorder is not None:
            self.recorder.begins_with(path, "" if metadata is None else metadata.identifier, step or 0, parent, went_on)

    def trains(self, data: Mapping[str, Any], seed: int, batch_size: int | None) -> None:
        """Note what there is to train on, as training begins."""
        if self.recorder is not None:
            self.recorder.trains(data, seed, batch_size)

    def wrote(self, path: str, metadata: CheckpointMetadata) -> None:
        """Note a checkpoint that has become whole."""
        if self.recorder is not None:
            self.recorder.wrote(path, metadata)

    def removed(self, identifier: str) -> None:
        """Note that a checkpoint is no longer kept."""
        if self.recorder is not None:
            self.recorder.removed(identifier)

    def note(self, kind: str, text: str, step: int) -> None:
        """Note that something has happened to the run after optimizer step ``step``."""
        if self.recorder is not None:
            self.recorder.note(kind, text, step)

    def end(self, status: str, why: str, step: int) -> None:
        """Note how the run ended.

        Args:
            status: "finished", "interrupted" or "failed".
            why: in words.
            step: optimizer steps that it made.
        """
        if self.recorder is None:
            return
        if self._is_anothers:
            self.recorder.note("evaluated", f"{status}: {why}" if why else status, step)
        else:
            self.recorder.end(status, why, step)

    def __getstate__(self) -> dict[str, Any]:
        # What keeps the record stays with the process that has it.
        return self.__dict__ | {"recorder": None, "before": None}
