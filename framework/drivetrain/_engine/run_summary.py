"""Lists a training run's checkpoints and files for the closing message."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from drivetrain._runtime.working_directory import working_directory
from drivetrain.callback import KeepsCheckpoints

if TYPE_CHECKING:
    from drivetrain._engine.assembly.run_core import RunCore


def output_summary(run: RunCore, written: str | None) -> list[str]:
    """Return lines that name the best and last checkpoints and the files in the run's folder.

    Args:
        run: the run.
        written: the path of the last checkpoint that the run has written, which may have been removed; None for none.
    """
    keepers = [each for each in run.callbacks if isinstance(each, KeepsCheckpoints)]
    best = {each.best_model_path: _score(each) for each in keepers if each.best_model_path and _score(each)}
    last = newest_checkpoint(run, written)
    lines = [
        f"best {'and last ' if path == last else ''}checkpoint: {_relative_path(path)}{score}"
        for path, score in best.items()
    ]
    if last is not None and last not in best:
        lines.append(f"last checkpoint: {_relative_path(last)}")
    return [f"  {line}" for line in (*lines, *_files(run.folder.path))]


def newest_checkpoint(run: RunCore, written: str | None) -> str | None:
    """Return the path of the newest checkpoint that the run keeps, or None. Arguments are as for `output_summary`."""
    newest = (getattr(callback, "last_model_path", "") for callback in run.callbacks)
    return written if written is not None and _exists(written) else next(filter(None, newest), None)


def _exists(path: str) -> bool:
    return "://" in path or os.path.exists(path)


def _score(callback: KeepsCheckpoints) -> str:
    """Return the monitored value of the callback's best checkpoint, as " (name value)"; "" if nothing is monitored."""
    score, monitor = getattr(callback, "best_model_score", None), getattr(callback, "monitor", None)
    return f" ({monitor} {score:.4g})" if score is not None and monitor is not None else ""


def _files(folder: str | None) -> Iterator[str]:
    if folder is None:
        return
    names: list[str] = []
    if "://" not in folder:  # listing a remote folder may take long
        with suppress(OSError), os.scandir(folder) as entries:
            shown = [entry for entry in entries if not entry.name.startswith(".")]
            names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in shown)
    yield f"files: {_relative_path(folder)}" + (f" ({', '.join(names)})" if names else "")


def _relative_path(path: str) -> str:
    """Return ``path`` relative to the working directory if it is inside it, else unchanged."""
    return path.removeprefix(f"{working_directory()}/")
