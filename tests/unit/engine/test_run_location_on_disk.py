"""The note on an error with the position in the run. K-04."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, fit, regression
from torch.utils.data import IterableDataset

from drivetrain import Callback


class Boom(Exception):
    """An error that only these tests raise."""


class Failing(Regression):
    """Raises at the ``at``-th call of a method."""

    def __init__(self, method: str, at: int) -> None:
        super().__init__()
        self.calls, self.at = 0, at
        setattr(self, f"_{method}_fails", True)

    def _come_to(self, method: str) -> None:
        if hasattr(self, f"_{method}_fails"):
            self.calls += 1
            if self.calls == self.at:
                raise Boom

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._come_to("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._come_to("validation_step")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self._come_to("predict_step")
        return batch[0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._come_to("on_train_batch_end")

    def on_validation_end(self) -> None:
        self._come_to("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self._come_to("on_train_epoch_end")

    def on_train_epoch_start(self) -> None:
        self._come_to("on_train_epoch_start")


def _where(run: Any) -> str:
    with pytest.raises(Boom) as caught:
        run()
    (note,) = caught.value.__notes__
    assert note.startswith("Where: rank 0")
    return str(note).removeprefix("Where: rank 0")


@pytest.mark.parametrize(
    ("method", "at", "where"),
    [
        ("training_step", 9, ", epoch 1, global step 8, batch index 2"),
        ("on_train_batch_end", 3, ", epoch 0, global step 3, batch index 2"),
        ("validation_step", 4, ", epoch 0, global step 4, evaluation batch index 3"),
        ("on_validation_end", 1, ", epoch 0, global step 4, after 4 batches of the epoch"),
        ("on_train_epoch_start", 2, ", epoch 1, global step 6"),
        ("on_train_epoch_end", 2, ", epoch 1, global step 12"),
    ],
)
def test_an_error_states_the_location_of_the_run(tmp_path: Path, method: str, at: int, where: str) -> None:
    run = fit(tmp_path, max_epochs=2, val_check_interval=4, num_sanity_val_steps=0)
    assert _where(lambda: run.fit(Failing(method, at), regression(), regression())) == where


def test_an_error_of_a_separate_evaluation_states_its_location(tmp_path: Path) -> None:
    data = regression()
    run = fit(tmp_path)
    assert _where(lambda: run.validate(Failing("validation_step", 3), data)) == ", evaluation batch index 2"
    assert _where(lambda: run.predict(Failing("predict_step", 2), data)) == ", prediction batch index 1"


def test_an_error_of_the_data_names_the_previous_batch(tmp_path: Path) -> None:
    class Breaking(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from [(torch.ones(3), torch.ones(1))] * 5
            raise Boom

    data = torch.utils.data.DataLoader(Breaking(), batch_size=None)
    where = _where(lambda: fit(tmp_path).fit(Regression(), data))
    assert where.endswith("batches of the epoch")


def test_a_finished_validation_is_not_a_location(tmp_path: Path) -> None:
    class Counting(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:  # after a validation
                raise Boom

    run = fit(tmp_path, val_check_interval=4, num_sanity_val_steps=0, callbacks=Counting())
    where = _where(lambda: run.fit(Failing("nothing", 0), regression(), regression()))
    assert where == ", epoch 0, global step 5, batch index 5"
