"""Profiler: the interface between a run and whatever measures it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class ProfiledRun:
    """What a profiler is told of a run. What has a default is filled in once the engine knows it.

    Attributes:
        stage: "fit", "validate", "test" or "predict".
        rank: this process among all.
        world_size: processes.
        device: on which this rank computes.
        log_every_n_steps: as `Fit` has it.
        compiles: whether `Fit(compile=...)` is on.
        num_workers: worker processes of the loader; None where nothing tells.
        pin_memory: whether the loader's batches are in pinned memory; None where nothing tells.
        folder: where files go, a path or URL that may not be there yet; None for nowhere, as with ``fast_dev_run``.
        name: what files' names begin with, other on each rank: ``fit-simple-rank-0``.
    """

    stage: str
    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    log_every_n_steps: int = 50
    compiles: bool = False
    num_workers: int | None = None
    pin_memory: bool | None = None
    folder: str | None = None
    name: str = ""


class Profiler(ABC):
    """Base class of everything that measures a run. Three methods must be written: `start`, `stop` and `summary`.

    What may be written besides: `begin` and `end` (of a run), `step` (a micro-batch is over), `write` (files),
    `measured` and `take_ranks` (what ranks tell each other at the end). Every rank has a profiler and calls it from the
    thread of the run; the engine's phases nest, and are stopped in the reverse order of their starts, also where an
    error ends them.

    Building one touches no disk and starts no measurement. It must be possible to pickle one that is not in a run:
    launchers send it to the processes that they start.

    Give one to ``Fit(profiler=...)``, or register a callable that takes no arguments and makes one in the entry-point
    group ``drivetrain.profilers``, and give its name.

    Args:
        dirpath: a folder or fsspec URL for its files; None for ``profile/`` in the run's folder.
        filename: what their names begin with; None for the stage and the kind of profiler: ``fit-simple``.
    """

    dirpath: str | None = None  # of a class whose __init__ does not call this one, too
    filename: str | None = None

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath = None if dirpath is None else os.fspath(dirpath)
        self.filename = filename

    @abstractmethod
    def start(self, phase: str) -> None:
        """Begin ``phase``: the engine's ("data", "forward", "Net.on_train_start"), or one of the user's own."""

    @abstractmethod
    def stop(self, phase: str) -> None:
        """End the ``phase`` that was begun last."""

    @abstractmethod
    def summary(self) -> str:
        """Return what was measured, as text. Rank 0 prints it at the end of the run; "" prints nothing."""

    def profile(self, phase: str) -> AbstractContextManager[None]:
        """Return a context that is a phase: ``with self.trainer.profiler.profile("augmentation"): ...``."""
        return self._phase(phase)

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        self.start(phase)
        try:
            yield
        finally:
            self.stop(phase)

    def begin(self, run: ProfiledRun) -> None:
        """Take note that a run begins; what was measured in an earlier one may be forgotten.

        Raises:
            ConfigurationError: it cannot measure such a run.
        """

    def step(self) -> None:
        """Take note that a micro-batch of training or evaluation is over, with all hooks that come after it."""

    def end(self) -> None:
        """Take note that the run is over, also where it failed. `summary` and `write` come afterwards."""

    def write(self, folder: str, name: str) -> list[str]:
        """Write files, on every rank, and return their paths. By default the summary.

        Args:
            folder: a path or URL, which may not be there yet.
            name: what each file's name begins with, other on each rank: ``fit-simple-rank-0``.

        Raises:
            OSError: the storage refuses; the run then warns, and goes on.
        """
        from drivetrain.profilers._atomic_publish import publish  # by runs that have files

        text = self.summary()
        return [publish(folder, f"{name}.txt", text.encode())] if text else []

    def measured(self) -> Any:
        """Return what rank 0 is to know of this rank: numbers, text, lists and dicts; None for nothing."""
        return None

    def take_ranks(self, measured: Sequence[Any]) -> None:
        """Take what `measured` returned on every rank, by rank. Called on every rank at the end of a whole run."""

    @property
    def kind(self) -> str:
        """What the names of its files say it is: the class in lower case, without "Profiler"."""
        return type(self).__name__.removesuffix("Profiler").lower() or "profiler"


_NOTHING: AbstractContextManager[None] = nullcontext()


class PassThroughProfiler(Profiler):
    """Measures nothing: ``trainer.profiler`` where `Fit` was given none."""

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
        """Return a context that does nothing."""
        return _NOTHING
