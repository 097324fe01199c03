"""An error names the position in the run (K-04), and its traceback shows the user's lines, each once (I-17)."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, regression
from small_modules import calling, linear, tiny
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import CheckpointError, ConfigurationError, Fit


class PlannedError(Exception):
    """An error that only these tests raise."""


def failing(method: str, nth: int) -> Regression:
    """A module that raises at the ``nth`` call of a method."""
    calls: list[str] = []

    def call(self: Any, *args: Any) -> Any:
        calls.append(method)
        if len(calls) == nth:
            raise PlannedError
        return self.loss(args[0]) if method == "training_step" else None

    return linear(**{"validation_step": lambda self, batch: None, method: call})


def location_of(run: Any) -> str:
    with pytest.raises(PlannedError) as caught:
        run()
    (note,) = caught.value.__notes__
    assert note.startswith("Where: rank 0")
    return str(note).removeprefix("Where: rank 0")


@pytest.mark.parametrize(
    ("method", "nth", "where"),
    [
        ("training_step", 9, ", epoch 1, global step 8, batch index 2"),
        ("on_train_batch_end", 3, ", epoch 0, global step 3, batch index 2"),
        ("on_train_batch_start", 6, ", epoch 0, global step 5, batch index 5"),  # after a validation
        ("validation_step", 4, ", epoch 0, global step 4, evaluation batch index 3"),
        ("on_validation_end", 1, ", epoch 0, global step 4, after 4 batches of the epoch"),
        ("on_train_epoch_start", 2, ", epoch 1, global step 6"),
        ("on_train_epoch_end", 2, ", epoch 1, global step 12"),
    ],
)
def test_an_error_states_the_location_of_the_run(tmp_path: Path, method: str, nth: int, where: str) -> None:
    run = fit(tmp_path, max_epochs=2, val_check_interval=4, num_sanity_val_steps=0)
    assert location_of(lambda: run.fit(failing(method, nth), regression(), regression())) == where


def test_an_error_of_a_separate_evaluation_states_its_location(tmp_path: Path) -> None:
    run, data = fit(tmp_path), regression()
    assert location_of(lambda: run.validate(failing("validation_step", 3), data)) == ", evaluation batch index 2"
    assert location_of(lambda: run.predict(failing("predict_step", 2), data)) == ", prediction batch index 1"


def test_an_error_of_the_data_names_the_previous_batch(tmp_path: Path) -> None:
    class Breaking(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from [(torch.ones(3), torch.ones(1))] * 5
            raise PlannedError

    data = DataLoader(Breaking(), batch_size=None)
    assert location_of(lambda: fit(tmp_path).fit(Regression(), data)).endswith("batches of the epoch")


# Tracebacks


def frames(error: BaseException) -> list[tuple[str, str]]:
    """Return the file and function of each frame, outermost first."""
    return [(Path(one.filename).name, one.name) for one in traceback.extract_tb(error.__traceback__)]


def test_a_refusal_before_the_run_shows_only_the_call(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Fit(max_epochs=1.5)  # type: ignore[arg-type]
    assert len(frames(caught.value)) == 2
    trainer = fit(tmp_path, strategy="ddp", devices=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(Tiny(), [])
    assert [name for _, name in frames(caught.value)][1:] == ["fit", "_launch"]


def test_frames_of_user_code_are_kept(tmp_path: Path) -> None:
    def logs(module: Any) -> None:
        module.log("note", "no number")

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        logs(self)

    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(tiny(training_step=step), loader())
    names = [name for _, name in frames(caught.value)]
    assert names[-2:] == ["step", "logs"]
    assert len(names) == 5
    assert "Where: rank 0, epoch 0" in "".join(traceback.format_exception(caught.value))


def test_other_errors_keep_their_frames(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        raise ValueError("a mistake of the callback's")

    with pytest.raises(ValueError, match="mistake") as caught:
        fit(tmp_path, callbacks=calling("on_train_start", fail)).fit(Tiny(), loader())
    assert ("session.py", "execute") in frames(caught.value)


def test_mismatched_weights_are_reported_once(tmp_path: Path) -> None:
    trainer, wider = fit(tmp_path), Regression()
    trainer.fit(Regression(), regression())
    trainer.save_checkpoint(tmp_path / "saved")
    wider.more = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"more\.weight") as caught:
        fit(tmp_path, max_epochs=2).fit(wider, regression(), ckpt_path=tmp_path / "saved", allow="optimizer")
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count("do not fit") == 1
    assert frames(caught.value).count(("collective_errors.py", "run_collectively")) == 1
