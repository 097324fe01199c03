"""Loggers that are reused, or used before a run, do not mix files of several folders: J-13."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_case import Net, data, edit, fit, folders, rows, trained

from drivetrain.callbacks import Checkpoint
from drivetrain.loggers import CSVLogger, TensorBoardLogger


class Wide(Net):
    """Logs an additional value first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("first", 5.0)
        return super().training_step(batch, batch_idx)


def test_a_reused_logger_starts_a_new_table(tmp_path: Path) -> None:
    # J-13: of the first run's columns, and at a URL of its rows too
    logger = CSVLogger(tmp_path)
    trained(tmp_path, module=Wide(), logger=logger)
    again = trained(tmp_path, logger=logger)
    assert list(rows(again.log_dir)[0]) == ["step", "epoch", "loss_step", "loss_epoch"]


def test_a_logger_that_continues_in_another_folder_reads_its_table(tmp_path: Path) -> None:
    # J-13: previously values were written to the wrong columns
    wide = fit(tmp_path, callbacks=Checkpoint(every_n_train_steps=2), max_steps=4)
    wide.fit(Wide(), data())
    folder = Path(str(wide.log_dir))
    edit(folder, module="run_case.Net")
    logger = CSVLogger(tmp_path, version="another")
    logger.log_metrics({"loss_step": 1.0}, 1)
    logger.save()
    logger.adopt(folder.name)
    logger.rewind(4)
    logger.log_metrics({"loss_step": 9.0}, 5)
    logger.save()
    assert (rows(folder)[-1]["step"], rows(folder)[-1]["loss_step"], rows(folder)[-1]["first"]) == ("5", "9.0", "")


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_values_logged_before_the_run_are_in_its_folder(tmp_path: Path, kind: Any) -> None:
    # J-13: previously it stayed in version_0, while the run was in version_1
    logger = kind(tmp_path)
    logger.log_hyperparams({"of": "the script"})
    assert folders(tmp_path) == ["version_0"]
    trained(tmp_path, logger=logger)
    assert folders(tmp_path) == ["version_0"]
    trained(tmp_path, logger=logger)
    assert folders(tmp_path) == ["version_0", "version_1"]
