"""The search for the newest checkpoint, as a resuming run does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from drivetrain._format import CheckpointReader, load
from drivetrain._runs.identity import Identity
from drivetrain._runs.start_decision import StartRequest, decide
from drivetrain._runs.start_search import RETRY_SECONDS, StartSearch, StorageRetry, resumable_in


def newest(
    folders: Iterable[str],
    retry_seconds: float = RETRY_SECONDS,
    check: Callable[[CheckpointReader], None] = lambda checkpoint: None,
) -> CheckpointReader | None:
    """Return the newest checkpoint directly inside ``folders`` that a run can resume from, or None."""
    request = StartRequest("auto", True, Identity("", "", {}), [], "", needs_folder=False)
    search = StartSearch(request, retry_seconds)
    search.found.checkpoints = resumable_in(folders, StorageRetry(retry_seconds))
    while (path := decide(search.found, search.request).path) and search.drop_if_unreadable(path, check):
        pass
    return None if path is None else load(path)
