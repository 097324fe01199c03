"""Set up the real wandb and mlflow on a local disk for a test, and read their data back."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb_files import read_records, row_of

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
"""The environment in which neither touches the network."""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither service touches the network, and wandb's own process does not outlive the test."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    yield
    if importlib.util.find_spec("wandb") is not None:
        import wandb

        wandb.teardown()


def _parts(folder: Path) -> list[Path]:
    """The ``.wandb`` files of the run in a folder, in order of time. What wandb's process still has is written."""
    import wandb

    wandb.teardown()
    return sorted(folder.glob("wandb/*run-*/run-*.wandb"), key=lambda path: path.parent.stat().st_ctime_ns)


def wandb_records(folder: Path) -> list[list[Any]]:
    """By part of the run in a folder, its records by wandb's own schema. wandb 0.31 has no reader in Python."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    return [[Record.FromString(content) for content in read_records(path)] for path in _parts(folder)]


def wandb_rows(folder: Path) -> list[list[dict[str, Any]]]:
    """By part of the run in a folder, its rows."""
    return [
        [row_of(record) for record in part if record.WhichOneof("record_type") == "history"]
        for part in wandb_records(folder)
    ]


def wandb_curve(folder: Path, name: str) -> list[list[tuple[int, Any]]]:
    """By part of the run in a folder, the steps and values of a metric."""
    return [[(row["trainer/global_step"], row[name]) for row in part if name in row] for part in wandb_rows(folder)]


def mlflow_client(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{root}/mlflow.db")


def mlflow_run(root: Path, folder: Path) -> Any:
    """The run of MLflow's that belongs to a run's folder."""
    return mlflow_client(root).get_run(json.loads((folder / "mlflow.json").read_text())["run_id"])


def mlflow_curve(root: Path, folder: Path, name: str) -> list[tuple[int, float]]:
    run_id = mlflow_run(root, folder).info.run_id
    return sorted((one.step, one.value) for one in mlflow_client(root).get_metric_history(run_id, name))


class Drawing:
    """A figure that draws itself, as matplotlib's do."""

    def savefig(self, file: Any, format: str) -> None:
        from PIL import Image

        Image.new("RGB", (5, 3), (255, 0, 0)).save(file, format=format)
