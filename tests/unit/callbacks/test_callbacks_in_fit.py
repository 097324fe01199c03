"""Every callback in a real run, in one process."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import Regression, loader, quiet_fit
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, ConfigurationError, NonFiniteError
from drivetrain.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    LossSpikeGuard,
    NonFiniteGuard,
    ReplicaCheck,
    ThroughputMonitor,
    Timer,
)
from drivetrain.loggers import CSVLogger


class _Scripted(Regression):
    """Logs the given validation losses, one per validation."""

    def __init__(self, script: list[float]) -> None:
        super().__init__()
        self.script = script
        self.validations = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(self.script[min(self.validations, len(self.script) - 1)]))

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations += 1


def _rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(f"{logger.log_dir}/metrics.csv", newline="") as stream:
        return list(csv.DictReader(stream))


# EarlyStopping


def test_training_stops_when_validation_stops_improving() -> None:
    module = _Scripted([3.0, 2.0, 2.5, 2.5, 1.0])
    stopping = EarlyStopping("val_loss", patience=2)
    fit = quiet_fit(max_epochs=10, callbacks=[stopping], num_sanity_val_steps=1)
    fit.fit(module, loader(), loader(8))
    assert fit.current_epoch == 4
    assert fit.global_step == 40
    assert stopping.stopped_epoch == 3
    assert stopping.best_score == 2.0


def test_with_several_validations_an_epoch_each_is_a_check_and_the_epoch_is_not_finished() -> None:
    module = _Scripted([3.0, 2.0, 2.5, 2.5, 1.0])
    fit = quiet_fit(max_epochs=10, val_check_interval=5, callbacks=[EarlyStopping("val_loss", patience=1)])
    fit.fit(module, loader(), loader(8))
    assert fit.global_step == 15  # two validations in epoch 0, and the bad one after 5 more batches


def test_what_the_module_logs_in_its_own_epoch_hook_can_be_monitored() -> None:
    class _Late(Regression):
        def on_train_epoch_end(self) -> None:
            self.log("late", float("nan"))

    fit = quiet_fit(max_epochs=5, callbacks=[EarlyStopping("late")])
    fit.fit(_Late(), loader())
    assert fit.current_epoch == 1


def test_a_training_metric_is_monitored_without_validation() -> None:
    fit = quiet_fit(max_epochs=10, callbacks=[EarlyStopping("train_loss", stopping_threshold=1e9)])
    fit.fit(Regression(), loader())
    assert fit.current_epoch == 1


def test_a_key_that_nobody_logs_ends_the_run_with_the_nearest_name() -> None:
    # G-06
    fit = quiet_fit(max_epochs=2, callbacks=[EarlyStopping("val_los")])
    with pytest.raises(ConfigurationError, match="Did you mean 'val_loss'"):
        fit.fit(Regression(), loader(), loader(8))


def test_min_epochs_holds_against_an_early_stop() -> None:
    fit = quiet_fit(max_epochs=10, min_epochs=4, callbacks=[EarlyStopping("val_loss", patience=1)])
    fit.fit(_Scripted([1.0, 2.0, 3.0]), loader(), loader(8))
    assert fit.current_epoch == 4


# LearningRateMonitor, ThroughputMonitor: logged rows


class _Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_rates_stand_in_the_rows_of_the_steps_they_made(tmp_path: Path) -> None:
    # B-09
    logger = CSVLogger(tmp_path)
    fit = quiet_fit(
        max_epochs=2, accumulate_grad_batches=2, logger=logger, log_every_n_steps=2, callbacks=[LearningRateMonitor()]
    )
    fit.fit(_Scheduled(), loader())
    rows = [row for row in _rows(logger) if row["lr-SGD"]]
    # Step n uses the rate 1/n: the scheduler steps after it.
    assert [(int(row["step"]), float(row["lr-SGD"])) for row in rows] == [  # type: ignore[comparison-overlap]
        (n, pytest.approx(1 / n)) for n in (2, 4, 6, 8, 10)
    ]
    assert all(row["train_loss"] for row in rows)  # in the same row


def test_rates_by_epoch(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit = quiet_fit(max_epochs=3, logger=logger, callbacks=[LearningRateMonitor()])
    fit.fit(Regression(lr=0.25), loader())
    assert [row["lr-SGD"] for row in _rows(logger) if row["lr-SGD"]] == ["0.25"] * 3


def test_throughput_is_logged_with_its_share_of_the_peak(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    monitor = ThroughputMonitor(peak_flops=1e9)
    fit = quiet_fit(max_epochs=2, accumulate_grad_batches=2, logger=logger, log_every_n_steps=5, callbacks=[monitor])
    start = time.monotonic()
    fit.fit(Regression(), loader(80), loader(8))
    seconds = time.monotonic() - start
    rows = [row for row in _rows(logger) if row["throughput/steps_per_sec"]]
    assert [row["step"] for row in rows] == ["5", "10", "15", "20"]
    last = {name: float(value) for name, value in rows[-1].items() if name.startswith("throughput/")}
    assert last["throughput/steps_per_sec"] > 20 / seconds
    assert last["throughput/samples_per_sec"] == pytest.approx(8 * last["throughput/steps_per_sec"])
    # Linear(4, 1) on 4 rows, forward and the weight's gradient.
    assert last["throughput/mfu"] == pytest.approx(2 * 2 * 4 * 4 * last["throughput/micro_batches_per_sec"] / 1e9)
    assert monitor.latest["throughput/mfu"] == last["throughput/mfu"]


# Timer, LambdaCallback, GradientAccumulationScheduler


def test_the_timer_ends_the_run() -> None:
    timer = Timer({"milliseconds": 300}, verbose=False)
    slow = LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.01))
    fit = quiet_fit(max_epochs=-1, callbacks=[timer, slow])
    fit.fit(Regression(), loader())
    assert 0.3 <= timer.time_elapsed() < 3.0
    assert 1 <= fit.global_step <= 30


def test_functions_are_called_like_any_callback() -> None:
    seen: list[str] = []
    fit = quiet_fit(
        limit_train_batches=2,
        callbacks=[
            LambdaCallback(
                setup=lambda trainer, module, stage: seen.append(stage),
                on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append(f"batch {index}"),
                on_train_end=lambda trainer, module: seen.append(f"end {trainer.global_step}"),
            )
        ],
    )
    fit.fit(Regression(), loader())
    assert seen == ["fit", "batch 0", "batch 1", "end 2"]


def test_windows_follow_the_schedule() -> None:
    # B-02: 10 micro-batches an epoch; windows of 1, then 4 (4, 4 and the short 2), then 10.
    steps: list[int] = []
    fit = quiet_fit(
        max_epochs=4,
        callbacks=[
            GradientAccumulationScheduler({1: 4, 3: 16}),
            LambdaCallback(on_train_epoch_end=lambda trainer, module: steps.append(trainer.global_step)),
        ],
    )
    fit.fit(Regression(), loader())
    assert steps == [10, 13, 16, 17]
    assert fit.accumulate_grad_batches == 1
    fit.fit(Regression(), loader())  # a second fit starts from the beginning
    assert steps[4:] == [10, 13, 16, 17]
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=2"):
        quiet_fit(accumulate_grad_batches=2, callbacks=[GradientAccumulationScheduler({0: 4})]).fit(
            Regression(), loader()
        )


# NonFiniteGuard


class _Bad(Regression):
    """Returns a NaN loss for one micro-batch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.trainer.micro_batches == self.at:
            loss = loss * float("nan")
        self.seen += 1
        return loss


