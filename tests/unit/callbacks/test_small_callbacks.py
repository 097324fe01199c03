from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from callback_run import FakeRun

from drivetrain._loops.hooks import HOOKS, HookTable
from drivetrain.callback import Callback
from drivetrain.callbacks import GradientAccumulationScheduler, LambdaCallback, Timer
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

_NO_MODULE: Any = None


# Timer


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("00:12:00:00", 43200), ("1:2:3:4", 93784), (timedelta(minutes=2), 120), ({"hours": 1, "seconds": 5}, 3605)],
)
def test_durations_are_read(duration: Any, seconds: int) -> None:
    assert Timer(duration).duration == timedelta(seconds=seconds)


@pytest.mark.parametrize("duration", ["12:00", "a:b:c:d", {"hour": 1}, timedelta(seconds=-1)])
def test_durations_that_cannot_be_read_are_refused(duration: Any) -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="duration="):
        Timer(duration)


def test_the_timer_asks_for_a_stop_when_time_is_up() -> None:
    run: Any = FakeRun()
    timer = Timer(timedelta(seconds=0.15))
    timer.setup(run, _NO_MODULE, "fit")
    timer.on_train_start(run, _NO_MODULE)
    timer.on_train_batch_end(run, _NO_MODULE, {}, None, 0)
    assert not run.should_stop
    remaining = timer.time_remaining()
    assert remaining is not None
    assert 0 < remaining <= 0.15
    time.sleep(0.16)
    timer.on_train_batch_end(run, _NO_MODULE, {}, None, 1)
    assert run.should_stop
    assert "time of 0:00:00.150000 is up" in run.printed[0]
    timer.on_train_end(run, _NO_MODULE)
    spent = timer.time_elapsed()
    time.sleep(0.02)
    assert timer.time_elapsed() == spent
    start, end = timer.start_time(), timer.end_time()
    assert start is not None
    assert end is not None
    assert 0.15 <= end - start < 5


def test_with_epochs_the_timer_waits_for_their_end() -> None:
    run: Any = FakeRun()
    timer = Timer({"milliseconds": 300}, interval="epoch", verbose=False)
    timer.on_train_start(run, _NO_MODULE)
    time.sleep(0.4)
    timer.on_train_batch_end(run, _NO_MODULE, {}, None, 0)
    assert not run.should_stop
    timer.on_train_epoch_end(run, _NO_MODULE)
    assert run.should_stop
    assert run.printed == []


def test_the_time_of_a_resumed_run_counts() -> None:
    # F-12
    run: Any = FakeRun()
    timer = Timer("00:00:01:00")
    timer.load_state_dict({"time_elapsed": {"train": 61.0, "validate": 2.0, "test": 0.0}})
    timer.on_train_start(run, _NO_MODULE)
    assert run.should_stop
    assert timer.time_elapsed("validate") == 2.0
    assert timer.state_dict()["time_elapsed"]["train"] >= 61.0


def test_stages_are_measured_apart_and_a_failure_stops_the_clock() -> None:
    run: Any = FakeRun()
    timer = Timer()
    assert timer.time_remaining() is None
    timer.on_test_start(run, _NO_MODULE)
    time.sleep(0.02)
    timer.on_test_end(run, _NO_MODULE)
    assert timer.time_elapsed("test") >= 0.02
    assert timer.time_elapsed("train") == 0.0
    timer.on_train_start(run, _NO_MODULE)
    timer.teardown(run, _NO_MODULE, "fit")
    spent = timer.time_elapsed()
    time.sleep(0.02)
    assert timer.time_elapsed() == spent
    run.sanity_checking = True
    timer.on_validation_start(run, _NO_MODULE)
    timer.on_validation_end(run, _NO_MODULE)
    assert timer.start_time("validate") is None
    with pytest.raises(ConfigurationError, match="Did you mean 'train'"):
        timer.time_elapsed("training")


def test_timers_are_told_apart() -> None:
    # F-12
    assert len({Timer().state_key, Timer("00:01:00:00").state_key, Timer(interval="epoch").state_key}) == 3
    with pytest.raises(ConfigurationError, match="interval='steps'"):
        Timer(interval="steps")


# LambdaCallback


def test_only_the_hooks_that_were_given_are_in_the_loop() -> None:
    # H-01
    seen: list[Any] = []
    callback = LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append((trainer, module, batch_idx)),
        setup=lambda trainer, module, stage: seen.append(stage),
        priority=-5,
    )
    assert callback.priority == -5
    run: Any = FakeRun()
    module = TrainModule()
    table = HookTable(run, module, [callback])
    assert {name for name in HOOKS if getattr(table, name)} == {"on_train_batch_end", "setup"}
    table.setup[0]("fit")
    table.on_train_batch_end[0]({}, None, 3)
    assert seen == ["fit", (run, module, 3)]


def test_a_hook_that_does_not_exist_is_refused_with_the_nearest() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="Did you mean 'on_train_epoch_end'"):
        LambdaCallback(on_train_epoch_ends=print)
    with pytest.raises(ConfigurationError, match="not a function"):
        LambdaCallback(on_fit_end="print")  # type: ignore[arg-type]
    assert LambdaCallback(setup=print).state_key != LambdaCallback(teardown=print).state_key
    assert isinstance(LambdaCallback(), Callback)


# GradientAccumulationScheduler


def test_windows_follow_the_schedule_and_the_setting_comes_back() -> None:
    run: Any = FakeRun()
    module: Any = TrainModule()
    scheduler = GradientAccumulationScheduler({4: 2, 1: 8})
    assert [scheduler.window(epoch) for epoch in range(6)] == [1, 8, 8, 8, 2, 2]
    scheduler.setup(run, module, "fit")
    windows = []
    for epoch in range(6):
        run.current_epoch = epoch
        scheduler.on_train_epoch_start(run, module)
        windows.append(run.accumulate_grad_batches)
    assert windows == [1, 8, 8, 8, 2, 2]
    scheduler.teardown(run, module, "fit")
    assert run.accumulate_grad_batches == 1
    # Resumed midway in epoch 2, for which on_train_epoch_start is not called.
    run.current_epoch = 2
    scheduler.setup(run, module, "fit")
    scheduler.on_train_start(run, module)
    assert run.accumulate_grad_batches == 8


@pytest.mark.parametrize("schedule", [{}, {-1: 2}, {0: 0}, {0: 1.5}, {"0": 1}, {True: 2}])
def test_a_schedule_that_makes_no_sense_is_refused(schedule: Any) -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="GradientAccumulationScheduler"):
        GradientAccumulationScheduler(schedule)


def test_two_sayings_about_windows_are_refused() -> None:
    # G-06
    module: Any = TrainModule()
    run: Any = FakeRun(accumulate_grad_batches=4)
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=4"):
        GradientAccumulationScheduler({0: 2}).setup(run, module, "fit")
    module.automatic_optimization = False
    run = FakeRun()
    with pytest.raises(ConfigurationError, match="manual optimization"):
        GradientAccumulationScheduler({0: 2}).setup(run, module, "fit")
    assert GradientAccumulationScheduler({0: 2}).state_key != GradientAccumulationScheduler({0: 3}).state_key
