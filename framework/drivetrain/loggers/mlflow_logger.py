"""MLFlowLogger: metrics and media as a run of MLflow."""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any
from urllib.parse import quote

from drivetrain._runtime.lazy_names import is_installed
from drivetrain.checkpoint._format.storage import filesystem_of
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.loggers._directory_logger import DirectoryLogger
from drivetrain.loggers._service_run_id import KeptRunId
from drivetrain.loggers.media import Histogram, Table, pixels_of, pixels_of_figure, text_of
from drivetrain.runs._directory import alone_in

_log = logging.getLogger("drivetrain")

_STATUS = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_UNKNOWN_TO_MLFLOW = re.compile(r"[^\w\-. :/]", re.ASCII)
_MOST_METRICS = 1000  # of one request
_MOST_PARAMS = 100
_LONGEST_NAME = 250
_SHORTEST_CUT = 250  # a parameter's value is cut at 250, 500 or 6000 characters, as the server's release has it
_STORED_IMAGE = re.compile(r"([^/]+?)[+%]step[+%](\d+)[+%]timestamp")
_REFUSED = {
    "log_model": "it does not upload checkpoints: call logger.experiment.log_artifacts(logger.run_id, "
    "trainer.log_dir + '/checkpoints/...') in a hook",
    "checkpoint_path_prefix": "it does not upload checkpoints, so that there is nothing to name",
}


