"""Finds the newest checkpoint that a run can resume from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from drivetrain._format import CheckpointReader, load
from drivetrain._runs.checkpoint_folders import children, read_latest
from drivetrain._storage.folder import StorageError
from drivetrain._storage.paths import child
from drivetrain.errors import CheckpointError

logger = logging.getLogger("drivetrain")

T = TypeVar("T")

RETRY_SECONDS = 30.0
"""How long requests to a failing storage are retried, in seconds.

If the retries ended early, a newer checkpoint could be missed.
"""

_FIRST_PAUSE = 0.5  # seconds before the first retry; the pause doubles for each further retry


def resumable_in(folders: Iterable[str], retry: StorageRetry) -> list[CheckpointReader]:
    """Return the complete checkpoints directly inside ``folders`` that hold more than weights.

    Raises:
        StorageError: the storage still fails after the last retry.
    """
    checkpoints = []
    for folder in dict.fromkeys(folders):
        latest_name = retry.call(partial(read_latest, folder))
        names = retry.call(partial(children, folder))
        for name in dict.fromkeys([*names, *([latest_name] if latest_name is not None else [])]):
            checkpoint = retry.call(partial(_load_if_complete, child(folder, name)))
            if checkpoint is not None and not checkpoint.weights_only:
                checkpoints.append(checkpoint)
    return checkpoints


def newest_of(checkpoints: Iterable[CheckpointReader]) -> CheckpointReader | None:
    """Return the newest of some checkpoints; None if there are none.

    A checkpoint is newer than its ancestors in the lineage, regardless of their timestamps; between unrelated
    checkpoints, the checkpoint with the later timestamp is newer.
    """
    checkpoints = list(checkpoints)
    without_descendants = [
        checkpoint for checkpoint in checkpoints if not any(_descends_from(other, checkpoint) for other in checkpoints)
    ]
    return max(without_descendants, key=lambda each: (each.manifest.written, each.path), default=None)


def problem_of(checkpoint: CheckpointReader, check: Callable[[CheckpointReader], None]) -> CheckpointError | None:
    """Return the `CheckpointError` that ``check`` raises for a checkpoint, or None. A `StorageError` is raised."""
    try:
        check(checkpoint)
    except StorageError:
        raise
    except CheckpointError as error:
        return error
    return None


def _load_if_complete(path: str) -> CheckpointReader | None:
    """Open the checkpoint at ``path``; return None if it is missing or incomplete."""
    try:
        return load(path)
    except StorageError:
        raise
    except CheckpointError:
        return None


def _descends_from(checkpoint: CheckpointReader, other: CheckpointReader) -> bool:
    return checkpoint.manifest.metadata.descends_from(other.manifest.metadata)


class StorageRetry:
    """Retries operations that raise `StorageError`, with exponential backoff and one time limit for all calls.

    Args:
        retry_seconds: the total duration of all pauses in seconds; `RETRY_SECONDS` by default.
    """

    def __init__(self, retry_seconds: float | None = None) -> None:
        self._remaining = RETRY_SECONDS if retry_seconds is None else retry_seconds
        self._pause = _FIRST_PAUSE

    def call(self, operation: Callable[[], T]) -> T:
        """Return the result of ``operation``, retrying while it raises `StorageError`.

        Raises:
            StorageError: the operation still fails when the time limit is reached.
        """
        while True:
            try:
                return operation()
            except StorageError as error:
                if self._remaining <= 0:
                    raise
                pause = min(self._pause, self._remaining)
                logger.warning("%s Retrying in %.1f s.", error.what, pause)
                time.sleep(pause)
                self._remaining -= pause
                self._pause *= 2
