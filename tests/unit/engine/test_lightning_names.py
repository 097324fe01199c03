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


def of_stage(stage: str) -> Any:
    return lambda self: self.loaders[stage]


class Data(DataModule):
    train_dataloader, val_dataloader = of_stage("train"), of_stage("val")
    test_dataloader, predict_dataloader = of_stage("test"), of_stage("predict")

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loaders = {stage: loader(3 * batch_size, batch_size) for stage in ("train", "val", "test", "predict")}


PHASES = (
    *("built", "fit.setup", "fit.start", "sanity", "sanity.end", "train.start", "epoch.start", "batch.start", "batch"),
    *("last.batch", "validation", "validation.end", "epoch.end", "fit.end", "fit.teardown", "after fit"),
    *("validate", "after validate", "test", "after test", "predict", "after predict"),
)
"""When a value is read; those of an epoch are the first's, "batch" is the end of its first micro-batch."""

IN_VALIDATION = ("validation", "validation.end")
IN_SANITY_CHECK = ("sanity", "sanity.end")
TRAINING = tuple(phase for phase in PHASES[1:15] if phase not in IN_VALIDATION + IN_SANITY_CHECK)

HOOKS = {"setup": "fit.setup", "teardown": "fit.teardown", "on_sanity_check_end": "sanity.end"}
HOOKS |= {"on_fit_start": "fit.start", "on_train_start": "train.start", "on_train_epoch_start": "epoch.start"}
HOOKS |= {"on_train_batch_start": "batch.start", "on_train_epoch_end": "epoch.end", "on_fit_end": "fit.end"}
HOOKS |= {"on_test_batch_end": "test", "on_predict_batch_end": "predict"}
"""The phases by the hook in which they are read."""


def kind(value: Any) -> str:
    return type(value).__name__


SHOWN: dict[str, Any] = {
    **dict.fromkeys(("trainer.strategy", "trainer.logger.version"), kind),
    **dict.fromkeys(("module.optimizers()", "module.lr_schedulers()"), kind),
    **dict.fromkeys(("checkpoint.current_score", "checkpoint.kth_value"), kind),
    **dict.fromkeys(("checkpoint.best_model_path", "checkpoint.kth_best_model_path"), bool),
    "trainer.callback_metrics": lambda metrics: " ".join(sorted(metrics)),
    "trainer.logged_metrics": lambda metrics: " ".join(sorted(metrics)),
    "trainer.progress_bar_metrics": lambda metrics: " ".join(name for name in metrics if type(metrics[name]) is float),
    "trainer.optimizers": lambda optimizers: [kind(one) for one in optimizers],
    "trainer.lr_scheduler_configs": lambda configs: [
        (kind(one.scheduler), one.interval, one.frequency, one.monitor, one.strict, one.reduce_on_plateau)
        for one in configs
    ],
    "rates.lrs": lambda lrs: {name: len(rates) for name, rates in lrs.items()},
}
"""What the table holds of the values that are not compared themselves."""


