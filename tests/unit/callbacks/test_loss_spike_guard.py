"""LossSpikeGuard: detection of spikes and the three actions."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, ConfigurationError, Fit, LossSpikeError, TrainModule
from drivetrain.callbacks import Checkpoint, LossSpikeGuard
from drivetrain.callbacks._spike_statistic import SpikeStatistic
from worlds import on_ranks

RUN = "drivetrain_logs/version_0"  # the folder of the first run, below the root


STEPS, BAD = 24, 12


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            self.parameters(), lr=0.01
        )  # weight decay and momentum change weights even with zero gradients


def data(bad: int | None = BAD) -> TensorDataset:
    """Return a loader with batches of 4; the last two samples of batch ``bad`` have wrong targets."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(STEPS * 4, 3, generator=generator), torch.randn(STEPS * 4, 1, generator=generator)
    if bad is not None:
        y[bad * 4 + 2 : bad * 4 + 4] = 1e4
    return TensorDataset(x, y)


def by_hand(bad: int = BAD) -> torch.Tensor:
    """Return the loader without the bad batch."""
    module, batches = Line(), list(DataLoader(data(bad), batch_size=4))
    optimizer = module.configure_optimizers()
    for step, batch in enumerate(batches):
        if step != bad:
            optimizer.zero_grad()
            module.training_step(batch).backward()
            optimizer.step()
    return module.layer.weight.detach()


def train(
    path: Path,
    *callbacks: Any,
    bad: int | None = BAD,
    batch_size: int = 4,
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[Fit, Line]:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Line()
    fit = Fit(accelerator="cpu", max_epochs=1, default_root_dir=path, callbacks=list(callbacks), **quiet, **options)
    fit.fit(module, DataLoader(data(bad), batch_size=batch_size), ckpt_path=ckpt_path)
    return fit, module


def guard(action: str, **options: Any) -> LossSpikeGuard:
    return LossSpikeGuard(action, window=8, warmup=4, **{"every_n_steps": 4, **options})


def test_what_a_spike_is() -> None:
    statistic = SpikeStatistic(threshold=5, window=10, warmup=4)
    assert statistic.is_spike(math.nan)
    for loss in (5.0, 4.0, 100.0):
        assert not statistic.is_spike(loss)  # warm-up
        statistic.add(loss)
    for loss in (4.5, 4.2, 4.8, 4.4):
        statistic.add(loss)
    assert not statistic.is_spike(5.5)
    assert statistic.is_spike(8.0)
    for _ in range(5):
        statistic.add(8.0)
    assert not statistic.is_spike(8.0)  # a level that lasts is not a spike


def test_a_warning_names_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "drivetrain"):
        train(tmp_path, guard("warn"), enable_checkpointing=False)
    (said,) = [record.message for record in caplog.records if "LossSpikeGuard" in record.message]
    assert f"in the step after global_step={BAD} (median " in said


def test_a_step_that_is_skipped_leaves_no_trace(tmp_path: Path) -> None:
    fit, module = train(tmp_path, guard("skip"), enable_checkpointing=False, gradient_clip_val=100.0)
    assert torch.allclose(module.layer.weight, by_hand(), atol=1e-7)
    assert fit.global_step == STEPS


def _written(folder: Path) -> set[str]:
    return {path.name for path in (folder / RUN / "checkpoints").iterdir()}


