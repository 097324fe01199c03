"""TensorBoardLogger when a run resumes from a checkpoint: TensorBoard shows each step once. J-13"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drivetrain import Logger
from drivetrain.loggers import CSVLogger, TensorBoardLogger
from drivetrain.testing import requires_package


def logged(logger: Logger, *steps: int, name: str = "loss") -> Logger:
    for step in steps:
        logger.log_metrics({name: step / 2}, step)
    return logger


KILLED = """
import os, signal, sys
from drivetrain.loggers import TensorBoardLogger
logger = TensorBoardLogger(sys.argv[1], version=0)
logger.log_hyperparams({"lr": 0.1})
for step in range(31):
    logger.log_metrics({"loss": float(step)}, step)
logger.save()
os.kill(os.getpid(), signal.SIGKILL)
"""


def scalars(folder: str, tag: str = "loss") -> list[tuple[int, float]]:
    """What TensorBoard shows: as who reads event files in Python finds it, and as its server does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as ServersAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(folder, size_guidance={"scalars": 0}, purge_orphaned_data=True)
    server = ServersAccumulator(folder, tensor_size_guidance={"scalars": 0}, purge_orphaned_data=True)
    for one in (events, server):
        one.Reload()
    read = [(one.step, one.value) for one in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []
    shown = server.Tensors(tag) if tag in server.Tags()["tensors"] else []
    assert read == [(one.step, float(make_ndarray(one.tensor_proto))) for one in shown]
    return read


@requires_package("tensorboard")
class TestTensorBoard:
    """J-13"""

    def test_a_killed_run_that_goes_on_shows_each_step_once(self, tmp_path: Path) -> None:
        killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
        assert killed.returncode == -signal.SIGKILL
        logger = TensorBoardLogger(tmp_path, version=0)
        assert scalars(logger.log_dir) == [(step, float(step)) for step in range(31)]
        logger.rewind(20)
        logger.log_hyperparams({"lr": 0.1})
        for step in range(21, 41):
            logger.log_metrics({"loss": 100.0 + step}, step)
        logger.finalize("success")
        kept = [(step, float(step)) for step in range(21)]
        assert scalars(logger.log_dir) == kept + [(step, 100.0 + step) for step in range(21, 41)]
        assert scalars(logger.log_dir, "hp_metric") == [(0, -1.0)]

    def test_several_times_by_several_objects(self, tmp_path: Path) -> None:
        expected: dict[int, float] = {}
        for number, step in enumerate((-1, 5, 3)):
            logger = TensorBoardLogger(tmp_path, version=0)
            for rewound in (step + 2, step, step + 1):  # nothing comes between them: the lowest holds
                logger.rewind(rewound)
            for at in range(step + 1, 9):
                logger.log_metrics({"loss": number + at / 10}, at)
            logger.finalize("failed")
            expected = {at: value for at, value in expected.items() if at <= step}
            expected |= {at: number + at / 10 for at in range(step + 1, 9)}
            assert scalars(logger.log_dir) == [(at, pytest.approx(value)) for at, value in sorted(expected.items())]  # type: ignore[comparison-overlap]

    def test_an_open_writer_is_closed_first_and_what_it_held_counts(self, tmp_path: Path) -> None:
        logger = TensorBoardLogger(tmp_path, version=0, flush_secs=600)
        logged(logger, 1, 2, 3).rewind(2)
        logged(logger, 3, 4).rewind(3)
        logged(logger, 4)
        logger.finalize("success")
        logged(logger, 5)  # hides nothing of what the same object has written
        logger.finalize("success")
        assert scalars(logger.log_dir) == [(step, step / 2) for step in range(1, 6)]

    @pytest.mark.parametrize(("step", "kept"), [(0, [(0, 0.0)]), (-1, [])])
    def test_from_the_beginning(self, tmp_path: Path, step: int, kept: list[Any]) -> None:
        first = TensorBoardLogger(tmp_path, version=0)
        first.log_hyperparams({"lr": 0.1})
        logged(first, 0, 1).finalize("failed")
        again = TensorBoardLogger(tmp_path, version=0)
        again.rewind(step)
        again.rewind(1)
        again.log_hyperparams({"lr": 0.1})
        logged(again, 1).finalize("failed")
        assert scalars(again.log_dir) == [*kept, (1, 0.5)]
        assert scalars(again.log_dir, "hp_metric") == [(0, -1.0)]

    def test_the_value_that_a_run_gave_hp_metric_stays_the_last(self, tmp_path: Path) -> None:
        first = TensorBoardLogger(tmp_path, version=0)
        first.log_hyperparams({"lr": 0.1})
        first.log_metrics({"hp_metric": 0.5}, 7)
        first.finalize("failed")
        again = TensorBoardLogger(tmp_path, version=0)
        again.rewind(8)
        again.log_hyperparams({"lr": 0.1})
        again.finalize("success")
        assert scalars(again.log_dir, "hp_metric") == [(0, -1.0), (7, 0.5)]

    def test_starting_values_that_are_not_there_yet_are_written(self, tmp_path: Path) -> None:
        logged(CSVLogger(tmp_path, version=0), 1, 2).save()  # the run had another logger
        CSVLogger(tmp_path, version=0).log_hyperparams({"lr": 0.1})
        again = TensorBoardLogger(tmp_path, version=0)
        again.rewind(1)
        again.log_hyperparams({"lr": 0.1})
        logged(again, 2).finalize("success")
        assert scalars(again.log_dir, "hp_metric") == [(0, -1.0)]

    def test_where_nothing_was_written_nothing_is(self, tmp_path: Path) -> None:
        logger = TensorBoardLogger(tmp_path / "logs", version=0)
        logger.rewind(3)
        logger.finalize("success")
        assert list(tmp_path.iterdir()) == []

    def test_another_folder_is_not_rewound(self, tmp_path: Path) -> None:
        logged(TensorBoardLogger(tmp_path, version=0), 1, 2).finalize("failed")
        logged(TensorBoardLogger(tmp_path, version=1), 1, 2).finalize("failed")
        logger = TensorBoardLogger(tmp_path, version=0)
        logger.rewind(0)
        logger.adopt("version_1")
        logged(logger, 3).finalize("success")
        assert [step for step, _ in scalars(logger.log_dir)] == [1, 2, 3]

    def test_a_purge_step_of_the_users_hides_once(self, tmp_path: Path) -> None:
        logged(TensorBoardLogger(tmp_path, version=0), *range(12)).finalize("failed")
        logger = TensorBoardLogger(tmp_path, version=0, purge_step=5)
        logged(logger, 20).finalize("success")
        logged(logger, 21).finalize("success")
        assert [step for step, _ in scalars(logger.log_dir)] == [*range(5), 20, 21]

    def test_the_files_are_read_in_the_order_in_which_they_were_written(self, tmp_path: Path) -> None:
        """Many within a second, and TensorBoard goes by their names."""
        logger = TensorBoardLogger(tmp_path, version=0)
        order: list[str] = []
        for _ in range(2):
            logger.rewind(0)
            logged(logger, 1).save()
            order += [path.name for path in Path(logger.log_dir).iterdir() if path.name not in order]
        logger.finalize("success")
        assert len(order) == 2
        assert order == sorted(order)

    def test_a_clock_that_is_behind_is_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = tmp_path / "v"
        folder.mkdir()
        (folder / "events.out.tfevents.9999999999.host.1.0").touch()
        logger = TensorBoardLogger(tmp_path, name="", version="v")
        logger.rewind(1)
        logged(logger, 2).finalize("success")
        assert "ahead of this machine's clock" in caplog.text
