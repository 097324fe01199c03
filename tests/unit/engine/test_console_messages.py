"""Messages that a run logs: at the right time, once, on rank 0 (I-17)."""

from __future__ import annotations

import logging
import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, regression

from captured_warnings import captured_warnings
from drivetrain import Callback, CheckpointError, ConfigurationError, Fit, RunContext, TrainModule
from drivetrain._runtime import console_logging
from drivetrain.callbacks import Checkpoint, EarlyStopping, Timer
from drivetrain.loggers import CSVLogger


class Logs(Tiny):
    """Logs ``loss`` in training and ``val_loss`` in validation; with ``mute``, not in the sanity check."""

    mute = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if not (self.mute and self.trainer.sanity_checking):
            self.log("val_loss", 1.0)


def logged_messages(
    trainer: Fit, module: TrainModule, *loaders: Any, level: int = logging.WARNING, **options: Any
) -> list[str]:
    """Return the messages that a fit logs at ``level`` and above."""
    with captured_warnings(level) as lines:
        trainer.fit(module, *loaders, **options)
    return lines


def ending(trainer: Fit, module: TrainModule, *loaders: Any, **options: Any) -> str:
    """Return the line with which a run ends."""
    (line,) = [
        one for one in logged_messages(trainer, module, *loaders, level=logging.INFO, **options) if "run ended" in one
    ]
    return line


# Why a run ended


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


def test_early_stopping_logs_its_values(tmp_path: Path) -> None:  # I-17
    stopper = EarlyStopping("val_loss", patience=2)
    line = ending(fit(tmp_path, max_epochs=9, callbacks=stopper), Logs(), loader(), loader())
    assert line.startswith("The run ended: EarlyStopping: val_loss did not improve on 1 by more than 0 in the last 2")
    assert "(3 epochs, 12 optimizer steps)" in line


def test_a_limit_and_a_requested_stop_are_both_logged(tmp_path: Path) -> None:  # I-17
    line = ending(
        fit(tmp_path, max_epochs=3, callbacks=EarlyStopping("val_loss", patience=2)), Logs(), loader(), loader()
    )
    assert "max_epochs=3 is reached; EarlyStopping: val_loss" in line


def test_a_timer_and_a_hook_are_named(tmp_path: Path) -> None:  # I-17
    class Enough(Callback):
        def on_train_batch_end(self, trainer: RunContext, module: TrainModule, *rest: Any) -> None:
            trainer.should_stop = True

    line = ending(fit(tmp_path, callbacks=Timer(timedelta(microseconds=1), verbose=False)), Tiny(), loader())
    assert "Timer: the time of 0:00:00.000001 is up" in line
    assert "Enough.on_train_batch_end" in ending(fit(tmp_path, callbacks=Enough()), Tiny(), loader())


def test_a_withdrawn_stop_is_not_a_reason(tmp_path: Path) -> None:  # I-17
    class Hesitant(Callback):
        def on_train_batch_end(self, trainer: RunContext, module: TrainModule, *rest: Any) -> None:
            trainer.request_stop("a whim")
            trainer.should_stop = False

    assert "whim" not in ending(fit(tmp_path, callbacks=Hesitant()), Tiny(), loader())


def test_a_process_logs_each_precision_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # L-09
    monkeypatch.setattr(console_logging, "_LOGGED", set())
    with captured_warnings(logging.INFO) as lines:
        for precision in ("32-true", "32-true", "bf16-mixed"):
            fit(tmp_path, precision=precision).fit(Tiny(), loader())
    told = [line.partition(":")[0] for line in lines if line.startswith("Precision")]
    assert told == ["Precision 32-true", "Precision bf16-mixed"]


# Monitors


@pytest.mark.parametrize(
    ("callback", "who"),
    [
        (EarlyStopping("val_los"), "EarlyStopping(monitor='val_los')"),
        (Checkpoint(monitor="val_los"), "Checkpoint(monitor='val_los')"),
        (Checkpoint(filename="{epoch}-{val_los:.2f}"), "names 'val_los'"),
    ],
)
def test_a_wrong_monitor_is_warned_about_in_the_first_step(
    tmp_path: Path, callback: Callback, who: str
) -> None:  # I-17
    module = Logs()
    seen: list[int] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if who in record.getMessage():
                seen.append(len(module.seen))

    listener = Listening()
    logging.getLogger("drivetrain").addHandler(listener)
    try:
        with captured_warnings() as lines, pytest.raises(ConfigurationError, match="val_los"):
            fit(tmp_path, callbacks=callback).fit(module, loader(), loader())
    finally:
        logging.getLogger("drivetrain").removeHandler(listener)
    assert seen == [1]  # after one training step of four
    (line,) = [one for one in lines if who in one]
    assert "Did you mean 'val_loss'?" in line


