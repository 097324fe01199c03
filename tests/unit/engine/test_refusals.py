"""G-06: each bad argument is refused with its value, the reason, a fix and, for a typo, the nearest name.

Settings that could have no effect, or that torch cannot apply, are refused or warned about when a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from engine_case import Bare, Regression, Tiny, fit, loader, regression
from small_modules import linear
from torch import nn

from captured_warnings import captured_warnings
from drivetrain import ConfigurationError, DataModule, DrivetrainError, Fit, Strategy, TrainModule, seed_everything

# Private: this test process is seeded, and must look as if it were not.
from drivetrain._engine.ranks import seeding
from drivetrain._runtime import seed
from drivetrain._runtime.process_state import ProcessState
from drivetrain.callbacks import Checkpoint

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
    "preemption_signals": [3, True, 2.5],
    "default_root_dir": [3, ["x"], b"x", object],
    "accelerator": [3, torch.zeros(2)],
    "seed": [True],
    "plugins": [["x"]],
}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        *(({name: value}, [f"{name}={value!r}"]) for name, values in WRONG.items() for value in values),
        ({"precision": "bf16-mixd"}, ["'bf16-mixd'", "Did you mean 'bf16-mixed'?"]),
        ({"precision": 8}, ["8"]),
        ({"accelerator": "cpuu"}, ["'cpuu'", "Did you mean 'cpu'?"]),
        ({"max_steps": None}, ["max_steps=None", "takes int"]),
        ({"min_steps": 5, "max_steps": 2}, ["min_steps=5", "max_steps=2"]),
        ({"gradient_clip_algorithm": "nrom"}, ["'nrom'", "Did you mean 'norm'?"]),
        ({"limit_train_batches": 1.5}, ["limit_train_batches=1.5", "a float is a fraction"]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, ["val_check_interval=0.5"]),
        ({"callbacks": [torch.optim.SGD]}, ["the class SGD", "Callback"]),
        ({"callbacks": 3}, ["callbacks=3", "Callback"]),
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
        (lambda run: run.fit(Untrained(), loader()), ["Untrained has no training_step"]),
        (lambda run: run.fit(OnlyTraining(), loader()), ["no configure_optimizers", "def configure_optimizers"]),
        (lambda run: run.fit(Tiny(), datamodule=DataModule()), ["no training loader"]),
        (lambda run: run.fit(Tiny(), loader(), datamodule=DataModule()), ["train loaders and a datamodule"]),
        (lambda run: run.fit(Tiny(), loader(3, 4, drop_last=True)), ["no batch", "drop_last"]),
        (lambda run: run.fit(Tiny(), {}), ["no loader"]),
        (lambda run: run.fit(Tiny(), loader(), ckpt_path=3), ["ckpt_path=3 is not a path", "pathlib.Path"]),
        (lambda run: run.fit(Tiny(), {"one": loader().dataset}), ["which is a data set", "wrap it in a loader"]),
        (lambda run: run.validate(Tiny()), ["validate was given no loader", "val_dataloader"]),
        (lambda run: run.test(Tiny()), ["test was given no loader", "test_dataloader"]),
        (lambda run: run.predict(Tiny()), ["predict was given no loader", "predict_dataloader"]),
        (lambda run: run.validate(OnlyTraining(), loader()), ["has no validation_step", "def validation_step"]),
        (lambda run: run.test(OnlyTraining(), loader()), ["has no test_step", "def test_step"]),
    ],
)
def test_unusable_modules_and_loaders_are_refused(tmp_path: Path, call: Any, parts: Any, monkeypatch: Any) -> None:
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
        ({"accelerator": "cpu", "devices": [0, 1]}, "not counted and have no index"),
        ({"accelerator": "cpu", "sync_batchnorm": True}, "needs an accelerator"),
        ({"accelerator": "cpu", "strategy": "single_device", "devices": 2}, "one replica on one device"),
        # it would silently normalise over each rank's own samples
        ({"strategy": Replicas(), "sync_batchnorm": True}, "sync_batchnorm=True with strategy='replicas'"),
    ],
)
def test_what_cannot_be_had_is_not_silently_replaced(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    #
    if options.get("accelerator") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigurationError, match=error):
        fit(tmp_path, **options).fit(Tiny(), loader())


class Complex(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + (batch[0] * self.phase).abs().square().sum()


def test_clipping_by_value_is_refused_for_complex_parameters(tmp_path: Path) -> None:  # B-05
    with pytest.raises(ConfigurationError, match=r"a gradient of dtype torch\.complex64"):
        fit(tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm="value").fit(Complex(), regression())
    frozen = Complex()
    frozen.phase.requires_grad_(False)
    fit(tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm="value").fit(frozen, regression())


def test_clipping_by_norm_treats_complex_gradients_as_torch_does(tmp_path: Path) -> None:  # B-05
    module, reference = Complex(), Complex()
    reference.load_state_dict(module.state_dict())
    fit(tmp_path, gradient_clip_val=0.1).fit(module, regression())
    optimizer = reference.configure_optimizers()
    for batch in regression():  # Written by hand: the oracle has no complex parameters.
        optimizer.zero_grad()
        reference.training_step(batch, 0).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
    for found, expected in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_an_algorithm_without_a_limit_is_refused_unless_it_is_read(tmp_path: Path) -> None:  # B-05
    def clip(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        self.read = gradient_clip_algorithm
        self.clip_gradients(optimizer, 0.1, gradient_clip_algorithm)

    with pytest.raises(ConfigurationError, match="gradient_clip_algorithm='value' without gradient_clip_val"):
        fit(tmp_path, gradient_clip_algorithm="value").fit(Regression(), regression())
    reading: Any = linear(configure_gradient_clipping=clip)
    fit(tmp_path, gradient_clip_algorithm="value").fit(reading, regression())
    assert reading.read == "value"
    by_hand = linear(automatic_optimization=False, training_step=lambda self, batch: self.optimizers().step())
    fit(tmp_path, gradient_clip_algorithm="value").fit(by_hand, regression())
    fit(tmp_path, gradient_clip_algorithm="value", gradient_clip_val=0).fit(Regression(), regression())
    validating = linear(validation_step=lambda self, batch: None)
    fit(tmp_path, gradient_clip_algorithm="value").validate(validating, regression(), verbose=False)


@pytest.mark.parametrize(
    ("validates", "warnings", "options"),
    [
        (True, 1, {"max_epochs": 2}),
        (True, 1, {"max_epochs": 2, "val_check_interval": 0.5}),
        (True, 0, {"max_epochs": 3}),
        (True, 0, {"max_steps": 2, "max_epochs": -1}),
        (True, 0, {"limit_val_batches": 0}),
        (True, 0, {"fast_dev_run": True}),
        (True, 0, {"check_val_every_n_epoch": None, "val_check_interval": 2}),
        (False, 0, {}),
    ],
)
def test_a_run_that_never_validates_warns(tmp_path: Path, validates: bool, warnings: int, options: Any) -> None:  # I-06
    module, validation = linear(validation_step=lambda self, batch: None), regression() if validates else None
    with captured_warnings() as lines:
        fit(tmp_path, **{"check_val_every_n_epoch": 3, **options}).fit(module, regression(), validation)
    found = [line for line in lines if "check_val_every_n_epoch" in line]
    assert len(found) == warnings
    assert all("=3 is more than max_epochs=2: this run never validates." in line for line in found)


class Line(Bare):
    def predict_step(self, batch: Any) -> None: ...


class Late(Line):
    def __init__(self) -> None:
        super().__init__()
        self.layer = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = torch.nn.Linear(2, 1)


@pytest.fixture
def unseeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the process look as if no generator had been seeded."""
    with ProcessState(generators=True):
        random = torch.seed() >> 11 | 2**40
        torch.manual_seed(random)
        monkeypatch.setattr(seed, "_seed_at_import", random)
        monkeypatch.setattr(seed, "_last_seed", None)
        monkeypatch.setattr(seeding, "_reported_unseeded", False)
        yield


