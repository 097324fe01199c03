"""Logger: the interface through which a run logs metrics, hyper-parameters and media."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

_log = logging.getLogger("drivetrain")


class Logger(ABC):
    """Base class of loggers.

    A subclass must implement `name`, `version` and `log_metrics`. It may implement `log_hyperparams`, `log_graph`,
    `rewind`, `save` and `finalize`, which do nothing by default. A logger that writes files implements `save_dir`,
    `log_dir`, and `use_folder` with `given_version` to write to the run's folder. The methods for media, `log_image`
    to `log_table`, warn once by default that they are not supported. `drivetrain.loggers.media` converts
    users' values to pixels, counts and rows.

    Only rank 0 writes. On other ranks, the methods of a run's loggers do nothing. The constructor must not touch the
    disk, the network or other state, so that building a `Fit` has no side effects. Directories, files and connections
    are created at the first write.

    Pass one or several loggers to ``Fit(logger=...)``. To select a logger by name, register a callable in the
    entry-point group ``drivetrain.loggers`` that takes the run's ``default_root_dir`` (a path or URL) and returns a
    logger.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The experiment's name."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """A number or text (such as ``"long-run"``) that distinguishes runs of the same name; None if not known yet."""

    @property
    def given_version(self) -> int | str | None:
        """The version that the user chose, which then names the run's folder; None lets each run take a free number."""
        return self.version

    def use_folder(self, folder: str) -> None:
        """Use the folder of a run, a path or URL, for this logger's files.

        A run calls this method on every rank when it begins, before any write, if this logger has a `save_dir`.
        """
        del folder

    @property
    def log_dir(self) -> str | None:
        """The folder or URL that contains this run's files; None if there are no files, or before a run has begun."""
        return None

    @property
    def experiment(self) -> Any:
        """The underlying library's object, for features that this interface lacks; None if there is no object."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The folder or URL that contains the directories of runs; None if this logger writes no files.

        A run checks before its first step that this folder is writable.
        """
        return None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log ``metrics``, numbers by name, at optimizer step ``step``."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the run's hyper-parameters, JSON-serializable values by name. A run removes secrets before this call."""
        del params

    def log_graph(self, module: torch.nn.Module, example: Any = None) -> None:
        """Log the module's graph, traced with ``example``, if the logger supports graphs."""
        del module, example

    # Media, which users log in a hook or a step with ``self.logger.log_image(...)``

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Log an image.

        Args:
            key: the image's name.
            value: a tensor of shape (C, H, W) or (H, W), an array of shape (H, W, C) or (H, W), or a Pillow image.
                The image's numbers are bytes (uint8), or between 0 and 1.
            step: the optimizer step.
        """
        self._warn_unsupported("images")

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Log a matplotlib figure, or another object with a compatible ``savefig``."""
        self._warn_unsupported("figures")

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Log a histogram of a tensor or array, or a `drivetrain.loggers.Histogram`.

        For a tensor that is sharded over ranks, call ``trainer.log_histogram`` on every rank instead.
        """
        self._warn_unsupported("histograms")

    def log_text(self, key: str, value: str, step: int) -> None:
        """Log a text."""
        self._warn_unsupported("texts")

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Log a table.

        Args:
            key: the table's name.
            value: a mapping from column names to lists, a list of mappings (one per row), or a DataFrame.
            step: the optimizer step.
        """
        self._warn_unsupported("tables")

    def _warn_unsupported(self, media: str) -> None:
        warned: set[str] = self.__dict__.setdefault("_warned_media", set())
        if media not in warned:
            warned.add(media)
            _log.warning("%s cannot log %s, so they are ignored.", type(self).__name__, media)

    def rewind(self, step: int) -> None:
        """Remove what was logged after optimizer step ``step``, because the run resumes from a checkpoint of that step.

        This method is called when a run resumes in the folder of an earlier run, possibly in another process. It is
        called before anything is logged, including hyper-parameters. Afterwards, each step should be shown only once,
        unless the logger writes to a service that cannot remove rows.

        Args:
            step: the checkpoint's step. 0 keeps only what was logged before the first step, and -1 keeps nothing.
        """
        del step

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Receive a `Checkpoint` callback that has just completed a checkpoint. Only rank 0 calls this method."""
        del checkpoint_callback

    def save(self) -> None:
        """Write pending data."""

    def finalize(self, status: str) -> None:
        """Write pending data, and close files and connections. The logger may be used again afterwards.

        Args:
            status: how the run ended: "success", "failed" or "interrupted".
        """
        del status
        self.save()
