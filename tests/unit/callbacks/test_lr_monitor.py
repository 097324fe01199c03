"""LearningRateMonitor: names of rates, and in which rows they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import Regression, loader, logged_rows, quiet_fit
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from drivetrain import ConfigurationError
from drivetrain.callbacks import LearningRateMonitor
from drivetrain.loggers import CSVLogger


class Several(Regression):
    """Has three optimizers, one of them with two groups, and steps none."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        pass

    def configure_optimizers(self) -> Any:
        self.more = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(4))
        first, second, third, fourth = self.more
        groups = [{"params": [second], "lr": 0.2}, {"params": [third], "lr": 0.3, "name": "head"}]
        return [AdamW([first], lr=0.1), AdamW(groups), SGD([fourth], lr=0.5, momentum=0.9, weight_decay=0.01)]


def test_every_group_of_every_optimizer_has_a_key(tmp_path: Path) -> None:
    rates = {"lr-AdamW": 0.1, "lr-AdamW-1/pg1": 0.2, "lr-AdamW-1/head": 0.3, "lr-SGD": 0.5}
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    fit = quiet_fit(logger=CSVLogger(tmp_path), callbacks=monitor)
    fit.fit(Several(), loader(4))
    more = {"lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.01, "lr-AdamW-momentum": 0.9}
    assert {name: float(fit.callback_metrics[name]) for name in more} == pytest.approx(more)
    assert len(fit.callback_metrics) == 12
    assert monitor.lrs == {name: [value] for name, value in rates.items()}


class Scheduled(Regression):
    """The step after n others has the rate 1 / (n + 1)."""

    def __init__(self, interval: str | None, name: str | None = None) -> None:
        super().__init__()
        self.settings = {"interval": interval, "name": name}

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        if self.settings["interval"] is None:
            return optimizer
        scheduler = LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.settings}}


@pytest.mark.parametrize(
    ("interval", "module", "rates"),
    [
        pytest.param(None, Scheduled("step"), {n: 1 / n for n in (2, 4, 6, 8, 10)}, id="as the scheduler, by steps"),
        pytest.param(None, Scheduled("epoch"), {0: 1.0, 5: 0.5}, id="as the scheduler, by epochs"),
        pytest.param(None, Scheduled(None), {0: 1.0, 5: 1.0}, id="no scheduler"),
        pytest.param("step", Scheduled(None), dict.fromkeys((2, 4, 6, 8, 10), 1.0), id="steps, as asked"),
        pytest.param("epoch", Scheduled("step"), {0: 1.0, 5: 1 / 6}, id="epochs, as asked"),
    ],
)
def test_rates_are_in_the_rows_of_their_steps(
    interval: str | None, module: Scheduled, rates: dict[int, float], tmp_path: Path
) -> None:
    # B-09
    logger, monitor = CSVLogger(tmp_path), LearningRateMonitor(interval)
    fit = quiet_fit(max_epochs=2, accumulate_grad_batches=2, logger=logger, log_every_n_steps=2, callbacks=monitor)
    fit.fit(module, loader())
    rows = [row for row in logged_rows(logger) if row["lr-SGD"]]
    assert {int(row["step"]): float(row["lr-SGD"]) for row in rows} == pytest.approx(rates)
    assert len(rows) == len(rates)
    assert all(row["train_loss"] for row in rows if 2 in rates)  # in the same row


def test_a_scheduler_names_its_rate(tmp_path: Path) -> None:
    monitor = LearningRateMonitor()
    quiet_fit(logger=CSVLogger(tmp_path), callbacks=monitor).fit(Scheduled("epoch", "warmup"), loader(4))
    assert monitor.lrs == {"warmup": [1.0]}


def test_without_a_logger_it_warns_and_does_nothing() -> None:
    monitor = LearningRateMonitor("step")
    with pytest.warns(UserWarning, match="no logger"):
        quiet_fit(callbacks=monitor).fit(Regression(), loader(4))
    assert monitor.lrs == {}


def test_an_unknown_interval_is_refused_with_the_nearest() -> None:
    # G-06
    with pytest.raises(ConfigurationError, match="Did you mean 'step'"):
        LearningRateMonitor("steps")
    assert LearningRateMonitor("step").state_key != LearningRateMonitor("epoch").state_key
