"""What WandbLogger and MLFlowLogger do alike, and MLFlowLogger with the real mlflow and its local store. L-04"""

from __future__ import annotations

import csv
import json
import logging
import math
import pickle
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services import OFFLINE, assert_no_file_has, folder_of, log_all_media, log_steps, offline
from test_wandb_logger import wandb_curve
from torch.utils.data import DataLoader

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.loggers import MLFlowLogger, WandbLogger
from drivetrain.testing import requires_package
from one_layer import OneLayer

__all__ = ["offline"]
MLFLOW = [requires_package("mlflow"), requires_package("sqlalchemy")]
WANDB = requires_package("wandb")
pytestmark = pytest.mark.usefixtures("offline")


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        pytest.param(MLFlowLogger, {"save_dir": "memory://logs"}, "tracking_uri", marks=MLFLOW),
        pytest.param(WandbLogger, {"save_dir": "memory://logs"}, "local save_dir", marks=WANDB),
    ],
)
def test_an_unsupported_argument_is_refused(kind: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        kind(**arguments)


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        (WandbLogger, "wandb", "wandb"),
        pytest.param(MLFlowLogger, "mlflow.tracking", "mlflow", marks=MLFLOW),
    ],
)
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: Any, kind: Any, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as Python marks what cannot be imported
    with pytest.raises(ConfigurationError, match=rf"pip install 'drivetrain\[{extra}\]'"):
        kind(save_dir=tmp_path)


@pytest.mark.parametrize("kind", [pytest.param(MLFlowLogger, marks=MLFLOW), pytest.param(WandbLogger, marks=WANDB)])
def test_another_folder_is_another_run(tmp_path: Path, kind: Any) -> None:
    logger = kind(save_dir=tmp_path)
    ids = []
    for version in ("version_0", "version_1"):
        logger.use_folder(str(tmp_path / version))
        log_steps(logger, 1).finalize("success")
        ids.append(logger.run_id)
    assert ids[0] != ids[1]


