"""A resumed run must have the saved run's parts: differences are refused by name before anything changes (J-07)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from drivetrain import ConfigurationError, Fit, TrainModule

SAVED_AT = 3


class Model(TrainModule):
    def __init__(self, optimizer: Any = torch.optim.AdamW, scheduler: Any = None, save: Path | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.optimizer, self.scheduler, self.save = optimizer, scheduler, save
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        self.seen += x[:, 0].tolist()
        return self.layer(x).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.save is not None and self.trainer.global_step == SAVED_AT:
            self.trainer.save_checkpoint(self.save)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=0.01)
        return optimizer if self.scheduler is None else ([optimizer], [self.scheduler(optimizer)])


class OtherModel(Model):
    pass


def data(samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * samples).reshape(samples, 2))


def shuffled(samples: int = 24, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size=batch_size, shuffle=True)


def fit(module: Model, loader: Any, **options: Any) -> Fit:
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    off: dict[str, Any] = dict.fromkeys(names, False)
    trainer = Fit(max_epochs=2, seed=1, accelerator="cpu", **off)
    trainer.fit(module, loader, **options)
    return trainer


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    fit(Model(scheduler=steps, save=path), shuffled())
    return path


def in_order() -> DataLoader[Any]:
    return DataLoader(data(24), batch_size=4)


def weighted() -> DataLoader[Any]:
    return DataLoader(data(24), batch_size=4, sampler=WeightedRandomSampler([1.0] * 24, 24))


DIFFERENT = [
    (lambda: Model(scheduler=steps), lambda: shuffled(26), "data", "24 training samples, and this one 26"),
    (lambda: Model(scheduler=steps), in_order, "data", "training data shuffled, and this one in order"),
    (lambda: Model(scheduler=steps), weighted, "data", "shuffled, and this one of WeightedRandomSampler"),
    (lambda: Model(torch.optim.SGD, steps), shuffled, "optimizer", "AdamW, and this one SGD"),
    (lambda: Model(scheduler=cosine), shuffled, "scheduler", "StepLR, and this one CosineAnnealingLR"),
    (lambda: OtherModel(scheduler=steps), shuffled, "module", "Model, and this one .*OtherModel"),
]


@pytest.mark.parametrize(("module", "loader", "consent", "difference"), DIFFERENT)
def test_differences_are_refused_by_name_unless_they_are_allowed(
    module: Any, loader: Any, consent: str, difference: str, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # J-07
    other, batches = module(), loader()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ConfigurationError, match=difference) as refused:
        fit(other, batches, ckpt_path=saved)
    assert f'fit(..., allow=("{consent}",))' in str(refused.value)
    assert other.seen == []
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())

    trainer = fit(other, batches, ckpt_path=saved, allow=(consent,))
    assert "These differences from the resumed run are allowed: " in caplog.text
    assert trainer.current_epoch == 2
    if consent == "data":  # the current epoch restarts
        assert trainer.global_step == SAVED_AT + 2 * len(batches)
        assert len(other.seen) == 2 * len(batches.dataset)
    else:
        assert (trainer.global_step, len(other.seen)) == (12, 24 - 4 * SAVED_AT + 24)
        assert len(set(other.seen[: 24 - 4 * SAVED_AT])) == 24 - 4 * SAVED_AT


def test_an_allowed_optimizer_starts_fresh(saved: Path) -> None:
    # J-07
    module = Model(torch.optim.SGD, steps)
    trainer = fit(module, shuffled(), ckpt_path=saved, allow="optimizer")
    (optimizer,) = trainer.optimizers
    assert set(optimizer.param_groups[0]) >= {"momentum", "nesterov"}
    assert "betas" not in optimizer.param_groups[0]


def test_an_unknown_name_in_allow_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"allow='optimiser'\) is unknown. Did you mean 'optimizer'"):
        fit(Model(), shuffled(), allow=("optimiser",))
