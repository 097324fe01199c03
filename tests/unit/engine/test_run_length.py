"""The length of a run, the data it reads, when it validates, and runs that make no step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader, stream
from small_modules import calling, tiny
from torch.amp import GradScaler

from captured_warnings import captured_warnings
from drivetrain import Callback
from drivetrain.callbacks import Checkpoint, EarlyStopping
from drivetrain.loggers import CSVLogger
from drivetrain.precision import MixedPrecision

BATCHES = 400


def recording_validations(found: list[Any]) -> Callback:
    """A callback that records the epoch and micro-batch of each validation, and the sanity checks."""

    def record(trainer: Any) -> None:
        at = (trainer.current_epoch, trainer.micro_batches)
        found.append("sanity check" if trainer.sanity_checking else at)

    return calling("on_validation_start", record)


def stopping_in(hook: str, step: int = 0) -> Callback:
    """A callback that requests a stop in a hook, from a step on."""

    def stop(trainer: Any) -> None:
        if trainer.global_step >= step and not trainer.sanity_checking:
            trainer.should_stop = True

    return calling(hook, stop)


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({"max_epochs": 2}, 8, 2),
        # L-10: an epoch that was cut short counts
        ({"max_epochs": 2, "max_steps": 3}, 3, 1),
        ({"max_epochs": 2, "max_steps": 4}, 4, 1),  # the epoch was complete
        ({"max_epochs": -1, "max_steps": 6}, 6, 2),
        ({"max_epochs": 0}, 0, 0),
        ({"max_steps": 0}, 0, 0),
        ({"max_epochs": 3, "limit_train_batches": 1}, 3, 3),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 4, 2),
        ({"max_epochs": 2, "limit_train_batches": 1.0}, 8, 2),
        ({"max_epochs": 2, "limit_train_batches": 0}, 0, 0),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 4, 2),
    ],
)
def test_limits_of_training(tmp_path: Path, options: dict[str, Any], steps: int, epochs: int) -> None:
    runner = fit(tmp_path, **options)
    runner.fit(Tiny(), loader(8))
    assert (runner.global_step, runner.current_epoch) == (steps, epochs)
    assert runner.state == "finished"


@pytest.mark.parametrize("stage", ["val", "test", "predict"])
@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (0.25, 1), (1.0, 4), (10, 4), (None, 4), (0, 0)])
def test_limits_of_evaluation(tmp_path: Path, stage: str, limit: Any, batches: int) -> None:
    runner, module = fit(tmp_path, **{f"limit_{stage}_batches": limit}), Tiny()
    if stage == "predict":
        assert len(runner.predict(module, loader(8))) == batches
    else:
        getattr(runner, {"val": "validate"}.get(stage, stage))(module, loader(8), verbose=False)
        assert len(module.evaluated) == batches
    assert getattr(runner, f"num_{stage}_batches") == [batches]


def test_without_another_limit_a_run_has_a_thousand_epochs_and_logs_it_once(tmp_path: Path) -> None:
    runner = fit(tmp_path, max_epochs=None, callbacks=stopping_in("on_train_epoch_end"))
    with captured_warnings() as lines:
        runner.fit(Tiny(), loader(4))
    assert runner.max_epochs == 1000
    assert sum("max_epochs=1000" in line for line in lines) == 1
    runner = fit(tmp_path, max_epochs=None, max_time={"seconds": 0.2})
    began = time.monotonic()
    runner.fit(Tiny(), loader(8))
    assert 0.2 <= time.monotonic() - began < 60
    assert runner.max_epochs is None
    assert runner.global_step > 10


@pytest.mark.parametrize(
    ("hook", "step", "options", "micro_batches"),
    [
        ("on_train_batch_end", 3, {}, 3),
        ("on_train_batch_start", 0, {"accumulate_grad_batches": 3}, 3),  # not within a window
        ("on_train_start", 0, {}, 1),
        ("on_fit_start", 0, {}, 1),
        ("on_train_epoch_end", 0, {}, 4),
        ("on_train_batch_end", 1, {"min_steps": 6}, 6),
        ("on_train_batch_end", 1, {"min_epochs": 2}, 8),
        ("on_train_batch_end", 1, {"min_epochs": 1, "min_steps": 5}, 5),
        ("on_train_epoch_end", 0, {"min_epochs": 3}, 12),
    ],
)
def test_should_stop_ends_the_run_after_the_window_but_not_before_the_minimum(
    tmp_path: Path, hook: str, step: int, options: dict[str, int], micro_batches: int
) -> None:
    runner = fit(tmp_path, max_epochs=5, callbacks=stopping_in(hook, step), **options)
    runner.fit(Tiny(), loader(8))
    assert runner.micro_batches == micro_batches
    assert runner.should_stop


@pytest.mark.parametrize(("hook", "step", "interval"), [("on_train_batch_end", 3, None), ("on_validation_end", 3, 3)])
def test_a_run_that_stops_has_validated_its_weights_once(tmp_path: Path, hook: str, step: int, interval: Any) -> None:
    validations: list[Any] = []
    callbacks = [recording_validations(validations), stopping_in(hook, step)]
    run = fit(tmp_path, max_epochs=5, val_check_interval=interval, callbacks=callbacks)
    run.fit(Tiny(), loader(8), loader(4))
    assert validations == ["sanity check", (0, 3)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train": stream(8), "val_check_interval": 3}, [(0, 3), (1, 7), (2, 11)]),  # of unknown length
        ({}, [(0, 6), (1, 12), (2, 18)]),
        ({"val_check_interval": 6}, [(0, 6), (1, 12), (2, 18)]),
        ({"val_check_interval": 4}, [(0, 4), (1, 10), (2, 16)]),
        ({"val_check_interval": 0.5}, [(0, 3), (0, 6), (1, 9), (1, 12), (2, 15), (2, 18)]),
        ({"val_check_interval": 0.4}, [(0, 2), (0, 4), (0, 6), (1, 8), (1, 10), (1, 12), (2, 14), (2, 16), (2, 18)]),
        ({"check_val_every_n_epoch": 2}, [(1, 12)]),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 3}, [(1, 9), (1, 12)]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4}, [(0, 4), (1, 8), (1, 12), (2, 16)]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 9}, [(1, 9), (2, 18)]),
        ({"limit_train_batches": 2}, [(0, 2), (1, 4), (2, 6)]),
        ({"limit_val_batches": 0}, []),
        ({"check_val_every_n_epoch": 5}, []),
    ],
)
def test_a_run_validates_where_lightning_does(tmp_path: Path, options: dict[str, Any], expected: Any) -> None:
    validations: list[Any] = []
    settings = {"callbacks": recording_validations(validations), "num_sanity_val_steps": 0, **options}
    data = settings.pop("train", loader(12))
    fit(tmp_path, max_epochs=3, **settings).fit(Tiny(), data, loader(4))
    assert validations == expected


def test_training_goes_on_in_its_modes_with_gradients(tmp_path: Path) -> None:
    """A frozen layer stays in eval mode."""
    modes: list[Any] = []

    def look(self: Any, stage: str) -> None:
        modes.append((stage, self.layer.training, self.frozen.training, torch.is_grad_enabled()))

    module = tiny(
        on_train_batch_start=lambda self, batch, batch_idx: look(self, "train"),
        validation_step=lambda self, batch: look(self, "val"),
    )
    module.frozen = torch.nn.Linear(1, 1).eval()
    fit(tmp_path, val_check_interval=1).fit(module, loader(4), loader(2))
    assert set(modes) == {("train", True, False, True), ("val", False, False, False)}


@pytest.mark.parametrize(("steps", "batches"), [(0, 0), (1, 1), (100, 4), (-1, 4)])
def test_the_number_of_sanity_batches(tmp_path: Path, steps: int, batches: int) -> None:
    module = Tiny()
    validations: list[Any] = []
    callback = recording_validations(validations)
    fit(tmp_path, num_sanity_val_steps=steps, max_steps=0, callbacks=callback).fit(module, loader(8), loader(8))
    assert len(module.evaluated) == batches
    assert validations == ["sanity check"] * bool(batches)


@pytest.mark.parametrize(("setting", "batches"), [(2, 2), (0.5, 2), (1.0, 4), (100, 4)])
def test_overfit_trains_on_the_first_batches_in_order(tmp_path: Path, setting: Any, batches: int) -> None:
    module = Tiny()
    runner = fit(tmp_path, max_epochs=2, overfit_batches=setting, num_sanity_val_steps=0)
    runner.fit(module, loader(8, shuffle=True), loader(6))  # L-10: it validates on what it trains on
    expected = [[2 * index, 2 * index + 1] for index in range(batches)]
    assert module.seen == expected * 2
    assert module.evaluated == expected * 2


@pytest.mark.parametrize(("setting", "batches"), [(True, 1), (1, 1), (3, 3)])
def test_fast_dev_run_runs_every_stage_and_writes_nothing(tmp_path: Path, setting: Any, batches: int) -> None:
    module = Tiny()
    logger = CSVLogger(tmp_path / "logs")
    options = {"logger": logger, "num_sanity_val_steps": 2, "max_epochs": 7, "val_check_interval": 2}
    runner = fit(tmp_path, fast_dev_run=setting, overfit_batches=2, **options)
    runner.fit(module, loader(16), loader(16))
    assert (runner.global_step, len(module.evaluated)) == (batches, batches)
    runner.test(module, loader(16), verbose=False)
    assert len(module.evaluated) == 2 * batches
    assert len(runner.predict(module, loader(16))) == batches
    assert runner.loggers == []
    assert list(tmp_path.iterdir()) == []


def test_a_second_fit_of_one_object_starts_afresh(tmp_path: Path) -> None:
    """Its counters, the request to stop, the order of the samples (B-11), and the patience of `EarlyStopping`."""
    stopper = EarlyStopping("val_loss", patience=1)
    runner = fit(tmp_path, max_epochs=9, accumulate_grad_batches=2, callbacks=stopper)
    orders = []
    for _ in range(2):
        module = tiny(validation_step=lambda self, batch: self.log("val_loss", 1.0))
        runner.fit(module, loader(9, shuffle=True), loader(4))
        assert (runner.micro_batches, runner.samples_seen, runner.global_step) == (10, 18, 6)
        assert (runner.current_epoch, runner.should_stop) == (2, True)
        orders.append([number for batch in module.seen for number in batch])
    first, again = orders
    assert first == again
    assert sorted(first[:9]) == sorted(first[9:]) == list(range(9))
    assert first[:9] != first[9:]


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
def test_max_time_ends_the_run_and_the_first_epoch_is_warned_about(tmp_path: Path, kind: Any, options: Any) -> None:
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


def test_an_epoch_that_is_resumed_after_its_only_step_is_not_warned_about(tmp_path: Path) -> None:  # I-05
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
