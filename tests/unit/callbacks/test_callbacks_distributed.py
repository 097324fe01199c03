"""Callbacks in real runs on several ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import Regression, loader, quiet_fit
from torch import nn

from drivetrain import Callback, DistributedError, NonFiniteError
from drivetrain.callbacks import (
    EarlyStopping,
    LambdaCallback,
    NonFiniteGuard,
    ProgressBar,
    ReplicaCheck,
    ThroughputMonitor,
    Timer,
)
from drivetrain.loggers import CSVLogger
from worlds import on_ranks


def _fit(**options: Any) -> Any:
    return quiet_fit(**({"strategy": "ddp", "devices": 2} | options))


# One decision (B-19)


class _Local(Regression):
    """Logs a validation loss that falls on rank 0, rises on rank 1 and rises on average, without ``sync_dist``."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        epoch = self.current_epoch
        value = 10.0 - epoch if self.global_rank == 0 else 10.0 + 3 * epoch
        self.log("val_loss", torch.tensor(value), sync_dist=False)


def _stop_by_a_local_value() -> tuple[int, int, float]:
    stopping = EarlyStopping("val_loss", patience=2)
    fit = _fit(max_epochs=8, callbacks=[stopping])
    fit.fit(_Local(), loader(32), loader(8))
    return fit.current_epoch, stopping.stopped_epoch, stopping.best_score


def test_a_local_value_stops_all_ranks_at_once() -> None:
    # B-19: deciding alone, rank 0 would train to the end and rank 1 would stop, so that rank 0 hangs.
    assert on_ranks(_stop_by_a_local_value, 2, process_group=None) == [(3, 2, 10.0)] * 2


def _stop_by_time_on_one_rank() -> tuple[int, bool]:
    # The time is up on one rank only.
    rank_0_only = LambdaCallback(
        on_train_start=lambda trainer, module: setattr(timer, "_deadline", 0.0 if trainer.is_global_zero else 1e12)
    )
    timer = Timer("01:00:00:00", verbose=False)
    fit = _fit(max_epochs=50, callbacks=[timer, rank_0_only])
    fit.fit(Regression(), loader(64))
    return fit.global_step, fit.should_stop


def test_time_that_is_up_on_one_rank_stops_all_after_the_same_step() -> None:
    # B-19
    results = on_ranks(_stop_by_time_on_one_rank, 2, process_group=None)
    assert results[0] == results[1]
    assert results[0][0] < 50 * 8


# Replicas (C-04)


class _Corrupt(Callback):
    """Changes one weight slightly on one rank, as a bug might."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            with torch.no_grad():
                module.net.weight[0, 2] += 1e-3  # the next step could round away a change of the last bit


class _Normalised(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.net(self.norm(x)) - y).square().mean()


def _replicas(strategy: str, corrupt: bool) -> tuple[str, int]:
    callbacks: list[Callback] = [ReplicaCheck(every_n_steps=2)]
    if corrupt:
        callbacks.append(_Corrupt(rank=1, step=3))
    fit = _fit(strategy=strategy, max_epochs=2, callbacks=callbacks)
    try:
        fit.fit(_Normalised(), loader(44))
    except DistributedError as error:
        return error.what, fit.global_step
    return "", fit.global_step


def test_replicas_are_found_alike_and_a_little_difference_is_named() -> None:
    # C-04: statistics of batch normalization differ between ranks until the next forward, which is not an error.
    for strategy in ("ddp", "ddp_static_graph"):
        assert on_ranks(_replicas, 2, strategy, False, process_group=None) == [("", 12), ("", 12)]
    found = on_ranks(_replicas, 2, "ddp", True, process_group=None)
    expected = "The replicas differ after step 4: parameter 'net.weight' is not the same on rank 0 and on rank 1"
    assert [what.partition(" (the first")[0] for what, _ in found] == [expected] * 2


# NaN (G-05)


class _BadOnOneRank(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        return loss * float("nan") if self.global_rank == 1 and batch_idx == 3 else loss


def _stop_at_a_nan() -> tuple[str, str]:
    fit = _fit(max_epochs=2, callbacks=[NonFiniteGuard(every_n_steps=2)])
    try:
        fit.fit(_BadOnOneRank(), loader(80))
    except NonFiniteError as error:
        return type(error).__name__, error.what
    return "", ""


def test_a_nan_on_one_rank_stops_all_and_all_know_where() -> None:
    # G-05, G-01
    start = time.monotonic()
    results = on_ranks(_stop_at_a_nan, 2, process_group=None)
    assert results[0] == results[1]
    assert results[0][0] == "NonFiniteError"
    assert "loss is nan on rank 1 at batch index 3 of epoch 0, after 3 optimizer steps" in results[0][1]
    assert time.monotonic() - start < 60


# An uneven tail (B-04): the joining rank, without data, is not counted


class _Tokens(Regression):
    def batch_weight(self, batch: Any) -> int:
        return 10 * len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        return loss * float("nan") if self.trainer.joining else loss


def _uneven() -> tuple[int, float, float]:
    monitor = ThroughputMonitor()
    fit = _fit(max_epochs=3, log_every_n_steps=1, callbacks=[monitor, NonFiniteGuard(every_n_steps=1), ReplicaCheck()])
    fit.fit(_Tokens(), loader(17, batch_size=2))
    rates = monitor.latest
    tokens, samples = rates["throughput/tokens_per_sec"], rates["throughput/samples_per_sec"]
    return fit.samples_seen, tokens / samples, samples


def test_a_joining_rank_is_not_suspected() -> None:
    # B-04: 17 samples as 4 + 4 + 4 + 4 + 1; rank 1 joins the last step with a NaN loss of weight zero.
    assert [seen for seen, _, _ in on_ranks(_uneven, 2, process_group=None)] == [51, 51]


def test_a_joining_rank_is_not_counted() -> None:
    # B-04
    for _, tokens_per_sample, rate in on_ranks(_uneven, 2, process_group=None):
        assert tokens_per_sample == pytest.approx(10)
        assert rate > 0


# Only rank 0 prints and writes


def _outputs(root: str) -> tuple[str, list[str]]:
    import io

    output = io.StringIO()
    logger = CSVLogger(root)
    fit = _fit(max_epochs=2, logger=logger, callbacks=[ProgressBar(stream=output)], log_every_n_steps=1)
    fit.fit(Regression(), loader(32), loader(8))
    return output.getvalue(), sorted(path.name for path in (Path(root) / "drivetrain_logs").iterdir())


def test_rank_0_alone_prints_and_writes(tmp_path: Path) -> None:
    #
    (first, versions), (second, _) = on_ranks(_outputs, 2, str(tmp_path), process_group=None)
    assert len(first.splitlines()) == 2
    assert second == ""
    assert versions == ["version_0"]


# Launched processes: the callbacks' state is returned to the caller


def test_the_caller_has_the_callbacks_state_and_the_logger_s_place(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", stopping_threshold=1e9)
    timer, monitor = Timer(), ThroughputMonitor()
    logger = CSVLogger(tmp_path)
    fit = _fit(
        strategy="ddp",
        launcher="forkserver",
        max_epochs=5,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[stopping, timer, monitor],
    )
    fit.fit(Regression(), loader(32), loader(8))
    assert fit.global_step == 4
    assert "better than the stopping threshold" in (stopping.stopping_reason or "")
    assert timer.time_elapsed() > 0
    assert monitor.latest["throughput/steps_per_sec"] > 0
    assert logger.log_dir == f"{tmp_path}/drivetrain_logs/version_0"
    assert (Path(logger.log_dir) / "metrics.csv").exists()
