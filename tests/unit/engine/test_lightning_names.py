"""The names that Lightning's users read, with Lightning's meaning: before a run, in each phase, and after it.

The values are those that Lightning 2.6.6 gives in the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, DataModule, Fit, TrainModule
from drivetrain.callbacks import Checkpoint, EarlyStopping, LearningRateMonitor, ProgressBar
from drivetrain.loggers import CSVLogger


class Model(TrainModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, width)

    def _loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self._loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Data(DataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        of_stages = ("train", "val", "test", "predict")
        x = TensorDataset(torch.randn(3 * batch_size, 4, generator=torch.Generator().manual_seed(0)))
        self.loaders = {stage: DataLoader(x, batch_size=batch_size) for stage in of_stages}

    def train_dataloader(self) -> Any:
        return self.loaders["train"]

    def val_dataloader(self) -> Any:
        return self.loaders["val"]

    def test_dataloader(self) -> Any:
        return self.loaders["test"]

    def predict_dataloader(self) -> Any:
        return self.loaders["predict"]


PHASES = (
    *("built", "fit.setup", "fit.start", "sanity", "sanity.end", "train.start", "epoch.start", "batch.start", "batch"),
    *("last.batch", "validation", "validation.end", "epoch.end", "fit.end", "fit.teardown", "after fit"),
    *("validate", "after validate", "test", "after test", "predict", "after predict"),
)
"""When a value is read; those of an epoch are the first's, "batch" is the end of its first micro-batch."""