def test_a_nan_stops_the_run_with_the_step_the_rank_and_the_batch() -> None:
    # G-05
    module = _Bad(at=17)
    fit = quiet_fit(max_epochs=3, accumulate_grad_batches=2, callbacks=[NonFiniteGuard(every_n_steps=4)])
    with pytest.raises(
        NonFiniteError, match="loss is nan on rank 0 at batch index 7 of epoch 1, after 8 optimizer steps"
    ):
        fit.fit(module, loader())
    assert module.seen == 18  # four steps after the check at the end of epoch 0


def test_a_nan_is_found_before_the_model_is_validated() -> None:
    # G-05
    module = _Bad(at=9)
    validated: list[int] = []
    fit = quiet_fit(
        callbacks=[
            NonFiniteGuard(),
            LambdaCallback(on_validation_batch_start=lambda *_: validated.append(1)),
        ]
    )
    with pytest.raises(NonFiniteError, match="batch index 9 of epoch 0"):
        fit.fit(module, loader(), loader(8))
    assert validated == []


def test_in_manual_optimization_every_backward_is_watched() -> None:
    # G-05, B-13
    class _Manual(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.manual_backward(self.loss(batch) * (float("inf") if batch_idx == 4 else 1.0))
            optimizer.step()

    with pytest.raises(NonFiniteError, match=r"loss is inf on rank 0 at batch index 4 .*after 4 optimizer steps"):
        quiet_fit(callbacks=[NonFiniteGuard()]).fit(_Manual(), loader())


def test_gradients_are_watched_before_they_are_clipped() -> None:
    # G-05
    class _Exploding(Regression):
        def on_after_backward(self) -> None:
            if self.trainer.micro_batches == 3:
                self.net.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]

    fit = quiet_fit(gradient_clip_val=1.0, callbacks=[NonFiniteGuard(check_gradients=True)])
    with pytest.raises(NonFiniteError, match="gradient is inf on rank 0 at batch index 3"):
        fit.fit(_Exploding(), loader())


