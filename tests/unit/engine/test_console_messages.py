"""Messages that a run logs: at the right time, once, on rank 0 (I-17)."""

from __future__ import annotations

import logging
import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_case import Regression, Tiny, fit, loader, regression
from small_modules import Logs, calling, linear, logs

from captured_warnings import captured_warnings
from drivetrain import Callback, ConfigurationError, Fit, TrainModule
from drivetrain._runtime import console_logging  # private: a process logs a precision once, and this one has
from drivetrain.callbacks import Checkpoint, EarlyStopping, Timer
from drivetrain.loggers import CSVLogger


def warnings_of(trainer: Fit, module: TrainModule, *loaders: Any) -> list[str]:
    """Return the warnings of a fit."""
    with captured_warnings() as lines:
        trainer.fit(module, *loaders)
    return lines


def ending(trainer: Fit, module: TrainModule, *loaders: Any, **options: Any) -> str:
    """Return the line with which a fit ends."""
    with captured_warnings(logging.INFO) as lines:
        trainer.fit(module, *loaders, **options)
    (line,) = [one for one in lines if "run ended" in one]
    return line


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_epochs": 2}, "max_epochs=2 is reached (2 epochs, 8 optimizer steps)"),
        ({"max_epochs": 1}, "max_epochs=1 is reached (1 epoch, 4 optimizer steps)"),
        ({"max_epochs": 1, "max_steps": 4}, "max_steps=4 and max_epochs=1 are reached (1 epoch, 4 optimizer steps)"),
        ({"max_epochs": -1, "max_steps": 3}, "max_steps=3 is reached (0 epochs, 3 optimizer steps)"),
        ({"max_time": timedelta(microseconds=1)}, "max_time=0:00:00.000001 is up (0 epochs, 1 optimizer step)"),
        ({"limit_train_batches": 0}, "limit_train_batches=0 leaves nothing to train on (0 epochs, 0 optimizer steps)"),
    ],
)
def test_the_limit_that_ended_a_run_is_logged(tmp_path: Path, options: dict[str, Any], reason: str) -> None:  # I-17
    line = ending(fit(tmp_path, **options), Tiny(), loader())
    assert re.fullmatch(re.escape(f"The run ended: {reason} after ") + r"\d\.\d s\.", line)


def test_who_requested_a_stop_is_logged(tmp_path: Path) -> None:  # I-17
    class Enough(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = True

    def request_and_withdraw(trainer: Any) -> None:
        trainer.request_stop("withdrawn")
        trainer.should_stop = False

    timer, withdraws = Timer(timedelta(microseconds=1), verbose=False), calling("on_train_start", request_and_withdraw)
    assert "Timer: the time of 0:00:00.000001 is up" in ending(fit(tmp_path, callbacks=timer), Tiny(), loader())
    assert "Enough.on_train_batch_end" in ending(fit(tmp_path, callbacks=Enough()), Tiny(), loader())
    assert "withdrawn" not in ending(fit(tmp_path, callbacks=withdraws), Tiny(), loader())
    patient = fit(tmp_path, max_epochs=3, callbacks=EarlyStopping("val_loss", patience=2))
    both = "max_epochs=3 is reached; EarlyStopping: val_loss did not improve on 1 by more than 0 in the last 2"
    assert both in ending(patient, Logs(), loader(), loader())


def test_a_process_logs_each_precision_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # L-09
    monkeypatch.setattr(console_logging, "_LOGGED", set())
    with captured_warnings(logging.INFO) as lines:
        for precision in ("32-true", "32-true", "bf16-mixed"):
            fit(tmp_path, precision=precision).fit(Tiny(), loader())
    precisions = [line.partition(":")[0] for line in lines if line.startswith("Precision")]
    assert precisions == ["Precision 32-true", "Precision bf16-mixed"]


class HasMonitorAttribute(Callback):
    """A user's callback with an attribute ``monitor`` of another meaning."""

    monitor, filename, dirpath = "gpu", "{split}.csv", "/proc/data"


AT_THE_END = logs(on_train_epoch_end=lambda self: self.log("at_" + "the_end", 1.0))


@pytest.mark.parametrize(
    ("module", "callback", "options"),
    [
        pytest.param(Logs(), EarlyStopping("val_loss"), {}, id="logged in the sanity check"),
        pytest.param(Logs(), EarlyStopping("loss_epoch"), {}, id="with a suffix"),
        pytest.param(AT_THE_END, EarlyStopping("at_the_end"), {}, id="logged at the end of the epoch"),
        pytest.param(logs(mute=True), EarlyStopping("val_loss"), {}, id="not in the sanity check"),
        pytest.param(Logs(), EarlyStopping("val_loss"), {"num_sanity_val_steps": 0}, id="no sanity check"),
        pytest.param(Logs(), HasMonitorAttribute(), {}, id="an attribute of another meaning"),
    ],
)
def test_a_monitor_is_not_warned_about(tmp_path: Path, module: Logs, callback: Callback, options: Any) -> None:  # I-17
    assert warnings_of(fit(tmp_path, callbacks=callback, **options), module, loader(), loader()) == []


def test_folders_are_probed_in_training_only_and_without_a_trace(tmp_path: Path) -> None:  # I-17
    trainer = fit(tmp_path, callbacks=Checkpoint(dirpath=tmp_path / "a" / "b", save_top_k=0), limit_train_batches=0)
    trainer.fit(Tiny(), loader())
    assert [one.name for one in tmp_path.iterdir()] == ["drivetrain_logs"]  # the run's own
    (tmp_path / "a file").write_text("")
    assert fit(tmp_path, logger=CSVLogger(tmp_path / "a file")).predict(Tiny(), loader())


class Manual(Regression):
    """Manual optimization that steps every so many batches or as the epoch ends; logs its loss and another value."""

    automatic_optimization = False
    every, factor, value, wrapped, at_end = 0, 1.0, 0.0, True, False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        vars(self).update(options)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.log("manual_loss", loss * self.factor)
        self.log("best_so_far", self.value)
        if self.every and (batch_idx + 1) % self.every == 0:
            optimizer = self.optimizers()
            (optimizer if self.wrapped else optimizer.optimizer).step()

    def on_train_epoch_end(self) -> None:
        if self.at_end:
            self.optimizers().step()


class Shifted(Regression):
    """Adds a number per batch to the loss, without changing the gradient."""

    def __init__(self, *numbers: float, from_step: int = 0) -> None:
        super().__init__()
        self.numbers, self.from_step = numbers, from_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        shift = self.numbers[min(batch_idx, len(self.numbers) - 1)]
        return self.loss(batch) + (shift if self.trainer.global_step >= self.from_step else 0.0)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Shifted(math.inf), "In epoch 0 the loss was inf after the first micro-batch, and inf after the last"),
        (Shifted(math.nan, from_step=7), "In epoch 2 "),
        (Manual(every=1, factor=math.nan), "manual_loss was nan"),
        pytest.param(Shifted(math.nan, 0.0), None, id="a single loss is not finite"),
        pytest.param(Manual(every=1, value=math.inf), None, id="another value is not finite"),
        pytest.param(Manual(every=6), None, id="steps rarely"),
        pytest.param(Manual(at_end=True), None, id="steps as the epoch ends"),
        pytest.param(Manual(every=1, wrapped=False), None, id="steps the optimizer itself"),
    ],
)
def test_losses_and_steps_that_are_warned_about(tmp_path: Path, module: Any, named: str | None) -> None:  # I-17
    lines = warnings_of(fit(tmp_path, max_epochs=4), module, regression())
    assert len(lines) == (named is not None)
    assert all(str(named) in line for line in lines)


