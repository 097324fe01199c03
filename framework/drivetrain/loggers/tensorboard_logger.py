"""TensorBoardLogger: log metrics and media as TensorBoard events."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from drivetrain._runtime.lazy_names import import_optional, is_installed
from drivetrain._storage.paths import folder_at
from drivetrain.loggers._directory_logger import DirectoryLogger, flat_params
from drivetrain.loggers.media import Histogram, Table, pixels_of, pixels_of_figure

_log = logging.getLogger("drivetrain")

_EVENT_FILE = re.compile(r"\.tfevents\.(\d+)\.[^/]*$")
_RETRY_AFTER = 30.0  # seconds from a failed write to the next attempt
_MAX_WAIT = 5  # seconds; files of a machine whose clock is further ahead are not waited for


class TensorBoardLogger(DirectoryLogger):
    """Writes TensorBoard event files and ``hparams.json`` to ``<save_dir>/<name>/version_<n>``.

    Args:
        save_dir: a local path, or a URL that the installed TensorBoard writes to.
        name: the sub-directory of the experiment; empty for none.
        version: a number, a directory name, or ``None`` for the run's version.
        default_hp_metric: whether to write a metric ``hp_metric`` with the hyper-parameters, because the HParams tab
            shows only runs that have a metric.
        prefix: prepended to every metric's name, with a dash.
        **options: further arguments of ``SummaryWriter``, such as ``flush_secs`` or ``max_queue``. A ``purge_step``
            applies to the first event file that this object writes, unless the run resumes in the folder.

    Raises:
        ConfigurationError: TensorBoard is not installed.
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
        import_optional("tensorboard", "TensorBoardLogger", "pip install 'drivetrain[tensorboard]', or use CSVLogger.")
        super().__init__(save_dir, name, version, prefix)
        self._default_hp_metric = default_hp_metric
        self._options = options
        self._pending_purge: int | None = None  # the first step that the next event file hides
        self._has_purged = False  # whether an event file of this object has hidden steps in the folder
        self._has_initial_values = False  # whether the folder already has the initial values of metrics
        self._write_failed = False
        self._retry_at = 0.0  # in seconds of time.monotonic
        self._writer: Any = None

    @property
    def experiment(self) -> Any:
        """The ``SummaryWriter``, for features that have no method in this class (audio, meshes).

        Only for rank 0, because the first use creates the run's directory.
        """
        if self._writer is None:
            self._writer = self._open(self.make_folder())
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write each metric as a scalar. If writing fails, metrics are dropped for 30 seconds, with a warning."""
        if time.monotonic() < self._retry_at:
            return
        try:
            for key, value in metrics.items():
                self.experiment.add_scalar(f"{self._prefix}{key}", value, step)
        except OSError as error:  # A temporarily full disk must not end the training.
            self._writer = None  # The writer's thread has ended, so the next write opens another event file.
            self._retry_at = time.monotonic() + _RETRY_AFTER
            if not self._write_failed:
                self._write_failed = True
                _log.warning(
                    "The event file in %r cannot be written: %s. The run continues, but steps are missing in "
                    "TensorBoard until the file can be written.",
                    self.log_dir,
                    error,
                )

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Write ``params``, without secrets, to ``hparams.json`` and to the HParams tab.

        Args:
            params: values by name. Nested mappings become ``outer/inner``. Values other than numbers, strings and
                booleans are converted to text.
            metrics: initial values of the metrics that the HParams tab should list.
        """
        from torch.utils.tensorboard.summary import hparams

        params, _ = self._secret_filter.take_out(params)
        self.write_json("hparams.json", params)
        initial_metrics = (
            dict(metrics) if metrics is not None else ({"hp_metric": -1.0} if self._default_hp_metric else {})
        )
        writer = self.experiment
        shown = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in flat_params(params)
        }
        for summary in hparams(shown, initial_metrics):  # type: ignore[no-untyped-call]
            writer.file_writer.add_summary(summary)
        if not self._has_initial_values:
            for key, value in initial_metrics.items():
                writer.add_scalar(key, value, 0)
        writer.flush()  # The values must survive a kill, because a resumed run does not write them again.

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Write an image."""
        self._add_image(key, pixels_of, value, step)

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Write a figure as an image."""
        self._add_image(key, pixels_of_figure, value, step)

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Write a histogram."""
        histogram = Histogram.of(value)
        self.experiment.add_histogram_raw(
            f"{self._prefix}{key}",
            min=histogram.edges[0],
            max=histogram.edges[-1],
            num=histogram.total,
            sum=histogram.sum,
            sum_squares=histogram.sum_of_squares,
            bucket_limits=list(histogram.edges[1:]),
            bucket_counts=list(histogram.counts),
            global_step=step,
        )

    def log_text(self, key: str, value: str, step: int) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        self.experiment.add_text(f"{self._prefix}{key}", value, step)

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Write a table as text in Markdown."""
        self.experiment.add_text(f"{self._prefix}{key}", Table.of(value).as_markdown(), step)

    def _add_image(self, key: str, pixels: Callable[[Any], Any], value: Any, step: int) -> None:
        if not is_installed("PIL"):
            self._warn_unsupported("images without Pillow (pip install pillow)")
        else:
            self.experiment.add_image(f"{self._prefix}{key}", pixels(value), step, dataformats="HWC")

    def log_graph(self, module: torch.nn.Module, example: Any = None) -> None:
        """Trace ``module`` with ``example`` and write the module's graph. Without an example, nothing is written."""
        if example is not None:
            self.experiment.add_graph(module, example)

    def rewind(self, step: int) -> None:
        """Hide what was logged after ``step``, by a ``purge_step`` in the next event file.

        Event files cannot be shortened. TensorBoard reads them in the order of their names and skips hidden events. The
        fast loader of TensorBoard skips the hidden events of each metric separately, once the run logs that metric
        again at the same or an earlier step. Initial values of metrics, such as ``hp_metric``, are not written again
        unless ``step`` is -1.

        Args:
            step: the checkpoint's step; -1 hides everything.
        """
        self._close()
        names = [] if self.log_dir is None else self._file_names(self.log_dir)
        self._has_initial_values = False
        if any(map(_EVENT_FILE.search, names)):
            hidden = (step + 1, self._pending_purge)
            self._pending_purge = min(first for first in hidden if first is not None)
            self._has_initial_values = "hparams.json" in names and self._pending_purge > 0

    def _leave_folder(self) -> None:
        self._close()
        self._pending_purge, self._has_purged, self._has_initial_values = None, False, False

    def save(self) -> None:
        """Flush the event file, if one is open."""
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        """Close the event file. A later write opens another file."""
        try:
            super().finalize(status)
        finally:
            self._close()

    def __getstate__(self) -> dict[str, Any]:
        # The writer has a thread and a queue, so another process has to open another event file.
        return self.__dict__ | {"_writer": None}

    def _open(self, path: str) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        rewound = self._pending_purge
        options = self._options if rewound is None else {**self._options, "purge_step": rewound}
        purge_step = options.get("purge_step")
        # The time in a file's name has a resolution of one second. A file with a purge step must sort after the files
        # whose events it hides.
        if purge_step is not None or self._has_purged:
            self._wait_for_later_name(path)
        writer: Any = SummaryWriter(log_dir=path, **options)
        if purge_step is not None:
            self._has_purged = True
            # TensorBoard's server treats the first session start in a folder as the start of the run, and does not
            # purge at this event.
            writer.file_writer.add_event(_session_start(purge_step))
        self._pending_purge = None
        self._options.pop("purge_step", None)
        return writer

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _file_names(self, path: str) -> list[str]:
        try:
            return folder_at(path).names()
        except FileNotFoundError:
            return []

    def _wait_for_later_name(self, path: str) -> None:
        seconds = [int(match[1]) for match in map(_EVENT_FILE.search, self._file_names(path)) if match]
        time.sleep(min(max(0.0, max(seconds, default=0) + 1 - time.time()), _MAX_WAIT))


def _session_start(step: int) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(step=step, session_log=SessionLog(status=SessionLog.START))
