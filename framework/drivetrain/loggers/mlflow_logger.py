"""MLFlowLogger: log metrics and media to an MLflow run."""

from __future__ import annotations

import logging
import os
import re
import time
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from urllib.parse import quote

from drivetrain._runtime.lazy_names import import_optional, is_installed
from drivetrain._storage.paths import local_path
from drivetrain._storage.publication import lock_folder
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.loggers._directory_logger import DirectoryLogger, flat_params
from drivetrain.loggers.media import Histogram, Table, pixels_of, pixels_of_figure

_log = logging.getLogger("drivetrain")

_ID_FILE = "mlflow.json"
_STATUS = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_INVALID_CHARACTERS = re.compile(r"[^\w\-. :/]", re.ASCII)
_MAX_METRICS = 1000  # metrics that MLflow accepts in one request
_MAX_PARAMS = 100  # parameters that MLflow accepts in one request
_MAX_NAME_LENGTH = 250  # characters
# Servers truncate a parameter's value at 250, 500 or 6000 characters, depending on their release.
_MIN_TRUNCATED_LENGTH = 250


class MLFlowLogger(DirectoryLogger):
    """Logs to an MLflow server, or to a local store, ``<save_dir>/mlflow.db``.

    The run's folder, ``<save_dir>/<experiment_name>/version_<n>`` if this is the first logger that writes files,
    contains ``mlflow.json`` with the id of the MLflow run. A run that resumes in the folder continues this MLflow run.
    MLflow cannot remove metrics, so values that were logged after the checkpoint may be there twice.

    If the server fails, metrics are kept in memory and sent together with later metrics, and the run continues with a
    warning. `save` and `finalize` raise an error instead.

    Args:
        experiment_name: the name of the MLflow experiment, which is created if necessary, and of the folder for its
            runs.
        run_name: the run's name in MLflow; None lets MLflow choose a name.
        tracking_uri: the URI of a server or database; None means the environment's ``MLFLOW_TRACKING_URI``, else the
            local store.
        tags: the run's tags.
        save_dir: a local path, or an fsspec URL if there is a ``tracking_uri``.
        prefix: prepended to every metric's name, with a dash.
        artifact_location: the location for the media of a new experiment; None lets the server choose, or means
            ``<save_dir>/<experiment_name>/mlflow-artifacts`` with the local store.
        run_id: the id of an existing MLflow run to continue.
        synchronous: if False, MLflow sends metrics in a background thread.
        version: a number, a directory name, or ``None`` for the run's version.

    Raises:
        ConfigurationError: mlflow is not installed, or ``save_dir`` is a URL and there is no ``tracking_uri``.
    """

    def __init__(
        self,
        experiment_name: str = "drivetrain_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] = ".",
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
        version: int | str | None = None,
    ) -> None:
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
        self._tags = self._secret_filter.take_out(dict(tags or {}))[0]
        self._given_run_id = run_id
        self._synchronous = synchronous
        self._client: Any = None
        self._run_id: str | None = None  # of the run of this folder, once it was opened
        self._is_open = False
        self._resumes = False  # whether a run resumes in the folder
        self._latest: dict[str, tuple[int, float]] = {}  # the last logged step and value, by metric
        self._pending: list[Any] = []  # metrics that are not sent yet
        self._in_flight: list[Any] = []  # asynchronous requests that have not completed
        self._write_failed = False
        self._renamed_warned: set[str] = set()  # invalid names about which a warning was logged

    @property
    def experiment(self) -> Any:
        """The ``MlflowClient``, for features that have no method in this class. Only for rank 0.

        Most methods of the client take the run's id, which is `run_id`.
        """
        if self._client is None:
            self._client = _mlflow("mlflow.tracking").MlflowClient(self._tracking_uri)
        return self._client

    @property
    def run_id(self) -> str:
        """The id of the MLflow run, which is started if there is none yet. Only for rank 0.

        Reading it after the run has ended does not change the run's status.
        """
        return self._run_id or self._open_run_id()

    @property
    def experiment_id(self) -> str:
        """The id of the MLflow experiment. The run is started if necessary. Only for rank 0."""
        return str(self.experiment.get_run(self.run_id).info.experiment_id)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send metrics."""
        entities = _mlflow("mlflow.entities")
        now = int(time.time() * 1000)
        run_id = self._open_run_id()
        for key, value in metrics.items():
            name = self._valid_name(f"{self._prefix}{key}")
            value = float(value)
            # Some values, such as the epoch, are logged several times at the same step.
            if self._latest.get(name) != (step, value):
                self._latest[name] = (step, value)
                self._pending.append(entities.Metric(name, value, now, step))
        try:
            self._send(run_id)
        except Exception as error:  # A temporary failure of the server must not end the run.
            if not self._write_failed:
                self._write_failed = True
                _log.warning(
                    "MLflow at %s does not accept metrics: %s: %s. The run continues: the metrics are kept in memory "
                    "and sent with later metrics or at the end of the run.",
                    _without_credentials(self._tracking_uri or ""),
                    type(error).__name__,
                    error,
                )

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log ``params``, without secrets, as the run's parameters, with nested values as ``outer/inner``.

        MLflow cannot change a parameter. If a resumed run has another value, MLflow keeps the first value, and the
        logger warns.
        """
        entities = _mlflow("mlflow.entities")
        new_params = {
            self._valid_name(name): str(value) for name, value in flat_params(self._secret_filter.take_out(params)[0])
        }
        run_id = self._open_run_id()
        stored_params = self.experiment.get_run(run_id).data.params
        changed = [
            name
            for name, value in new_params.items()
            if name in stored_params and not _equals_stored(value, stored_params[name])
        ]
        if changed:
            _log.warning(
                "MLflow cannot change parameters, so it keeps the first values of these parameters: %s.",
                ", ".join(changed),
            )
        new = [entities.Param(name, value) for name, value in new_params.items() if name not in stored_params]
        for start in range(0, len(new), _MAX_PARAMS):
            self.experiment.log_batch(run_id, params=new[start : start + _MAX_PARAMS])

    def log_image(self, key: str, value: Any, step: int) -> None:
        """Log an image, which MLflow shows by key and step. Requires Pillow."""
        self._add_image(key, lambda: pixels_of(value), step)

    def log_figure(self, key: str, value: Any, step: int) -> None:
        """Log a figure as an image. Requires Pillow."""
        self._add_image(key, lambda: pixels_of_figure(value), step)

    def log_histogram(self, key: str, value: Any, step: int) -> None:
        """Log a histogram as ``histograms/<key>/step=<n>.json``, since MLflow has no histograms."""
        histogram = Histogram.of(value)
        document = {"counts": list(histogram.counts), "edges": list(histogram.edges), "left_out": histogram.left_out}
        self.experiment.log_dict(self._open_run_id(), document, self._artifact_path("histograms", key, step, "json"))

    def log_text(self, key: str, value: str, step: int) -> None:
        """Log a text as ``texts/<key>/step=<n>.txt``."""
        self.experiment.log_text(self._open_run_id(), value, self._artifact_path("texts", key, step, "txt"))

    def log_table(self, key: str, value: Any, step: int) -> None:
        """Log a table as ``tables/<key>/step=<n>.json``, with ``columns`` and ``data`` as MLflow expects them."""
        table = Table.of(value)
        document = {"columns": table.columns, "data": table.rows}
        self.experiment.log_dict(self._open_run_id(), document, self._artifact_path("tables", key, step, "json"))

    def rewind(self, step: int) -> None:
        """Continue the MLflow run."""
        del step  # MLflow cannot remove metrics.
        self._is_open, self._resumes = False, True

    def _leave_folder(self) -> None:
        self._run_id, self._is_open, self._resumes = None, False, False
        self._latest, self._pending = {}, []

    def save(self) -> None:
        """Send pending metrics.

        Raises:
            DrivetrainError: sending failed. The metrics stay pending.
        """
        if self._run_id is None:
            return
        try:
            self._send(self._run_id)
            while self._in_flight:
                self._in_flight[0].wait()
                self._in_flight.pop(0)
        except Exception as error:
            raise DrivetrainError(
                f"MLflow at {_without_credentials(self._tracking_uri or '')} does not accept metrics: "
                f"{type(error).__name__}: {error}.",
                "metrics that are kept in memory are lost when this process ends.",
                "check the server, the network and the credentials, such as MLFLOW_TRACKING_TOKEN.",
            ) from error

    def finalize(self, status: str) -> None:
        """Send pending metrics and end the MLflow run with ``status``. A later write continues the run."""
        if not self._is_open or self._run_id is None:
            return
        try:
            self.save()
        finally:
            self._is_open = False
            self.experiment.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None, "_in_flight": []}  # Another process opens its own connection.

    # Start or continue the MLflow run, and send to it

    def _open_run_id(self) -> str:
        """Return the id of the MLflow run, which is started or continued, so that it can be written to."""
        if not self._is_open or self._run_id is None:
            self._run_id = self._open(self.make_folder())
            self._is_open, self._resumes = True, False
        return self._run_id

    def _open(self, folder: str) -> str:
        # Two runs that start at the same time would both create the store's tables.
        with lock_folder(_local_root(self.save_dir)) if self._is_local_store else nullcontext():
            client = self.experiment
            run_id = self._given_run_id or self._run_id or (self.read_run_id(_ID_FILE) if self._resumes else None)
            if run_id is None:
                run_id = client.create_run(
                    self._experiment_id(client), run_name=self._run_name, tags=self._tags
                ).info.run_id
            else:
                client.update_run(run_id, status="RUNNING", name=self._run_name)
                for name, value in self._tags.items():
                    client.set_tag(run_id, name, value)
        self.write_json(_ID_FILE, {"run_id": run_id})
        return str(run_id)

    def _experiment_id(self, client: Any) -> Any:
        experiment = client.get_experiment_by_name(self.name)
        if experiment is None:
            try:
                return client.create_experiment(self.name, artifact_location=self._artifact_location)
            except Exception:  # Another run may have created the experiment meanwhile.
                experiment = client.get_experiment_by_name(self.name)
                if experiment is None:
                    raise
        return experiment.experiment_id

    def _send(self, run_id: str) -> None:
        while self._pending:
            batch = self._pending[:_MAX_METRICS]
            sent = self.experiment.log_batch(run_id, metrics=batch, synchronous=self._synchronous)
            del self._pending[: len(batch)]
            if self._synchronous is False:
                self._in_flight.append(sent)
        self._write_failed = False

    def _add_image(self, key: str, pixels: Any, step: int) -> None:
        if not is_installed("PIL"):
            self._warn_unsupported("images without Pillow (pip install pillow)")
            return
        name, run_id = self._valid_name(f"{self._prefix}{key}"), self._open_run_id()
        name = name.replace(":", "_")  # MLflow accepts colons in names of metrics, but not in names of images.
        self.experiment.log_image(run_id, pixels(), key=name, step=step)

    def _artifact_path(self, folder: str, key: str, step: int, kind: str) -> str:
        return f"{folder}/{self._valid_name(f'{self._prefix}{key}')}/step={step}.{kind}"

    def _valid_name(self, name: str) -> str:
        valid = _to_valid_name(name)
        if valid != name and name not in self._renamed_warned:
            self._renamed_warned.add(name)
            _log.warning("MLflow does not accept the name %r, so the value is logged as %r.", name, valid)
        return valid


