"""WandbLogger: metrics and media as a run of Weights & Biases."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from drivetrain._config.secret_values import arguments_without_secrets
from drivetrain.checkpoint._format.storage import filesystem_of
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.loggers._directory_logger import DirectoryLogger
from drivetrain.loggers._row_journal import RowJournal
from drivetrain.loggers._service_run_id import ServiceRunId
from drivetrain.loggers._wandb_store import StoredRows
from drivetrain.loggers.media import Histogram, Table, pixels_of, pixels_of_figure, text_of

_log = logging.getLogger("drivetrain")

STEP = "trainer/global_step"
"""Under which a row has its optimizer step: the axis of all charts, as with Lightning."""

_EXIT_CODES = {"success": 0, "failed": 1, "interrupted": 255}  # 255 is what wandb itself says of Ctrl-C: "killed"

_MOST_BINS = 512  # that wandb takes

_REFUSED = {
    "log_model": "it does not upload checkpoints: call logger.experiment.log_artifact(trainer.log_dir + '/checkpoints/"
    "...') in a hook, or wandb artifact put on the command line",
    "checkpoint_name": "it does not upload checkpoints, so that there is nothing to name",
    "anonymous": "wandb no longer has anonymous runs: log in, or say offline=True",
}


class WandbLogger(DirectoryLogger):
    """Keeps a run at Weights & Biases, or offline until ``wandb sync`` sends it there.

    wandb's files are in the run's folder, ``<save_dir>/<project>/version_<n>/wandb``. A run that goes on in its folder
    goes on in the same run of wandb's, and rows that are in its files already are not written again.

    Args:
        name: what wandb shows the run as; None lets wandb choose.
        save_dir: a local path.
        version: the run's folder, and wandb's id of it where it is text and no ``id`` is given; ``None`` for the run's.
        offline: write to the disk alone; the environment's ``WANDB_MODE`` decides otherwise.
        dir: the same as ``save_dir``.
        id: wandb's id of the run, to go on with one that there is; None for a new one, kept in ``wandb.json``.
        anonymous: refused: wandb has none any more.
        project: wandb's project, and the name of the folder of its runs; None for the environment's ``WANDB_PROJECT``,
            else "drivetrain_logs".
        log_model: only False: checkpoints stay where `Checkpoint` puts them.
        experiment: a run that the caller has begun with ``wandb.init``, and ends.
        prefix: put before every metric's name, with a dash.
        checkpoint_name: refused: no checkpoint is uploaded.
        **options: further arguments of ``wandb.init``: ``group``, ``tags``, ``entity``, ``notes``, ``job_type``,
            ``config``, ``settings``.

    Raises:
        ConfigurationError: wandb is not installed, ``wandb.init`` has no such argument, or ``save_dir`` is a URL.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: int | str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        **options: Any,
    ) -> None:
        asked = {"log_model": log_model, "checkpoint_name": checkpoint_name, "anonymous": anonymous}
        for argument, value in asked.items():
            if value:
                raise ConfigurationError(f"WandbLogger({argument}={value!r})", _REFUSED[argument], "leave it out")
        wandb = _wandb()
        _check_options(wandb, options)
        root = os.path.expanduser(os.fspath(save_dir if dir is None else dir))
        if filesystem_of(root)[0] is not None:
            raise ConfigurationError(
                f"WandbLogger(save_dir={root!r})",
                "wandb writes to a disk of this machine before it sends anything",
                "give it a local save_dir; checkpoints and other loggers may be at a URL",
            )
        super().__init__(root, project or os.environ.get("WANDB_PROJECT") or "drivetrain_logs", version, prefix)
        self._run_name = name
        self._fixed_id = id or (version if isinstance(version, str) else None)
        self._options = dict(options)
        if isinstance(config := options.get("config"), Mapping):
            self._options["config"] = self._left_out.take_out(config)[0]
        if offline:
            self._options["mode"] = "offline"
        self._given = experiment
        self._run: Any = None
        self._is_anothers = False  # the run is of whoever called wandb.init in this process
        self._opened: tuple[str, str] | None = None  # the folder and the id of the run that was opened last
        self._rewound: tuple[str, int] | None = None  # a folder, and the step that the run in it goes on from
        self._next_row: int | None = None  # wandb's number of the next row, where it would begin from 0 again
        self._stored: dict[str, int] = {}  # after a rewind: by metric, the last step that is stored
        self._sent: dict[str, int] = {}  # by metric, the last step that this object has sent
        self._refused = False  # rows could not be kept in the run's folder
        self._journal = RowJournal(self._directory, "wandb-rows.jsonl")

    @property
    def experiment(self) -> Any:
        """Wandb's ``Run``, for what this class has no method for (artifacts, ``watch``); begun at the first use.

        Use it on rank 0 only: it creates the run's directory, and where wandb is online it connects.
        """
        if self._given is not None:
            return self._given
        if self._run is None:
            self._run = self._open(self._directory.make())
        return self._run

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a row, with the step under ``trainer/global_step``."""
        row = self._new({f"{self._prefix}{key}": value for key, value in metrics.items()}, step)
        if row:
            self._send(row, step)
            if self._given is None and not self._is_anothers:
                self._keep(step, row)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Put ``params``, without secrets, into the run's configuration."""
        kept, _ = self._left_out.take_out(params)
        self.experiment.config.update(_by_text(kept), allow_val_change=True)

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Send a picture. Needs Pillow."""
        self._log_object(key, lambda: _wandb().Image(_squeezed(pixels_of(value))), step)

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Send a figure, as a picture. Needs Pillow."""
        self._log_object(key, lambda: _wandb().Image(_squeezed(pixels_of_figure(value))), step)

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Send how the numbers are distributed; neighbouring bins are joined where there are more than 512."""
        found = Histogram.of(value).with_at_most(_MOST_BINS)
        self._log_object(key, lambda: _wandb().Histogram(np_histogram=(list(found.counts), list(found.edges))), step)

    def log_text(self, key: str, value: str, step: int) -> None:
        """Send a text, as a table of one cell."""
        self._log_object(key, lambda: _wandb().Table(columns=["text"], data=[[text_of(value)]]), step)

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Send a table."""
        table = Table.of(value)
        self._log_object(key, lambda: _table(table), step)

    def log_graph(self, module: torch.nn.Module, example: Any = None) -> None:
        """Nothing: wandb shows the graph of a module that it watches, ``logger.experiment.watch(module)``."""

    def rewind(self, step: int) -> None:
        """Go on with the run of wandb's, and leave out what it has already of the steps that come again.

        Rows up to ``step`` that were handed to wandb and did not reach its files are sent again.
        """
        self._finish(0)
        self._rewound = (self._directory.path, step)

    def save(self) -> None:
        """Keep in the run's folder which rows were handed to wandb, whose files get them in blocks of 32 KiB."""
        if self._run is not None:
            self._journal.save()

    def finalize(self, status: str) -> None:
        """End the run of wandb's with that status; a later write goes on with it."""
        try:
            self.save()
        finally:
            self._finish(_EXIT_CODES.get(status, 1))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_run": None, "_given": None}  # another process has no connection

    # The run

    def _open(self, path: str) -> Any:
        wandb = _wandb()
        if wandb.run is not None:
            _log.warning(
                "wandb has a run under way in this process, %s: WandbLogger writes to it, and does not end it.",
                wandb.run.id,
            )
            _define_step(wandb.run)
            self._is_anothers = True
            return wandb.run
        goes_on = self._rewound is not None and self._rewound[0] == path
        kept = ServiceRunId(self._directory, "wandb.json")
        before = self._opened[1] if self._opened is not None and self._opened[0] == path else None
        run_id = self._fixed_id or before or (kept.read() if goes_on else None)
        is_new = run_id is None
        run_id = run_id or secrets.token_hex(4)
        kept.write(run_id)
        if self._opened != (path, run_id):
            self._sent, self._stored = {}, {}
        arguments = {"resume": "allow", **self._options, "project": self.name, "name": self._run_name}
        with _arguments_without_secrets():
            run = wandb.init(dir=path, id=run_id, **arguments)
        self._opened = (path, run_id)
        _define_step(run)
        if not is_new:
            self._take_up(run, path, run_id, self._rewound[1] if goes_on and self._rewound is not None else None)
        elif not goes_on:
            self._journal.cut(-2)  # of another run of wandb's, in a folder that the user has named
        self._rewound = None
        return run

    def _take_up(self, run: Any, path: str, run_id: str, step: int | None) -> None:
        """See what the run has, so that nothing is sent twice where it has gone back to ``step``."""
        try:
            there = StoredRows(path, run_id, STEP)
        except Exception as error:  # wandb may change its files in any release
            _log.warning(
                "What wandb has of the run %s cannot be read; steps after the checkpoint may be shown twice: %s: %s",
                run_id,
                type(error).__name__,
                error,
            )
            return
        if run.offline:  # else the server says from which row on
            self._next_row = max(there.next_row, run.step) or None
        if step is None:
            return
        self._run = run
        self._stored = dict(there.latest)
        if run.resumed and isinstance(last := run.summary.get(STEP), int | float):
            # The server may have had rows that had not come to the disk.
            self._stored = {name: max(each, int(last)) for name, each in self._stored.items()}
        for name, each in self._sent.items():
            self._stored[name] = max(self._stored.get(name, -1), each)
        for at, row in self._journal.cut(step):
            missing = self._new(row, at)
            if missing:
                self._send(missing, at)

    def _finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None and not self._is_anothers:
            run.finish(exit_code=exit_code)
        self._is_anothers = False

    # Rows

    def _keep(self, step: int, row: Mapping[str, float]) -> None:
        """Keep a row for a run that goes on. A disk that is full for an hour must not end a training of days."""
        try:
            self._journal.add(step, row)
        except OSError as error:
            if not self._refused:
                self._refused = True
                _log.warning(
                    "wandb-rows.jsonl in %r cannot be written: %s. The run goes on: its rows are held back, and "
                    "written with the next ones or at its end.",
                    self.log_dir,
                    error,
                )

    def _new(self, row: dict[str, Any], step: int) -> dict[str, Any]:
        """What of a row is not stored yet."""
        self.experiment  # noqa: B018 - where the run is taken up, it is known by then what is stored
        stored, epoch = self._stored, f"{self._prefix}epoch"
        if not stored or all(step > stored.get(name, -1) for name in row):
            return row
        new = {name: value for name, value in row.items() if step > stored.get(name, -1)}
        # A chart over epochs takes them from the rows of what it shows.
        return {name: value for name, value in row.items() if name in new or name == epoch} if new else new

    def _send(self, row: Mapping[str, Any], step: int) -> None:
        number, self._next_row = self._next_row, None
        numbered = {} if number is None else {"step": number, "commit": True}
        self.experiment.log({**row, STEP: step}, **numbered)
        for name in row:
            self._sent[name] = step

    def _log_object(self, key: str, make: Any, step: int) -> None:
        name = f"{self._prefix}{key}"
        if self._new({name: None}, step):
            self._send({name: make()}, step)