class Reads(Callback):
    """Reads every attribute in every phase."""

    def __init__(self, read: Any) -> None:
        self.read = read

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            self.read("fit.setup")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if stage == "fit":
            self.read("fit.teardown")

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.read("fit.start")

    def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
        self.read("sanity.end")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.read("train.start")

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            self.read("epoch.start")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == batch_idx == 0:
            self.read("batch.start")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx != 1:
            self.read("last.batch" if batch_idx else "batch")

    def on_validation_batch_end(  # type: ignore[override]
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0 and trainer.current_epoch != 1:
            of_epoch = "validation" if trainer.lightning_module is not None and trainer.global_step == 3 else "validate"
            self.read("sanity" if trainer.sanity_checking else of_epoch)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 3:
            self.read("validation.end")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            self.read("epoch.end")

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.read("fit.end")

    def on_test_batch_end(  # type: ignore[override]
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.read("test")

    def on_predict_batch_end(  # type: ignore[override]
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.read("predict")


class Recorded:
    """One trainer that fits, validates, tests and predicts, and the value of each name in each phase."""

    def __init__(self, path: Path) -> None:
        self.module, self.data = Model(), Data()
        self.stopping, self.checkpoint, self.rates = (
            EarlyStopping("val"),
            Checkpoint(monitor="val"),
            LearningRateMonitor(),
        )
        self.trainer: Any = Fit(
            callbacks=[Reads(self.read), self.stopping, self.checkpoint, self.rates],
            logger=CSVLogger(path),
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            enable_model_summary=False,
            default_root_dir=path,
            log_every_n_steps=1,
            seed=0,
        )
        self.values: dict[tuple[str, str], Any] = {}
        self.read("built")
        self.trainer.fit(self.module, datamodule=self.data)
        self.read("after fit")
        for stage in ("validate", "test", "predict"):
            getattr(self.trainer, stage)(self.module, datamodule=self.data)
            self.read(f"after {stage}")

    def read(self, phase: str) -> None:
        for name, read in READS.items():
            try:
                self.values[name, phase] = read(self)
            except Exception as error:
                self.values[name, phase] = type(error).__name__


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("names"))


def of_trainer(name: str) -> Any:
    return lambda run: getattr(run.trainer, name)


READS: dict[str, Any] = {
    **{
        f"trainer.{name}": of_trainer(name)
        for name in (
            *("training", "validating", "testing", "predicting", "sanity_checking", "evaluating", "is_last_batch"),
            *("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders", "ckpt_path"),
            *("num_devices", "device_ids", "checkpoint_callback", "checkpoint_callbacks", "early_stopping_callback"),
            *("early_stopping_callbacks", "progress_bar_callback", "lightning_module", "module", "model", "datamodule"),
            *("interrupted", "received_sigterm", "current_epoch", "global_step", "world_size", "global_rank"),
            *("local_rank", "node_rank", "is_global_zero", "should_stop", "num_training_batches", "num_val_batches"),
            *("num_sanity_val_batches", "num_test_batches", "num_predict_batches", "enable_validation", "scaler"),
            *("distributed_sampler_kwargs", "loggers", "logger", "estimated_stepping_batches", "log_dir"),
        )
    },
    "trainer.strategy": lambda run: type(run.trainer.strategy).__name__,
    "trainer.strategy.root_device": lambda run: run.trainer.strategy.root_device.type,
    "trainer.precision.name": lambda run: run.trainer.precision.name,
    "trainer.optimizers": lambda run: [type(one).__name__ for one in run.trainer.optimizers],
    "trainer.lr_scheduler_configs": lambda run: [
        (type(one.scheduler).__name__, one.interval, one.frequency, one.monitor, one.strict, one.reduce_on_plateau)
        for one in run.trainer.lr_scheduler_configs
    ],
    "trainer.callback_metrics": lambda run: sorted(run.trainer.callback_metrics),
    "trainer.logged_metrics": lambda run: sorted(run.trainer.logged_metrics),
    "trainer.progress_bar_metrics": lambda run: {
        name: type(value).__name__ for name, value in sorted(run.trainer.progress_bar_metrics.items())
    },
    "logger.save_dir": lambda run: run.trainer.logger.save_dir,
    "logger.version": lambda run: type(run.trainer.logger.version).__name__,
    "module.trainer": lambda run: run.module.trainer,
    "module.current_epoch": lambda run: run.module.current_epoch,
    "module.global_step": lambda run: run.module.global_step,
    "module.global_rank": lambda run: run.module.global_rank,
    "module.local_rank": lambda run: run.module.local_rank,
    "module.on_gpu": lambda run: run.module.on_gpu,
    "module.device": lambda run: run.module.device.type,
    "module.dtype": lambda run: run.module.dtype,
    "module.logger": lambda run: run.module.logger,
    "module.loggers": lambda run: run.module.loggers,
    "module.strict_loading": lambda run: run.module.strict_loading,
    "module.automatic_optimization": lambda run: run.module.automatic_optimization,
    "module.hparams": lambda run: dict(run.module.hparams),
    "module.hparams_initial": lambda run: dict(run.module.hparams_initial),
    "module.optimizers()": lambda run: type(run.module.optimizers()).__name__,
    "module.lr_schedulers()": lambda run: type(run.module.lr_schedulers()).__name__,
    "datamodule.trainer": lambda run: run.data.trainer,
    "datamodule.hparams": lambda run: dict(run.data.hparams),
    "callback.lrs": lambda run: {name: len(rates) for name, rates in run.rates.lrs.items()},
    "checkpoint.best_model_path": lambda run: bool(run.checkpoint.best_model_path),
    "checkpoint.kth_best_model_path": lambda run: run.checkpoint.kth_best_model_path == run.checkpoint.best_model_path,
    "checkpoint.current_score": lambda run: type(run.checkpoint.current_score).__name__,
    "checkpoint.kth_value": lambda run: type(run.checkpoint.kth_value).__name__,
    "early_stopping.wait_count": lambda run: run.stopping.wait_count,
}

FIT = PHASES[1:15]
TRAINING = tuple(phase for phase in FIT if phase not in ("sanity", "sanity.end", "validation", "validation.end"))


def everywhere(value: Any) -> dict[str, Any]:
    return {"built": value}


def during(phases: Any, value: Any, other: Any) -> dict[str, Any]:
    """Expect ``value`` in ``phases``, and ``other`` in all others."""
    return {phase: value if phase in phases else other for phase in PHASES}


class Own:
    """Placeholder for an object of the run, in a table that is written before the run exists."""

    def __init__(self, read: Any) -> None:
        self.read = read


TRAINER, MODULE, DATA = Own(lambda run: run.trainer), Own(lambda run: run.module), Own(lambda run: run.data)
LOGGER, LOGGERS = Own(lambda run: run.trainer.loggers[0]), Own(lambda run: run.trainer.loggers)
STOPPING, CHECKPOINT = Own(lambda run: run.stopping), Own(lambda run: run.checkpoint)
BAR = Own(lambda run: next(one for one in run.trainer.callbacks if isinstance(one, ProgressBar)))


def loader(stage: str) -> Own:
    return Own(lambda run: run.data.loaders[stage])


def listed(one: Own) -> Own:
    return Own(lambda run: [one.read(run)])


RATES = [("StepLR", "epoch", 1, None, True, False)]
FROM_FIRST_RUN = {"built": None, "fit.setup": MODULE}

TABLE: dict[str, dict[str, Any]] = {
    "trainer.training": during(TRAINING, True, False),
    "trainer.validating": during(("validation", "validation.end", "validate"), True, False),
    "trainer.testing": during(("test",), True, False),
    "trainer.predicting": during(("predict",), True, False),
    "trainer.sanity_checking": during(("sanity", "sanity.end"), True, False),
    "trainer.evaluating": during(
        ("sanity", "sanity.end", "validation", "validation.end", "validate", "test"), True, False
    ),
    "trainer.is_last_batch": {"built": False, "last.batch": True, "validate": False},
    "trainer.train_dataloader": {"built": None, "fit.start": loader("train"), "validate": None},
    "trainer.val_dataloaders": {"built": None, "fit.start": loader("val"), "test": None},
    "trainer.test_dataloaders": {"built": None, "test": loader("test"), "predict": None},
    "trainer.predict_dataloaders": {"built": None, "predict": loader("predict")},
    "trainer.ckpt_path": everywhere(None),
    "trainer.num_devices": everywhere(1),
    "trainer.device_ids": everywhere([0]),
    "trainer.checkpoint_callback": everywhere(CHECKPOINT),
    "trainer.checkpoint_callbacks": everywhere(listed(CHECKPOINT)),
    "trainer.early_stopping_callback": everywhere(STOPPING),
    "trainer.early_stopping_callbacks": everywhere(listed(STOPPING)),
    "trainer.progress_bar_callback": everywhere(BAR),
    "trainer.lightning_module": FROM_FIRST_RUN,
    "trainer.module": FROM_FIRST_RUN,
    "trainer.model": FROM_FIRST_RUN,
    "trainer.datamodule": {"built": None, "fit.setup": DATA},
    "trainer.interrupted": everywhere(False),
    "trainer.received_sigterm": everywhere(False),
    "trainer.current_epoch": {"built": 0, "fit.end": 2},
    "trainer.global_step": {"built": 0, "batch": 1, "last.batch": 3, "fit.end": 6},
    "trainer.world_size": everywhere(1),
    "trainer.global_rank": everywhere(0),
    "trainer.local_rank": everywhere(0),
    "trainer.node_rank": everywhere(0),
    "trainer.is_global_zero": everywhere(True),
    "trainer.should_stop": everywhere(False),
    "trainer.num_training_batches": {"built": float("inf"), "fit.start": 3, "validate": float("inf")},
    "trainer.num_val_batches": {"built": [], "fit.start": [3], "test": []},
    "trainer.num_sanity_val_batches": {"built": [], "fit.start": [2], "validate": []},
    "trainer.num_test_batches": {"built": [], "test": [3], "predict": []},
    "trainer.num_predict_batches": {"built": [], "predict": [3]},
    "trainer.enable_validation": {"built": False, "fit.setup": True, "validate": False},
    "trainer.scaler": everywhere(None),
    "trainer.distributed_sampler_kwargs": everywhere(None),
    "trainer.loggers": everywhere(LOGGERS),
    "trainer.logger": everywhere(LOGGER),
    "trainer.estimated_stepping_batches": {"built": "ConfigurationError", "fit.setup": 6, "validate": float("inf")},
    "trainer.log_dir": {"built": None, "fit.setup": Own(lambda run: run.trainer.logger.log_dir)},
    "trainer.strategy": everywhere("SingleDeviceStrategy"),
    "trainer.strategy.root_device": everywhere("cpu"),
    "trainer.precision.name": everywhere("32-true"),
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
    "logger.save_dir": everywhere(Own(lambda run: str(run.trainer.default_root_dir))),
    "logger.version": everywhere("int"),
    "module.trainer": {"built": "ConfigurationError", "fit.setup": TRAINER},
    "module.current_epoch": {"built": 0, "fit.end": 2},
    "module.global_step": {"built": 0, "batch": 1, "last.batch": 3, "fit.end": 6},
    "module.global_rank": everywhere(0),
    "module.local_rank": everywhere(0),
    "module.on_gpu": everywhere(False),
    "module.device": everywhere("cpu"),
    "module.dtype": everywhere(torch.float32),
    "module.logger": {"built": None, "fit.setup": LOGGER},
    "module.loggers": {"built": [], "fit.setup": LOGGERS},
    "module.strict_loading": everywhere(True),
    "module.automatic_optimization": everywhere(True),
    "module.hparams": everywhere({"width": 1}),
    "module.hparams_initial": everywhere({"width": 1}),
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
    "datamodule.hparams": everywhere({"batch_size": 8}),
    "callback.lrs": {"built": {}, "epoch.start": {}, "batch.start": {"lr-SGD": 1}, "fit.end": {"lr-SGD": 2}},
    "checkpoint.best_model_path": {"built": False, "fit.end": True},
    "checkpoint.kth_best_model_path": everywhere(True),
    "checkpoint.current_score": {"built": "NoneType", "fit.end": "float"},
    "checkpoint.kth_value": {"built": "NoneType", "fit.end": "float"},
    "early_stopping.wait_count": everywhere(0),
}
"""When each name takes which value: what stands at a phase holds until the next one that is named."""


def test_every_name_is_tested() -> None:
    # L-10
    assert TABLE.keys() == READS.keys()


def test_every_phase_was_reached(recorded: Recorded) -> None:
    assert {phase for _, phase in recorded.values} == set(PHASES)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_name_has_lightnings_meaning(recorded: Recorded, name: str) -> None:
    # L-10
    expected: Any = None
    for phase in PHASES:
        expected = TABLE[name].get(phase, expected)
        wanted = expected.read(recorded) if isinstance(expected, Own) else expected
        assert recorded.values[name, phase] == wanted, f"{name} in {phase!r}"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("fit_loop", r"read trainer\.current_epoch, \.global_step"),
        ("logger_connector", r"read trainer\.callback_metrics"),
        ("_checkpoint_connector", r"use trainer\.save_checkpoint"),
        ("precision_plugin", r"read trainer\.precision"),
        ("strategy.model", r"read trainer\.model"),
        ("strategy.precision_plugin", r"read strategy\.precision"),
        ("strategy.global_rank", r"read strategy\.rank"),
    ],
)
def test_an_unsupported_name_states_the_replacement(name: str, way: str) -> None:
    # L-10
    owner: Any = Fit(accelerator="cpu")
    *path, last = name.split(".")
    for one in path:
        owner = getattr(owner, one)
    with pytest.raises(AttributeError, match=rf"has no attribute '{last}': {way}"):
        getattr(owner, last)
    assert not hasattr(owner, last)
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        _ = owner.nonsense
