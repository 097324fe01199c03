"""TensorBoardLogger: its files, a full disk, and resumed runs, of which TensorBoard shows each step once (J-13)."""

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
from services import file_size_limit, log_steps

from drivetrain import Fit
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, TensorBoardLogger, tensorboard_logger
from drivetrain.testing import requires_package

pytestmark = requires_package("tensorboard")


def _events(logger: TensorBoardLogger) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(logger.log_dir, size_guidance={"scalars": 0}).Reload()


def test_scalars_are_written_and_nothing_before_the_first(tmp_path: Path) -> None:
    assert isinstance(Fit(accelerator="cpu", default_root_dir=tmp_path).logger, TensorBoardLogger)  # the default
    logger = TensorBoardLogger(tmp_path, prefix="run")
    logger.rewind(3)
    logger.save()
    logger.finalize("success")
    assert list(tmp_path.iterdir()) == []
    for step, loss in ((3, 0.5), (4, 0.25)):  # a second fit continues in the same directory
        logger.log_metrics({"loss": loss}, step)
        for copied in (pickle.loads(pickle.dumps(logger)), copy.deepcopy(logger)):  # as for another process
            assert copied.log_dir == logger.log_dir
            copied.finalize("success")
        logger.finalize("success")
    assert scalars(logger.log_dir, "run-loss") == [(3, 0.5), (4, 0.25)]
    assert logger.log_dir == f"{tmp_path}/drivetrain_logs/version_0"


def test_hyper_parameters_are_in_the_tab_and_in_a_file(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 4, "kinds": ["a"]}})
    logger.finalize("success")
    assert json.loads((Path(str(logger.log_dir)) / "hparams.json").read_text())["net"] == {"width": 4, "kinds": ["a"]}
    events = _events(logger)
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert (hparams["lr"].number_value, hparams["net/width"].number_value) == (0.1, 4)
    assert hparams["net/kinds"].string_value == "['a']"
    assert "hp_metric" in events.Tags()["scalars"]


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_full_disk_does_not_end_a_run(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:  # L-04
    monkeypatch.setattr(tensorboard_logger, "_RETRY_AFTER", 0.0)
    logger = TensorBoardLogger(tmp_path, version=0, max_queue=1)
    logger.log_metrics({"loss": 0.0}, 0)
    logger.save()
    with file_size_limit(1):
        for step in range(1, 200):
            logger.log_metrics({"loss": 1.0}, step)
            time.sleep(0.01)  # the writer's thread may take a while to find out
            if "cannot be written" in caplog.text:
                break
    assert caplog.text.count("cannot be written") == 1
    logger.log_metrics({"loss": 0.5}, 300)
    logger.finalize("success")
    first, *_, last = sorted(scalars(logger.log_dir))  # the names of files of one second have no order
    assert (first, last) == ((0, 0.0), (300, 0.5))


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `time.sleep` advance the clock instead: names of event files have a resolution of a second."""
    slept, now = [0.0], time.time
    monkeypatch.setattr("time.time", lambda: now() + sum(slept))
    monkeypatch.setattr("time.sleep", slept.append)


def scalars(folder: str | None, tag: str = "loss") -> list[tuple[int, float]]:
    """Return what TensorBoard shows: in its reader for Python and, equally, in its server."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServersAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(folder, size_guidance={"scalars": 0}, purge_orphaned_data=True).Reload()
    server = ServersAccumulator(folder, tensor_size_guidance={"scalars": 0}, purge_orphaned_data=True).Reload()
    read = [(one.step, one.value) for one in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []
    shown = server.Tensors(tag) if tag in server.Tags()["tensors"] else []
    assert read == [(one.step, float(make_ndarray(one.tensor_proto))) for one in shown]
    return read


def steps_and_values(*steps: int) -> list[tuple[int, float]]:
    return [(step, step / 2) for step in steps]


@pytest.fixture
def logger(tmp_path: Path, no_waiting: None) -> TensorBoardLogger:
    return TensorBoardLogger(tmp_path, version=0)


@pytest.fixture
def again(tmp_path: Path, no_waiting: None) -> TensorBoardLogger:
    """The logger of the resumed run."""
    return TensorBoardLogger(tmp_path, version=0)


def test_a_killed_run_that_resumes_shows_each_step_once(logger: Any, again: TensorBoardLogger) -> None:  # J-13
    logger.log_hyperparams({"lr": 0.1})
    log_steps(logger, 7, name="hp_metric")
    log_steps(logger, *range(31)).save()  # and the event file is never closed
    assert scalars(again.log_dir) == steps_and_values(*range(31))
    again.rewind(20)
    again.log_hyperparams({"lr": 0.1})
    for step in range(21, 41):
        again.log_metrics({"loss": 100.0 + step}, step)
    again.finalize("success")
    assert scalars(again.log_dir) == steps_and_values(*range(21)) + [(step, 100.0 + step) for step in range(21, 41)]
    assert scalars(again.log_dir, "hp_metric") == [(0, -1.0), (7, 3.5)]  # the logged one stays the last
    logger.finalize("failed")


def test_an_open_writer_is_closed_before_the_rewind(tmp_path: Path, no_waiting: None) -> None:  # J-13
    logger = TensorBoardLogger(tmp_path, version=0, flush_secs=600)
    log_steps(logger, 1, 2, 3).rewind(2)
    log_steps(logger, 3, 4).rewind(3)
    log_steps(logger, 4).finalize("success")
    log_steps(logger, 5).finalize("success")  # hides nothing of what the same object has written
    assert scalars(logger.log_dir) == steps_and_values(1, 2, 3, 4, 5)


@pytest.mark.parametrize(("step", "kept"), [(0, [(0, 0.0)]), (-1, [])])
def test_a_rewind_to_the_beginning(logger: Any, again: Any, step: int, kept: list[Any]) -> None:  # J-13
    logger.log_hyperparams({"lr": 0.1})
    log_steps(logger, 0, 1).finalize("failed")
    again.rewind(step)
    again.rewind(1)
    again.log_hyperparams({"lr": 0.1})
    log_steps(again, 1).finalize("failed")
    assert scalars(again.log_dir) == [*kept, (1, 0.5)]
    assert scalars(again.log_dir, "hp_metric") == [(0, -1.0)]


def test_a_resumed_run_that_had_another_logger_gets_initial_values(tmp_path: Path, again: TensorBoardLogger) -> None:
    CSVLogger(tmp_path, version=0).log_hyperparams({"lr": 0.1})
    again.rewind(1)
    again.log_hyperparams({"lr": 0.1})
    log_steps(again, 2).finalize("success")
    assert scalars(again.log_dir, "hp_metric") == [(0, -1.0)]


def test_another_folder_is_not_rewound(tmp_path: Path, logger: TensorBoardLogger, again: TensorBoardLogger) -> None:
    log_steps(logger, 1, 2).finalize("failed")
    log_steps(TensorBoardLogger(tmp_path, version=1), 1, 2).finalize("failed")
    again.rewind(0)
    again.use_folder(str(tmp_path / "drivetrain_logs" / "version_1"))
    log_steps(again, 3).finalize("success")
    assert scalars(again.log_dir) == steps_and_values(1, 2, 3)


def test_a_purge_step_of_the_users_applies_once(tmp_path: Path, logger: TensorBoardLogger) -> None:
    log_steps(logger, *range(12)).finalize("failed")
    purging = TensorBoardLogger(tmp_path, version=0, purge_step=5)
    log_steps(purging, 20).finalize("success")
    log_steps(purging, 21).finalize("success")
    assert scalars(purging.log_dir) == steps_and_values(*range(5), 20, 21)