def test_a_schedulers_wrong_monitor_is_warned_about_too(tmp_path: Path) -> None:  # I-17
    class Plateau(Logs):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "losss"}

    with captured_warnings() as lines, pytest.raises(ConfigurationError, match="'losss'"):
        fit(tmp_path).fit(Plateau(), loader())
    assert [line for line in lines if "'monitor': 'losss' of ReduceLROnPlateau: nothing of that name" in line]


class Late(Logs):
    def on_train_epoch_end(self) -> None:
        self.log("at_" + "the_end", 1.0)


class Muted(Logs):
    mute = True


class Staged(Tiny):
    """Logs composed names, and nothing in the sanity check."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(batch, "val")

    def step(self, batch: Any, stage: str) -> Any:
        loss = self.layer(batch).mean()
        if not self.trainer.sanity_checking:
            self.log(f"{stage}_loss", loss, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    ("module", "monitor"),
    [
        (Logs(), "val_loss"),
        (Logs(), "loss_epoch"),
        (Late(), "at_the_end"),
        (Muted(), "val_loss"),
        (Staged(), "val_loss"),
    ],
)
def test_a_name_that_will_be_logged_later_is_not_warned_about(
    tmp_path: Path, module: Logs, monitor: str
) -> None:  # I-17
    lines = logged_messages(fit(tmp_path, callbacks=EarlyStopping(monitor)), module, loader(), loader())
    assert lines == []


def test_without_a_sanity_check_validation_names_are_not_judged(tmp_path: Path) -> None:  # I-17
    trainer = fit(tmp_path, callbacks=EarlyStopping("val_loss"), num_sanity_val_steps=0)
    assert logged_messages(trainer, Logs(), loader(), loader()) == []


class HasMonitorAttribute(Callback):
    """A user's callback with an attribute ``monitor`` of another meaning."""

    def __init__(self, folder: str) -> None:
        self.monitor, self.filename, self.dirpath = "gpu", "{split}.csv", folder


def test_attributes_of_a_users_callback_are_not_interpreted(tmp_path: Path) -> None:  # I-17
    trainer = fit(tmp_path, callbacks=HasMonitorAttribute("/proc/data"))
    assert logged_messages(trainer, Logs(), loader(), loader()) == []


# Folders


def _file(tmp_path: Path) -> Path:
    path = tmp_path / "a file"
    path.write_text("")
    return path


@pytest.mark.parametrize("callback", [True, False])
def test_a_checkpoint_folder_is_probed_before_the_first_step(tmp_path: Path, callback: bool) -> None:  # I-17
    folder, module = _file(tmp_path) / "below", Tiny()
    callbacks = [Checkpoint(dirpath=folder)] if callback else []
    root = tmp_path if callback else folder
    with pytest.raises(ConfigurationError, match=r"Checkpoint cannot write to '.*a file/below.*': .* is not a folder"):
        fit(root, enable_checkpointing=True, callbacks=callbacks).fit(module, loader())
    assert module.seen == []


def test_the_systems_error_is_named(tmp_path: Path) -> None:  # I-17
    module = Tiny()
    with pytest.raises(ConfigurationError, match="Checkpoint cannot write to '/proc/runs': "):
        fit(tmp_path, callbacks=Checkpoint(dirpath="/proc/runs")).fit(module, loader())
    assert module.seen == []


def test_a_loggers_folder_is_probed_too(tmp_path: Path) -> None:  # I-17
    module = Tiny()
    with pytest.raises(ConfigurationError, match="CSVLogger cannot write to"):
        fit(tmp_path, logger=CSVLogger(_file(tmp_path))).fit(module, loader())
    assert module.seen == []


def test_predictions_need_no_loggers_folder(tmp_path: Path) -> None:  # I-17
    class Net(Tiny):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return batch

    assert fit(tmp_path, logger=CSVLogger(_file(tmp_path))).predict(Net(), loader())


def test_probing_a_folder_leaves_no_files(tmp_path: Path) -> None:  # I-17
    trainer = fit(tmp_path, callbacks=Checkpoint(dirpath=tmp_path / "a" / "b", save_top_k=0), limit_train_batches=0)
    trainer.fit(Tiny(), loader())
    assert [one.name for one in tmp_path.iterdir()] == ["drivetrain_logs"]  # the run's own


# Steps


def test_a_validation_step_without_a_loader_is_logged(tmp_path: Path) -> None:  # I-17
    (line,) = logged_messages(fit(tmp_path), Tiny(), loader())
    assert "Tiny has a validation_step, and fit was given no validation loader" in line
    assert logged_messages(fit(tmp_path, limit_val_batches=0), Tiny(), loader()) == []


