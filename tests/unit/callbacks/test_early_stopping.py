"""EarlyStopping, and the age of monitored values: each scores the weights it was computed with, once (S-04)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from callback_modules import Regression, Scored, Validated, loader, quiet_fit

from drivetrain import ConfigurationError, Fit, TrainModule
from drivetrain.callbacks import Checkpoint, EarlyStopping, LambdaCallback
from worlds import on_ranks


def fit(values: list[float], *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Fit:
    """Train two steps an epoch, and log one of ``values`` as ``val_loss`` after each."""
    trainer = quiet_fit(callbacks=list(callbacks), **{"max_epochs": len(values), **options})
    trainer.fit(Validated(values), loader(8), loader(4), ckpt_path=ckpt_path)
    return trainer


# The results of Lightning with the same arguments and values.
@pytest.mark.parametrize(
    ("options", "values", "stops"),
    [
        ({"patience": 1}, [1.0, 0.5, 0.6, 0.4], 2),
        ({"patience": np.int64(2)}, [1.0, 0.5, 0.6, 0.55, 0.4], 3),  # I-10
        ({"patience": 3}, [6.0, 5.0, 5.0, 5.0, 5.0, 5.0], 4),
        ({"patience": 0}, [1.0, 0.9, 0.95], 2),
        ({"patience": 2, "mode": "max"}, [0.1, 0.5, 0.4, 0.5], 3),
        ({"patience": 1, "min_delta": 0.1}, [1.0, 0.95], 1),
        ({"patience": 1, "min_delta": -0.1, "mode": "max"}, [1.0, 1.05], 1),
        ({"patience": 1, "min_delta": 0.1}, [1.0, 0.85, 0.7], None),
        ({"patience": 9}, [1.0, math.nan], 1),
        ({"patience": 9}, [1.0, math.inf], 1),
        ({"patience": 9, "check_finite": False}, [1.0, math.nan, 0.5], None),
        ({"patience": 9, "stopping_threshold": 0.3}, [1.0, 0.3, 0.29], 2),
        ({"patience": 9, "stopping_threshold": 0.9, "mode": "max"}, [0.5, 0.95], 1),
        ({"patience": 9, "divergence_threshold": 2.0}, [1.0, 2.0, 2.1], 2),
        ({"patience": 9, "divergence_threshold": 0.2, "mode": "max"}, [0.5, 0.1], 1),
    ],
)
def test_it_stops_in_the_epoch_of(options: dict[str, Any], values: list[float], stops: int | None) -> None:
    stopping = EarlyStopping("val_loss", **options)
    trainer = fit(values, stopping)
    assert trainer.current_epoch == (len(values) if stops is None else stops + 1)
    assert stopping.stopped_epoch == (stops or 0)
    assert (stopping.stopping_reason is None) == (stops is None)


def test_verbose_prints_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    fit([1.0, 0.5, 0.75], EarlyStopping("val_loss", patience=1, verbose=True))
    printed = capsys.readouterr().out
    assert printed.index("improved to 0.5") < printed.index("did not improve on 0.5")


def test_without_strict_a_key_that_nobody_logs_is_skipped_with_one_warning() -> None:
    stopping = EarlyStopping("acc", strict=False)
    with pytest.warns(RuntimeWarning, match=r"'acc'.* was logged\. The check is skipped \(strict=False\): ") as caught:
        trainer = fit([1.0, 1.0, 1.0], stopping)
    assert sum("'acc'" in str(warning.message) for warning in caught) == 1
    assert (trainer.current_epoch, stopping.wait_count) == (3, 0)


@pytest.mark.parametrize(
    ("monitor", "at_epoch_end", "options", "steps"),
    [
        pytest.param("bad", None, {}, 4, id="a validation in each epoch"),
        pytest.param("bad", None, {"val_check_interval": 0.5}, 2, id="two validations in each epoch"),
        pytest.param("bad", True, {"val_check_interval": 0.5}, 4, id="the epoch's end, as asked"),
        pytest.param("bad", None, {"check_val_every_n_epoch": 2}, 8, id="a validation in each second epoch"),
        pytest.param("bad", False, {}, 4, id="validations, as asked"),
        pytest.param("bad", None, {"limit_val_batches": 0}, 4, id="no validation"),
        pytest.param("score", None, {"limit_val_batches": 0}, 4, id="no validation, a value of the module's hook"),
    ],
)
def test_when_it_looks(monitor: str, at_epoch_end: bool | None, options: dict[str, Any], steps: int) -> None:
    class Bad(Scored):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("bad", math.nan)
            return self.loss(batch)

    stopping = EarlyStopping(monitor, check_on_train_epoch_end=at_epoch_end)
    trainer = quiet_fit(max_epochs=4, num_sanity_val_steps=1, callbacks=stopping, **options)
    trainer.validate(Regression(), loader(4))  # where the value is absent, and not looked at
    trainer.fit(Bad([math.nan] * 4), loader(16), loader(4))
    assert trainer.global_step == steps


VALIDATED = (9.0, 9.0, 5.0, 9.0, 9.0, 4.0, 9.0)
THIRDS: dict[str, Any] = {"max_epochs": 7, "check_val_every_n_epoch": 3}
VALUES = [1.0, 1.1, 1.2, 1.3, 0.9, 0.8, 0.7, 0.6, 0.65, 0.66, 0.67, 0.68]


@pytest.mark.parametrize(
    ("values", "options", "settings", "ends"),
    [
        (VALUES, [{"patience": 2}], {"min_epochs": 6}, (10, 20, [9])),
        (VALUES, [{"patience": 2}], {"min_steps": 12}, (10, 20, [9])),
        (VALUES, [{"patience": 2}], {"min_epochs": 4}, (4, 8, [3])),  # there is no improvement yet
        (VALUES, [{"patience": 2}], {"min_steps": 7}, (4, 7, [3])),  # it ends within the epoch, after a last check
        (VALUES, [{"patience": 9, "stopping_threshold": 1.05}], {"min_epochs": 2}, (5, 10, [4])),
        ([1.0, math.nan, 0.5, 0.4], [{"patience": 9}], {"min_epochs": 3}, (4, 8, [0])),
        (VALUES, [{"patience": 2}, {"patience": 50}], {"min_epochs": 4}, (4, 8, [3, 0])),
    ],
)
def test_a_request_before_the_minimum_must_hold_then(values: Any, options: Any, settings: Any, ends: Any) -> None:
    # S-05
    stops = [EarlyStopping("val_loss", **each) for each in options]
    trainer = fit(values, *stops, **settings)
    assert (trainer.current_epoch, trainer.global_step, [stop.stopped_epoch for stop in stops]) == ends


def test_a_request_before_the_minimum_outlives_a_resume_until_withdrawn(tmp_path: Path) -> None:  # S-05, F-12, I-17
    def save(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 2:
            trainer.save_checkpoint(tmp_path / "saved")

    rising, minimum = [1.0, *([2.0] * 5)], {"min_steps": 7}
    fit(rising, EarlyStopping("val_loss", patience=2), LambdaCallback(on_train_epoch_end=save), **minimum)
    stopping = EarlyStopping("val_loss", patience=2)
    trainer = fit([2.0] * 6, stopping, ckpt_path=tmp_path / "saved", **minimum)
    assert (trainer.current_epoch, trainer.global_step, stopping.stopped_epoch) == (4, 7, 3)
    assert stopping.best_score == 1.0
    stopping = EarlyStopping("val_loss", patience=2)
    trainer = fit([0.5, 0.4, 0.3, 0.2, 0.1, 0.0], stopping, ckpt_path=tmp_path / "saved", min_epochs=5)
    assert (trainer.current_epoch, stopping.state_dict()["stopping_reason"]) == (6, None)


Values = list[list[float | None]]  # by epoch and rank
# Deciding alone, rank 0 would train to the end and rank 1 would stop, so that rank 0 hangs.
FALLING_AND_RISING: Values = [[10.0 - epoch, 10.0 + 3 * epoch] for epoch in range(8)]
MISSING: Values = [[None, None]]


def _stop_on_ranks(values: Values, options: dict[str, Any]) -> tuple[int, int, float]:
    class Local(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            value = values[self.current_epoch][self.global_rank]
            if value is not None:
                self.log("val_loss", value, sync_dist=False)

    stopping = EarlyStopping("val_loss", patience=2)
    trainer = quiet_fit(strategy="ddp", devices=2, max_epochs=len(values), callbacks=stopping, **options)
    with pytest.raises(ConfigurationError, match="'val_loss'") if values == MISSING else nullcontext():
        trainer.fit(Local(), loader(16), loader(8))
    return trainer.current_epoch, trainer.global_step, stopping.best_score


@pytest.mark.parametrize(
    ("values", "options", "ends"),
    [
        pytest.param(FALLING_AND_RISING, {}, (3, 6, 10.0), id="averaged"),
        pytest.param([[1.0, None], [2.0, None], [3.0, None], [4.0, None]], {}, (3, 6, 1.0), id="one rank without"),
        pytest.param([[value, value] for value in VALUES], {"min_epochs": 6}, (10, 20, 0.6), id="min_epochs"),
        pytest.param([[value, value] for value in VALUES], {"min_steps": 7}, (4, 7, 1.0), id="min_steps"),
        pytest.param(MISSING, {}, (0, 2, math.inf), id="a missing value, refused on every rank"),
    ],
)
def test_all_ranks_stop_together(values: Any, options: Any, ends: tuple[int, int, float]) -> None:  # B-19, S-05
    results = on_ranks(_stop_on_ranks, 2, values, options, process_group=None)
    assert results == [(*ends[:2], pytest.approx(ends[2]))] * 2


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
def test_a_score_is_that_of_the_saved_weights(tmp_path: Path, when: Any, options: Any, saved: Any) -> None:  # S-04
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


def test_a_plateau_gets_no_value_twice_and_the_error_advises_a_frequency(caplog: pytest.LogCaptureFixture) -> None:
    class Sparse(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % 4 == 1:
                self.log("train", self.weight.detach().sum())
            return super().training_step(batch, batch_idx)

    class Twice(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val", 0.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    module: Growing = Sparse(scheduler={"monitor": "train", "interval": "step", "strict": False})
    run(module)
    assert module.fed == [1.0, 5.0]
    caplog.clear()
    module = Growing(VALIDATED, {"strict": False})
    run(module, **THIRDS)
    assert module.fed == [5.0, 4.0]
    assert caplog.text.count("was not logged again") == 1
    module = Twice(VALIDATED, {"strict": False})  # two stages log the same key
    run(module, **THIRDS)
    assert module.fed[2:] == [5.0, 4.0]
    with pytest.raises(ConfigurationError, match="'frequency': 2 with check_val_every_n_epoch=2"):
        run(Growing((1.0, 1.0), {}), max_epochs=2, check_val_every_n_epoch=2)
    module = Growing((1.0, 2.0), {"frequency": 2})
    run(module, max_epochs=2, check_val_every_n_epoch=2)
    assert module.fed == [2.0]


def test_early_stopping_checks_no_value_twice_and_new_ones_also_of_a_run_without_steps() -> None:
    class Once(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 0:
                self.log("train", 1.0)
            return super().training_step(batch, batch_idx)

    class Fixed(Growing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

        def configure_optimizers(self) -> Any:
            return None

    stop = EarlyStopping("train", patience=1, check_on_train_epoch_end=True)
    assert run(Once(), stop, max_epochs=3).current_epoch == 3
    stop = EarlyStopping("val", patience=2)
    assert run(Fixed((1.0,) * 8), stop, max_epochs=8).global_step == 0
    assert stop.stopped_epoch == 2


@pytest.mark.parametrize("saved_in", ["on_validation_end", "on_train_epoch_end", "on_train_batch_end"])
def test_used_values_are_known_after_a_resume(tmp_path: Path, saved_in: str) -> None:  # S-04
    def save(trainer: Any, *arguments: Any) -> None:
        if trainer.current_epoch == 2 and not (tmp_path / "saved").exists():
            trainer.save_checkpoint(tmp_path / "saved")

    # The schedulers step before on_train_epoch_end, so a save in that hook includes their first step.
    resumed = [5.0, 8.0] if saved_in == "on_train_epoch_end" else [2.0, 5.0, 8.0]
    for ckpt_path, fed in ((None, [2.0, 5.0, 8.0]), (tmp_path / "saved", resumed)):
        module = Growing(tuple(map(float, range(9))), {"strict": False})
        stop = EarlyStopping("val", patience=2, strict=False, check_on_train_epoch_end=True)
        options: dict[str, Any] = {"max_epochs": 9, "check_val_every_n_epoch": 3, "val_check_interval": 4}
        saving = LambdaCallback(**{saved_in: save})  # type: ignore[arg-type]
        trainer = run(module, saving, stop, ckpt_path=ckpt_path, **options)
        assert module.fed == fed
        assert (trainer.current_epoch, stop.wait_count) == (9, 2)  # three checks: the first sets the best value
