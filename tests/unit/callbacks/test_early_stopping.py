from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from callback_run import FakeRun, distributed_run
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, Fit, TrainModule
from drivetrain.callbacks import EarlyStopping
from drivetrain.errors import ConfigurationError
from worlds import on_ranks

MODULE: Any = None
"""The callback does not use the module."""


def test_patience_may_be_an_integer_of_numpys() -> None:  # I-10
    assert EarlyStopping("val_loss", patience=np.int64(3)).patience == 3  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="patience=True"):
        EarlyStopping("val_loss", patience=True)


def _drive(
    callback: EarlyStopping, values: list[float], key: str = "val_loss", state: dict[str, Any] | None = None
) -> tuple[int | None, FakeRun]:
    """Pass one value per epoch, after loading ``state``; return the epoch in which it stopped, and the run."""
    run: Any = FakeRun()
    callback.setup(run, MODULE, "fit")
    if state is not None:
        callback.load_state_dict(state)
    callback.on_train_start(run, MODULE)
    for epoch, value in enumerate(values):
        run.current_epoch = epoch
        run.callback_metrics[key] = torch.tensor(value, dtype=torch.float64)
        callback.on_train_epoch_end(run, MODULE)
        if run.should_stop:
            return epoch, run
    return None, run


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
def test_it_stops_when_told(options: dict[str, Any], values: list[float], stops: int | None) -> None:
    callback = EarlyStopping("val_loss", **options)
    epoch, _ = _drive(callback, values)
    assert epoch == stops
    assert callback.stopped_epoch == (stops or 0)
    assert (callback.stopping_reason is None) == (stops is None)


def test_verbose_says_what_happened() -> None:
    _, run = _drive(EarlyStopping("val_loss", patience=1, verbose=True), [1.0, 0.5, 0.75])
    assert "improved to 0.5" in run.printed[1]
    assert "did not improve on 0.5" in run.printed[2]


def test_a_missing_key_is_refused_with_the_nearest_and_the_known_ones() -> None:
    # G-06
    run: Any = FakeRun(callback_metrics={"val_loss": torch.tensor(1.0), "train_loss": torch.tensor(2.0)})
    callback = EarlyStopping("vall_loss")
    callback.on_train_start(run, MODULE)
    with pytest.raises(ConfigurationError, match="Did you mean 'val_loss'") as caught:
        callback.on_train_epoch_end(run, MODULE)
    assert "train_loss, val_loss" in str(caught.value)


