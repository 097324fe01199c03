"""Logger: the interface between a run and whatever keeps its numbers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from drivetrain.runs._directory import RunDirectory

_log = logging.getLogger("drivetrain")


class Logger(ABC):
    """Base class of everything that keeps metrics and hyper-parameters. Three must be written.

    These are `name`, `version` and `log_metrics`. What may be written does nothing by default: `log_hyperparams`,
    `log_graph`, `rewind`, `save` and `finalize`; `writes_to` and `log_dir` where there are files, and `adopt` where the
    version is not known before the run. The media, `log_image` to `log_table`, say once that this logger cannot keep
    them; `drivetrain.loggers.media` has what turns a user's value into pixels, counts or rows.

    Only rank 0 calls a logger; on other ranks a run's loggers do nothing when they are called. Building one touches no
    disk, network or other state (a `Fit` must be free to build): directories, files and connections come with the
    first write.

    Give one or several to ``Fit(logger=...)``, or register a callable that takes the run's ``default_root_dir`` (a path
    or URL) and makes one in the entry-point group ``drivetrain.loggers``, and give its name.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The experiment's name."""

    @property
    @abstractmethod
    def version(self) -> int | str:
        """What tells this run from the others of the same name: a number, or a name such as ``"long-run"``."""

    @property
    def directory(self) -> RunDirectory | None:
        """What a run claims for the files of this logger, and of all that share it; None where it has none to claim."""
        return None

    @property
    def version_name(self) -> str:
        """`version` as text, as `adopt` takes it: the directory's name, if there is one."""
        return str(self.version) if self.directory is None else self.directory.version

    def adopt(self, version: str) -> None:
        """Take the version that the run has, the same on every rank. Called as a run begins, and before any write."""
        del version

    @property
    def log_dir(self) -> str | None:
        """The directory or URL that holds this run's files, ``None`` where it keeps none."""
        return None

    @property
    def experiment(self) -> Any:
        """The object of the library behind it, for what this interface has no method for; None where there is none."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The folder or URL below which each run gets a directory; None where it keeps no files."""
        return self.writes_to

    @property
    def writes_to(self) -> str | None:
        """The folder or URL below which this logger writes, tried before the first step; None where it writes none."""
        return None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep ``metrics``, plain numbers by name, as of optimizer step ``step``."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Keep the run's hyper-parameters, JSON-able values by name; what a run hands over holds no secret."""
        del params

    def log_graph(self, module: torch.nn.Module, example: Any = None) -> None:
        """Keep the module's graph, traced on ``example``, where the logger can show one."""
        del module, example

    # Media: what a user logs by hand, in a hook or a step, with ``self.logger.log_image(...)``

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Keep a picture as of optimizer step ``step``.

        Args:
            key: its name.
            value: a tensor of shape (C, H, W) or (H, W), an array of shape (H, W, C) or (H, W), or a picture of
                Pillow's. Numbers are bytes (uint8), or from 0 to 1.
            step: the optimizer step.
        """
        self._cannot_keep("images")

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Keep a figure of matplotlib's, or whatever has a ``savefig`` like it."""
        self._cannot_keep("figures")

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Keep the distribution of a tensor's or array's numbers, or a `drivetrain.loggers.Histogram` of them.

        For a tensor that is spread over ranks call ``trainer.log_histogram`` on every rank.
        """
        self._cannot_keep("histograms")

    def log_text(self, key: str, value: str, step: int) -> None:
        """Keep a text."""
        self._cannot_keep("texts")

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Keep a table.

        Args:
            key: its name.
            value: columns by name, rows by column (a list of mappings), or a DataFrame.
            step: the optimizer step.
        """
        self._cannot_keep("tables")

    def _cannot_keep(self, what: str) -> None:
        told: set[str] = self.__dict__.setdefault("_told_that_it_cannot_keep", set())
        if what not in told:
            told.add(what)
            _log.warning("%s cannot keep %s: they are passed over.", type(self).__name__, what)

    def rewind(self, step: int) -> None:
        """Drop what was logged after optimizer step ``step``: the run goes on from a checkpoint of that step.

        It comes before the run logs anything, hyper-parameters included, where it goes on in the folder of an earlier
        one, which may have been another process. What is logged afterwards shall show each step once.

        Args:
            step: 0 where the run begins again and what was logged before its first step stays, -1 where nothing does.
        """
        del step

    def save(self) -> None:
        """Write out whatever is still held back."""

    def finalize(self, status: str) -> None:
        """Write out everything and let go of files and connections.

        Args:
            status: how the run ended: "success", "failed" or "interrupted". The logger may be used again.
        """
        del status
        self.save()
