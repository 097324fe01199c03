"""The length of a run, the data it reads, and when it validates."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader, stream
from small_modules import tiny

from drivetrain import Callback, ConfigurationError
from drivetrain.callbacks import EarlyStopping
from drivetrain.loggers import CSVLogger


class Events(Callback):
    """Records the epoch and micro-batch of each validation."""

    priority = 5

    def __init__(self) -> None:
        self.validations: list[tuple[int, int]] = []
        self.sanity: list[bool] = []

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.sanity.append(trainer.sanity_checking)
        if not trainer.sanity_checking:
            self.validations.append((trainer.current_epoch, trainer.micro_batches))


class StopAt(Callback):
    """Requests a stop at a given point."""

    def __init__(self, hook: str, step: int = 0) -> None:
        self._step = step
        setattr(self, hook, self._ask)

    def _ask(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step >= self._step and not trainer.sanity_checking:
            trainer.should_stop = True


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


def test_a_fraction_of_zero_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"limit_train_batches=0.1 of 4 micro-batches rounds down to 0"):
        fit(tmp_path, limit_train_batches=0.1).fit(Tiny(), loader(8))


def test_the_default_of_a_thousand_epochs_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = fit(tmp_path, max_epochs=None, callbacks=StopAt("on_train_epoch_end"))
    with caplog.at_level("WARNING", logger="drivetrain"):
        runner.fit(Tiny(), loader(4))
    assert runner.max_epochs == 1000
    assert len([record for record in caplog.records if "max_epochs=1000" in record.getMessage()]) == 1


def test_max_time(tmp_path: Path) -> None:
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
    runner = fit(tmp_path, max_epochs=5, callbacks=StopAt(hook, step), **options)
    runner.fit(Tiny(), loader(8))
    assert runner.micro_batches == micro_batches
    assert runner.should_stop


@pytest.mark.parametrize(("hook", "step", "interval"), [("on_train_batch_end", 3, None), ("on_validation_end", 3, 3)])
def test_a_run_that_stops_has_validated_its_weights_once(
    tmp_path: Path, hook: str, step: int, interval: int | None
) -> None:
    events = Events()
    options: dict[str, Any] = {"max_epochs": 5, "val_check_interval": interval}
    fit(tmp_path, callbacks=[events, StopAt(hook, step)], **options).fit(Tiny(), loader(8), loader(4))
    assert events.validations == [(0, 3)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train": stream(8), "val_check_interval": 3}, [(0, 3), (1, 7), (2, 11)]),  # of unknown length
        ({}, [(0, 6), (1, 12), (2, 18)]),
        ({"val_check_interval": 6}, [(0, 6), (1, 12), (2, 18)]),
        ({"val_check_interval": 4}, [(0, 4), (1, 10), (2, 16)]),
        ({"val_check_interval": 0.5}, [(0, 3), (0, 6), (1, 9), (1, 12), (2, 15), (2, 18)]),
        (
            {"val_check_interval": 0.4},
            [(0, 2), (0, 4), (0, 6), (1, 8), (1, 10), (1, 12), (2, 14), (2, 16), (2, 18)],
        ),
        ({"check_val_every_n_epoch": 2}, [(1, 12)]),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 3}, [(1, 9), (1, 12)]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4}, [(0, 4), (1, 8), (1, 12), (2, 16)]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 9}, [(1, 9), (2, 18)]),
        ({"limit_train_batches": 2}, [(0, 2), (1, 4), (2, 6)]),
        ({"limit_val_batches": 0}, []),
        ({"check_val_every_n_epoch": 5}, []),
    ],
)
def test_a_run_validates_where_lightning_does(
    tmp_path: Path, options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    events, data = Events(), options.get("train", loader(12))
    settings = {name: value for name, value in options.items() if name != "train"}
    fit(tmp_path, max_epochs=3, callbacks=events, **settings).fit(Tiny(), data, loader(4))
    assert events.validations == expected


@pytest.mark.parametrize(
    ("options", "train", "error"),
    [
        ({"val_check_interval": 7}, loader(12), "val_check_interval=7 is more than the 6 micro-batches"),
        ({"val_check_interval": 0.5}, stream(12), "val_check_interval=0.5 with a training loader of unknown"),
        ({"limit_train_batches": 0.5}, stream(12), "limit_train_batches=0.5 with a loader of unknown length"),
        ({"overfit_batches": 0.5}, stream(12), "overfit_batches=0.5 with a loader of unknown length"),
    ],
)
def test_intervals_that_do_not_fit_the_epoch_are_refused(
    tmp_path: Path, options: dict[str, Any], train: Any, error: str
) -> None:
    """G-06."""
    with pytest.raises(ConfigurationError, match=error):
        fit(tmp_path, **options).fit(Tiny(), train, loader(4))


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
    module, events = Tiny(), Events()
    fit(tmp_path, num_sanity_val_steps=steps, max_steps=0, callbacks=events).fit(module, loader(8), loader(8))
    assert len(module.evaluated) == batches
    assert events.validations == []
    assert events.sanity == [True] * bool(batches)


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
    runner = fit(tmp_path, fast_dev_run=setting, **options)
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