class MLFlowLogger(DirectoryLogger):
    """Keeps a run at an MLflow server, or in a local store, ``<save_dir>/mlflow.db``.

    The run's folder, ``<save_dir>/<experiment_name>/version_<n>``, holds ``mlflow.json``, by which a run that goes on
    there goes on in the same run of MLflow's; steps that are stored already are not written again.

    Where the server refuses, rows are held back and sent with the next ones: a warning says so, and the run goes on.
    `save` and `finalize` raise.

    Args:
        experiment_name: of MLflow, which makes it where there is none; and the name of the folder of its runs.
        run_name: what MLflow shows the run as; None lets MLflow choose.
        tracking_uri: of a server, or of a database; None for the environment's ``MLFLOW_TRACKING_URI``, else the local
            store.
        tags: of the run.
        save_dir: a local path, or with a ``tracking_uri`` an fsspec URL.
        log_model: only False: checkpoints stay where `Checkpoint` puts them.
        checkpoint_path_prefix: refused: no checkpoint is uploaded.
        prefix: put before every metric's name, with a dash.
        artifact_location: where a new experiment keeps its media; None for the server's choice, and for
            ``<save_dir>/<experiment_name>/mlflow-artifacts`` of the local store.
        run_id: of a run that there is, to go on with it.
        synchronous: False sends metrics from a thread of MLflow's.
        version: a number, a directory name, or ``None`` for the run's folder.

    Raises:
        ConfigurationError: mlflow is not installed, or what the local store needs.
    """

    def __init__(
        self,
        experiment_name: str = "drivetrain_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] = ".",
        log_model: bool = False,
        checkpoint_path_prefix: str = "",
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
        version: int | str | None = None,
    ) -> None:
        for argument, value in {"log_model": log_model, "checkpoint_path_prefix": checkpoint_path_prefix}.items():
            if value:
                raise ConfigurationError(f"MLFlowLogger({argument}={value!r})", _REFUSED[argument], "leave it out")
        _mlflow("mlflow.tracking")
        super().__init__(save_dir, experiment_name, version, prefix)
        self._tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._is_local_store = self._tracking_uri is None
        self._artifact_location = artifact_location
        if self._is_local_store:
            root = os.path.abspath(_local_root(self.save_dir))
            self._tracking_uri = f"sqlite:///{quote(os.path.join(root, 'mlflow.db'))}"
            if artifact_location is None:
                self._artifact_location = os.path.join(root, self.name, "mlflow-artifacts")
        self._run_name = run_name
        self._tags = self._left_out.take_out(dict(tags or {}))[0]
        self._fixed_id = run_id
        self._synchronous = synchronous
        self._client: Any = None
        self._opened: tuple[str, str] | None = None  # the folder and the id of the run that was opened last
        self._is_open = False
        self._rewound: str | None = None  # a folder in which a run goes on
        self._stored: dict[str, int] = {}  # after a rewind: by metric, the last step that is stored
        self._stored_images: dict[str, int] = {}
        self._latest: dict[str, tuple[int, float]] = {}  # by metric, what was logged last
        self._pending: list[Any] = []
        self._sending: list[Any] = []
        self._refused = False
        self._renamed: set[str] = set()

    @property
    def experiment(self) -> Any:
        """The ``MlflowClient``, for what this class has no method for; its methods take `run_id`. Use it on rank 0."""
        if self._client is None:
            self._client = _mlflow("mlflow.tracking").MlflowClient(self._tracking_uri)
        return self._client

    @property
    def run_id(self) -> str:
        """The id of the run of MLflow's; asking begins it. Use it on rank 0."""
        if not self._is_open or self._opened is None:
            self._open(self._directory.make())
        assert self._opened is not None
        return self._opened[1]

    @property
    def experiment_id(self) -> str:
        """The id of the experiment of MLflow's; asking begins the run. Use it on rank 0."""
        return str(self.experiment.get_run(self.run_id).info.experiment_id)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send a row."""
        entities = _mlflow("mlflow.entities")
        now = int(time.time() * 1000)
        run_id, stored = self.run_id, self._stored
        for key, value in metrics.items():
            name = self._named(f"{self._prefix}{key}")
            number = float(value)
            # The epoch, say, comes with several rows of one step.
            if step > stored.get(name, -1) and self._latest.get(name) != (step, number):
                self._latest[name] = (step, number)
                self._pending.append(entities.Metric(name, number, now, step))
        try:
            self._send(run_id)
        except Exception as error:  # a server that refuses for an hour must not end a training of days
            if not self._refused:
                self._refused = True
                _log.warning(
                    "MLflow at %s refuses a row: %s: %s. The run goes on: rows are held back, and sent with the next "
                    "ones or at its end.",
                    _without_password(self._tracking_uri or ""),
                    type(error).__name__,
                    error,
                )

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Keep ``params``, without secrets, as the run's parameters: nested ones as ``outer/inner``.

        MLflow never changes a parameter: where a run goes on with another value, the first one stays, and a warning
        says so.
        """
        entities = _mlflow("mlflow.entities")
        wanted = {self._named(name): str(value) for name, value in _flat(self._left_out.take_out(params)[0])}
        there = self.experiment.get_run(self.run_id).data.params
        changed = [name for name, value in wanted.items() if name in there and not _is_kept_as(value, there[name])]
        if changed:
            _log.warning("MLflow keeps the values that these parameters had at first: %s.", ", ".join(changed))
        new = [entities.Param(name, value) for name, value in wanted.items() if name not in there]
        for at in range(0, len(new), _MOST_PARAMS):
            self.experiment.log_batch(self.run_id, params=new[at : at + _MOST_PARAMS])

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Keep a picture, which MLflow shows by key and step. Needs Pillow."""
        self._add_image(key, lambda: pixels_of(value), step)

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Keep a figure, as a picture. Needs Pillow."""
        self._add_image(key, lambda: pixels_of_figure(value), step)

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Keep ``histograms/<key>/step=<n>.json``: MLflow has no histograms."""
        found = Histogram.of(value)
        document = {"counts": list(found.counts), "edges": list(found.edges), "left_out": found.left_out}
        self.experiment.log_dict(self.run_id, document, self._file("histograms", key, step, "json"))

    def log_text(self, key: str, value: str, step: int) -> None:
        """Keep ``texts/<key>/step=<n>.txt``."""
        self.experiment.log_text(self.run_id, text_of(value), self._file("texts", key, step, "txt"))

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Keep ``tables/<key>/step=<n>.json``, with ``columns`` and ``data``, as MLflow shows tables."""
        table = Table.of(value)
        document = {"columns": table.columns, "data": table.rows}
        self.experiment.log_dict(self.run_id, document, self._file("tables", key, step, "json"))

    def rewind(self, step: int) -> None:
        """Go on with the run of MLflow's, and leave out what it has already of the steps that come again."""
        del step  # MLflow drops nothing: what is there stays
        self._is_open = False
        self._rewound = self._directory.path

    def save(self) -> None:
        """Send what is held back.

        Raises:
            DrivetrainError: the server refuses. The rows stay held back.
        """
        if self._opened is None:
            return
        try:
            self._send(self._opened[1])
            while self._sending:
                self._sending[0].wait()
                self._sending.pop(0)
        except Exception as error:
            raise DrivetrainError(
                f"MLflow at {_without_password(self._tracking_uri or '')} refuses rows: "
                f"{type(error).__name__}: {error}.",
                "what is held back in memory is lost with this process.",
                "look at the server, the network and MLFLOW_TRACKING_TOKEN or its like.",
            ) from error

    def finalize(self, status: str) -> None:
        """Send what is held back, and end the run of MLflow's with that status; a later write goes on with it."""
        if not self._is_open or self._opened is None:
            return
        try:
            self.save()
        finally:
            self._is_open = False
            self.experiment.set_terminated(self._opened[1], _STATUS.get(status, "FAILED"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None, "_sending": []}  # another process connects by itself

    # The run

    def _open(self, path: str) -> None:
        goes_on = self._rewound == path
        kept = KeptRunId(self._directory, "mlflow.json")
        before = self._opened[1] if self._opened is not None and self._opened[0] == path else None
        # Two runs that begin at once would both make the tables of a store.
        with alone_in(_local_root(self.save_dir)) if self._is_local_store else nullcontext():
            client = self.experiment
            run_id = self._fixed_id or before or (kept.read() if goes_on else None)
            if run_id is None:
                run_id = client.create_run(
                    self._experiment_id(client), run_name=self._run_name, tags=self._tags
                ).info.run_id
            else:
                client.update_run(run_id, status="RUNNING", name=self._run_name)
                for name, value in self._tags.items():
                    client.set_tag(run_id, name, value)
        kept.write(run_id)
        if self._opened != (path, run_id):
            self._stored, self._stored_images, self._latest, self._pending = {}, {}, {}, []
        if goes_on:
            self._take_up(client, run_id)
        self._opened, self._rewound, self._is_open = (path, run_id), None, True

    def _experiment_id(self, client: Any) -> Any:
        found = client.get_experiment_by_name(self.name)
        if found is None:
            try:
                return client.create_experiment(self.name, artifact_location=self._artifact_location)
            except Exception:  # another run was quicker, or there is a problem indeed
                found = client.get_experiment_by_name(self.name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise ConfigurationError(
                f"The experiment {self.name!r} of MLflow was deleted.",
                "MLflow keeps the name, and takes no runs into it.",
                "restore it (mlflow experiments restore), or give another experiment_name.",
            )
        return found.experiment_id

    def _take_up(self, client: Any, run_id: str) -> None:
        for name in client.get_run(run_id).data.metrics:
            self._stored[name] = max(one.step for one in client.get_metric_history(run_id, name))
        for file in client.list_artifacts(run_id, "images"):
            found = _STORED_IMAGE.match(file.path.rpartition("/")[2])
            if found is not None:
                self._stored_images[found[1]] = max(int(found[2]), self._stored_images.get(found[1], -1))

    def _send(self, run_id: str) -> None:
        while self._pending:
            batch = self._pending[:_MOST_METRICS]
            sent = self.experiment.log_batch(run_id, metrics=batch, synchronous=self._synchronous)
            del self._pending[: len(batch)]
            if self._synchronous is False:
                self._sending.append(sent)
        self._refused = False

    def _add_image(self, key: str, pixels: Any, step: int) -> None:
        if not is_installed("PIL"):
            self._cannot_keep("images without Pillow (pip install pillow)")
            return
        name, run_id = self._named(f"{self._prefix}{key}"), self.run_id
        name = name.replace(":", "_")  # which MLflow takes in other names
        if step > self._stored_images.get(name.replace("/", "~"), -1):
            self.experiment.log_image(run_id, pixels(), key=name, step=step)

    def _file(self, folder: str, key: str, step: int, kind: str) -> str:
        return f"{folder}/{self._named(f'{self._prefix}{key}')}/step={step}.{kind}"

    def _named(self, name: str) -> str:
        known = _known_to_mlflow(name)
        if known != name and name not in self._renamed:
            self._renamed.add(name)
            _log.warning("MLflow does not take the name %r: it is %r there.", name, known)
        return known


def _known_to_mlflow(name: str) -> str:
    """Make of a name one that MLflow takes: a name that it refuses would hold back all that comes after it."""
    parts = _UNKNOWN_TO_MLFLOW.sub("_", name).split("/")
    # MLflow takes names for paths: one that leads elsewhere, or is another one's, it refuses.
    known = "/".join("_" * max(1, len(part)) if not part.strip(".") else part for part in parts)
    known = f"__{known[2:]}" if known.startswith("..") else known
    if len(known) > _LONGEST_NAME:
        known = f"{known[: _LONGEST_NAME - 9]}-{zlib.crc32(name.encode(errors='backslashreplace')):08x}"
    return known


def _is_kept_as(value: str, kept: str) -> bool:
    return value == kept or (len(kept) >= _SHORTEST_CUT and value.startswith(kept))


def _mlflow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            "MLFlowLogger needs mlflow, which is not installed",
            f"runs of MLflow are written by that package, or by mlflow-skinny, its smaller part ({error})",
            "pip install 'drivetrain[mlflow]' (or mlflow itself), or use CSVLogger",
        ) from error


def _local_root(save_dir: str) -> str:
    if not is_installed("sqlalchemy", "alembic"):
        raise ConfigurationError(
            "MLFlowLogger's local store needs SQLAlchemy and Alembic, which are not installed",
            "mlflow-skinny writes a database by them, and does not bring them along",
            "pip install 'drivetrain[mlflow]' (or mlflow itself), or give a server's tracking_uri",
        )
    filesystem, root = filesystem_of(save_dir)
    if filesystem is not None:
        raise ConfigurationError(
            f"MLFlowLogger(save_dir={save_dir!r}) without a tracking_uri",
            "the store of runs is a database on a disk of this machine then",
            "give a tracking_uri, or a local save_dir; checkpoints and other loggers may be at a URL",
        )
    return root


def _without_password(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//...@", uri)


def _flat(params: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