def test_a_batch_without_items_may_have_no_loss() -> None:
    # B-21
    class _Weighed(Regression):
        def batch_weight(self, batch: Any) -> torch.Tensor:
            return (batch[1] > 0).sum()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            items = (y > 0).squeeze(1)
            return (self.net(x) - y)[items].square().mean()  # NaN where there are none

    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.rand(16, 1)
    y[4:8] = -1
    data = DataLoader(TensorDataset(x, y), batch_size=4)
    module = _Weighed()
    assert module.training_step((x[4:8], y[4:8]), 0).isnan()
    quiet_fit(accumulate_grad_batches=2, callbacks=[NonFiniteGuard(check_gradients=True)]).fit(module, data)
    assert module.net.weight.isfinite().all()


# All callbacks together, and their cost


def test_all_of_them_leave_the_numbers_alone(tmp_path: Path) -> None:
    # B-01
    def weights(callbacks: list[Callback]) -> torch.Tensor:
        torch.manual_seed(0)
        module = Regression()
        quiet_fit(max_epochs=3, logger=CSVLogger(tmp_path), log_every_n_steps=3, callbacks=callbacks).fit(
            module, loader(42), loader(10)
        )
        return module.net.weight.detach()

    everything: list[Callback] = [
        EarlyStopping("val_loss", patience=100),
        LearningRateMonitor("step"),
        Timer("01:00:00:00"),
        GradientAccumulationScheduler({0: 1}),
        ReplicaCheck(every_n_steps=1),
        NonFiniteGuard(every_n_steps=1, check_gradients=True, check_parameters=True),
        ThroughputMonitor(peak_flops=1e12),
        LambdaCallback(on_fit_start=lambda *_: None),
    ]
    assert len({callback.state_key for callback in everything}) == len(everything)
    assert torch.equal(weights(everything), weights([]))


def test_what_a_batch_weighs_is_asked_once_and_of_the_loaders_batch(tmp_path: Path) -> None:  # O-04
    # For a batch on a device, three callbacks would wait for the result.
    given: list[bool] = []

    class Weighing(Regression):
        def batch_weight(self, batch: Any) -> Any:
            given.append(isinstance(batch, list))
            return len(batch[0])

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return tuple(one.clone() for one in batch)  # like a copy to a device

    monitors: list[Callback] = [ThroughputMonitor(), NonFiniteGuard(), LossSpikeGuard(action="warn")]
    trainer = quiet_fit(callbacks=monitors, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Weighing(), loader())
    assert given == [True] * trainer.micro_batches
    assert given
