"""The names that Lightning's users read, with Lightning's meaning: before a run, in each phase, and after it.

The values are those that Lightning 2.6.6 gives in the same run.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, loader

from drivetrain import Callback, DataModule, Fit
from drivetrain.callbacks import Checkpoint, EarlyStopping, LambdaCallback, LearningRateMonitor, ProgressBar
from drivetrain.loggers import CSVLogger


class Model(Tiny):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("loss", 1.0, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", -float(self.global_step), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


STAGES = ("train", "val", "test", "predict")


class Data(DataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loaders = {stage: loader(3 * batch_size, batch_size) for stage in STAGES}


for stage in STAGES:
    setattr(Data, f"{stage}_dataloader", lambda self, stage=stage: self.loaders[stage])


PHASES = (
    *("built", "fit.setup", "fit.start", "sanity", "sanity.end", "train.start", "epoch.start", "batch.start", "batch"),
    *("last.batch", "validation", "validation.end", "epoch.end", "fit.end", "fit.teardown", "after fit"),
    *("validate", "after validate", "test", "after test", "predict", "after predict"),
)
"""When a value is read; those of an epoch are the first's, "batch" is the end of its first micro-batch."""


HOOKS = {"setup": "fit.setup", "teardown": "fit.teardown", "on_sanity_check_end": "sanity.end"}
HOOKS |= {"on_fit_start": "fit.start", "on_train_start": "train.start", "on_train_epoch_start": "epoch.start"}
HOOKS |= {"on_train_batch_start": "batch.start", "on_train_epoch_end": "epoch.end", "on_fit_end": "fit.end"}
HOOKS |= {"on_test_batch_end": "test", "on_predict_batch_end": "predict"}
"""The phases by the hook in which they are read."""