def test_a_run_that_goes_back_ends_as_if_the_step_had_not_been(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = guard("rollback")
    saving = Checkpoint(every_n_train_steps=4, save_top_k=2)
    with caplog.at_level(logging.WARNING, "drivetrain"):
        fit, module = train(tmp_path, saving, watching)
    assert torch.equal(module.layer.weight, by_hand())
    assert (watching.rollbacks, watching.skipped_steps, fit.global_step) == (1, {BAD}, STEPS)
    (said,) = [record.message for record in caplog.records if "LossSpikeGuard" in record.message]
    path = tmp_path / RUN / "checkpoints/epoch=0-step=12"
    assert f"Rolling back from global_step=16 to 12, {path} (rollback 1 of 3)" in said
    assert _written(tmp_path) == {"epoch=0-step=20", "epoch=0-step=24", "latest"}


class FailOnceBack(Callback):
    """Raises in the step after a rollback."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.callbacks[0].rollbacks and trainer.global_step == BAD + 1:
            raise InterruptedError


def test_what_was_saved_since_the_spike_goes_as_the_run_goes_back(tmp_path: Path) -> None:  # F-05
    # Detected at step 16; checkpoints 14 and 15 contain the spike, and "auto" would resume from the newest.
    def callbacks() -> list[Any]:
        best = Checkpoint(every_n_train_steps=3, save_top_k=-1, save_weights_only=True)
        return [guard("rollback"), Checkpoint(every_n_train_steps=2, keep_last=2), best]

    with pytest.raises(InterruptedError):
        train(tmp_path, *callbacks(), FailOnceBack())
    names = {f"epoch=0-step={step}" for step in (3, 6, 9, 12)}
    assert {name.partition("-v")[0] for name in _written(tmp_path)} == {*names, "latest"}
    assert (tmp_path / RUN / "checkpoints" / "latest").read_text().strip() == f"epoch=0-step={BAD}"
    _, module = train(tmp_path, *callbacks(), ckpt_path="auto")
    assert torch.equal(module.layer.weight, by_hand())


def _ask_once_back(folder: str) -> int:
    class AskOnceBack(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if watching.rollbacks and trainer.global_step == 9 and trainer.global_rank == 1:
                trainer.should_stop = True

    watching = guard("rollback", every_n_steps=STEPS)
    saving = Checkpoint(every_n_train_steps=8, save_top_k=-1)
    fit, _ = train(Path(folder), watching, saving, AskOnceBack(), strategy="ddp", batch_size=2, bad=8)
    return fit.global_step


def test_who_asks_to_stop_after_going_back_is_heard_soon(tmp_path: Path) -> None:  # G-03
    # Ranks poll for requests every few steps. Without a reset they would poll next at the step planned before the
    # rollback.
    stopped = on_ranks(_ask_once_back, 2, str(tmp_path))
    assert stopped in ([9, 9], [10, 10])  # the other rank may have polled just before


def test_an_epochs_end_is_gone_back_from_too(tmp_path: Path) -> None:
    # The spike is detected by the check at the end of the epoch, and the run rolls back into the epoch.
    watching = guard("rollback", every_n_steps=1000)
    _, module = train(tmp_path, Checkpoint(every_n_train_steps=8, save_top_k=-1), watching)
    assert torch.equal(module.layer.weight, by_hand())


def test_after_the_last_rollback_a_spike_raises(tmp_path: Path) -> None:
    with pytest.raises(LossSpikeError, match=rf"(?s)after global_step={BAD} .*has rolled back 0 time\(s\)"):
        train(tmp_path, Checkpoint(every_n_train_steps=4), guard("rollback", max_rollbacks=0))
    with pytest.raises(LossSpikeError, match="no complete checkpoint from before the spike"):
        train(tmp_path, Checkpoint(every_n_train_steps=20), guard("rollback"))


class Drawing(Line):
    """Has a learning rate that falls, draws, and logs."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = super().training_step((torch.nn.functional.dropout(x, 0.3), y))
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _on_a_rank(folder: str) -> dict[str, Any]:
    seen = {}
    for action in ("rollback", "skip"):
        callbacks = [guard(action), Checkpoint(every_n_train_steps=4, save_top_k=2, save_async=True)]
        _, module = train(Path(folder, action), *callbacks, strategy="ddp", batch_size=2)
        seen[action] = module.layer.weight.detach()
    ends = []
    skipped_steps: set[int] = set()
    for name in ("as it comes about", "known from the start"):
        watching, module = guard("rollback", max_rollbacks=9), Drawing()
        watching.skipped_steps |= skipped_steps
        saving = Checkpoint(Path(folder, name), every_n_train_steps=2, save_top_k=-1)
        options: dict[str, Any] = {"strategy": "fsdp", "callbacks": [saving, watching], "max_epochs": 2, "seed": 5}
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        fit = Fit(accelerator="cpu", default_root_dir=folder, **options, **quiet)
        fit.fit(module, DataLoader(data(), batch_size=2, shuffle=True))
        skipped_steps = watching.skipped_steps
        ends.append((watching.rollbacks, module.layer.weight.detach(), float(fit.callback_metrics["loss_epoch"])))
    return {**seen, "ends": ends}


@pytest.mark.slow
def test_ranks_go_back_together_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    for result in on_ranks(_on_a_rank, 2, str(tmp_path)):
        for action in ("rollback", "skip"):
            assert torch.allclose(result[action], by_hand(), atol=1e-6)
        (rollbacks, weight, logged), (none, known_weight, known_logged) = result["ends"]
        assert rollbacks > 1
        assert none == 0
        assert torch.equal(weight, known_weight)
        assert logged == known_logged


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:  # G-06
    with pytest.raises(ConfigurationError, match=r"action='rolback'\)\. Did you mean 'rollback'"):
        LossSpikeGuard("rolback")
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        LossSpikeGuard(every_n_steps=0)
    with pytest.raises(ConfigurationError, match="no Checkpoint callback"):
        train(tmp_path, guard("rollback"), enable_checkpointing=False)
