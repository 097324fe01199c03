"""EarlyStopping: when a run stops, and that all ranks stop together."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from callback_modules import Regression, Scored, Validated, loader, quiet_fit

from drivetrain import ConfigurationError, Fit
from drivetrain.callbacks import EarlyStopping, LambdaCallback
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
        ({"patience": 2}, [1.0, 0.5, 0.6, 0.55, 0.4], 3),
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


def test_a_key_that_nobody_logs_is_refused_with_the_nearest_and_the_known_ones() -> None:  # G-06
    with pytest.raises(ConfigurationError, match="Did you mean 'val_loss'") as caught:
        fit([1.0], EarlyStopping("vall_loss"))
    assert "train_loss, val_loss" in str(caught.value)


def test_without_strict_a_missing_key_is_skipped_with_one_warning() -> None:
    stopping = EarlyStopping("acc", strict=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit([1.0, 1.0, 1.0], stopping)
    assert sum("'acc'" in str(warning.message) for warning in caught) == 1
    assert (trainer.current_epoch, stopping.wait_count) == (3, 0)


@pytest.mark.parametrize(
    ("at_epoch_end", "options", "steps"),
    [
        pytest.param(None, {}, 4, id="a validation in each epoch"),
        pytest.param(None, {"val_check_interval": 0.5}, 2, id="two validations in each epoch"),
        pytest.param(True, {"val_check_interval": 0.5}, 4, id="the epoch's end, as asked"),
        pytest.param(None, {"check_val_every_n_epoch": 2}, 8, id="a validation in each second epoch"),
        pytest.param(False, {}, 4, id="validations, as asked"),
        pytest.param(None, {"limit_val_batches": 0}, 4, id="no validation"),
    ],
)
def test_when_it_looks(at_epoch_end: bool | None, options: dict[str, Any], steps: int) -> None:
    class Bad(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("bad", math.nan)
            return self.loss(batch)

    stopping = EarlyStopping("bad", check_on_train_epoch_end=at_epoch_end)
    trainer = quiet_fit(max_epochs=4, num_sanity_val_steps=1, callbacks=stopping, **options)
    trainer.fit(Bad(), loader(16), loader(4))
    assert trainer.global_step == steps


def test_a_value_of_the_modules_own_epoch_hook_can_be_monitored() -> None:
    trainer = quiet_fit(max_epochs=5, callbacks=EarlyStopping("score"))
    trainer.fit(Scored([math.nan] * 5), loader(8))
    assert trainer.current_epoch == 1


def test_a_validation_outside_fit_is_not_looked_at() -> None:
    stopping = EarlyStopping("absent", check_on_train_epoch_end=False)
    quiet_fit(callbacks=stopping).validate(Regression(), loader(4))


def test_patience_may_be_an_integer_of_numpys() -> None:  # I-10
    assert EarlyStopping("a", patience=np.int64(4)).patience == 4  # type: ignore[arg-type]


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
def test_a_request_before_the_minimum_is_obeyed_only_if_it_still_holds(
    values: list[float], options: list[dict[str, Any]], settings: dict[str, Any], ends: tuple[int, int, list[int]]
) -> None:  # S-05
    stops = [EarlyStopping("val_loss", **each) for each in options]
    trainer = fit(values, *stops, **settings)
    assert (trainer.current_epoch, trainer.global_step, [stop.stopped_epoch for stop in stops]) == ends


def test_a_request_before_the_minimum_outlives_a_resume_until_it_is_withdrawn(tmp_path: Path) -> None:
    # S-05, F-12, I-17
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


class Local(Validated):
    """Logs the value of its rank, if it has one, and does not average it over the ranks."""

    def __init__(self, values: Values) -> None:
        super().__init__([])
        self.values = values

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = self.values[self.current_epoch][self.global_rank]
        if value is not None:
            self.log("val_loss", value, sync_dist=False)


# Deciding alone, rank 0 would train to the end and rank 1 would stop, so that rank 0 hangs.
FALLING_AND_RISING: Values = [[10.0 - epoch, 10.0 + 3 * epoch] for epoch in range(8)]


def _stop_on_ranks(values: Values, options: dict[str, Any]) -> tuple[int, int, float]:
    stopping = EarlyStopping("val_loss", patience=2)
    trainer = quiet_fit(strategy="ddp", devices=2, max_epochs=len(values), callbacks=stopping, **options)
    trainer.fit(Local(values), loader(16), loader(8))
    return trainer.current_epoch, trainer.global_step, stopping.best_score


@pytest.mark.parametrize(
    ("values", "options", "ends"),
    [
        pytest.param(FALLING_AND_RISING, {}, (3, 6, 10.0), id="averaged"),
        pytest.param([[1.0, None], [2.0, None], [3.0, None], [4.0, None]], {}, (3, 6, 1.0), id="one rank without"),
        pytest.param([[value, value] for value in VALUES], {"min_epochs": 6}, (10, 20, 0.6), id="min_epochs"),
        pytest.param([[value, value] for value in VALUES], {"min_steps": 7}, (4, 7, 1.0), id="min_steps"),
    ],
)
def test_all_ranks_stop_together(values: Any, options: dict[str, Any], ends: tuple[int, int, float]) -> None:
    # B-19, S-05
    results = on_ranks(_stop_on_ranks, 2, values, options, process_group=None)
    assert results == [(*ends[:2], pytest.approx(ends[2]))] * 2


def _missing_on_ranks() -> None:
    with pytest.raises(ConfigurationError, match="'val_loss'"):
        _stop_on_ranks([[None, None]], {})


def test_a_missing_key_is_refused_on_every_rank() -> None:
    # B-19: never a hang
    on_ranks(_missing_on_ranks, 2, process_group=None)