class Recorded:
    """One trainer that fits, validates, tests and predicts, and the value of each name in each phase."""

    def __init__(self, path: Path) -> None:
        self.module, self.datamodule = Model(), Data()
        self.early_stopping, self.checkpoint = EarlyStopping("val"), Checkpoint(monitor="val")
        self.rates, self.logger = LearningRateMonitor(), CSVLogger(path)
        callbacks = [self.reading(), self.early_stopping, self.checkpoint, self.rates]
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "seed": 0, "enable_model_summary": False}
        options |= {"max_epochs": 2, "log_every_n_steps": 1, "default_root_dir": path}
        self.trainer: Any = Fit(callbacks=callbacks, logger=self.logger, **options)
        self.expected = expected_values(self)
        self.values: dict[tuple[str, str], Any] = {}
        self.read("built")
        for self.verb in ("fit", "validate", "test", "predict"):
            getattr(self.trainer, self.verb)(self.module, datamodule=self.datamodule)
            self.read(f"after {self.verb}")

    def reading(self) -> Callback:
        def trained(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.read("last.batch" if batch_idx == 2 else "batch")

        def validated(trainer: Any, *_: Any) -> None:
            self.read("sanity" if trainer.sanity_checking else {"fit": "validation"}.get(self.verb, self.verb))

        def ended(trainer: Any, *_: Any) -> None:
            if not trainer.sanity_checking:
                self.read("validation.end")

        hooks: dict[str, Any] = {hook: lambda *_, phase=phase: self.read(phase) for hook, phase in HOOKS.items()}
        hooks |= {"on_train_batch_end": trained, "on_validation_batch_end": validated, "on_validation_end": ended}
        return LambdaCallback(**hooks)

    def read(self, phase: str) -> None:
        """Read every name, in a phase's first moment."""
        if ("trainer.training", phase) in self.values:
            return
        for name in self.expected:
            try:
                value = attrgetter(name.removesuffix("()"))(self)
                value = value() if name.endswith("()") else value
                self.values[name, phase] = SHOWN[name](value) if name in SHOWN else value
            except Exception as error:
                self.values[name, phase] = type(error).__name__


def during(phases: Any, value: Any, other: Any) -> dict[str, Any]:
    return {phase: value if phase in phases else other for phase in PHASES}


def in_fit(outside: str, inside: str) -> dict[str, Any]:
    """Expect ``inside`` from the start of fit to its end, ``outside`` in other runs, and an error before the first."""
    return {"built": "ConfigurationError", "fit.setup": outside, "fit.start": inside, "validate": outside}


CONSTANT: list[tuple[Any, str]] = [
    (None, "trainer.ckpt_path trainer.scaler trainer.distributed_sampler_kwargs"),
    (False, "trainer.interrupted trainer.received_sigterm trainer.should_stop module.on_gpu"),
    (0, "trainer.global_rank trainer.local_rank trainer.node_rank module.global_rank module.local_rank"),
    (0, "early_stopping.wait_count"),
    (True, "trainer.is_global_zero module.strict_loading module.automatic_optimization"),
    (1, "trainer.num_devices trainer.world_size"),
    ("SingleDeviceStrategy", "trainer.strategy"),
    ("32-true", "trainer.precision.name"),
    ("int", "trainer.logger.version"),
    ([0], "trainer.device_ids"),
    (torch.device("cpu"), "trainer.strategy.root_device module.device"),
    (torch.float32, "module.dtype"),
    ({"width": 1}, "module.hparams module.hparams_initial"),
    ({"batch_size": 2}, "datamodule.hparams"),
]
"""Values that hold in all phases."""


def expected_values(run: Recorded) -> dict[str, dict[str, Any]]:
    """When each name takes which value: what stands at a phase holds until the next one that is named."""
    trainer, loaders = run.trainer, run.datamodule.loaders
    (bar,) = (one for one in trainer.callbacks if isinstance(one, ProgressBar))
    rates = [("StepLR", "epoch", 1, None, True, False)]
    from_first_run = {"built": None, "fit.setup": run.module}
    steps, epochs = {"built": 0, "batch": 1, "last.batch": 3, "fit.end": 6}, {"built": 0, "fit.end": 2}
    logged = {"built": "", "sanity.end": "val", "train.start": ""}
    logged |= {"validate": "", "after validate": "val", "test": "", "after test": "test", "predict": ""}
    losses = {"batch": "loss", "validation.end": "loss val"}
    with_rates = {"batch.start": "lr-SGD", "batch": "loss lr-SGD", "validation.end": "loss lr-SGD val"}
    return {
        **{name: {"built": value} for value, names in CONSTANT for name in names.split()},
        "trainer.training": during(TRAINING, True, False),
        "trainer.validating": during((*IN_VALIDATION, "validate"), True, False),
        "trainer.testing": during(("test",), True, False),
        "trainer.predicting": during(("predict",), True, False),
        "trainer.sanity_checking": during(IN_SANITY_CHECK, True, False),
        "trainer.evaluating": during((*IN_SANITY_CHECK, *IN_VALIDATION, "validate", "test"), True, False),
        "trainer.is_last_batch": {"built": False, "last.batch": True, "validate": False},
        "trainer.train_dataloader": {"built": None, "fit.start": loaders["train"], "validate": None},
        "trainer.val_dataloaders": {"built": None, "fit.start": loaders["val"], "test": None},
        "trainer.test_dataloaders": {"built": None, "test": loaders["test"], "predict": None},
        "trainer.predict_dataloaders": {"built": None, "predict": loaders["predict"]},
        "trainer.checkpoint_callback": {"built": run.checkpoint},
        "trainer.checkpoint_callbacks": {"built": [run.checkpoint]},
        "trainer.progress_bar_callback": {"built": bar},
        "trainer.early_stopping_callback": {"built": run.early_stopping},
        "trainer.early_stopping_callbacks": {"built": [run.early_stopping]},
        **dict.fromkeys(("trainer.lightning_module", "trainer.module", "trainer.model"), from_first_run),
        "trainer.datamodule": {"built": None, "fit.setup": run.datamodule},
        **dict.fromkeys(("trainer.current_epoch", "module.current_epoch"), epochs),
        **dict.fromkeys(("trainer.global_step", "module.global_step"), steps),
        "trainer.num_training_batches": {"built": float("inf"), "fit.start": 3, "validate": float("inf")},
        "trainer.num_val_batches": {"built": [], "fit.start": [3], "test": []},
        "trainer.num_sanity_val_batches": {"built": [], "fit.start": [2], "validate": []},
        "trainer.num_test_batches": {"built": [], "test": [3], "predict": []},
        "trainer.num_predict_batches": {"built": [], "predict": [3]},
        "trainer.enable_validation": {"built": False, "fit.setup": True, "validate": False},
        "trainer.estimated_stepping_batches": {"built": "ConfigurationError", "fit.setup": 6, "validate": float("inf")},
        "trainer.optimizers": {"built": [], "fit.start": ["SGD"], "validate": []},
        "trainer.lr_scheduler_configs": {"built": [], "fit.start": rates, "validate": []},
        "trainer.callback_metrics": logged | with_rates,
        "trainer.logged_metrics": logged | losses,
        "trainer.progress_bar_metrics": logged | losses | {"after test": ""},
        "trainer.loggers": {"built": [run.logger]},
        "trainer.logger": {"built": run.logger},
        "trainer.logger.save_dir": {"built": str(trainer.default_root_dir)},
        "trainer.log_dir": {"built": None, "fit.setup": run.logger.log_dir},
        "module.logger": {"built": None, "fit.setup": run.logger},
        "module.loggers": {"built": [], "fit.setup": [run.logger]},
        "module.trainer": {"built": "ConfigurationError", "fit.setup": trainer},
        "datamodule.trainer": {"built": "ConfigurationError", "fit.setup": trainer},
        "module.optimizers()": in_fit("list", "OptimizerHandle"),
        "module.lr_schedulers()": in_fit("NoneType", "StepLR"),
        "rates.lrs": {"built": {}, "epoch.start": {}, "batch.start": {"lr-SGD": 1}, "fit.end": {"lr-SGD": 2}},
        "checkpoint.best_model_path": {"built": False, "fit.end": True},
        "checkpoint.kth_best_model_path": {"built": False, "fit.end": True},
        "checkpoint.current_score": {"built": "NoneType", "fit.end": "float"},
        "checkpoint.kth_value": {"built": "NoneType", "fit.end": "float"},
    }


def test_names_have_lightnings_meaning(tmp_path: Path) -> None:  # L-10
    run = Recorded(tmp_path)
    wrong: dict[tuple[str, str], Any] = {}
    for name, by_phase in run.expected.items():
        expected: Any = None
        for phase in PHASES:
            expected = by_phase.get(phase, expected)
            if run.values[name, phase] != expected:
                wrong[name, phase] = (run.values[name, phase], expected)
    assert not wrong
    assert run.checkpoint.kth_best_model_path == run.checkpoint.best_model_path


@pytest.mark.parametrize(
    ("owner", "name", "way"),
    [
        ("trainer", "fit_loop", r"read trainer\.current_epoch, \.global_step"),
        ("trainer", "logger_connector", r"read trainer\.callback_metrics"),
        ("trainer", "_checkpoint_connector", r"use trainer\.save_checkpoint"),
        ("strategy", "model", r"read trainer\.model"),
        ("strategy", "global_rank", r"read strategy\.rank"),
    ],
)
def test_an_unsupported_name_states_the_replacement(owner: str, name: str, way: str) -> None:  # L-10
    trainer = Fit(accelerator="cpu")
    read: Any = trainer.strategy if owner == "strategy" else trainer
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}': {way}"):
        getattr(read, name)
    assert not hasattr(read, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        _ = read.nonsense
