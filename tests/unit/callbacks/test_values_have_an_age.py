"""A monitored value has an age: it scores only the weights it was computed with, and is not used twice (S-04)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_modules import loader, quiet_fit

from drivetrain import ConfigurationError, Fit, TrainModule
from drivetrain.callbacks import Checkpoint, EarlyStopping, LambdaCallback


class Growing(TrainModule):
    """Its weight grows by 1 in each step. Validation logs the weight, or ``values`` by epoch."""

    def __init__(self, values: tuple[float, ...] = (), scheduler: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.values = values
        self.scheduler = scheduler
        self.fed: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return -self.weight.sum() / self.trainer.optimizers[0].param_groups[0]["lr"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.values[self.current_epoch] if self.values else self.weight.detach().sum())

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.fed.append(metric)
        scheduler.step(metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.scheduler is None:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val", **self.scheduler}}


def run(module: Growing, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Fit:
    """Train six steps an epoch."""
    options = {"enable_checkpointing": any(isinstance(one, Checkpoint) for one in callbacks), **options}
    trainer = quiet_fit(callbacks=list(callbacks), **options)
    trainer.fit(module, loader(6, 1), loader(1, 1), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    ("when", "options", "saved"),
    [
        ({"every_n_train_steps": 2}, {"val_check_interval": 2}, [2, 4, 6]),
        ({"every_n_train_steps": 4}, {"val_check_interval": 2}, [4]),
        ({"every_n_train_steps": 2}, {"val_check_interval": 3}, [3, 6]),  # at 2 and 4 they wait
        ({"every_n_train_steps": 6}, {}, [6]),  # the validation at the end of the epoch
        ({"every_n_train_steps": 12}, {"max_epochs": 2}, [12]),
        ({"every_n_epochs": 1, "save_on_train_epoch_end": True}, {"val_check_interval": 4, "max_epochs": 2}, [10, 12]),
    ],
)
def test_a_score_is_that_of_the_saved_weights(tmp_path: Path, when: Any, options: Any, saved: list[int]) -> None:
    kept = Checkpoint(tmp_path, filename="{step}-{val:.0f}", monitor="val", save_top_k=-1, **when)
    run(Growing(), kept, **options)
    scores = {Path(path).name: score for path, score in kept.best_k_models.items()}
    expected: dict[str, float | None] = {f"step={step}-val={step}": float(step) for step in saved}
    if saved == [10, 12]:  # the end of the run has no value for its weights
        expected = {"step=10-val=10": 10.0, "step=12-val=nan": None}
    assert scores == expected


def test_a_key_with_step_and_epoch_values_has_the_newer_one(tmp_path: Path) -> None:
    class Both(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train", self.weight.detach().sum(), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    kept = Checkpoint(tmp_path, filename="{step}", monitor="train", save_top_k=-1, every_n_train_steps=4)
    run(Both(), kept, max_epochs=2)
    scores = {Path(path).name: score for path, score in kept.best_k_models.items()}
    # Step 8 is within the second epoch, and step 12 is its last.
    assert scores == {"step=4": 3.0, "step=8": 7.0, "step=12": 11.0}


VALUES = (9.0, 9.0, 5.0, 9.0, 9.0, 4.0, 9.0)
THIRDS: dict[str, Any] = {"max_epochs": 7, "check_val_every_n_epoch": 3}


def test_a_plateau_gets_no_validated_value_twice(caplog: pytest.LogCaptureFixture) -> None:
    module = Growing(VALUES, {"strict": False})
    with caplog.at_level(logging.WARNING):
        run(module, **THIRDS)
    assert module.fed == [5.0, 4.0]
    assert sum("was not logged again" in record.getMessage() for record in caplog.records) == 1


def test_a_plateau_gets_no_step_value_twice() -> None:
    class Sparse(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % 4 == 1:
                self.log("train", self.weight.detach().sum())
            return super().training_step(batch, batch_idx)

    module = Sparse(scheduler={"monitor": "train", "interval": "step", "strict": False})
    run(module)
    assert module.fed == [1.0, 5.0]


def test_the_age_is_that_of_the_value_if_two_stages_log_the_same_key() -> None:
    class Twice(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val", 0.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    module = Twice(VALUES, {"strict": False})
    run(module, **THIRDS)
    assert module.fed[2:] == [5.0, 4.0]


def test_the_error_of_a_plateau_advises_a_frequency() -> None:
    with pytest.raises(ConfigurationError, match="'frequency': 2 with check_val_every_n_epoch=2"):
        run(Growing((1.0, 1.0), {}), max_epochs=2, check_val_every_n_epoch=2)
    module = Growing((1.0, 2.0), {"frequency": 2})
    run(module, max_epochs=2, check_val_every_n_epoch=2)
    assert module.fed == [2.0]


def test_early_stopping_checks_no_value_twice() -> None:
    class Once(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 0:
                self.log("train", 1.0)
            return super().training_step(batch, batch_idx)

    stop = EarlyStopping("train", patience=1, check_on_train_epoch_end=True)
    assert run(Once(), stop, max_epochs=3).current_epoch == 3


def test_early_stopping_counts_checks_of_a_run_that_makes_no_step() -> None:
    class Fixed(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

        def configure_optimizers(self) -> Any:
            return None

    stop = EarlyStopping("val", patience=2)
    assert run(Fixed((1.0,) * 8), stop, max_epochs=8).global_step == 0
    assert stop.stopped_epoch == 2


@pytest.mark.parametrize("saved_in", ["on_validation_end", "on_train_epoch_end", "on_train_batch_end"])
def test_used_values_are_known_after_a_resume(tmp_path: Path, saved_in: str) -> None:
    def save(trainer: Any, *arguments: Any) -> None:
        if trainer.current_epoch == 2 and not (tmp_path / "saved").exists():
            trainer.save_checkpoint(tmp_path / "saved")

    fed, stopped = [], []
    for ckpt_path in (None, tmp_path / "saved"):
        module = Growing(tuple(map(float, range(9))), {"strict": False})
        stop = EarlyStopping("val", patience=2, strict=False, check_on_train_epoch_end=True)
        options: dict[str, Any] = {"max_epochs": 9, "check_val_every_n_epoch": 3, "val_check_interval": 4}
        saving = LambdaCallback(**{saved_in: save})  # type: ignore[arg-type]
        trainer = run(module, saving, stop, ckpt_path=ckpt_path, **options)
        fed.append(module.fed)
        stopped.append((trainer.current_epoch, stop.wait_count))
    assert fed[0] == [2.0, 5.0, 8.0]
    # The schedulers step before on_train_epoch_end, so a save in that hook includes their first step.
    assert fed[1] == (fed[0][1:] if saved_in == "on_train_epoch_end" else fed[0])
    assert stopped == [(9, 2), (9, 2)]  # three checks, of which the first sets the best value