def test_a_module_built_before_the_seed_is_warned_about_once_unless_it_was_built_in_a_seeded_fork(
    unseeded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # I-18
    monkeypatch.setattr(seed, "_state_at_import", torch.get_rng_state())
    with captured_warnings() as lines:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            module = Line()
        fit(tmp_path, seed=7).fit(module, loader(4))
        assert lines == []
        fit(tmp_path, seed=7).fit(Line(), loader(4))
        fit(tmp_path, seed=7).fit(Line(), loader(4))
    (line,) = lines
    assert line.startswith("Fit(seed=7) seeds the run, but Line was built before the run with unseeded generators")
    assert "seed_everything(7)" in line
    assert "configure_model" in line


def test_no_module_is_warned_about_with_an_early_seed_or_without_one(unseeded: None, tmp_path: Path) -> None:  # I-18
    run = fit(tmp_path, seed=7)
    with captured_warnings() as lines:
        fit(tmp_path, seed=None).fit(Line(), loader(4))
        run.predict(Line(), loader(4))
        run.fit(Late(), loader(4))
        run.save_checkpoint(tmp_path / "saved")
        # The weights come from the checkpoint, of another class.
        fit(tmp_path, seed=7, max_epochs=2).fit(Line(), loader(4), ckpt_path=tmp_path / "saved", allow=("module",))
        state = torch.get_rng_state()
        seed_everything(1)
        torch.set_rng_state(state)  # as `fork_rng` does
        run.fit(Line(), loader(4))
    assert [line for line in lines if "are allowed" not in line] == []


def test_started_functions_know_how_their_caller_built_the_module(unseeded: None, tmp_path: Path) -> None:  # I-18
    # Their own generators give no indication: those of a fork server are never seeded.
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "launcher": "fork", "seed": 7}
    options["callbacks"] = Checkpoint(save_top_k=0)  # a logs folder requires a run folder
    trainer = fit(tmp_path, **options)
    trainer.fit(Line(), loader(4))
    assert sum(log.read_text().count("Fit(seed=7) seeds the run") for log in tmp_path.rglob("rank-*.log")) == 1
    seeding._reported_unseeded = False
    torch.manual_seed(1)
    trainer = fit(tmp_path / "again", **options)
    trainer.fit(Line(), loader(4))
    assert not [log for log in (tmp_path / "again").rglob("rank-*.log") if "seeds the run" in log.read_text()]