def test_without_strict_a_missing_key_is_skipped_with_one_warning() -> None:
    run: Any = FakeRun()
    callback = EarlyStopping("acc", strict=False)
    callback.on_train_start(run, MODULE)
    with pytest.warns(RuntimeWarning, match="'acc'"):
        callback.on_train_epoch_end(run, MODULE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_train_epoch_end(run, MODULE)
    assert not run.should_stop
    assert callback.wait_count == 0


@pytest.mark.parametrize(
    ("asked", "values", "at_epoch_end"),
    [
        (None, {"num_val_batches": [3]}, True),
        (None, {"num_val_batches": [3], "val_check_interval": 1.0}, True),
        (None, {"num_val_batches": [3], "val_check_interval": 0.5}, False),
        (None, {"num_val_batches": [3], "check_val_every_n_epoch": 2}, False),
        (None, {"num_val_batches": [], "check_val_every_n_epoch": 2}, True),
        (False, {"num_val_batches": [3]}, False),
        (True, {"num_val_batches": [3], "val_check_interval": 0.5}, True),
    ],
)
def test_when_it_looks(asked: bool | None, values: dict[str, Any], at_epoch_end: bool) -> None:
    run: Any = FakeRun(callback_metrics={"loss": torch.tensor(math.nan)}, **values)
    callback = EarlyStopping("loss", check_on_train_epoch_end=asked)
    callback.setup(run, MODULE, "fit")
    callback.on_train_start(run, MODULE)
    run.sanity_checking = True
    callback.on_validation_end(run, MODULE)
    assert not run.should_stop
    run.sanity_checking = False
    callback.on_validation_end(run, MODULE)
    assert run.should_stop is not at_epoch_end
    run.should_stop = False
    callback.on_train_epoch_end(run, MODULE)
    assert run.should_stop is at_epoch_end


def test_a_validation_outside_fit_is_none_of_its_business() -> None:
    run: Any = FakeRun()
    callback = EarlyStopping("loss", check_on_train_epoch_end=False)
    callback.setup(run, MODULE, "validate")
    callback.on_validation_end(run, MODULE)  # would raise an error for the missing key
    assert not run.should_stop


def test_its_state_goes_on_where_it_was() -> None:
    # F-12
    first = EarlyStopping("val_loss", patience=3)
    _drive(first, [1.0, 0.5, 0.6, 0.7])
    second = EarlyStopping("val_loss", patience=3)
    epoch, _ = _drive(second, [0.6], state=first.state_dict())
    assert epoch == 0
    assert second.best_score == 0.5


def test_two_with_different_settings_have_different_state_keys() -> None:
    # F-12
    keys = {
        EarlyStopping("a").state_key,
        EarlyStopping("b").state_key,
        EarlyStopping("a", mode="max").state_key,
        EarlyStopping("a", patience=4).state_key,
        EarlyStopping("a", stopping_threshold=1.0).state_key,
    }
    assert len(keys) == 5
    assert EarlyStopping("a").state_key == EarlyStopping("a").state_key


@pytest.mark.parametrize("options", [{"mode": "mni"}, {"patience": -1}])
def test_bad_arguments_are_refused(options: dict[str, Any]) -> None:
    # G-06
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        EarlyStopping("loss", **options)


def _local_values(rank_values: list[list[float | None]]) -> tuple[list[bool], float, int]:
    run: Any = distributed_run()
    rank = run.strategy.control.rank
    callback = EarlyStopping("loss", patience=1)
    callback.on_train_start(run, MODULE)
    decisions = []
    for values in rank_values:
        value = values[rank]
        run.callback_metrics = {} if value is None else {"loss": torch.tensor(value)}
        callback.on_train_epoch_end(run, MODULE)
        decisions.append(run.should_stop)
    return decisions, callback.best_score, callback.wait_count


def test_a_value_that_is_local_to_the_ranks_is_averaged_and_decided_alike() -> None:
    # B-19. With its own values rank 0 would continue (1.0, 0.5, 0.4) and rank 1 would stop at the second (1.0, 3.0).
    results = on_ranks(_local_values, 2, [[1.0, 1.0], [0.5, 3.0], [0.25, 0.25]])
    assert results[0] == results[1] == ([False, True, False], 0.25, 0)  # the last check withdraws the request
    # A rank without data logs nothing, so the mean of the others counts.
    results = on_ranks(_local_values, 3, [[1.0, 2.0, None], [1.0, None, None]])
    assert results[0] == results[1] == results[2] == ([False, False], 1.0, 0)


def _missing_everywhere() -> str:
    run: Any = distributed_run()
    callback = EarlyStopping("loss")
    callback.on_train_start(run, MODULE)
    try:
        callback.on_train_epoch_end(run, MODULE)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_missing_key_is_refused_on_every_rank() -> None:
    # B-19: never a hang
    assert all("'loss'" in text for text in on_ranks(_missing_everywhere, 2))


def test_a_run_that_was_held_back_and_goes_on_has_not_stopped() -> None:  # I-17
    """A stop was requested, ``min_epochs`` delayed it, the run was resumed, and the value has improved since."""
    held_back = {"wait_count": 1, "best_score": 1.0, "stopped_epoch": 1, "stopping_reason": "val_loss did not improve"}
    callback = EarlyStopping("val_loss", patience=1)
    assert _drive(callback, [0.5], state=held_back)[0] is None
    assert callback.state_dict()["stopping_reason"] is None


class Scored(TrainModule):
    """Logs ``values`` by epoch. An epoch has two steps."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.values = values

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight.sum() * batch[0].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.values[self.current_epoch])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


VALUES = [1.0, 1.1, 1.2, 1.3, 0.9, 0.8, 0.7, 0.6, 0.65, 0.66, 0.67, 0.68]


def _stop(values: list[float], options: list[dict[str, Any]], **settings: Any) -> tuple[int, int, list[int]]:
    data = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=settings.pop("batch_size", 2))
    stops = [EarlyStopping("val", **each) for each in options]
    callbacks: list[Callback] = [*stops, *settings.pop("callbacks", [])]
    ckpt_path = settings.pop("ckpt_path", None)
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    off |= {"enable_checkpointing": False, "num_sanity_val_steps": 0, "max_epochs": 12}
    fit = Fit(accelerator="cpu", callbacks=callbacks, **(off | settings))
    fit.fit(Scored(values), data, data, ckpt_path=ckpt_path)
    return fit.current_epoch, fit.global_step, [stop.stopped_epoch for stop in stops]


@pytest.mark.parametrize(
    ("values", "options", "settings", "ends"),
    [
        (VALUES, [{"patience": 2}], {"min_epochs": 6}, (10, 20, [9])),
        (VALUES, [{"patience": 2}], {"min_steps": 12}, (10, 20, [9])),
        (VALUES, [{"patience": 2}], {"min_epochs": 4}, (4, 8, [3])),  # there is no improvement yet
        (VALUES, [{"patience": 2}], {"min_steps": 7}, (4, 7, [3])),  # it ends within the epoch, after a last check
        (VALUES, [{"patience": 9, "stopping_threshold": 1.05}], {"min_epochs": 2}, (5, 10, [4])),
        ([1.0, math.nan, 0.5, 0.4], [{"patience": 9}], {"min_epochs": 3, "max_epochs": 4}, (4, 8, [0])),
        (VALUES, [{"patience": 2}, {"patience": 50}], {"min_epochs": 4}, (4, 8, [3, 0])),
    ],
)
def test_a_request_before_the_minimum_is_obeyed_only_if_it_still_holds(
    values: list[float], options: list[dict[str, Any]], settings: dict[str, Any], ends: tuple[int, int, list[int]]
) -> None:
    # S-05
    assert _stop(values, options, **settings) == ends


def test_a_request_before_the_minimum_outlives_a_resume(tmp_path: Path) -> None:
    # S-05
    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 2:
                trainer.save_checkpoint(tmp_path / "saved")

    rising = [1.0, *([2.0] * 11)]
    assert _stop(rising, [{"patience": 2}], min_steps=7, callbacks=[Saves()]) == (4, 7, [3])
    assert _stop(rising, [{"patience": 2}], min_steps=7, ckpt_path=tmp_path / "saved") == (4, 7, [3])


def _stop_on_ranks() -> list[tuple[int, int, list[int]]]:
    common: dict[str, Any] = {"strategy": "ddp", "batch_size": 1}
    return [
        _stop(VALUES, [{"patience": 2}], min_epochs=6, **common),
        _stop(VALUES, [{"patience": 2}], min_steps=7, **common),
    ]


def test_all_ranks_obey_a_request_after_the_minimum_together() -> None:
    # S-05
    assert on_ranks(_stop_on_ranks, 2) == [[(10, 20, [9]), (4, 7, [3])]] * 2
