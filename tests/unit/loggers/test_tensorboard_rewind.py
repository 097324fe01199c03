"""TensorBoardLogger when a run resumes from a checkpoint: TensorBoard shows each step once. J-13"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from services import log_steps

from drivetrain.loggers import TensorBoardLogger
from drivetrain.testing import requires_package

pytestmark = requires_package("tensorboard")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `time.sleep` advance the clock instead: names of event files have a resolution of a second."""
    slept, now = [0.0], time.time
    monkeypatch.setattr("time.time", lambda: now() + sum(slept))
    monkeypatch.setattr("time.sleep", slept.append)


def scalars(folder: str, tag: str = "loss") -> list[tuple[int, float]]:
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
def logger(tmp_path: Path) -> TensorBoardLogger:
    return TensorBoardLogger(tmp_path, version=0)


@pytest.fixture
def again(tmp_path: Path) -> TensorBoardLogger:
    """The logger of the resumed run."""
    return TensorBoardLogger(tmp_path, version=0)


def test_a_killed_run_that_resumes_shows_each_step_once(logger: TensorBoardLogger, again: TensorBoardLogger) -> None:
    # J-13
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


def test_an_open_writer_is_closed_before_the_rewind(tmp_path: Path) -> None:  # J-13
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


def test_another_folder_is_not_rewound(tmp_path: Path, logger: TensorBoardLogger, again: TensorBoardLogger) -> None:
    log_steps(logger, 1, 2).finalize("failed")
    log_steps(TensorBoardLogger(tmp_path, version=1), 1, 2).finalize("failed")
    again.rewind(0)
    again.adopt("version_1")
    log_steps(again, 3).finalize("success")
    assert scalars(again.log_dir) == steps_and_values(1, 2, 3)


def test_a_purge_step_of_the_users_applies_once(tmp_path: Path, logger: TensorBoardLogger) -> None:
    log_steps(logger, *range(12)).finalize("failed")
    purging = TensorBoardLogger(tmp_path, version=0, purge_step=5)
    log_steps(purging, 20).finalize("success")
    log_steps(purging, 21).finalize("success")
    assert scalars(purging.log_dir) == steps_and_values(*range(5), 20, 21)


def test_a_clock_that_is_behind_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "events.out.tfevents.9999999999.host.1.0").touch()
    logger = TensorBoardLogger(tmp_path, name="", version="v")
    logger.rewind(1)
    log_steps(logger, 2).finalize("success")
    assert "ahead of this machine's clock" in caplog.text
