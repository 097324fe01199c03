"""A run that makes no step: it stops when requested, and warns. Row I-05."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_case import Tiny, fit, loader, stream
from torch.amp import GradScaler

from drivetrain import Callback
from drivetrain.precision import MixedPrecision

BATCHES = 400


class NoLoss(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return None


class Overflowing(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float("nan")


class Weightless(Tiny):
    def batch_weight(self, batch: Any) -> float:
        return 0.0


class Unwilling(Tiny):
    """Its own `optimizer_step` never steps."""

    def optimizer_step(self, *args: Any) -> None:
        return None


class SkipsEpochs(Tiny):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class ByHand(Tiny):
    """Overflows in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx) * float("nan"))
        optimizer.step()


class At(Callback):
    """Calls a function after the ``batch``-th micro-batch."""

    def __init__(self, batch: int, call: Callable[[Any], None]) -> None:
        self.batch, self.call = batch, call

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch - 1:
            self.call(trainer)


KINDS: list[tuple[type[Tiny], dict[str, Any]]] = [
    (NoLoss, {}),
    (Overflowing, {"precision": "16-mixed"}),
    (Weightless, {}),
    (Unwilling, {}),
    (NoLoss, {"accumulate_grad_batches": 4}),
]


def _stop(trainer: Any) -> None:
    trainer.should_stop = True


def _terminate(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_should_stop_ends_the_run_after_the_window(tmp_path: Path, kind: type[Tiny], options: dict[str, Any]) -> None:
    # I-05
    run = fit(tmp_path, callbacks=At(4, _stop), **options)
    run.fit(kind(), loader(BATCHES, 1))
    assert (run.micro_batches, run.global_step) == (4, 0)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_signal_ends_the_run_after_the_window(tmp_path: Path, kind: type[Tiny], options: dict[str, Any]) -> None:
    # I-05
    run = fit(tmp_path, callbacks=At(4, _terminate), **options)
    with pytest.raises(SystemExit):
        run.fit(kind(), loader(BATCHES, 1))
    assert (run.micro_batches, run.global_step) == (4, 0)


@pytest.mark.parametrize(("kind", "options"), [*KINDS, (SkipsEpochs, {})])
def test_max_time_ends_the_run(tmp_path: Path, kind: type[Tiny], options: dict[str, Any]) -> None:
    # I-05: including an epoch in which every batch returns -1, which can only be stopped at its end.
    run = fit(tmp_path, max_epochs=300, max_time=timedelta(milliseconds=50), **options)
    run.fit(kind(), loader(BATCHES, 1))
    assert run.should_stop
    assert run.current_epoch < 300
    assert run.global_step == 0


def test_a_preempted_run_saves_and_resumes(tmp_path: Path) -> None:
    # I-05: with the progress of training, including the position in the data.
    from drivetrain.callbacks import Checkpoint

    options: dict[str, Any] = {"enable_checkpointing": True}
    run = fit(tmp_path, callbacks=[At(4, _terminate), Checkpoint(tmp_path / "c")], **options)
    with pytest.raises(SystemExit):
        run.fit(NoLoss(), loader(8, 1))
    module = NoLoss()
    resumed = fit(tmp_path, callbacks=Checkpoint(tmp_path / "c"), **options)
    resumed.fit(module, loader(8, 1), ckpt_path="auto")
    assert module.seen == [[4], [5], [6], [7]]
    assert resumed.micro_batches == 8


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "drivetrain" and one.levelno == logging.WARNING]


@pytest.mark.parametrize(("kind", "options"), [*KINDS, (SkipsEpochs, {})])
def test_an_epoch_without_steps_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Tiny], options: dict[str, Any]
) -> None:
    # I-05
    fit(tmp_path, max_epochs=3, **options).fit(kind(), loader(8, 1))
    (said,) = [one for one in warned(caplog) if "without an optimizer step" in one]
    assert "epoch 0" in said


def test_an_epoch_with_one_step_is_not_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # I-05: nor an epoch resumed after its only step.
    class Once(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if batch_idx == 0 else None

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(str(tmp_path / "saved"))

    fit(tmp_path, callbacks=Saving()).fit(Once(), loader(8, 1))
    fit(tmp_path, limit_train_batches=0).fit(Once(), loader(8, 1))
    module = Once()
    fit(tmp_path).fit(module, loader(8, 1), ckpt_path=str(tmp_path / "saved"))
    assert len(module.seen) == 6
    assert not [one for one in warned(caplog) if "optimizer step" in one]


@pytest.mark.parametrize("kind", [Overflowing, ByHand])
def test_a_scale_at_its_floor_is_logged_once_and_is_not_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Tiny]
) -> None:
    # I-05: previously GradScaler halved it down to 0, from which it cannot recover.
    scaler = GradScaler("cpu")
    run = fit(tmp_path, precision=MixedPrecision("16-mixed", "cpu", scaler))
    run.fit(kind(), loader(BATCHES, 1))
    (said,) = [one for one in warned(caplog) if "loss scale" in one]
    assert "2^-24" in said
    assert scaler.get_scale() == 2.0**-24


def test_training_recovers_after_many_overflows(tmp_path: Path) -> None:
    # I-05: from the floor the scale grows again.
    class Recovering(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch / 1000, batch_idx)
            return loss * float("nan") if batch_idx < 300 else loss

    run = fit(tmp_path, precision=MixedPrecision("16-mixed", "cpu", GradScaler("cpu", growth_interval=2)))
    run.fit(Recovering(lr=1e-4), loader(BATCHES, 1))
    assert run.global_step >= 90


def test_a_slightly_reduced_scale_is_not_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # I-05
    class Seldom(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx % 20 == 0 else loss

    scaler = GradScaler("cpu")
    fit(tmp_path, precision=MixedPrecision("16-mixed", "cpu", scaler)).fit(Seldom(), loader(100, 1))
    assert 1 <= scaler.get_scale() < 2.0**16
    assert not [one for one in warned(caplog) if "loss scale" in one]


def test_an_endless_stream_without_steps_can_be_stopped(tmp_path: Path) -> None:
    # I-05
    run = fit(tmp_path, max_epochs=-1, max_time=timedelta(milliseconds=50))
    run.fit(NoLoss(), stream(10**9, 1))
    assert run.global_step == 0
