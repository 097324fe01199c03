"""G-06: each bad argument is refused with its value, the reason, a fix and, for a typo, the nearest name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from engine_case import Tiny, fit, loader

from drivetrain import ConfigurationError, DataModule, DrivetrainError, Fit, Strategy, TrainModule

WRONG: dict[str, list[Any]] = {
    "strategy": [3],
    "devices": [0, -2, [], True],
    "num_nodes": [0],
    "max_epochs": [-2, True],
    "max_steps": [-5],
    "min_steps": [-1],
    "max_time": [{"hour": 1}, "00:00:00:00"],
    "accumulate_grad_batches": [0, 2.0, None],
    "gradient_clip_val": [float("nan"), "1"],
    "limit_train_batches": [1.5, True, numpy.int64(3)],
    "limit_val_batches": [-1],
    "limit_test_batches": [-0.1],
    "limit_predict_batches": ["all"],
    "overfit_batches": [2.5],
    "val_check_interval": [0, 1.5, 0.0],
    "check_val_every_n_epoch": [0],
    "num_sanity_val_steps": [-2, None],
    "reload_dataloaders_every_n_epochs": [-1, True, 1.0, "1"],
    "log_every_n_steps": [-1, None],
    "fast_dev_run": [-1, 1.0],
    "compile": ["yes"],
    "detect_anomaly": [1],
    "use_distributed_sampler": [None],
    "plugins": [["x"]],
}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        *(({name: value}, [f"{name}={value!r}"]) for name, values in WRONG.items() for value in values),
        ({"precision": "bf16-mixd"}, ["'bf16-mixd'", "Did you mean 'bf16-mixed'?"]),
        ({"precision": 8}, ["8"]),
        ({"accelerator": "cpuu"}, ["'cpuu'", "Did you mean 'cpu'?"]),
        ({"max_steps": None}, ["max_steps=None", "-1"]),
        ({"min_steps": 5, "max_steps": 2}, ["min_steps=5", "max_steps=2"]),
        ({"gradient_clip_algorithm": "nrom"}, ["'nrom'", "Did you mean 'norm'?"]),
        ({"limit_train_batches": 1.5}, ["limit_train_batches=1.5", "a float is a fraction"]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, ["val_check_interval=0.5"]),
        ({"callbacks": [torch.optim.SGD]}, ["the class SGD", "Callback"]),
        ({"logger": "tensorbord"}, ["'tensorbord' is unknown", "'tensorboard'"]),
        ({"seed": -1}, ["-1"]),
        ({"seed": 1.5}, ["1.5"]),
        ({"deterministic": "wran"}, ["deterministic='wran'", "Did you mean 'warn'?"]),
        ({"deterministic": True, "benchmark": True}, ["benchmark=True", "deterministic=True"]),
        ({"launcher": "forkservr"}, ["'forkservr'", "Did you mean 'forkserver'?"]),
        ({"environment": "slrum"}, ["'slrum'", "Did you mean 'slurm'?"]),
        ({"profiler": "simpel"}, ["profiler='simpel'", "Did you mean 'simple'?"]),
        ({"profiler": True}, ["profiler=True", "'simple'"]),
        ({"barebones": True, "profiler": "simple"}, ["barebones=True", "profiler='simple'"]),
        ({"barebones": True, "detect_anomaly": True}, ["barebones=True", "detect_anomaly=True"]),
        ({"barebones": True, "logger": True}, ["barebones=True", "logger=True"]),
        ({"gradient_clip_value": 1.0}, ["'gradient_clip_value'", "Did you mean 'gradient_clip_val'?"]),
    ],
    ids=repr,
)
def test_wrong_arguments_are_refused_as_fit_is_built(options: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Fit(**options)
    error = caught.value
    for part in parts:
        assert part in str(error)
    assert error.fix, f"no way out is named: {error}"
    assert error.why or "Did you mean" in error.what, f"no reason is given: {error}"


class Untrained(TrainModule):
    def train_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class OnlyTraining(TrainModule):
    training_step = Tiny.training_step


class Replicas(Strategy):
    """Cannot share the statistics of batch norms."""

    name = "replicas"

    def setup_module(self, module: torch.nn.Module) -> Callable[..., Any]:
        raise AssertionError

    def teardown(self) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda run: run.fit(Tiny, loader()), ["TrainModule"]),
        (lambda run: run.fit(Untrained(), loader()), ["Untrained has no training_step", "It has 'train_step'"]),
        (lambda run: run.fit(OnlyTraining(), loader()), ["no configure_optimizers", "def configure_optimizers"]),
        (lambda run: run.fit(Tiny(), datamodule=DataModule()), ["no training loader"]),
        (lambda run: run.fit(Tiny(), loader(), datamodule=DataModule()), ["train loaders and a datamodule"]),
        (lambda run: run.fit(Tiny(), loader(3, 4, drop_last=True)), ["no batch", "drop_last"]),
        (lambda run: run.fit(Tiny(), {}), ["no loader"]),
        (lambda run: run.validate(Tiny()), ["validate was given no loader", "val_dataloader"]),
        (lambda run: run.test(Tiny()), ["test was given no loader", "test_dataloader"]),
        (lambda run: run.predict(Tiny()), ["predict was given no loader", "predict_dataloader"]),
        (lambda run: run.validate(OnlyTraining(), loader()), ["has no validation_step", "def validation_step"]),
        (lambda run: run.test(OnlyTraining(), loader()), ["has no test_step", "def test_step"]),
    ],
)
def test_unusable_modules_and_loaders_are_refused_before_the_first_step(
    tmp_path: Path, call: Callable[[Fit], Any], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tiny, "training_step", lambda *_: pytest.fail("a step was made"))
    with pytest.raises(DrivetrainError) as caught:
        call(fit(tmp_path))
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"accelerator": "cuda"}, "torch sees no such device"),
        ({"accelerator": "cpu", "devices": -1}, "CPU processes are not counted"),
        ({"accelerator": "cpu", "devices": [0, 1]}, "CPU processes have no index"),
        ({"accelerator": "cpu", "sync_batchnorm": True}, "needs an accelerator"),
        ({"accelerator": "cpu", "strategy": "single_device", "devices": 2}, "one replica on one device"),
        # it would silently normalise over each rank's own samples
        ({"strategy": Replicas(), "sync_batchnorm": True}, "sync_batchnorm=True with strategy='replicas'"),
    ],
)
def test_what_cannot_be_had_is_not_silently_replaced(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    """A-06."""
    if options.get("accelerator") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigurationError, match=error):
        fit(tmp_path, **options).fit(Tiny(), loader())


def test_a_loader_over_an_exhausted_iterator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="an iterator can be read only once"):
        fit(tmp_path, max_epochs=2).fit(Tiny(), iter([torch.ones(2, 2)]))