def reading(run: Recorded) -> Callback:
    """Return a callback that reads every name in every phase."""

    def trained(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        run.read("last.batch" if batch_idx == 2 else "batch")

    def validated(trainer: Any, *_: Any) -> None:
        run.read("sanity" if trainer.sanity_checking else {"fit": "validation"}.get(run.verb, run.verb))

    def ended(trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            run.read("validation.end")

    hooks: dict[str, Any] = {hook: lambda *_, phase=phase: run.read(phase) for hook, phase in HOOKS.items()}
    return LambdaCallback(
        **hooks, on_train_batch_end=trained, on_validation_batch_end=validated, on_validation_end=ended
    )


class Recorded:
    """One trainer that fits, validates, tests and predicts, and the value of each name in each phase."""

    def __init__(self, path: Path) -> None:
        self.module, self.datamodule = Model(), Data()
        self.early_stopping, self.checkpoint = EarlyStopping("val"), Checkpoint(monitor="val")
        self.rates = LearningRateMonitor()
        callbacks = [reading(self), self.early_stopping, self.checkpoint, self.rates]
        options: dict[str, Any] = {
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 1,
            "log_every_n_steps": 1,
            "seed": 0,
        }
        options |= {"enable_model_summary": False, "default_root_dir": path}
        self.trainer: Any = Fit(callbacks=callbacks, logger=CSVLogger(path), **options)
        self.values: dict[tuple[str, str], Any] = {}
        self.read("built")
        for self.verb in ("fit", "validate", "test", "predict"):
            getattr(self.trainer, self.verb)(self.module, datamodule=self.datamodule)
            self.read(f"after {self.verb}")

    def read(self, phase: str) -> None:
        """Read every name, in a phase's first moment."""
        if ("trainer.training", phase) in self.values:
            return
        for name in TABLE:
            try:
                value = attrgetter(name.removesuffix("()"))(self)
                value = value() if name.endswith("()") else value
                self.values[name, phase] = SHOWN[name](value) if name in SHOWN else value
            except Exception as error:
                self.values[name, phase] = type(error).__name__


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("names"))


def kind(value: Any) -> str:
    return type(value).__name__


SHOWN: dict[str, Any] = {
    **dict.fromkeys(
        ("trainer.strategy", "trainer.logger.version", "module.optimizers()", "module.lr_schedulers()"), kind
    ),
    **dict.fromkeys(("checkpoint.current_score", "checkpoint.kth_value"), kind),
    **dict.fromkeys(("trainer.callback_metrics", "trainer.logged_metrics"), sorted),
    "trainer.progress_bar_metrics": lambda metrics: {name: kind(value) for name, value in metrics.items()},
    "trainer.optimizers": lambda optimizers: [kind(one) for one in optimizers],
    "trainer.lr_scheduler_configs": lambda configs: [
        (kind(one.scheduler), one.interval, one.frequency, one.monitor, one.strict, one.reduce_on_plateau)
        for one in configs
    ],
    "rates.lrs": lambda lrs: {name: len(rates) for name, rates in lrs.items()},
    "checkpoint.best_model_path": bool,
}
"""What the table holds of the values that are not compared themselves."""

FIT = PHASES[1:15]
EVALUATING = ("sanity", "sanity.end", "validation", "validation.end", "validate", "test")
TRAINING = tuple(phase for phase in FIT if phase not in ("sanity", "sanity.end", "validation", "validation.end"))


def during(phases: Any, value: Any, other: Any) -> dict[str, Any]:
    """Expect ``value`` in ``phases``, and ``other`` in all others."""
    return {phase: value if phase in phases else other for phase in PHASES}


class OfRun:
    """Placeholder for an object of the run, in a table that is written before the run exists."""

    def __init__(self, read: Any) -> None:
        self.read = read


TRAINER, MODULE, DATA = OfRun(lambda run: run.trainer), OfRun(lambda run: run.module), OfRun(lambda run: run.datamodule)
LOGGER, LOGGERS = OfRun(lambda run: run.trainer.loggers[0]), OfRun(lambda run: run.trainer.loggers)
STOPPING, CHECKPOINT = OfRun(lambda run: run.early_stopping), OfRun(lambda run: run.checkpoint)
BAR = OfRun(lambda run: next(one for one in run.trainer.callbacks if isinstance(one, ProgressBar)))


def of_stage(stage: str) -> OfRun:
    return OfRun(lambda run: run.datamodule.loaders[stage])


def listed(one: OfRun) -> OfRun:
    return OfRun(lambda run: [one.read(run)])


RATES = [("StepLR", "epoch", 1, None, True, False)]
FROM_FIRST_RUN = {"built": None, "fit.setup": MODULE}

CONSTANT: list[tuple[Any, str]] = [
    (None, "trainer.ckpt_path trainer.scaler trainer.distributed_sampler_kwargs"),
    (False, "trainer.interrupted trainer.received_sigterm trainer.should_stop module.on_gpu"),
    (0, "trainer.global_rank trainer.local_rank trainer.node_rank module.global_rank module.local_rank"),
    (0, "early_stopping.wait_count"),
    (True, "trainer.is_global_zero module.strict_loading module.automatic_optimization"),
    (1, "trainer.num_devices trainer.world_size"),
]
"""Values that hold in all phases."""

TABLE: dict[str, dict[str, Any]] = {
    **{name: {"built": value} for value, names in CONSTANT for name in names.split()},
    "trainer.training": during(TRAINING, True, False),
    "trainer.validating": during(("validation", "validation.end", "validate"), True, False),
    "trainer.testing": during(("test",), True, False),
    "trainer.predicting": during(("predict",), True, False),
    "trainer.sanity_checking": during(("sanity", "sanity.end"), True, False),
    "trainer.evaluating": during(EVALUATING, True, False),
    "trainer.is_last_batch": {"built": False, "last.batch": True, "validate": False},
    "trainer.train_dataloader": {"built": None, "fit.start": of_stage("train"), "validate": None},
    "trainer.val_dataloaders": {"built": None, "fit.start": of_stage("val"), "test": None},
    "trainer.test_dataloaders": {"built": None, "test": of_stage("test"), "predict": None},
    "trainer.predict_dataloaders": {"built": None, "predict": of_stage("predict")},
    "trainer.device_ids": {"built": [0]},
    "trainer.checkpoint_callback": {"built": CHECKPOINT},
    "trainer.checkpoint_callbacks": {"built": listed(CHECKPOINT)},
    "trainer.early_stopping_callback": {"built": STOPPING},
    "trainer.early_stopping_callbacks": {"built": listed(STOPPING)},
    "trainer.progress_bar_callback": {"built": BAR},
    **dict.fromkeys(("trainer.lightning_module", "trainer.module", "trainer.model"), FROM_FIRST_RUN),
    "trainer.datamodule": {"built": None, "fit.setup": DATA},
    "trainer.current_epoch": {"built": 0, "fit.end": 2},
    "trainer.global_step": {"built": 0, "batch": 1, "last.batch": 3, "fit.end": 6},
    "trainer.num_training_batches": {"built": float("inf"), "fit.start": 3, "validate": float("inf")},
    "trainer.num_val_batches": {"built": [], "fit.start": [3], "test": []},
    "trainer.num_sanity_val_batches": {"built": [], "fit.start": [2], "validate": []},
    "trainer.num_test_batches": {"built": [], "test": [3], "predict": []},
    "trainer.num_predict_batches": {"built": [], "predict": [3]},
    "trainer.enable_validation": {"built": False, "fit.setup": True, "validate": False},
    "trainer.loggers": {"built": LOGGERS},
    "trainer.logger": {"built": LOGGER},
    "trainer.estimated_stepping_batches": {"built": "ConfigurationError", "fit.setup": 6, "validate": float("inf")},
    "trainer.log_dir": {"built": None, "fit.setup": OfRun(lambda run: run.trainer.logger.log_dir)},
    "trainer.strategy": {"built": "SingleDeviceStrategy"},
    "trainer.strategy.root_device": {"built": torch.device("cpu")},
    "trainer.precision.name": {"built": "32-true"},
    "trainer.optimizers": {"built": [], "fit.start": ["SGD"], "validate": []},
    "trainer.lr_scheduler_configs": {"built": [], "fit.start": RATES, "validate": []},
    "trainer.callback_metrics": {
        "built": [],
        "sanity.end": ["val"],
        "train.start": [],
        "batch.start": ["lr-SGD"],
        "batch": ["loss", "lr-SGD"],
        "validation.end": ["loss", "lr-SGD", "val"],
        "validate": [],
        "after validate": ["val"],
        "test": [],
        "after test": ["test"],
        "predict": [],
    },
    "trainer.logged_metrics": {
        "built": [],
        "sanity.end": ["val"],
        "train.start": [],
        "batch": ["loss"],
        "validation.end": ["loss", "val"],
        "validate": [],
        "after validate": ["val"],
        "test": [],
        "after test": ["test"],
        "predict": [],
    },
    "trainer.progress_bar_metrics": {
        "built": {},
        "sanity.end": {"val": "float"},
        "train.start": {},
        "batch": {"loss": "float"},
        "validation.end": {"loss": "float", "val": "float"},
        "validate": {},
        "after validate": {"val": "float"},
        "test": {},
    },
    "trainer.logger.save_dir": {"built": OfRun(lambda run: str(run.trainer.default_root_dir))},
    "trainer.logger.version": {"built": "int"},
    "module.trainer": {"built": "ConfigurationError", "fit.setup": TRAINER},
    "module.current_epoch": {"built": 0, "fit.end": 2},
    "module.global_step": {"built": 0, "batch": 1, "last.batch": 3, "fit.end": 6},
    "module.device": {"built": torch.device("cpu")},
    "module.dtype": {"built": torch.float32},
    "module.logger": {"built": None, "fit.setup": LOGGER},
    "module.loggers": {"built": [], "fit.setup": LOGGERS},
    "module.hparams": {"built": {"width": 1}},
    "module.hparams_initial": {"built": {"width": 1}},
    "module.optimizers()": {
        "built": "ConfigurationError",
        "fit.setup": "list",
        "fit.start": "OptimizerHandle",
        "validate": "list",
    },
    "module.lr_schedulers()": {
        "built": "ConfigurationError",
        "fit.setup": "NoneType",
        "fit.start": "StepLR",
        "validate": "NoneType",
    },
    "datamodule.trainer": {"built": "ConfigurationError", "fit.setup": TRAINER},
    "datamodule.hparams": {"built": {"batch_size": 2}},
    "rates.lrs": {"built": {}, "epoch.start": {}, "batch.start": {"lr-SGD": 1}, "fit.end": {"lr-SGD": 2}},
    "checkpoint.best_model_path": {"built": False, "fit.end": True},
    "checkpoint.kth_best_model_path": {"built": "", "fit.end": OfRun(lambda run: run.checkpoint.best_model_path)},
    "checkpoint.current_score": {"built": "NoneType", "fit.end": "float"},
    "checkpoint.kth_value": {"built": "NoneType", "fit.end": "float"},
}
"""When each name takes which value: what stands at a phase holds until the next one that is named."""


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_name_has_lightnings_meaning(recorded: Recorded, name: str) -> None:  # L-10
    expected: Any = None
    for phase in PHASES:
        expected = TABLE[name].get(phase, expected)
        wanted = expected.read(recorded) if isinstance(expected, OfRun) else expected
        assert recorded.values[name, phase] == wanted, f"{name} in {phase!r}"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("fit_loop", r"read trainer\.current_epoch, \.global_step"),
        ("logger_connector", r"read trainer\.callback_metrics"),
        ("_checkpoint_connector", r"use trainer\.save_checkpoint"),
        ("strategy.model", r"read trainer\.model"),
        ("strategy.global_rank", r"read strategy\.rank"),
    ],
)
def test_an_unsupported_name_states_the_replacement(name: str, way: str) -> None:  # L-10
    owner: Any = Fit(accelerator="cpu")
    *path, last = name.split(".")
    for one in path:
        owner = getattr(owner, one)
    with pytest.raises(AttributeError, match=rf"has no attribute '{last}': {way}"):
        getattr(owner, last)
    assert not hasattr(owner, last)
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        _ = owner.nonsense
