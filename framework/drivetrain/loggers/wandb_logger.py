"""WandbLogger: log metrics and media to a Weights & Biases run."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from drivetrain._config.secret_values import arguments_without_secrets
from drivetrain._runtime.lazy_names import import_optional
from drivetrain._storage.paths import local_path
from drivetrain.errors import ConfigurationError
from drivetrain.loggers._directory_logger import DirectoryLogger
from drivetrain.loggers._wandb_checkpoints import CheckpointUploads
from drivetrain.loggers.media import Histogram, Table, pixels_of, pixels_of_figure

_log = logging.getLogger("drivetrain")

STEP = "trainer/global_step"
"""The key of the optimizer step in each row, which is the horizontal axis of all charts, as in Lightning."""

_EXIT_CODES = {"success": 0, "failed": 1, "interrupted": 255}  # wandb uses 255 for Ctrl-C and shows "killed"

_ID_FILE = "wandb.json"


class WandbLogger(DirectoryLogger):
    """Logs to Weights & Biases, or to local files that ``wandb sync`` uploads.

    wandb's files are in the run's folder, ``<save_dir>/<project>/version_<n>/wandb``. A run that resumes in the folder
    continues the same wandb run. wandb cannot remove rows, so rows that were logged after the checkpoint may be there
    twice.

    Args:
        name: the run's name in wandb; None lets wandb choose a name.
        save_dir: a local path.
        version: the run's folder: a number, a directory name, or ``None`` for the run's version. A directory name is
            also wandb's id of the run, unless ``id`` is passed.
        offline: if True, only write local files. If False, the environment's ``WANDB_MODE`` decides.
        dir: another name of ``save_dir``.
        id: the id of a wandb run to continue; None for a new one, which is stored in ``wandb.json``.
        project: wandb's project, and the name of the folder for its runs; None means the environment's
            ``WANDB_PROJECT``, else "drivetrain_logs".
        log_model: "all" uploads each checkpoint of a `Checkpoint` callback once it is complete. True uploads those that
            are left at the end of a successful run, or each one if ``save_top_k=-1``. Artifacts have the aliases
            "latest" and, for the best one, "best", as in Lightning.
        experiment: a run that the caller has started with ``wandb.init``, and that the caller finishes.
        prefix: prepended to every metric's name, with a dash.
        checkpoint_name: the name of the artifact with the checkpoints; None for ``model-<id of the run>``.
        **options: further arguments of ``wandb.init``: ``group``, ``tags``, ``entity``, ``notes``, ``job_type``,
            ``config``, ``settings``.

    Raises:
        ConfigurationError: wandb is not installed, or ``save_dir`` is a URL.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: int | str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        **options: Any,
    ) -> None:
        _wandb()
        root = os.path.expanduser(os.fspath(save_dir if dir is None else dir))
        if local_path(root) is None:
            raise ConfigurationError(
                f"WandbLogger(save_dir={root!r})",
                "wandb writes to a local disk before it sends anything",
                "pass a local save_dir; checkpoints and other loggers may be at a URL",
            )
        super().__init__(root, project or os.environ.get("WANDB_PROJECT") or "drivetrain_logs", version, prefix)
        self._run_name = name
        self._given_run_id = id or (version if isinstance(version, str) else None)
        self._options = dict(options)
        if isinstance(config := options.get("config"), Mapping):
            self._options["config"] = self._secret_filter.take_out(config)[0]
        if offline:
            self._options["mode"] = "offline"
        self._user_run = experiment
        self._run: Any = None
        self._is_foreign_run = False  # whether other code in this process started the run with wandb.init
        self._opened: tuple[str, str | None] | None = None  # the id and the URL of this folder's run
        self._resumes = False  # whether a run resumes in the folder
        self._uploads = CheckpointUploads(log_model, checkpoint_name)

    @property
    def experiment(self) -> Any:
        """The wandb ``Run``, for features that have no method in this class (artifacts, ``watch``).

        Only for rank 0, because the first use creates the run's directory and, if wandb is online, connects. After the
        run has ended, this property continues it at the service; `run_id` and `url` do not.
        """
        if self._user_run is not None:
            return self._user_run
        if self._run is None:
            self._run = self._open(self.make_folder())
        return self._run

    @property
    def run_id(self) -> str:
        """Wandb's id of the run, which is started if there is none yet. Only for rank 0."""
        return self._identity()[0]

    @property
    def url(self) -> str | None:
        """The address of the run's page, or None if wandb is offline. The run is started if there is none yet."""
        return self._identity()[1]

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a row, with the step under ``trainer/global_step``."""
        self._log(metrics, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Add ``params``, without secrets, to the run's configuration."""
        public_params, _ = self._secret_filter.take_out(params)
        self.experiment.config.update(_with_text_keys(public_params), allow_val_change=True)

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Send an image. Requires Pillow."""
        self._log({key: _wandb().Image(_drop_single_channel(pixels_of(value)))}, step)

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Send a figure as an image. Requires Pillow."""
        self._log({key: _wandb().Image(_drop_single_channel(pixels_of_figure(value)))}, step)

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Send a histogram, which must have at most 512 bins."""
        histogram = Histogram.of(value)
        counts_and_edges = list(histogram.counts), list(histogram.edges)
        self._log({key: _wandb().Histogram(np_histogram=counts_and_edges)}, step)

    def log_text(self, key: str, value: str, step: int) -> None:
        """Send a text as a table with one cell."""
        self._log({key: _wandb().Table(columns=["text"], data=[[value]])}, step)

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Send a table."""
        self._log({key: _table(Table.of(value))}, step)

    def rewind(self, step: int) -> None:
        """Continue the wandb run, by wandb's own resume."""
        del step  # wandb cannot remove rows.
        self._finish(0)
        self._resumes = True

    def _leave_folder(self) -> None:
        self._opened, self._resumes = None, False

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Upload the checkpoints of a `Checkpoint` callback, as ``log_model`` selects them."""
        self._uploads.after_save(checkpoint_callback, self)

    def finalize(self, status: str) -> None:
        """Upload the checkpoints that are left, if ``log_model`` is True, and finish the wandb run.

        A later write continues the run.
        """
        try:
            if status == "success":
                self._uploads.at_end(self)
        finally:
            self._finish(_EXIT_CODES.get(status, 1))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_run": None, "_user_run": None}  # Another process cannot use these connections.

    # Start, continue and finish the wandb run

    def _identity(self) -> tuple[str, str | None]:
        """Return the run's id and URL, without continuing a run that has ended."""
        if self._run is None and self._user_run is None and self._opened is not None:
            return self._opened
        return self.experiment.id, self.experiment.url

    def _open(self, path: str) -> Any:
        wandb = _wandb()
        if wandb.run is not None:
            _log.warning(
                "wandb has an active run in this process, %s. WandbLogger writes to that run, and does not finish it.",
                wandb.run.id,
            )
            _define_step(wandb.run)
            self._is_foreign_run = True
            return wandb.run
        previous_id = None if self._opened is None else self._opened[0]
        known_id = self._given_run_id or previous_id or (self.read_run_id(_ID_FILE) if self._resumes else None)
        run_id = known_id or secrets.token_hex(4)
        self.write_json(_ID_FILE, {"run_id": run_id})
        arguments = {"resume": "allow", **self._options, "project": self.name, "name": self._run_name}
        with _arguments_without_secrets():
            run = wandb.init(dir=path, id=run_id, **arguments)
        self._opened, self._resumes = (run_id, run.url), False
        _define_step(run)
        return run

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None and not self._is_foreign_run:
            run.finish(exit_code=exit_code)
        self._is_foreign_run = False

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        row = {f"{self._prefix}{key}": value for key, value in values.items()}
        self.experiment.log({**row, STEP: step})


def _wandb() -> Any:
    fix = "pip install 'drivetrain[wandb]' (or only wandb), or use CSVLogger."
    return import_optional("wandb", "WandbLogger", fix)


def _table(table: Table) -> Any:
    table_class = _wandb().Table
    try:
        return table_class(columns=table.columns, data=table.rows)
    except TypeError:  # A column has values of several types, such as numbers and text.
        return table_class(columns=table.columns, data=table.rows, allow_mixed_types=True)


def _with_text_keys(value: Any) -> Any:
    """Convert the keys of a configuration to text, since wandb accepts only text."""
    return {str(key): _with_text_keys(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


def _define_step(run: Any) -> None:
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP, step_sync=True)


def _drop_single_channel(pixels: Any) -> Any:
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


@contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """Context manager that removes secrets from ``sys.argv``, which wandb records."""
    original = sys.argv
    arguments, left_out = arguments_without_secrets(original[1:])
    if left_out:
        sys.argv = [*original[:1], *arguments]
    try:
        yield
    finally:
        sys.argv = original