def _to_valid_name(name: str) -> str:
    """Return a valid MLflow name, because an invalid one would block all later metrics."""
    parts = _INVALID_CHARACTERS.sub("_", name).split("/")
    # MLflow treats names as paths, and refuses paths that are not normalised.
    valid = "/".join("_" * max(1, len(part)) if not part.strip(".") else part for part in parts)
    valid = f"__{valid[2:]}" if valid.startswith("..") else valid
    if len(valid) > _MAX_NAME_LENGTH:
        valid = f"{valid[: _MAX_NAME_LENGTH - 9]}-{zlib.crc32(name.encode(errors='backslashreplace')):08x}"
    return valid


def _equals_stored(value: str, stored: str) -> bool:
    return value == stored or (len(stored) >= _MIN_TRUNCATED_LENGTH and value.startswith(stored))


def _mlflow(module: str) -> Any:
    fix = "pip install 'drivetrain[mlflow]' (or only mlflow or mlflow-skinny), or use CSVLogger."
    return import_optional(module, "MLFlowLogger", fix)


def _local_root(save_dir: str) -> str:
    root = local_path(save_dir)
    if root is None:
        raise ConfigurationError(
            f"MLFlowLogger(save_dir={save_dir!r}) without a tracking_uri",
            "without a tracking_uri, the store is a database on a local disk",
            "pass a tracking_uri, or a local save_dir; checkpoints and other loggers may be at a URL",
        )
    return root


def _without_credentials(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//...@", uri)
