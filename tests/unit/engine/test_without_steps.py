"""A run that makes no step: it stops when requested, and warns. Row I-05."""

from __future__ import annotations

import os
import signal
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


class NoLoss(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return None


class Overflowing(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float("nan")


class OverflowingByHand(Tiny):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).mean() * float("nan"))
        optimizer.step()


def weightless() -> Tiny:
    return tiny(batch_weight=lambda self, batch: 0.0)


def never_stepping() -> Tiny:
    return tiny(optimizer_step=lambda self, *args: None)


def skipping_epochs() -> Tiny:
    return tiny(on_train_batch_start=lambda self, batch, batch_idx: -1)


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (NoLoss, {"accumulate_grad_batches": 4}),
    (Overflowing, {"precision": "16-mixed"}),
    (weightless, {}),
    (never_stepping, {}),
]


def after_four(how: str) -> Callback:
    """A callback that ends the run after the fourth micro-batch, by should_stop or by a signal."""

    def stop(trainer: Any) -> None:
        if trainer.batch_idx == 4 and how == "should_stop":
            trainer.should_stop = True
        elif trainer.batch_idx == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    return calling("on_train_batch_end", stop)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_run_ends_after_the_window(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    # I-05
    run = fit(tmp_path, callbacks=after_four("should_stop"), **options)
    run.fit(kind(), loader(BATCHES, 1))
    assert (run.micro_batches, run.global_step) == (4, 0)
    run = fit(tmp_path, callbacks=after_four("signal"), **options)
    with pytest.raises(SystemExit):
        run.fit(kind(), loader(BATCHES, 1))
    assert (run.micro_batches, run.global_step) == (4, 0)


@pytest.mark.parametrize(("kind", "options"), [*KINDS, (skipping_epochs, {})])
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


def test_an_endless_stream_can_be_stopped(tmp_path: Path) -> None:
    # I-05
    run = fit(tmp_path, max_epochs=-1, max_time=timedelta(milliseconds=50))
    run.fit(NoLoss(), stream(10**9, 1))
    assert run.global_step == 0


def test_a_preempted_run_saves_and_resumes(tmp_path: Path) -> None:
    # I-05: with the progress of training, including the position in the data.
    run = fit(tmp_path, callbacks=[after_four("signal"), Checkpoint(tmp_path / "c")])
    with pytest.raises(SystemExit):
        run.fit(NoLoss(), loader(8, 1))
    module = NoLoss()
    resumed = fit(tmp_path, callbacks=Checkpoint(tmp_path / "c"))
    resumed.fit(module, loader(8, 1), ckpt_path="auto")
    assert module.seen == [[4], [5], [6], [7]]
    assert resumed.micro_batches == 8


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


@pytest.mark.parametrize("kind", [Overflowing, OverflowingByHand])
def test_a_scale_at_its_floor_is_logged_once_and_is_not_zero(tmp_path: Path, kind: type[Tiny]) -> None:
    # I-05: torch's GradScaler would halve it down to 0, from which it cannot recover.
    scaler = GradScaler("cpu")
    with captured_warnings() as lines:
        fit(tmp_path, precision=MixedPrecision("16-mixed", "cpu", scaler)).fit(kind(), loader(BATCHES, 1))
    (warning,) = [line for line in lines if "loss scale" in line]
    assert "2^-24" in warning
    assert scaler.get_scale() == 2.0**-24


def test_training_recovers_after_many_overflows(tmp_path: Path) -> None:
    # I-05: from the floor the scale grows again.
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch / 1000).mean() * (float("nan") if batch_idx < 300 else 1)

    run = fit(tmp_path, precision=MixedPrecision("16-mixed", "cpu", GradScaler("cpu", growth_interval=2)))
    run.fit(tiny(training_step=step), loader(BATCHES, 1))
    assert run.global_step >= 90


def test_a_slightly_reduced_scale_is_not_warned_about(tmp_path: Path) -> None:
    # I-05
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).mean() * (float("inf") if batch_idx % 20 == 0 else 1)

    scaler = GradScaler("cpu")
    with captured_warnings() as lines:
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        fit(tmp_path, precision=precision).fit(tiny(training_step=step), loader(100, 1))
    assert 1 <= scaler.get_scale() < 2.0**16
    assert not [line for line in lines if "loss scale" in line]
