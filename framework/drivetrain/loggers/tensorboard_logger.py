"""TensorBoardLogger: metrics as TensorBoard events."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.loggers._directory_logger import DirectoryLogger


class TensorBoardLogger(DirectoryLogger):
    """Writes TensorBoard event files and ``hparams.json`` to ``<save_dir>/<name>/version_<n>``.

    Args:
        save_dir: a local path, or a URL that the installed TensorBoard writes to.
        name: the sub-directory of the experiment; empty for none.
        version: a number, a directory name, or ``None`` for the first free number.
        default_hp_metric: with hyper-parameters, write ``hp_metric`` so that the HParams tab shows the run.
        prefix: put before every metric's name, with a dash.
        **options: further arguments of ``SummaryWriter``, such as ``flush_secs`` or ``max_queue``.

    Raises:
        ConfigurationError: neither TensorBoard nor tensorboardX is installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str = "drivetrain_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        **options: Any,
    ) -> None:
        if not tensorboard_is_installed():
            raise ConfigurationError(
                "TensorBoardLogger needs TensorBoard, which is not installed",
                "event files are written by the package tensorboard (or tensorboardX)",
                "pip install 'drivetrain[tensorboard]' (or tensorboard itself), or use CSVLogger",
            )
        super().__init__(save_dir, name, version, prefix)
        self._default_hp_metric = default_hp_metric
        self._options = options
        self._writer: Any = None

    @property
    def experiment(self) -> Any:
        """The ``SummaryWriter``, for what this class has no method for (images, text); made at the first use.

        Use it on rank 0 only: it creates the run's directory.
        """
        if self._writer is None:
            self._writer = _summary_writer(self._directory.make(), self._options)
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write each metric as a scalar."""
        for key, value in metrics.items():
            self.experiment.add_scalar(f"{self._prefix}{key}", value, step)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Write ``params``, without secrets, to ``hparams.json`` and to the HParams tab.

        Args:
            params: values by name; nested mappings become ``outer/inner``, other values than numbers, strings and
                booleans their text.
            metrics: starting values of metrics that the HParams tab shall list.
        """
        params, _ = self._left_out.take_out(params)
        self._directory.write_json("hparams.json", params)
        shown = dict(metrics) if metrics is not None else ({"hp_metric": -1.0} if self._default_hp_metric else {})
        writer = self.experiment
        for summary in _hparams_summaries(_flat(params), shown):
            writer.file_writer.add_summary(summary)
        for key, value in shown.items():
            writer.add_scalar(key, value, 0)

    def log_graph(self, module: torch.nn.Module, example: Any = None) -> None:
        """Trace ``module`` on ``example`` and write its graph; without an example nothing is written."""
        if example is not None:
            self.experiment.add_graph(module, example)

    def save(self) -> None:
        """Flush the event file, if there is one."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Close the event file; a later write opens a new one beside it."""
        super().finalize(status)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens an event file of its own: the writer has a thread and a queue.
        return self.__dict__ | {"_writer": None}


def tensorboard_is_installed() -> bool:
    """True where TensorBoard or tensorboardX can be imported; imports neither."""
    return any(importlib.util.find_spec(name) is not None for name in ("tensorboard", "tensorboardX"))


def _package(of_tensorboard: str, of_tensorboardx: str) -> Any:
    """Import the module of whichever package is installed, TensorBoard first."""
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    return importlib.import_module(of_tensorboard if has_tensorboard else of_tensorboardx)


def _summary_writer(path: str, options: Mapping[str, Any]) -> Any:
    return _package("torch.utils.tensorboard", "tensorboardX").SummaryWriter(log_dir=path, **options)


def _hparams_summaries(params: Mapping[str, Any], metrics: Mapping[str, float]) -> Any:
    module = _package("torch.utils.tensorboard.summary", "tensorboardX.summary")
    return module.hparams(dict(params), dict(metrics))


def _flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    flat: dict[str, bool | int | float | str] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat
