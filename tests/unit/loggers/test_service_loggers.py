"""What WandbLogger and MLFlowLogger do alike, with the real packages. L-04"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from services import log_steps, offline

from drivetrain.errors import ConfigurationError
from drivetrain.loggers import MLFlowLogger, WandbLogger
from drivetrain.testing import requires_package

__all__ = ["offline"]
MLFLOW = [requires_package("mlflow"), requires_package("sqlalchemy")]
WANDB = requires_package("wandb")
pytestmark = pytest.mark.usefixtures("offline")


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        pytest.param(MLFlowLogger, {"log_model": True}, "log_model", marks=MLFLOW),
        pytest.param(MLFlowLogger, {"checkpoint_path_prefix": "x"}, "checkpoint_path_prefix", marks=MLFLOW),
        pytest.param(MLFlowLogger, {"save_dir": "memory://logs"}, "tracking_uri", marks=MLFLOW),
        pytest.param(WandbLogger, {"log_model": "every"}, "log_model", marks=WANDB),
        pytest.param(WandbLogger, {"anonymous": True}, "anonymous", marks=WANDB),
        pytest.param(WandbLogger, {"grup": "x"}, "Did you mean 'group'", marks=WANDB),
        pytest.param(WandbLogger, {"add_file_policy": "immutable"}, "add_file_policy", marks=WANDB),
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
        pytest.param(MLFlowLogger, "alembic", "mlflow", marks=MLFLOW),  # for its local store
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
        logger.adopt(version)
        log_steps(logger, 1).finalize("success")
        ids.append(logger.run_id)
    assert ids[0] != ids[1]