def _trained(tmp_path: Path, **options: Any) -> str:
    """Train two epochs and return the checkpoint."""
    trainer = fit(tmp_path, max_epochs=2, enable_checkpointing=True, **options)
    trainer.fit(Logs(), loader(), loader())
    assert trainer.checkpoint_callback is not None
    return trainer.checkpoint_callback.last_model_path


def test_resuming_a_finished_run_is_an_error_by_path_and_logged_by_auto(tmp_path: Path) -> None:  # I-17
    path, module = _trained(tmp_path), Logs()
    for asked, options, limit in (
        (path, {"max_epochs": 2}, "max_epochs=2 is reached"),
        ("last", {"max_epochs": 9, "max_steps": 8}, "max_steps=8 is reached"),
    ):
        with pytest.raises(ConfigurationError, match=limit) as caught:
            fit(tmp_path, enable_checkpointing=True, **options).fit(module, loader(), loader(), ckpt_path=asked)
        assert "2 epoch(s) and 8 optimizer step(s)" in caught.value.why
    trainer = fit(tmp_path, max_epochs=2, enable_checkpointing=True)
    line = ending(trainer, module, loader(), loader(), ckpt_path="auto")
    assert line == "The run ended: max_epochs=2 is reached (2 epochs, 8 optimizer steps); nothing was left to train."
    assert module.seen == []
    assert trainer.state == "finished"


def test_a_run_that_stopped_early_is_finished_unless_it_is_more_patient(tmp_path: Path) -> None:  # I-17
    def again(patience: int, ckpt_path: str) -> str:
        callbacks = EarlyStopping("val_loss", patience=patience)
        trainer = fit(tmp_path, callbacks=callbacks, max_epochs=5, enable_checkpointing=True)
        return ending(trainer, Logs(), loader(), loader(), ckpt_path=ckpt_path)

    path = _trained(tmp_path, callbacks=EarlyStopping("val_loss", patience=1))
    with pytest.raises(ConfigurationError, match="EarlyStopping has ended the run: val_loss did not improve"):
        again(1, path)
    assert "EarlyStopping has ended the run" in again(1, "auto")
    assert "max_epochs=5 is reached" in again(9, path)


def test_a_tensor_kept_from_an_evaluation_gets_a_fix(tmp_path: Path) -> None:  # I-17
    def keep(self: Any, batch: Any, batch_idx: int) -> None:
        self.kept = self.layer(batch[0])

    def use(self: Any, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[0]) * self.kept).sum()

    kept, trainer = linear(training_step=use, validation_step=keep), fit(tmp_path)
    trainer.validate(kept, regression(), verbose=False)
    with pytest.raises(RuntimeError, match="Inference tensors") as caught:
        trainer.fit(kept, regression())
    assert any("Fit(inference_mode=False)" in note for note in caught.value.__notes__)
    trainer.fit(linear(training_step=use, validation_step=keep), regression(), regression())  # not in inference mode