def test_a_parameter_in_no_optimizer_is_warned_about(tmp_path: Path) -> None:  # I-17
    class Half(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.layer.weight], lr=0.1)

    (line,) = logged_messages(fit(tmp_path, max_epochs=2), Half(), regression())
    assert "1 trainable parameter(s) are in no optimizer: 'layer.bias'" in line


class Manual(Regression):
    """Manual optimization, which steps every so many batches, or never."""

    every = 0

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.log("manual_loss", loss * self.factor)
        if self.every and (batch_idx + 1) % self.every == 0:
            self.optimizers().step()

    factor = 1.0


def test_a_manual_step_that_never_steps_is_warned_about_once(tmp_path: Path) -> None:  # I-17
    (line,) = logged_messages(fit(tmp_path, max_epochs=3), Manual(), regression())
    assert "Manual.training_step went through epoch 0 and did not call step() of any of self.optimizers()" in line


def test_a_manual_step_that_steps_rarely_is_not_warned_about(tmp_path: Path) -> None:  # I-17
    class Seldom(Manual):
        every = 6

    class AtTheEnd(Manual):
        def on_train_epoch_end(self) -> None:
            self.optimizers().step()

    class ByItself(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.optimizers().optimizer.step()

    assert logged_messages(fit(tmp_path), Seldom(), regression()) == []
    assert logged_messages(fit(tmp_path), AtTheEnd(), regression()) == []
    assert logged_messages(fit(tmp_path), ByItself(), regression()) == []


class Shifted(Regression):
    """Adds a number per batch to the loss, without changing the gradient."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = numbers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.numbers[min(batch_idx, len(self.numbers) - 1)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_never_finite_is_warned_about_once(tmp_path: Path, bad: float) -> None:  # I-17
    (line,) = logged_messages(fit(tmp_path, max_epochs=3), Shifted(bad), regression())
    assert f"In epoch 0 the loss was {bad} after the first micro-batch, and {bad} after the last" in line


def test_a_single_bad_loss_is_not_warned_about(tmp_path: Path) -> None:  # I-17
    assert logged_messages(fit(tmp_path), Shifted(math.nan, 0.0), regression()) == []


def test_the_epoch_in_which_it_begins_is_named(tmp_path: Path) -> None:  # I-17
    class From(Shifted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) + (math.nan if self.trainer.global_step >= 7 else 0.0)

    (line,) = logged_messages(fit(tmp_path, max_epochs=4), From(), regression())
    assert "In epoch 2 " in line


def test_in_manual_optimization_the_logged_loss_is_checked(tmp_path: Path) -> None:  # I-17
    class Bad(Manual):
        every, factor = 1, math.nan

    (line,) = logged_messages(fit(tmp_path), Bad(), regression())
    assert "manual_loss was nan" in line


def test_other_logged_values_may_be_infinite(tmp_path: Path) -> None:  # I-17
    class Best(Manual):
        every = 1

        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.log("best_so_far", math.inf)

    assert logged_messages(fit(tmp_path), Best(), regression()) == []


def test_the_first_loss_is_kept_as_it_was(tmp_path: Path) -> None:  # I-17
    class Reuses(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if batch_idx == 0:
                self.kept = loss.detach()
            if batch_idx == 5:
                self.kept.fill_(math.nan)
                loss = loss + math.nan
            return loss

    assert logged_messages(fit(tmp_path), Reuses(), regression()) == []


def test_a_forgotten_return_names_the_step(tmp_path: Path) -> None:  # I-17
    class Forgetful(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    lines = logged_messages(fit(tmp_path, max_epochs=2), Forgetful(), regression())
    assert sum("Forgetful.training_step returned None" in line and "return loss" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("loaders", "which"),
    [
        (([],), "The training loader: list has length 0"),
        ((loader(), []), "The validation loader: list has length 0"),
        ((loader(), [loader(), loader(0)]), "The validation loader 1: DataLoader has no batch"),
    ],
)
def test_the_empty_loader_is_named(tmp_path: Path, loaders: tuple[Any, ...], which: str) -> None:  # I-17
    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(Tiny(), *loaders)
    assert caught.value.what.startswith(which)


# Resuming and loading


def _trained(tmp_path: Path, **options: Any) -> str:
    """Train two epochs and return the checkpoint."""
    trainer = fit(tmp_path, max_epochs=2, enable_checkpointing=True, **options)
    trainer.fit(Logs(), loader(), loader())
    assert trainer.checkpoint_callback is not None
    return trainer.checkpoint_callback.last_model_path


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"max_epochs": 2}, "max_epochs=2 is reached"), ({"max_epochs": 9, "max_steps": 8}, "max_steps=8 is reached")],
)
def test_resuming_a_finished_run_by_path_is_an_error(
    tmp_path: Path, options: dict[str, Any], limit: str
) -> None:  # I-17
    path = _trained(tmp_path)
    for asked in (path, "last"):
        module = Logs()
        with pytest.raises(ConfigurationError, match=limit) as caught:
            fit(tmp_path, enable_checkpointing=True, **options).fit(module, loader(), loader(), ckpt_path=asked)
        assert "2 epoch(s) and 8 optimizer step(s)" in caught.value.why
        assert module.seen == []


def test_resuming_a_finished_run_by_auto_is_logged(tmp_path: Path) -> None:  # I-17
    _trained(tmp_path)
    trainer, module = fit(tmp_path, max_epochs=2, enable_checkpointing=True), Logs()
    line = ending(trainer, module, loader(), loader(), ckpt_path="auto")
    assert line == "The run ended: max_epochs=2 is reached (2 epochs, 8 optimizer steps); nothing was left to train."
    assert module.seen == []
    assert trainer.state == "finished"


def test_a_raised_limit_resumes_training(tmp_path: Path) -> None:  # I-17
    path = _trained(tmp_path)
    trainer = fit(tmp_path, max_epochs=3, enable_checkpointing=True)
    trainer.fit(Logs(), loader(), loader(), ckpt_path=path)
    assert trainer.global_step == 12


def test_a_run_that_stopped_early_is_finished_too(tmp_path: Path) -> None:  # I-17
    def stopper(patience: int = 1) -> EarlyStopping:
        return EarlyStopping("val_loss", patience=patience)

    path = _trained(tmp_path, callbacks=stopper())
    options: dict[str, Any] = {"max_epochs": 5, "enable_checkpointing": True}
    with pytest.raises(ConfigurationError, match="EarlyStopping has ended the run: val_loss did not improve"):
        fit(tmp_path, callbacks=stopper(), **options).fit(Logs(), loader(), loader(), ckpt_path=path)
    module = Logs()
    line = ending(fit(tmp_path, callbacks=stopper(), **options), module, loader(), loader(), ckpt_path="auto")
    assert "EarlyStopping has ended the run" in line
    assert module.seen == []
    patient = fit(tmp_path, callbacks=stopper(9), **options)
    patient.fit(Logs(), loader(), loader(), ckpt_path=path)
    assert patient.current_epoch == 5


@pytest.mark.parametrize("state", [[1, 2], {"stopping_reason": "not yet"}])
def test_the_state_of_a_users_callback_does_not_end_a_run(tmp_path: Path, state: Any) -> None:  # I-17
    class Own(Callback):
        def state_dict(self) -> Any:
            return state

        def load_state_dict(self, state_dict: Any) -> None:
            self.loaded = state_dict

    path, own = _trained(tmp_path, callbacks=Own()), Own()
    trainer = fit(tmp_path, max_epochs=3, callbacks=own)
    trainer.fit(Logs(), loader(), loader(), ckpt_path=path)
    assert trainer.current_epoch == 3
    assert own.loaded == state


class Sized(Regression):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()


def test_a_missing_hyper_parameter_is_named(tmp_path: Path) -> None:  # I-17
    trainer, path = fit(tmp_path), str(tmp_path / "saved")
    trainer.fit(Sized(1, 2), regression())
    trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises(CheckpointError, match="Sized needs 'width', 'depth'") as caught:
        Sized.load_from_checkpoint(path)
    assert "save_hyperparameters()" in caught.value.fix
    assert isinstance(Sized.load_from_checkpoint(path, width=1, depth=2), Sized)
    with pytest.raises(CheckpointError, match="Sized does not take 'height'"):
        Sized.load_from_checkpoint(path, width=1, depth=2, height=3)


def test_a_tensor_kept_from_an_evaluation_gets_a_fix(tmp_path: Path) -> None:  # I-17
    class Keeps(Regression):
        kept: torch.Tensor | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.layer(batch[0]) * self.kept).sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.kept = self.layer(batch[0])

    kept, runner = Keeps(), fit(tmp_path)
    runner.validate(kept, regression(), verbose=False)
    with pytest.raises(RuntimeError, match="Inference tensors") as caught:
        runner.fit(kept, regression())
    assert any("Fit(inference_mode=False)" in note for note in caught.value.__notes__)
    fit(tmp_path).fit(Keeps(), regression(), regression())  # a validation within fit is not in inference mode
