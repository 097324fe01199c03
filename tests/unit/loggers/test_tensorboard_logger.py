from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, TensorBoardLogger, tensorboard_logger
from drivetrain.loggers._default_logger import default_logger
from drivetrain.testing import requires_package


def _events(logger: TensorBoardLogger) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


@requires_package("tensorboard")
def test_scalars_come_back_and_nothing_is_made_before_the_first(tmp_path: Path) -> None:
    #
    logger = TensorBoardLogger(tmp_path, prefix="run")
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []
    logger.log_metrics({"loss": 0.5}, step=3)
    logger.finalize("success")
    logger.log_metrics({"loss": 0.25}, step=4)  # a second fit goes on in the same directory
    logger.finalize("success")
    scalars = _events(logger).Scalars("run-loss")
    assert [(event.step, event.value) for event in scalars] == [(3, 0.5), (4, 0.25)]
    assert logger.log_dir == f"{tmp_path}/drivetrain_logs/version_0"


@requires_package("tensorboard")
def test_hyper_parameters_reach_the_tab_and_a_file(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 4, "kinds": ["a"]}})
    logger.finalize("success")
    assert json.loads((Path(logger.log_dir) / "hparams.json").read_text())["net"] == {"width": 4, "kinds": ["a"]}
    tags = _events(logger).summary_metadata
    start = plugin_data_pb2.HParamsPluginData.FromString(
        tags["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info
    assert start.hparams["lr"].number_value == 0.1
    assert start.hparams["net/width"].number_value == 4
    assert start.hparams["net/kinds"].string_value == "['a']"
    assert "hp_metric" in _events(logger).Tags()["scalars"]


@requires_package("tensorboard")
def test_a_logger_in_use_can_be_copied_to_another_process(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=1)
    for copied in (pickle.loads(pickle.dumps(logger)), copy.deepcopy(logger)):
        assert copied.log_dir == logger.log_dir
        copied.finalize("success")
    logger.finalize("success")


@requires_package("tensorboard")
def test_a_graph_is_written(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_graph(torch.nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []
    logger.log_graph(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    logger.finalize("success")
    assert any("weight" in node.name for node in _graph_nodes(logger))


def _graph_nodes(logger: TensorBoardLogger) -> Any:
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    graph = GraphDef()
    graph.ParseFromString(_events(logger)._graph)
    return graph.node


@requires_package("tensorboard")
def test_the_default_is_tensorboard_where_it_is_installed(tmp_path: Path) -> None:
    logger = default_logger(tmp_path)
    assert isinstance(logger, TensorBoardLogger)
    assert logger.log_dir.startswith(str(tmp_path))


def test_without_the_package_the_default_is_csv_and_asking_for_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # G-06
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as Python marks what cannot be imported
    assert isinstance(default_logger(tmp_path), CSVLogger)
    with pytest.raises(ConfigurationError, match="pip install"):
        TensorBoardLogger(tmp_path)


@pytest.mark.slow
def test_the_package_loads_nothing_before_a_name_is_used() -> None:
    # H-02
    code = """
import sys, drivetrain.loggers, drivetrain.callbacks
lazy = {"fsspec", "tensorboard", "rich", "drivetrain.loggers.csv_logger", "drivetrain.callbacks.timer"}
assert not lazy & set(sys.modules), lazy & set(sys.modules)
assert "CSVLogger" in dir(drivetrain.loggers) and "Timer" in dir(drivetrain.callbacks)
from drivetrain.loggers import CSVLogger
from drivetrain.callbacks import RichProgressBar
assert "tensorboard" not in sys.modules and "rich" not in sys.modules
try:
    drivetrain.loggers.CvsLogger
except AttributeError as error:
    assert "CvsLogger" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@requires_package("tensorboard")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_full_disk_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # L-04
    import resource

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
    events = EventAccumulator(str(logger.log_dir), size_guidance={"scalars": 0}).Reload().Scalars("loss")
    assert (events[0].step, events[-1].step, events[-1].value) == (0, 300, 0.5)
