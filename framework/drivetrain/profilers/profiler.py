"""Profiler: the interface through which a run is measured."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from drivetrain._runtime.working_directory import resolved_path


@dataclass(slots=True)
class ProfiledRun:
    """Describes a run to a profiler. The engine sets `folder` and `name` once they are known.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        rank: this process's rank.
        world_size: the number of processes.
        device: the device of this rank.
        folder: the path or URL for files, which may not exist yet; None to write no files, as with ``fast_dev_run``.
        name: the prefix of file names, which differs between ranks, such as ``fit-simple-rank-0``.
    """

    stage: str
    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    folder: str | None = None
    name: str = ""


class Profiler(ABC):
    """Base class of profilers.

    A subclass must implement `start`, `stop` and `summary`. It may implement `begin` and `end` of a run, `step` after
    each micro-batch, and `write` for files. Every rank has a profiler, whose methods are called from the run's thread.
    The engine's phases nest and are stopped in the reverse order of their starts, also after an error.

    The constructor must not touch the disk or start measuring. A profiler that is not in a run must be picklable,
    because launchers send it to the processes that they start.

    Pass a profiler to ``Fit(profiler=...)``. To select a profiler by name, register a callable without arguments that
    returns a profiler in the entry-point group ``drivetrain.profilers``.

    Args:
        dirpath: a folder or fsspec URL for the profiler's files; None for ``profile/`` in the run's folder.
        filename: the prefix of the files' names; None for the stage and the kind of profiler, as in ``fit-simple``.
    """

    dirpath: str | None = None  # The defaults serve subclasses that do not call this `__init__`.
    filename: str | None = None

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath = None if dirpath is None else resolved_path(dirpath, "dirpath")
        self.filename = filename

    @abstractmethod
    def start(self, phase: str) -> None:
        """Begin a phase of the engine, such as "data", "forward" or "Net.on_train_start", or a phase of the user."""

    @abstractmethod
    def stop(self, phase: str) -> None:
        """End the ``phase`` that was started last."""

    @abstractmethod
    def summary(self) -> str:
        """Return the results as text, which rank 0 prints at the end of the run; "" prints nothing."""

    def profile(self, phase: str) -> AbstractContextManager[None]:
        """Return a context manager for a phase: ``with self.trainer.profiler.profile("augmentation"): ...``."""
        return self._phase(phase)

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        self.start(phase)
        try:
            yield
        finally:
            self.stop(phase)

    def begin(self, run: ProfiledRun) -> None:
        """Called when a run begins. The method may discard the measurements of an earlier run.

        Raises:
            ConfigurationError: the profiler does not support such a run.
        """

    def step(self) -> None:
        """Called after each micro-batch of training or evaluation, including the hooks after it."""

    def end(self) -> None:
        """Called when the run ends, also if it failed, before `summary` and `write`."""

    def write(self, folder: str, name: str) -> list[str]:
        """Write files and return their paths. The default writes one file with the summary. Called on every rank.

        Args:
            folder: a path or URL, which may not exist yet.
            name: the prefix of file names, which differs between ranks, such as ``fit-simple-rank-0``.

        Raises:
            OSError: writing failed. The run continues with a warning.
        """
        from drivetrain._storage.paths import publish  # Imported only by runs that write files.

        text = self.summary()
        return [publish(folder, f"{name}.txt", text.encode())] if text else []

    @property
    def kind(self) -> str:
        """The kind of profiler in file names: the class name in lower case without "Profiler"."""
        return type(self).__name__.removesuffix("Profiler").lower() or "profiler"


_NULL_CONTEXT: AbstractContextManager[None] = nullcontext()


class PassThroughProfiler(Profiler):
    """Measures nothing: the ``trainer.profiler`` of a `Fit` without a profiler."""

    def __init__(self) -> None:
        super().__init__()

    def start(self, phase: str) -> None:
        """Do nothing."""

    def stop(self, phase: str) -> None:
        """Do nothing."""

    def summary(self) -> str:
        """Return ""."""
        return ""

    def profile(self, phase: str) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return _NULL_CONTEXT
