"""TensorBoardLogger: metrics as TensorBoard events."""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain._runtime.lazy_names import is_installed
from drivetrain.errors import ConfigurationError
from drivetrain.loggers._directory_logger import DirectoryLogger
from drivetrain.loggers.media import Histogram, Table, pixels_of, pixels_of_figure, text_of

_log = logging.getLogger("drivetrain")

_EVENT_FILE = re.compile(r"\.tfevents\.(\d+)\.[^/]*$")
_REST = 30.0  # seconds, after which it is tried again where a disk has refused
_LONGEST_WAIT = 5  # seconds, for the clock to come to a name after that of the newest event file


class TensorBoardLogger(DirectoryLogger):
    """Writes TensorBoard event files and ``hparams.json`` to ``<save_dir>/<name>/version_<n>``.

    Args:
        save_dir: a local path, or a URL that the installed TensorBoard writes to.
        name: the sub-directory of the experiment; empty for none.
        version: a number, a directory name, or ``None`` for the run's folder.
        default_hp_metric: with hyper-parameters, write ``hp_metric`` so that the HParams tab shows the run.
        prefix: put before every metric's name, with a dash.
        **options: further arguments of ``SummaryWriter``, such as ``flush_secs`` or ``max_queue``. A ``purge_step`` is
            for the first event file that this object writes.

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
        self._purge_step: int | None = options.pop("purge_step", None)
        self._options = options
        self._rewound: tuple[str, int] | None = None  # a folder, and the first step that is hidden in it
        self._hides_in: str | None = None  # the folder where a file of ours hides what comes before it
        self._has_start: str | None = None  # the folder where an earlier run's starting values stay
        self._refused = False  # the disk, a row
        self._rests_until = 0.0  # seconds of time.monotonic
        self._writer: Any = None

    @property
    def experiment(self) -> Any:
        """The ``SummaryWriter``, for what this class has no method for (audio, meshes); made at the first use.

        Use it on rank 0 only: it creates the run's directory.
        """
        if self._writer is None:
            self._writer = self._open(self._directory.make())
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write each metric as a scalar. Where the disk refuses, rows are lost for a while, and a warning says so."""
        if time.monotonic() < self._rests_until:
            return
        try:
            for key, value in metrics.items():
                self.experiment.add_scalar(f"{self._prefix}{key}", value, step)
        except OSError as error:  # a disk that is full for an hour must not end a training of days
            self._writer = None  # its thread has ended: another event file goes on
            self._rests_until = time.monotonic() + _REST
            if not self._refused:
                self._refused = True
                _log.warning(
                    "The event file in %r cannot be written: %s. The run goes on; TensorBoard misses the steps until "
                    "it can be.",
                    self._directory.path,
                    error,
                )

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
        if self._has_start != self._directory.path:  # step 0 is shown once, and the tab shows what comes last
            for key, value in shown.items():
                writer.add_scalar(key, value, 0)
        writer.flush()  # a run that goes on from here, killed or not, finds them there

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Write a picture."""
        self._add_image(key, pixels_of, value, step)

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Write a figure, as a picture."""
        self._add_image(key, pixels_of_figure, value, step)

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Write how the numbers are distributed."""
        found = Histogram.of(value)
        self.experiment.add_histogram_raw(
            f"{self._prefix}{key}",
            min=found.edges[0],
            max=found.edges[-1],
            num=found.total,
            sum=found.sum,
            sum_squares=found.sum_of_squares,
            bucket_limits=list(found.edges[1:]),
            bucket_counts=list(found.counts),
            global_step=step,
        )

    def log_text(self, key: str, value: str, step: int) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        self.experiment.add_text(f"{self._prefix}{key}", text_of(value), step)

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Write a table, as a text in Markdown."""
        self.experiment.add_text(f"{self._prefix}{key}", Table.of(value).as_markdown(), step)

    def _add_image(self, key: str, pixels: Callable[[Any], Any], value: Any, step: int) -> None:
        if not is_installed("PIL"):
            self._cannot_keep("images without Pillow (pip install pillow)")
        else:
            self.experiment.add_image(f"{self._prefix}{key}", pixels(value), step, dataformats="HWC")

    def log_graph(self, module: torch.nn.Module, example: Any = None) -> None:
        """Trace ``module`` on ``example`` and write its graph; without an example nothing is written."""
        if example is not None:
            self.experiment.add_graph(module, example)

    def rewind(self, step: int) -> None:
        """Hide what was logged after ``step``: the next event file begins with its ``purge_step``.

        Event files only grow: TensorBoard leaves out what is hidden as it reads them, in the order of their names. Its
        fast loader goes metric by metric: what is hidden of one goes as the run logs that one at the same step again,
        or at an earlier one.
        Starting values of metrics, ``hp_metric`` for one, are not written a second time unless ``step`` is -1.

        Args:
            step: that of the checkpoint; -1 hides everything.
        """
        self._close()
        path = self._directory.path
        names = self._names(path)
        self._has_start = None
        if not any(map(_EVENT_FILE.search, names)):
            return
        before = [self._rewound[1]] if self._rewound is not None and self._rewound[0] == path else []
        self._rewound = (path, min([step + 1, *before]))
        if "hparams.json" in names and min(self._purges(path)) > 0:
            self._has_start = path

    def save(self) -> None:
        """Flush the event file, if there is one."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Close the event file; a later write opens a new one beside it."""
        try:
            super().finalize(status)
        finally:
            self._close()

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens an event file of its own: the writer has a thread and a queue.
        return self.__dict__ | {"_writer": None}

    def _open(self, path: str) -> Any:
        purges = self._purges(path)
        options = self._options | ({"purge_step": min(purges)} if purges else {})
        # Names have whole seconds. tensorboardX writes over a file of the same second; and where something is hidden
        # by a file that comes before another one in the order of names, what is hidden there comes to light.
        if purges or self._hides_in == path or not _has_tensorboard():
            self._await_a_later_name(path)
        writer = _summary_writer(path, options)
        if purges:
            self._hides_in = path
            # TensorBoard's server takes the first start that a folder tells of for that of the run, and hides nothing.
            writer.file_writer.add_event(_start(min(purges)))
        self._rewound = self._purge_step = None
        return writer

    def _purges(self, path: str) -> list[int]:
        """The steps from which on the next event file hides what is there: of rewinding, and the user's own."""
        rewound = self._rewound[1] if self._rewound is not None and self._rewound[0] == path else None
        return [step for step in (rewound, self._purge_step) if step is not None]

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _names(self, path: str) -> list[str]:
        filesystem = self._directory.filesystem
        filesystem.invalidate_cache()
        try:
            return [str(entry).rstrip("/").rpartition("/")[2] for entry in filesystem.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _await_a_later_name(self, path: str) -> None:
        seconds = [int(found[1]) for found in map(_EVENT_FILE.search, self._names(path)) if found]
        wait = max(seconds, default=0) + 1 - time.time()
        if wait > _LONGEST_WAIT:
            _log.warning(
                "An event file in %r is from %.0f seconds ahead of this machine's clock. TensorBoard reads event files "
                "in the order of their times, so that it may show some steps of this run twice, or not.",
                path,
                wait,
            )
        elif wait > 0:
            time.sleep(wait)


def tensorboard_is_installed() -> bool:
    """True where TensorBoard or tensorboardX can be imported; imports neither."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def _package(of_tensorboard: str, of_tensorboardx: str) -> Any:
    """Import the module of whichever package is installed, TensorBoard first."""
    return importlib.import_module(of_tensorboard if _has_tensorboard() else of_tensorboardx)


def _has_tensorboard() -> bool:
    return is_installed("tensorboard")


def _summary_writer(path: str, options: Mapping[str, Any]) -> Any:
    return _package("torch.utils.tensorboard", "tensorboardX").SummaryWriter(log_dir=path, **options)


def _start(step: int) -> Any:
    module = _package("tensorboard.compat.proto.event_pb2", "tensorboardX.proto.event_pb2")
    return module.Event(step=step, session_log=module.SessionLog(status=module.SessionLog.START))


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
