"""Set up the real wandb and mlflow on a local disk for a test, and read their data back."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb_files import read_records, row_of

from drivetrain.loggers import MLFlowLogger, WandbLogger

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
"""The environment in which neither uses the network."""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither service uses the network, and wandb's own process does not outlive the test."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    yield
    if importlib.util.find_spec("wandb") is not None:
        import wandb

        wandb.teardown()


def folder_of(logger: MLFlowLogger | WandbLogger) -> Path:
    return Path(str(logger.log_dir))


def assert_no_file_has(folder: Path, secret: str) -> None:
    assert not [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def wandb_records(folder: Path) -> list[list[Any]]:
    """Return, by part of the run in a folder in order of time, its records by wandb's own schema."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    wandb.teardown()  # writes what wandb's process still has
    parts = sorted(folder.glob("wandb/*run-*/run-*.wandb"), key=lambda path: path.parent.stat().st_ctime_ns)
    return [[Record.FromString(content) for content in read_records(path)] for path in parts]


def records_of_kind(part: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in part if record.WhichOneof("record_type") == kind]


def wandb_config(part: list[Any]) -> dict[str, Any]:
    updates = [one for record in records_of_kind(part, "config") for one in record.update]
    return {one.key: json.loads(one.value_json) for one in updates}


def wandb_rows(folder: Path) -> list[list[dict[str, Any]]]:
    """Return, by part of the run in a folder, its rows."""
    return [[row_of(history) for history in records_of_kind(part, "history")] for part in wandb_records(folder)]


def wandb_media(folder: Path) -> dict[str, Any]:
    """Return the media of a run by name; those in JSON files with their "data" and "columns"."""
    [rows] = wandb_rows(folder)
    (files,) = folder.glob("wandb/*run-*/files")
    found = {name: value for row in rows for name, value in row.items() if isinstance(value, dict)}
    for value in found.values():
        if value.get("_type") == "table-file":
            value.update(json.loads((files / value["path"]).read_text()))
    return found


def wandb_curve(folder: Path, name: str) -> list[list[tuple[int, Any]]]:
    """Return, by part of the run in a folder, the steps and values of a metric."""
    return [[(row["trainer/global_step"], row[name]) for row in part if name in row] for part in wandb_rows(folder)]


def mlflow_client(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{root}/mlflow.db")


def mlflow_run(root: Path, folder: Path) -> Any:
    """Return MLflow's run that belongs to a run's folder."""
    return mlflow_client(root).get_run(json.loads((folder / "mlflow.json").read_text())["run_id"])


def mlflow_curve(root: Path, folder: Path, name: str) -> list[tuple[int, float]]:
    run_id = mlflow_run(root, folder).info.run_id
    return sorted((one.step, one.value) for one in mlflow_client(root).get_metric_history(run_id, name))


class Drawing:
    """A figure that draws itself, as matplotlib's do."""

    def savefig(self, file: Any, format: str) -> None:
        from PIL import Image

        Image.new("RGB", (5, 3), (255, 0, 0)).save(file, format=format)
