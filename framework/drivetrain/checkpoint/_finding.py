"""Finding checkpoints that earlier runs wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from drivetrain.checkpoint._folders import child, children
from drivetrain.checkpoint._format import Checkpoint, load
from drivetrain.errors import CheckpointError


def newest(folders: Iterable[str]) -> Checkpoint | None:
    """Return the checkpoint committed last among those that lie directly in ``folders``, or None.

    What is torn or of another kind is passed over, and so are those that hold weights alone: no run can go on from
    them.
    """
    paths = [child(folder, name) for folder in dict.fromkeys(folders) for name in children(folder)]
    whole = [one for one in _readable(paths) if not one.weights_only]
    return max(whole, key=lambda one: (one.manifest.written, one.path), default=None)


def older(paths: Iterable[str], moment: float) -> list[str]:
    """Return those of ``paths`` at which there is a checkpoint from before ``moment``, in seconds since 1970."""
    return [one.path for one in _readable(paths) if one.manifest.written <= moment]


def _readable(paths: Iterable[str]) -> Iterator[Checkpoint]:
    for path in paths:
        with suppress(CheckpointError):
            yield load(path)
