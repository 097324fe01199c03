"""What a training run has left where, as it says in its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain._engine.run_parts import RunCore
    from drivetrain.callback import Callback

_MOST = 10  # names of the run's folder that are told


def left_behind(run: RunCore, written: str | None) -> list[str]:
    """Return a line for each checkpoint that a later run may begin with, and one for the run's folder, on rank 0.

    Args:
        run: which.
        written: the last checkpoint that it has written, which need not be there any more; None for none.
    """
    best = {one.best_model_path: _score(one) for one in run.callbacks if one.best_model_path and _score(one)}
    newest = (getattr(one, "last_model_path", "") for one in run.callbacks)
    last = written if written is not None and _is_there(written) else next(filter(None, newest), None)
    lines = [
        f"best {'and last ' if path == last else ''}checkpoint: {_shown(path)}{score}" for path, score in best.items()
    ]
    if last is not None and last not in best:
        lines.append(f"last checkpoint: {_shown(last)}")
    return [f"  {line}" for line in (*lines, *_files(run.folder.path))]


def _is_there(path: str) -> bool:
    return "://" in path or os.path.exists(path)


def _score(callback: Callback) -> str:
    """The value by which it is the best; "" where it is just the newest."""
    score, monitor = getattr(callback, "best_model_score", None), getattr(callback, "monitor", None)
    return f" ({monitor} {score:.4g})" if score is not None and monitor is not None else ""


def _files(folder: str | None) -> Iterator[str]:
    if folder is None:
        return
    names: list[str] = []
    if "://" not in folder:  # a listing over the network may take its time
        with suppress(OSError), os.scandir(folder) as found:
            names = sorted(one.name + ("/" if one.is_dir() else "") for one in found if not one.name.startswith("."))
    more = [f"and {len(names) - _MOST} more"] if len(names) > _MOST else []
    listed = ", ".join([*names[:_MOST], *more])
    yield f"files: {_shown(folder)}" + (f" ({listed})" if listed else "")


def _shown(path: str) -> str:
    """``path`` from the working directory, if it is below that; else as it is."""
    if "://" in path:
        return path
    try:
        below = os.path.relpath(path)
    except (OSError, ValueError):  # the working directory is gone, or on another drive
        return path
    return path if below.startswith("..") else below