def _wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigurationError(
            "WandbLogger needs wandb, which is not installed",
            f"runs of Weights & Biases are written by that package ({error})",
            "pip install 'drivetrain[wandb]' (or wandb itself), or use CSVLogger",
        ) from error


def _check_options(wandb: Any, options: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(wandb.init).parameters if name != "anonymous"]
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"WandbLogger({name}=...) is unknown.{nearest(name, known)}",
                "what it does not know itself it hands to wandb.init, which has no such argument.",
                f"use one of {', '.join(known)}; add_file_policy is of artifacts, which this logger does not upload.",
            )


def _table(table: Table) -> Any:
    kind = _wandb().Table
    try:
        return kind(columns=table.columns, data=table.rows)
    except TypeError:  # a column of numbers and texts, say: wandb takes it when it need not tell the column's type
        return kind(columns=table.columns, data=table.rows, allow_mixed_types=True)


def _by_text(value: Any) -> Any:
    """Make names of a configuration text, which wandb takes alone."""
    return {str(name): _by_text(one) for name, one in value.items()} if isinstance(value, Mapping) else value


def _define_step(run: Any) -> None:
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP, step_sync=True)


def _squeezed(pixels: Any) -> Any:
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


@contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """Let wandb, which keeps the command line, see it without the secrets in it."""
    before = sys.argv
    kept, left_out = arguments_without_secrets(before[1:])
    if left_out:
        sys.argv = [*before[:1], *kept]
    try:
        yield
    finally:
        sys.argv = before
