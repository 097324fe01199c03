"""Several callbacks together, in one process and on ranks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from callback_modules import Regression, loader, quiet_fit

from drivetrain import Callback
from drivetrain.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    LossSpikeGuard,
    NonFiniteGuard,
    ProgressBar,
    ReplicaCheck,
    ThroughputMonitor,
    Timer,
)
from drivetrain.loggers import CSVLogger
from worlds import on_ranks


def test_callbacks_that_watch_leave_the_numbers_alone(tmp_path: Path) -> None:
    # B-01
    def weights(callbacks: list[Callback]) -> torch.Tensor:
        torch.manual_seed(0)
        module = Regression()
        fit = quiet_fit(max_epochs=3, logger=CSVLogger(tmp_path), log_every_n_steps=3, callbacks=callbacks)
        fit.fit(module, loader(42), loader(10))
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


def test_a_batchs_weight_is_asked_once_and_of_the_loaders_batch() -> None:  # O-04
    # For a batch on a device, three callbacks would wait for the result.
    given: list[bool] = []

    class Weighing(Regression):
        def batch_weight(self, batch: Any) -> Any:
            given.append(isinstance(batch, list))
            return len(batch[0])

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return tuple(one.clone() for one in batch)  # like a copy to a device

    monitors: list[Callback] = [ThroughputMonitor(), NonFiniteGuard(), LossSpikeGuard(action="warn")]
    quiet_fit(callbacks=monitors, accumulate_grad_batches=2).fit(Weighing(), loader())
    assert given == [True] * 10


def _outputs(root: str) -> tuple[str, list[str]]:
    output = io.StringIO()
    bar = ProgressBar(stream=output)
    fit = quiet_fit(strategy="ddp", devices=2, max_epochs=2, logger=CSVLogger(root), callbacks=bar)
    fit.fit(Regression(), loader(32), loader(8))
    return output.getvalue(), sorted(path.name for path in (Path(root) / "drivetrain_logs").iterdir())


def test_rank_0_alone_prints_and_writes(tmp_path: Path) -> None:
    #
    (first, versions), (second, _) = on_ranks(_outputs, 2, str(tmp_path), process_group=None)
    assert len(first.splitlines()) == 2
    assert second == ""
    assert versions == ["version_0"]


def test_the_state_of_launched_callbacks_comes_back(tmp_path: Path) -> None:
    stopping, timer, monitor = EarlyStopping("val_loss", stopping_threshold=1e9), Timer(), ThroughputMonitor()
    logger = CSVLogger(tmp_path)
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "launcher": "forkserver", "log_every_n_steps": 1}
    fit = quiet_fit(max_epochs=5, logger=logger, callbacks=[stopping, timer, monitor], **options)
    fit.fit(Regression(), loader(32), loader(8))
    assert fit.global_step == 4
    assert "better than the stopping threshold" in (stopping.stopping_reason or "")
    assert timer.time_elapsed() > 0
    assert monitor.latest["throughput/steps_per_sec"] > 0
    assert logger.log_dir == f"{tmp_path}/drivetrain_logs/version_0"
    assert (Path(logger.log_dir) / "metrics.csv").exists()
