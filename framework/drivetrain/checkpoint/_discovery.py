"""Finding checkpoints that earlier runs wrote."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from drivetrain.checkpoint._folders import child, children, is_plain_name, pointed_to
from drivetrain.checkpoint._format import Checkpoint, StorageError, load
from drivetrain.errors import CheckpointError

logger = logging.getLogger("drivetrain")

Found = TypeVar("Found")

PATIENCE = 30.0
"""Seconds in all for which a storage that refuses is asked again: what it has is not known, and may be the newest."""

_FIRST_PAUSE = 0.5  # seconds; each one is twice as long as the one before


def newest(
    folders: Iterable[str], patience: float = PATIENCE, check: Callable[[Checkpoint], None] = lambda checkpoint: None
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
        StorageError: the storage refuses to say what is there, for ``patience`` seconds.
    """
    asking = Asking(patience)
    return newest_of(whole_in(folders, asking), asking, check)


def whole_in(folders: Iterable[str], asking: Asking) -> list[Checkpoint]:
    """Return the checkpoints that lie directly in ``folders`` and that a run could go on from.

    Raises:
        StorageError: the storage refuses to say what is there, for as long as it is asked.
    """
    found = []
    for folder in dict.fromkeys(folders):
        latest_there = asking.until_answered(partial(pointed_to, folder))
        names = asking.until_answered(partial(children, folder))
        for name in dict.fromkeys([*names, *([latest_there] if latest_there is not None else [])]):
            checkpoint = asking.until_answered(partial(_whole, child(folder, name)))
            if checkpoint is not None and not checkpoint.weights_only:
                found.append(checkpoint)
    return found


def newest_of(
    found: Iterable[Checkpoint],
    asking: Asking,
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> Checkpoint | None:
    """Return the newest of some checkpoints that ``check`` has nothing against, as `newest` does."""
    found = list(found)
    while found:
        latest = [one for one in found if not any(_comes_from(other, one) for other in found)]
        chosen = max(latest, key=lambda one: (one.manifest.written, one.path))
        problem = asking.until_answered(partial(_problem_of, chosen, check))
        if problem is None:
            return chosen
        logger.warning("%r is passed over. %s", chosen.path, problem)
        found.remove(chosen)
    return None


def best_beside(folder: str, said: Any) -> str | None:
    """Return the path of the checkpoint that another one calls the best, if it lies beside it; None elsewhere."""
    name = said.rpartition("/")[2] if isinstance(said, str) else ""  # earlier versions wrote a path
    if not is_plain_name(name):
        return None
    path = child(folder, name)
    return None if Asking(PATIENCE).until_answered(partial(_whole, path)) is None else path


def _whole(path: str) -> Checkpoint | None:
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


def _comes_from(one: Checkpoint, other: Checkpoint) -> bool:
    return one.manifest.facts.descends_from(other.manifest.facts)


class Asking:
    """Asks a storage again while it refuses, for so many seconds in all."""

    def __init__(self, patience: float | None = None) -> None:
        self._left = PATIENCE if patience is None else patience
        self._pause = _FIRST_PAUSE

    def until_answered(self, ask: Callable[[], Found]) -> Found:
        """Return what ``ask`` does, once it raises no `StorageError`.

        Raises:
            StorageError: the time is over.
        """
        while True:
            try:
                return ask()
            except StorageError as error:
                if self._left <= 0:
                    raise
                pause = min(self._pause, self._left)
                logger.warning("%s It is asked again in %.1f s.", error.what, pause)
                time.sleep(pause)
                self._left -= pause
                self._pause *= 2
