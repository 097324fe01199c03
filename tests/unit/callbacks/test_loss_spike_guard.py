"""LossSpikeGuard: detection of spikes and the three actions."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import CHECKPOINTS, Regression, loader, quiet_fit
from torch.utils.data import DataLoader, Subset, TensorDataset

from drivetrain import ConfigurationError, Fit, LossSpikeError
from drivetrain.callbacks import Checkpoint, LambdaCallback, LossSpikeGuard
from worlds import on_ranks

STEPS, BAD = 16, 8


class Line(Regression):
    """Has an optimizer that changes weights even with zero gradients, by weight decay and momentum."""

    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.constant_(self.net.weight, 0.1)
        torch.nn.init.zeros_(self.net.bias)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data() -> TensorDataset:
    """Return samples for batches of 4; the last two of batch `BAD` have wrong targets."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(STEPS * 4, 4, generator=generator), torch.randn(STEPS * 4, 1, generator=generator)
    y[BAD * 4 + 2 : BAD * 4 + 4] = 1e4
    return TensorDataset(x, y)


def train(path: Path, *callbacks: Any, module: Any = None, dataset: Any = None, **options: Any) -> tuple[Fit, Line]:
    module, ckpt_path = module or Line(), options.pop("ckpt_path", None)
    batch_size, shuffle = options.pop("batch_size", 4), options.pop("shuffle", False)
    settings = {"enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks), **options}
    fit = quiet_fit(default_root_dir=path, callbacks=list(callbacks), **settings)
    fit.fit(module, DataLoader(dataset or data(), batch_size=batch_size, shuffle=shuffle), ckpt_path=ckpt_path)
    return fit, module


def expected(path: Path) -> torch.Tensor:
    """Return the weight after training without the bad batch."""
    good = [sample for sample in range(STEPS * 4) if sample // 4 != BAD]
    return train(path, dataset=Subset(data(), good))[1].net.weight.detach()


def guard(action: str, **options: Any) -> LossSpikeGuard:
    return LossSpikeGuard(action, window=8, warmup=4, **{"every_n_steps": 4, **options})


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "LossSpikeGuard" in record.message]


def test_a_spike_is_far_above_the_median_of_the_last_steps(caplog: pytest.LogCaptureFixture) -> None:
    class Scripted(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch) * 0 + losses[batch_idx]

    # A high loss is no spike in the warm-up, and none after half a window of such losses.
    losses = [math.nan, 5.0, 4.0, 100.0, 4.5, 4.2, 4.8, 4.4, 5.5, *[8.0] * 8]
    spike = LossSpikeGuard(threshold=5, window=10, warmup=4, every_n_steps=1)
    quiet_fit(callbacks=spike).fit(Scripted(), loader(len(losses), 1))
    spikes = [re.findall(r"global_step=(\d+) \(median ([\w.]+)", warning)[0] for warning in warnings_in(caplog)]
    assert spikes == [("0", "nan"), ("9", "4.65")]


def _written(folder: Path) -> set[str]:
    return {path.name for path in (folder / CHECKPOINTS).iterdir()}


@pytest.mark.parametrize("every", [pytest.param(4, id="within the epoch"), pytest.param(1000, id="at its end")])
def test_a_run_that_rolls_back_ends_as_if_the_step_had_not_been(every: int, tmp_path: Path, caplog: Any) -> None:
    watching, saving = guard("rollback", every_n_steps=every), Checkpoint(every_n_train_steps=4, save_top_k=3)
    fit, module = train(tmp_path, saving, watching)
    assert torch.equal(module.net.weight, expected(tmp_path))
    assert (watching.rollbacks, watching.skipped_steps, fit.global_step) == (1, {BAD}, STEPS)
    (warning,) = warnings_in(caplog)
    detected, path = 12 if every == 4 else STEPS, tmp_path / CHECKPOINTS / "epoch=0-step=8"
    assert f"in the step after global_step={BAD} (median " in warning
    assert f"Rolling back from global_step={detected} to 8, {path} (rollback 1 of 3)" in warning
    assert _written(tmp_path) == {*(f"epoch=0-step={step}" for step in (8, 12, 16)), "latest"}


def test_checkpoints_later_than_the_spike_are_removed(tmp_path: Path) -> None:  # F-05
    # Detected at step 12; checkpoints 9 and 10 contain the spike, and "auto" would resume from the newest.
    def fail(trainer: Any, *arguments: Any) -> None:
        if trainer.callbacks[0].rollbacks and trainer.global_step == BAD + 1:
            raise InterruptedError

    def callbacks() -> list[Any]:
        best = Checkpoint(every_n_train_steps=3, save_top_k=-1, save_weights_only=True)
        return [guard("rollback"), Checkpoint(every_n_train_steps=2, keep_last=2), best]

    with pytest.raises(InterruptedError):
        train(tmp_path, *callbacks(), LambdaCallback(on_train_batch_end=fail))
    names = {name.partition("-v")[0] for name in _written(tmp_path)}
    assert names == {*(f"epoch=0-step={step}" for step in (3, 6, 8)), "latest"}
    assert (tmp_path / CHECKPOINTS / "latest").read_text().strip() == f"epoch=0-step={BAD}"
    _, module = train(tmp_path, *callbacks(), ckpt_path="auto")
    assert torch.equal(module.net.weight, expected(tmp_path))


def test_a_spike_after_the_last_rollback_or_without_a_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(LossSpikeError, match=rf"(?s)after global_step={BAD} .*has rolled back 0 time\(s\)"):
        train(tmp_path, Checkpoint(every_n_train_steps=4), guard("rollback", max_rollbacks=0))
    with pytest.raises(LossSpikeError, match="no complete checkpoint from before the spike"):
        train(tmp_path, Checkpoint(every_n_train_steps=10), guard("rollback"))


def _stop_after_a_rollback(folder: str) -> int:
    def stop(trainer: Any, *arguments: Any) -> None:
        if watching.rollbacks and trainer.global_step == 9 and trainer.global_rank == 1:
            trainer.should_stop = True

    watching = guard("rollback", every_n_steps=STEPS)
    callbacks = [watching, Checkpoint(every_n_train_steps=8, save_top_k=-1), LambdaCallback(on_train_batch_end=stop)]
    fit, _ = train(Path(folder), *callbacks, strategy="ddp", devices=2, batch_size=2)
    return fit.global_step


def test_a_request_to_stop_after_a_rollback_is_heard_soon(tmp_path: Path) -> None:  # G-03
    # Ranks poll for requests every few steps. Without a reset they would poll next at the step planned before the
    # rollback.
    stopped = on_ranks(_stop_after_a_rollback, 2, str(tmp_path), process_group=None)
    assert stopped in ([9, 9], [10, 10])  # the other rank may have polled just before


class Drawing(Line):
    """Has a learning rate that falls, draws, and logs."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = self.loss((torch.nn.functional.dropout(x, 0.3), y))
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


TWO: dict[str, Any] = {"devices": 2, "batch_size": 2}


def _weight_on_a_rank(folder: str, action: str) -> torch.Tensor:
    callbacks = [guard(action), Checkpoint(every_n_train_steps=4, save_top_k=2, save_async=True)]
    return train(Path(folder), *callbacks, strategy="ddp", gradient_clip_val=100.0, **TWO)[1].net.weight.detach()


@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_ranks_act_together(action: str, tmp_path: Path) -> None:
    for weight in on_ranks(_weight_on_a_rank, 2, str(tmp_path), action, process_group=None):
        assert torch.allclose(weight, expected(tmp_path), atol=1e-6)


def _roll_back_on_a_rank(folder: str) -> list[tuple[int, torch.Tensor, float]]:
    """Train with spikes that are detected, and with the same spikes known from the start."""
    ends, skipped_steps = [], set[int]()
    for name in ("detected", "known"):
        watching = guard("rollback", max_rollbacks=9)
        watching.skipped_steps |= skipped_steps
        saving = Checkpoint(Path(folder, name), every_n_train_steps=4, save_top_k=-1)
        options: dict[str, Any] = {"strategy": "fsdp", "max_epochs": 2, "shuffle": True, "seed": 5, **TWO}
        fit, module = train(Path(folder), saving, watching, module=Drawing(), **options)
        skipped_steps = watching.skipped_steps
        ends.append((watching.rollbacks, module.net.weight.detach(), float(fit.callback_metrics["loss_epoch"])))
    return ends


@pytest.mark.slow
def test_random_states_schedules_and_logged_values_go_back_too(tmp_path: Path) -> None:
    for detected, known in on_ranks(_roll_back_on_a_rank, 2, str(tmp_path), process_group=None):
        assert detected[0] > 1
        assert known[0] == 0
        assert torch.equal(detected[1], known[1])
        assert detected[2] == known[2]


def test_a_rollback_without_checkpoints_is_refused(tmp_path: Path) -> None:  # G-06
    with pytest.raises(ConfigurationError, match="no Checkpoint callback"):
        train(tmp_path, guard("rollback"))
