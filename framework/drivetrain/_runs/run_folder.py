"""RunFolder: the folder of a run, as every rank knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

# The code that writes records is imported only when it is used, because many runs have no folder.
if TYPE_CHECKING:
    from drivetrain._format import CheckpointMetadata

CKPT_PATH_KEYWORDS = ("last", "best", "auto")
"""The values of ``ckpt_path`` that are not paths."""


class RunStart(NamedTuple):
    """How a run begins, as rank 0 has decided it for all ranks.

    Attributes:
        path: the checkpoint that the run starts from; None for a fresh start.
        folder: the run's folder, or None.
        id: the run's identifier, or "".
        continues_run: whether the run continues in the folder of the run that wrote the checkpoint.
        parent: the identifier of the run that wrote the checkpoint, or "".
        skipped: the runs that were passed over in the search for a checkpoint, each with the reason.
        refusal: the what, why and fix of an error that prevents the run. The other fields then have their defaults.
    """

    path: str | None = None
    folder: str | None = None
    id: str = ""
    continues_run: bool = False
    parent: str = ""
    skipped: Sequence[str] = ()
    refusal: tuple[str, str, str] | None = None


class RunNotes:
    """Learns what happens in a run, and records nothing. On rank 0 of a run with a folder, `RunRecorder` records it."""

    def note_start(self, path: str | None, identifier: str, step: int, parent: str, continues_run: bool) -> None:
        """Record the checkpoint that the run starts from.

        Args:
            path: the checkpoint's path; None for a fresh start.
            identifier: the checkpoint's id; "" for a fresh start.
            step: the number of optimizer steps before the checkpoint was written.
            parent: the id of the run that wrote the checkpoint; "" for none.
            continues_run: whether this run continues in the folder of the run that wrote the checkpoint.
        """

    def note_training(self, data: Mapping[str, Any], seed: int, batch_size: int | None) -> None:
        """Record the training data as training begins."""

    def note_checkpoint(self, path: str, metadata: CheckpointMetadata) -> None:
        """Record a completed checkpoint."""

    def note_removal(self, identifier: str) -> None:
        """Record that a checkpoint was removed."""

    def note(self, kind: str, text: str, step: int) -> None:
        """Record an event after optimizer step ``step``."""

    def end(self, status: str, why: str, step: int) -> None:
        """Record how the run ended.

        Args:
            status: "finished", "interrupted" or "failed".
            why: the reason, as text.
            step: the number of optimizer steps made.
        """


class EvaluationNotes(RunNotes):
    """Adds an evaluation, in the folder of an earlier run of the same `Fit`, to the record of that run."""

    def __init__(self, earlier: RunNotes) -> None:
        self._earlier = earlier

    def note(self, kind: str, text: str, step: int) -> None:
        self._earlier.note(kind, text, step)

    def end(self, status: str, why: str, step: int) -> None:
        self._earlier.note("evaluated", f"{status}: {why}" if why else status, step)


@dataclass(slots=True)
class RunFolder:
    """The folder of one run.

    Attributes:
        path: the path or URL of the folder; None if the run has no folder.
        id: the identifier of the run; "" if the run has no folder.
        name: the first logger's name, which runs of one experiment share.
        rewinds_to: the optimizer step after which existing log rows are dropped; None if the run has a new folder.
        notes: receives what happens in the run.
    """

    path: str | None = None
    id: str = ""
    name: str = ""
    rewinds_to: int | None = None
    notes: RunNotes = field(default_factory=RunNotes)

    def adopt(self, other: RunFolder) -> None:
        """Become the folder of a run that took place in other processes."""
        self.path, self.id, self.name = other.path, other.id, other.name
