"""The search for the newest checkpoint, as a resuming run does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from drivetrain.checkpoint._discovery import RETRY_SECONDS, StorageRetry, resumable_in, select_newest
from drivetrain.checkpoint._format import CheckpointReader


def newest(
    folders: Iterable[str],
    retry_seconds: float = RETRY_SECONDS,
    check: Callable[[CheckpointReader], None] = lambda checkpoint: None,
) -> CheckpointReader | None:
    """Return the newest checkpoint directly inside ``folders`` that a run can resume from, or None."""
    retry = StorageRetry(retry_seconds)
    return select_newest(resumable_in(folders, retry), retry, check)
