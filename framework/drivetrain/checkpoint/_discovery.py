"""Finding checkpoints that earlier runs wrote."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from drivetrain.checkpoint._folders import child, children, is_plain_name, read_latest
from drivetrain.checkpoint._format import Checkpoint, StorageError, load
from drivetrain.errors import CheckpointError

logger = logging.getLogger("drivetrain")

T = TypeVar("Found")

RETRY_SECONDS = 30.0
"""Seconds in all for which a storage that refuses is asked again: what it has is not known, and may be the newest."""

_FIRST_PAUSE = 0.5  # seconds; each one is twice as long as the one before


def newest(
    folders: Iterable[str],
    retry_seconds: float = RETRY_SECONDS,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> Checkpoint | None:
    """Return the newest of the checkpoints that lie directly in ``folders``, or None.

    One that a run wrote after it had written another, or had gone on from it, is newer, whatever the clocks said; of
    those that do not come from each other, the one committed last is. What is torn or of another kind is passed over,
    and so are those that hold weights alone: no run can go on from them.

    Args:
        folders: paths or URLs.
        patience: seconds in all for which a storage that refuses is asked again.
        check: raises `CheckpointError` of what cannot be gone on from; that is passed over, and said.

    Raises:
        StorageError: the storage refuses to say what is there, for ``retry_seconds`` seconds.
    """
    retry = StorageRetry(retry_seconds)
    return select_newest(resumable_in(folders, retry), retry, check)


def resumable_in(folders: Iterable[str], retry: StorageRetry) -> list[Checkpoint]:
    """Return the checkpoints that lie directly in ``folders`` and that a run could go on from.

    Raises:
        StorageError: the storage refuses to say what is there, for as long as it is asked.
    """
    found = []
    for folder in dict.fromkeys(folders):
        latest_there = retry.call(partial(read_latest, folder))
        names = retry.call(partial(children, folder))
        for name in dict.fromkeys([*names, *([latest_there] if latest_there is not None else [])]):
            checkpoint = retry.call(partial(_load_if_complete, child(folder, name)))
            if checkpoint is not None and not checkpoint.weights_only:
                found.append(checkpoint)
    return found


def select_newest(
    found: Iterable[Checkpoint],
    retry: StorageRetry,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> Checkpoint | None:
    """Return the newest of some checkpoints that ``check`` has nothing against, as `newest` does."""
    found = list(found)
    while found:
        latest = [one for one in found if not any(_descends_from(other, one) for other in found)]
        chosen = max(latest, key=lambda one: (one.manifest.written, one.path))
        problem = retry.call(partial(_problem_of, chosen, check))
        if problem is None:
            return chosen
        logger.warning("%r is passed over. %s", chosen.path, problem)
        found.remove(chosen)
    return None


def find_best(folder: str, said: Any) -> str | None:
    """Return the path of the checkpoint that another one calls the best, if it lies beside it; None elsewhere."""
    name = said.rpartition("/")[2] if isinstance(said, str) else ""  # earlier versions wrote a path
    if not is_plain_name(name):
        return None
    path = child(folder, name)
    return None if StorageRetry(RETRY_SECONDS).call(partial(_load_if_complete, path)) is None else path


def _load_if_complete(path: str) -> Checkpoint | None:
    """What is at ``path``; None where that is no whole checkpoint."""
    try:
        return load(path)
    except StorageError:
        raise
    except CheckpointError:
        return None


def _problem_of(checkpoint: Checkpoint, check: Callable[[Checkpoint], None]) -> CheckpointError | None:
    try:
        check(checkpoint)
    except StorageError:
        raise
    except CheckpointError as error:
        return error
    return None


def _descends_from(one: Checkpoint, other: Checkpoint) -> bool:
    return one.manifest.metadata.descends_from(other.manifest.metadata)


class StorageRetry:
    """Asks a storage again while it refuses, for so many seconds in all."""

    def __init__(self, retry_seconds: float | None = None) -> None:
        self._left = RETRY_SECONDS if retry_seconds is None else retry_seconds
        self._pause = _FIRST_PAUSE

    def call(self, operation: Callable[[], T]) -> T:
        """Return what ``operation`` does, once it raises no `StorageError`.

        Raises:
            StorageError: the time is over.
        """
        while True:
            try:
                return operation()
            except StorageError as error:
                if self._left <= 0:
                    raise
                pause = min(self._pause, self._left)
                logger.warning("%s It is asked again in %.1f s.", error.what, pause)
                time.sleep(pause)
                self._left -= pause
                self._pause *= 2
