"""A checkpoint holds the state of a whole step, whatever asks for it and whenever (S-01)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import Checkpoint


class Net(TrainModule):
    """Has running statistics, draws random numbers, and logs a mean over the epoch."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.automatic_optimization = not manual
        self.fails_at = -1
        self.steps_before_failing = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fails = self.trainer.micro_batches == self.fails_at
        x = batch[0] * float("nan") if fails else batch[0]
        loss = self.net(x).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        if fails and not self.steps_before_failing:
            raise LookupError("as planned")
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if fails:
            raise LookupError("as planned")
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class SavesIn(Callback):
    """Saves at the ``at``-th call of a hook."""

    def __init__(self, hook: str, at: int, path: str) -> None:
        self.calls = 0

        def save(trainer: Any, module: Any, *args: Any) -> None:
            self.calls += 1
            if self.calls == at:
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0))), 2, shuffle=True)


def run(module: Net, *callbacks: Callback, window: int = 1, **options: Any) -> Fit:
    trainer = Fit(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accumulate_grad_batches=window,
        seed=5,
    )
    trainer.fit(module, data(), **options)
    return trainer


def equal(one: Net, other: Net) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


HOOKS = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
HOOKS += ["on_before_optimizer_step", "on_train_batch_end"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("window", "at", "manual"), [(1, 1, False), (1, 3, False), (2, 3, False), (1, 3, True)])
def test_a_save_from_a_hook_within_a_step_resumes_exactly(
    tmp_path: Path, hook: str, window: int, at: int, manual: bool
) -> None:
    if manual and hook == "on_before_zero_grad":
        pytest.skip("not called in manual optimization")
    whole, saving, resumed = Net(manual), Net(manual), Net(manual)
    expected = run(whole, window=window).callback_metrics["loss"]
    run(saving, SavesIn(hook, at, str(tmp_path / "saved")), window=window)
    assert equal(whole, saving)
    trainer = run(resumed, window=window, ckpt_path=tmp_path / "saved")
    assert equal(whole, resumed)
    torch.testing.assert_close(trainer.callback_metrics["loss"], expected, atol=0, rtol=0)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("fails_at", [0, 4, 10])
def test_a_save_after_a_failure_has_the_state_before_the_step_that_failed(
    tmp_path: Path, fails_at: int, manual: bool
) -> None:
    whole, failing, resumed = Net(manual), Net(manual), Net(manual)
    run(whole)
    failing.fails_at = fails_at
    with pytest.raises(LookupError, match="as planned"):
        run(failing, Checkpoint(tmp_path, save_on_exception=True, save_top_k=0))
    assert bool(failing.net[1].running_mean.isnan().all())  # type: ignore[operator]
    run(resumed, ckpt_path=tmp_path / f"exception-step={fails_at}")
    assert equal(whole, resumed)


def test_nothing_is_saved_after_a_failure_that_has_changed_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Net(manual=True)
    module.fails_at, module.steps_before_failing = 4, True
    with caplog.at_level(logging.WARNING), pytest.raises(LookupError, match="as planned"):
        run(module, Checkpoint(tmp_path, save_on_exception=True, save_top_k=0))
    assert "since weights had changed" in caplog.text
    assert not list(tmp_path.glob("exception*"))


@pytest.mark.parametrize("keeps", [False, True])
def test_a_save_in_on_exception_is_of_a_whole_step_or_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keeps: bool
) -> None:
    module, whole, resumed = Net(), Net(), Net()
    module.fails_at = 4
    saving = SavesIn("on_exception", 1, str(tmp_path / "saved"))
    saving.save_on_exception = keeps
    with caplog.at_level(logging.WARNING), pytest.raises(LookupError, match="as planned"):
        run(module, saving)
    assert (tmp_path / "saved").exists() == keeps
    assert ("was not kept by Checkpoint(save_on_exception=True)" in caplog.text) != keeps
    if keeps:
        run(whole)
        run(resumed, ckpt_path=tmp_path / "saved")
        assert equal(whole, resumed)


def test_a_failure_between_steps_is_saved_as_it_is(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                raise LookupError("as planned")

    module, whole, resumed = Net(), Net(), Net()
    run(whole)
    with pytest.raises(LookupError, match="as planned"):
        run(module, Fails(), SavesIn("on_exception", 1, str(tmp_path / "saved")))
    run(resumed, ckpt_path=tmp_path / "saved")
    assert equal(whole, resumed)