def mlflow_client(root: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{root}/mlflow.db")


def mlflow_run(root: Path, folder: Path) -> Any:
    """Return MLflow's run that belongs to a run's folder."""
    return mlflow_client(root).get_run(json.loads((folder / "mlflow.json").read_text())["run_id"])


def mlflow_curve(root: Path, folder: Path, name: str) -> list[tuple[int, float]]:
    run_id = mlflow_run(root, folder).info.run_id
    return sorted((one.step, one.value) for one in mlflow_client(root).get_metric_history(run_id, name))


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without runs: making its tables takes a second."""
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def root(tmp_path: Path, empty_store: Path) -> Path:
    (tmp_path / "100% of it").mkdir()
    return Path(shutil.copy(empty_store, tmp_path / "100% of it" / "mlflow.db")).parent


def test_metrics_parameters_and_tags_but_no_secrets_are_at_mlflow(root: Path, caplog: Any) -> None:  # J-11, L-04
    secret = "sk-very-secret"
    logger = MLFlowLogger("digits", "mine", save_dir=root, tags={"team": "a", "api_token": secret}, prefix="a")
    assert [path.name for path in root.iterdir()] == ["mlflow.db"]  # building it writes nothing
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 3, "password": secret}, "path": None, "api_token": secret})
    logger.log_metrics({"loss": np.float32(1.5), "epoch": 0}, 3)  # type: ignore[dict-item]
    logger.log_metrics({"loss": math.nan, "acc@1": torch.tensor(0.5).item()}, 6)
    folder = folder_of(logger)
    assert folder == root / "digits" / "version_0"
    assert mlflow_run(root, folder).info.status == "RUNNING"
    logger.finalize("success")
    run = mlflow_run(root, folder)
    assert (run.info.run_id, run.info.run_name, run.info.status) == (logger.run_id, "mine", "FINISHED")
    # S-17: reading what identifies the run does not continue it
    assert logger.experiment_id == run.info.experiment_id
    assert mlflow_run(root, folder).info.status == "FINISHED"
    logger.log_text("text", "later", 6)
    assert mlflow_run(root, folder).info.status == "RUNNING"
    logger.finalize("failed")
    assert mlflow_run(root, folder).info.status == "FAILED"
    assert_no_file_has(root, secret)
    assert run.data.tags["team"] == "a"
    assert run.data.params == {"lr": "0.1", "net/width": "3", "path": "None"}
    assert mlflow_curve(root, folder, "a-epoch") == [(3, 0.0)]
    assert mlflow_curve(root, folder, "a-acc_1") == [(6, 0.5)]
    assert "logged as 'a-acc_1'" in caplog.text
    (first, second) = mlflow_curve(root, folder, "a-loss")
    assert first == (3, 1.5)
    assert math.isnan(second[1])


def test_media_are_artifacts_at_mlflow(root: Path) -> None:  # L-04
    from PIL import Image

    logger = MLFlowLogger(save_dir=root)
    log_all_media(logger)
    logger.log_image("grey", np.zeros((4, 6)), 2)
    logger.log_text("text/../x", "a | b", 2)
    logger.finalize("success")
    artifacts = root / "drivetrain_logs" / "mlflow-artifacts" / logger.run_id / "artifacts"
    sizes = {path.name.split("+")[0]: Image.open(path).size for path in artifacts.glob("images/*.png")}
    assert sizes == {"seen~picture": (6, 4), "grey": (6, 4), "figure": (5, 3)}
    assert sum(json.loads((artifacts / "histograms/weights/step=2.json").read_text())["counts"]) == 8
    assert (artifacts / "texts/text/__/x/step=2.txt").read_text() == "a | b"
    table = json.loads((artifacts / "tables/table/step=2.json").read_text())
    assert table == {"columns": ["x", "y"], "data": [[1, "a|b"], [2, None]]}


def test_a_resumed_run_continues_at_mlflow_under_its_id(root: Path, caplog: Any) -> None:  # L-04
    first = MLFlowLogger(save_dir=root, version=0)
    first.log_hyperparams({"lr": 0.1, "width": 3, "long": "x" * 7000})
    log_steps(first, 2, 4)
    run_id = first.run_id
    again = MLFlowLogger(save_dir=root, version=0, synchronous=False)  # the first one was killed
    again.rewind(4)
    again.log_hyperparams({"lr": 0.15, "width": 3, "new": 1, "long": "x" * 7000})  # MLflow has cut the long one
    log_steps(again, 6, 8)
    log_steps(again, 6, 8, name="val_loss")
    assert again.run_id == run_id
    again.finalize("success")
    folder = folder_of(again)
    assert mlflow_curve(root, folder, "loss") == [(step, step / 2) for step in (2, 4, 6, 8)]
    assert mlflow_curve(root, folder, "val_loss") == [(6, 3.0), (8, 4.0)]
    run = mlflow_run(root, folder)
    assert run.info.status == "FINISHED"
    assert {name: run.data.params[name] for name in ("lr", "width", "new")} == {"lr": "0.1", "width": "3", "new": "1"}
    assert "first values of these parameters: lr." in caplog.text
    sent = pickle.loads(pickle.dumps(log_steps(again, 8, name="test_loss")))  # an evaluation, and another process
    assert sent.log_dir == again.log_dir
    again.finalize("interrupted")
    assert mlflow_run(root, folder).info.status == "KILLED"
    assert mlflow_curve(root, folder, "test_loss") == [(8, 4.0)]
    chosen = log_steps(MLFlowLogger(save_dir=root, run_id=run_id), 9)
    chosen.finalize("success")
    assert chosen.run_id == run_id
    assert mlflow_curve(root, folder, "loss")[-1] == (9, 4.5)


class Net(OneLayer):
    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.fails_at:
            raise RuntimeError("killed")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@WANDB
def test_a_fit_that_fails_and_is_resumed_continues_its_runs_at_the_services(root: Path) -> None:  # J-13, L-04
    data: Any = DataLoader(torch.ones(8, 2))  # type: ignore[arg-type]
    options: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "seed": 0, "log_every_n_steps": 1}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "logger": ["csv", "wandb", "mlflow"]}
    for fails_at in (5, -1):
        fit = Fit(default_root_dir=root, callbacks=Checkpoint(every_n_train_steps=4), **options)
        with nullcontext() if fails_at < 0 else pytest.raises(RuntimeError, match="killed"):
            fit.fit(Net(fails_at), data, ckpt_path="auto")
    folder = root / "drivetrain_logs" / "version_0"
    rows = csv.DictReader((folder / "metrics.csv").open())
    curve = [(int(row["step"]), float(row["loss"])) for row in rows]
    assert [step for step, _ in curve] == list(range(1, 9))
    assert wandb_curve(folder, "loss") == [curve[:5], curve[4:]]  # the checkpoint is of step 4
    assert len({path.name for path in folder.glob("wandb/*/run-*.wandb")}) == 1  # both parts are of one run
    assert mlflow_run(root, folder).info.status == "FINISHED"
    assert mlflow_curve(root, folder, "loss") == sorted([*curve, curve[4]])


def test_names_that_mlflow_refuses_are_replaced(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    # L-04: one of them would hold back all rows that come after it
    names = ["..", "../x", "..x", "/abs", "a//b", "a/./b", "end/", "", ".", "x" * 300, "x" * 300 + "y", "a:b"]
    logger = MLFlowLogger(save_dir=root)
    logger.log_hyperparams(dict.fromkeys(names, 1))
    for step, name in enumerate(names):
        logger.log_metrics({name: 1.0, "loss": 0.5}, step)
    logger.log_image("../x", torch.rand(3, 2, 2), 0)
    logger.finalize("success")
    folder = folder_of(logger)
    assert mlflow_curve(root, folder, "loss") == [(step, 0.5) for step in range(len(names))]
    run = mlflow_run(root, folder)
    assert "refuses" not in caplog.text
    assert {"__", "__/x", "__x", "_/abs", "a/_/b", "end/_", "_", "a:b"} <= run.data.metrics.keys()
    assert sum(name.startswith("xxx") for name in run.data.metrics) == 2
    assert run.data.metrics.keys() - {"loss"} == run.data.params.keys()


def test_a_store_of_mlflow_that_refuses_does_not_end_a_run(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    import sqlite3

    logger = log_steps(MLFlowLogger(save_dir=root), 1)
    database = sqlite3.connect(root / "mlflow.db")
    database.execute("ALTER TABLE metrics RENAME TO gone")
    log_steps(logger, 2, 3)
    with pytest.raises(DrivetrainError, match="does not accept metrics"):
        logger.save()
    assert caplog.text.count("The run continues") == 1
    database.execute("ALTER TABLE gone RENAME TO metrics")
    database.close()
    logger.finalize("success")
    assert mlflow_curve(root, folder_of(logger), "loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_a_password_in_the_uri_is_not_logged(caplog: pytest.LogCaptureFixture, root: Path) -> None:  # J-11
    logger = MLFlowLogger(tracking_uri="sqlite://user:hunter2@/nowhere", save_dir=root)
    logger._run_id, logger._is_open = "0", True
    with caplog.at_level(logging.WARNING, "drivetrain"):
        logger.log_metrics({"loss": 1.0}, 1)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "drivetrain"]
    assert "//...@/nowhere" in warning.split(" does not accept ")[0]
