from __future__ import annotations

from typing import Any

import pytest
import torch
from callback_run import FakeRun
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from drivetrain._loops.configured_optimizers import SchedulerConfig
from drivetrain.callbacks import LearningRateMonitor
from drivetrain.errors import ConfigurationError


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(2)]


def _rates(run: FakeRun, **options: Any) -> dict[str, float]:
    trainer: Any = run
    return LearningRateMonitor(**options).rates(trainer)


def test_every_group_of_every_optimizer_has_a_key() -> None:
    first, second = _parameters(), _parameters()
    run = FakeRun(
        optimizers=[
            AdamW(first, lr=0.1),
            AdamW([{"params": [second[0]], "lr": 0.2}, {"params": [second[1]], "lr": 0.3, "name": "head"}]),
            SGD(_parameters(), lr=0.5, momentum=0.9, weight_decay=0.01),
        ]
    )
    assert _rates(run) == {"lr-AdamW": 0.1, "lr-AdamW-1/pg1": 0.2, "lr-AdamW-1/head": 0.3, "lr-SGD": 0.5}
    more = _rates(run, log_momentum=True, log_weight_decay=True)
    assert more["lr-SGD-momentum"] == 0.9
    assert more["lr-SGD-weight_decay"] == 0.01
    assert more["lr-AdamW-momentum"] == 0.9
    assert len(more) == 12


def test_a_scheduler_names_its_optimizer() -> None:
    optimizer = SGD(_parameters(), lr=torch.tensor(0.5))
    run = FakeRun(optimizers=[optimizer], scheduler_configs=[SchedulerConfig(StepLR(optimizer, 1), name="warmup")])
    assert _rates(run) == {"warmup": 0.5}


def _train(run: FakeRun, monitor: LearningRateMonitor, epochs: int, batches: int, window: int) -> None:
    trainer: Any = run
    module: Any = None
    monitor.on_train_start(trainer, module)
    for epoch in range(epochs):
        run.current_epoch = epoch
        monitor.on_train_epoch_start(trainer, module)
        for index in range(batches):
            monitor.on_train_batch_start(trainer, module, None, index)
            if (index + 1) % window == 0:
                run.global_step += 1
                for config in run.scheduler_configs:
                    if config.interval == "step":
                        config.scheduler.optimizer.step()
                        config.scheduler.step()


def test_with_steps_it_logs_the_rate_that_each_logged_step_was_made_with() -> None:
    optimizer = SGD(_parameters(), lr=1.0)
    scheduler = SchedulerConfig(StepLR(optimizer, 1, gamma=0.5), interval="step")
    run = FakeRun(optimizers=[optimizer], scheduler_configs=[scheduler], log_every_n_steps=2)
    _train(run, LearningRateMonitor(), epochs=1, batches=12, window=3)
    assert run.logged == [(2, {"lr-SGD": 0.5}), (4, {"lr-SGD": 0.125})]


def test_with_epochs_it_logs_at_each_start() -> None:
    optimizer = SGD(_parameters(), lr=1.0)
    run = FakeRun(optimizers=[optimizer], log_every_n_steps=1)
    _train(
        run, LearningRateMonitor(), epochs=3, batches=2, window=1
    )  # no scheduler: rates do not change within an epoch
    assert [step for step, _ in run.logged] == [0, 2, 4]
    run = FakeRun(optimizers=[optimizer], log_every_n_steps=1)
    _train(run, LearningRateMonitor("step"), epochs=1, batches=2, window=1)
    assert [step for step, _ in run.logged] == [1, 2]


def test_without_a_logger_it_says_so_once_and_does_nothing() -> None:
    run = FakeRun(optimizers=[SGD(_parameters(), lr=1.0)], loggers=[])
    with pytest.warns(UserWarning, match="no logger"):
        _train(run, LearningRateMonitor("step"), epochs=1, batches=2, window=1)
    assert run.logged == []


def test_an_unknown_interval_is_refused_with_the_nearest() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="Did you mean 'step'"):
        LearningRateMonitor("steps")
    assert LearningRateMonitor("step").state_key != LearningRateMonitor("epoch").state_key
