"""A run that makes no step: it stops when requested, and warns. Row I-05."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_case import Tiny, fit, loader, stream
from small_modules import calling, tiny
from torch.amp import GradScaler

from captured_warnings import captured_warnings
from drivetrain import Callback
from drivetrain.callbacks import Checkpoint
from drivetrain.precision import MixedPrecision

BATCHES = 400


def returning(value: float | None, **methods: Any) -> Tiny:
    """A module whose loss is the mean of its output times ``value``, or None."""

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = Tiny.training_step(self, batch, batch_idx)
        return None if value is None else loss * value

    return tiny(training_step=step, **methods)


def overflowing_by_hand() -> Tiny:
    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.layer(batch).mean() * float("nan"))
        self.optimizers().step()

    return tiny(training_step=step, automatic_optimization=False)


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (lambda: returning(None), {"accumulate_grad_batches": 4}),
    (lambda: returning(float("nan")), {"precision": "16-mixed"}),
    (lambda: returning(1.0, batch_weight=lambda self, batch: 0.0), {}),
    (lambda: returning(1.0, optimizer_step=lambda self, *args: None), {}),
]
SKIPPED_EPOCHS: tuple[Any, dict[str, Any]] = (
    lambda: returning(1.0, on_train_batch_start=lambda self, batch, batch_idx: -1),
    {},
)


def after_four(act: Callable[[Any], object]) -> Callback:
    """A callback that acts after the fourth micro-batch."""
    return calling("on_train_batch_end", lambda trainer: act(trainer) if trainer.batch_idx == 4 else None)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_run_ends_after_the_window_and_resumes(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    # I-05: with the progress of training, including the position in the data.
    stopping = after_four(lambda trainer: setattr(trainer, "should_stop", True))
    run = fit(tmp_path, callbacks=stopping, **options)
    run.fit(kind(), loader(BATCHES, 1))
    assert (run.micro_batches, run.global_step) == (4, 0)
    preempted = after_four(lambda trainer: os.kill(os.getpid(), signal.SIGTERM))
    run = fit(tmp_path, callbacks=[preempted, Checkpoint(tmp_path / "c")], **options)
    with pytest.raises(SystemExit):
        run.fit(kind(), loader(8, 1))
    assert (run.micro_batches, run.global_step) == (4, 0)
    module = kind()
    run = fit(tmp_path, callbacks=Checkpoint(tmp_path / "c"), **options)
    run.fit(module, loader(8, 1), ckpt_path="auto")
    assert module.seen == [[4], [5], [6], [7]]
    assert run.micro_batches == 8


@pytest.mark.parametrize(("kind", "options"), [*KINDS, SKIPPED_EPOCHS])
def test_max_time_ends_the_run_and_the_first_epoch_is_warned_about(
    tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    # I-05: including an epoch in which every batch returns -1, which can only be stopped at its end.
    run = fit(tmp_path, max_epochs=3000, max_time=timedelta(milliseconds=200), **options)
    with captured_warnings() as lines:
        run.fit(kind(), loader(8, 1))
    assert run.should_stop
    assert 1 < run.current_epoch < 3000
    assert run.global_step == 0
    (warning,) = [line for line in lines if "without an optimizer step" in line]
    assert "epoch 0" in warning
    run = fit(tmp_path, max_epochs=-1, max_time=timedelta(milliseconds=50), **options)
    run.fit(kind(), stream(BATCHES if kind is SKIPPED_EPOCHS[0] else 10**9, 1))
    assert run.global_step == 0


def test_an_epoch_that_is_resumed_after_its_only_step_is_not_warned_about(tmp_path: Path) -> None:
    # I-05
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        return self.layer(batch).mean() if batch_idx == 0 else None

    def save(trainer: Any) -> None:
        if trainer.batch_idx == 2:
            trainer.save_checkpoint(str(tmp_path / "saved"))

    module = tiny(training_step=step)
    with captured_warnings() as lines:
        fit(tmp_path, callbacks=calling("on_train_batch_end", save)).fit(tiny(training_step=step), loader(8, 1))
        fit(tmp_path, limit_train_batches=0).fit(Tiny(), loader(8, 1))
        fit(tmp_path).fit(module, loader(8, 1), ckpt_path=str(tmp_path / "saved"))
    assert len(module.seen) == 6
    assert not [line for line in lines if "optimizer step" in line]


def fp16(scaler: GradScaler) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler)


@pytest.mark.parametrize("module", [returning(float("nan")), overflowing_by_hand()])
def test_a_scale_at_its_floor_is_logged_once_and_is_not_zero(tmp_path: Path, module: Tiny) -> None:
    # I-05: torch's GradScaler would halve it down to 0, from which it cannot recover.
    scaler = GradScaler("cpu")
    with captured_warnings() as lines:
        fit(tmp_path, precision=fp16(scaler)).fit(module, loader(BATCHES, 1))
    (warning,) = [line for line in lines if "loss scale" in line]
    assert "2^-24" in warning
    assert scaler.get_scale() == 2.0**-24


def test_training_recovers_after_many_overflows_and_a_few_are_not_warned_about(tmp_path: Path) -> None:
    # I-05: from the floor the scale grows again.
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        overflows = batch_idx < 300 if self.many else batch_idx % 20 == 0
        return self.layer(batch / 1000).mean() * (float("nan") if overflows else 1)

    run = fit(tmp_path, precision=fp16(GradScaler("cpu", growth_interval=2)))
    run.fit(tiny(training_step=step, many=True), loader(BATCHES, 1))
    assert run.global_step >= 90
    scaler = GradScaler("cpu")
    with captured_warnings() as lines:
        fit(tmp_path, precision=fp16(scaler)).fit(tiny(training_step=step, many=False), loader(100, 1))
    assert 1 <= scaler.get_scale() < 2.0**16
    assert not [line for line in lines if "loss scale" in line]
