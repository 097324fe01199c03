from __future__ import annotations

import copy
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Fit
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, TensorBoardLogger, tensorboard_logger
from drivetrain.testing import requires_package


def _events(logger: TensorBoardLogger) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(logger.log_dir, size_guidance={"scalars": 0}).Reload()


@requires_package("tensorboard")
def test_scalars_are_written_and_nothing_before_the_first(tmp_path: Path) -> None:
    assert isinstance(Fit(accelerator="cpu", default_root_dir=tmp_path).logger, TensorBoardLogger)  # the default
    logger = TensorBoardLogger(tmp_path, prefix="run")
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []
    for step, loss in ((3, 0.5), (4, 0.25)):  # a second fit continues in the same directory
        logger.log_metrics({"loss": loss}, step)
        for copied in (pickle.loads(pickle.dumps(logger)), copy.deepcopy(logger)):  # as for another process
            assert copied.log_dir == logger.log_dir
            copied.finalize("success")
        logger.finalize("success")
    scalars = _events(logger).Scalars("run-loss")
    assert [(event.step, event.value) for event in scalars] == [(3, 0.5), (4, 0.25)]
    assert logger.log_dir == f"{tmp_path}/drivetrain_logs/version_0"


@requires_package("tensorboard")
def test_hyper_parameters_are_in_the_tab_and_in_a_file(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 4, "kinds": ["a"]}})
    logger.finalize("success")
    assert json.loads((Path(logger.log_dir) / "hparams.json").read_text())["net"] == {"width": 4, "kinds": ["a"]}
    events = _events(logger)
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert (hparams["lr"].number_value, hparams["net/width"].number_value) == (0.1, 4)
    assert hparams["net/kinds"].string_value == "['a']"
    assert "hp_metric" in events.Tags()["scalars"]


@requires_package("tensorboard")
def test_a_graph_is_written(tmp_path: Path) -> None:
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    logger = TensorBoardLogger(tmp_path)
    logger.log_graph(torch.nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []
    logger.log_graph(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    logger.finalize("success")
    assert any("weight" in node.name for node in GraphDef.FromString(_events(logger)._graph).node)


def test_without_tensorboard_the_default_is_csv(tmp_path: Path, monkeypatch: Any) -> None:  # G-06
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as Python marks what cannot be imported
    (logger,) = Fit(accelerator="cpu", default_root_dir=tmp_path).loggers
    assert isinstance(logger, CSVLogger)
    with pytest.raises(ConfigurationError, match="pip install"):
        TensorBoardLogger(tmp_path)


@requires_package("tensorboard")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_full_disk_does_not_end_a_run(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:  # L-04
    import resource

    monkeypatch.setattr(tensorboard_logger, "_RETRY_AFTER", 0.0)
    logger = TensorBoardLogger(tmp_path, version=0, max_queue=1)
    logger.log_metrics({"loss": 0.0}, 0)
    logger.save()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        # The writer's thread may take a while to find out.
        for step in range(1, 200):
            logger.log_metrics({"loss": 1.0}, step)
            time.sleep(0.01)
            if "cannot be written" in caplog.text:
                break
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("cannot be written") == 1
    logger.log_metrics({"loss": 0.5}, 300)
    logger.finalize("success")
    scalars = _events(logger).Scalars("loss")
    assert (scalars[0].step, scalars[-1].step, scalars[-1].value) == (0, 300, 0.5)
