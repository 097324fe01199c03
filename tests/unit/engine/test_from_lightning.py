"""Lightning's API works, or is refused by name, and names have Lightning's meaning in each phase (L-10)."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader
from small_modules import metrics, tiny
from test_logging import Kept

import drivetrain
from drivetrain import Callback, CheckpointError, ConfigurationError, DataModule, Fit, rank_zero_only
from drivetrain.callbacks import Checkpoint, EarlyStopping, LambdaCallback, LearningRateMonitor, ProgressBar
from drivetrain.loggers import CSVLogger


class Logs(Tiny):
    """Logs the first number of each batch, and the number of steps in validation."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("it", batch[0, 0], on_step=False, on_epoch=True, **self.options)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", float(self.trainer.global_step))


class Sized(Tiny):
    def __init__(self, width: int = 4, logged: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters(logger=logged)


class Configured(Tiny):
    def __init__(self, config: Any, extra: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.extra = extra
        self.scale = config["scale"] if isinstance(config, dict) else config.scale


CONFIG = {"scale": 3, "deep": {"a": 1}}


def saved(module: Any, path: Path, weights_only: bool = False, **options: Any) -> Path:
    trainer = fit(path, **options)
    trainer.fit(module, loader(4))
    trainer.save_checkpoint(path / "kept", weights_only=weights_only)
    return path / "kept"


def test_lightnings_names_of_arguments_and_a_step_set_to_none(tmp_path: Path) -> None:  # L-10
    module: Any = Logs(rank_zero_only=True)
    trainer = fit(tmp_path)
    assert trainer.validate(model=module, dataloaders=loader(2), verbose=False) == [{"val": 0.0}]
    module.validation_step = None
    trainer.fit(model=module, train_dataloaders=loader(4), val_dataloaders=loader(2))
    assert not trainer.enable_validation
    assert metrics(trainer) == {"it": 1.0}
    assert len(trainer.predict(model=module, dataloaders=loader(4))) == 2


def test_without_a_module_the_best_weights_of_the_last_run_are_used(tmp_path: Path) -> None:  # L-10
    class Counting(Logs):
        def configure_callbacks(self) -> Any:
            return [Checkpoint(tmp_path / "kept", monitor="epoch", mode="min"), EarlyStopping("it", patience=9)]

        def on_train_epoch_end(self) -> None:
            self.layer.weight.data.fill_(float(self.current_epoch))

        def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.log("weight", float(self.layer.weight.detach()[0, 0]))

    module, trainer = Counting(), fit(tmp_path, max_epochs=3, enable_checkpointing=True)
    trainer.fit(module, loader(4))
    (first,) = trainer.checkpoint_callbacks
    assert isinstance(trainer.early_stopping_callback, EarlyStopping)
    assert trainer.progress_bar_callback is None
    assert trainer.test(dataloaders=loader(2), verbose=False) == [{"weight": 0.0}]
    assert trainer.ckpt_path == first.best_model_path
    module.layer.weight.data.fill_(7.0)
    # an explicitly given module is used unchanged
    assert trainer.test(module, loader(2), verbose=False) == [{"weight": 7.0}]
    assert trainer.ckpt_path is None


@pytest.mark.parametrize("config", [CONFIG, argparse.Namespace(**CONFIG)], ids=["mapping", "namespace"])
def test_a_mapping_or_a_namespace_is_saved_and_passed_again(tmp_path: Path, config: Any) -> None:  # L-10
    module = Configured(config, extra=5)
    assert module.hparams == CONFIG
    path = saved(module, tmp_path)
    again = Configured.load_from_checkpoint(path, extra=7)
    assert (again.hparams, again.scale, again.extra) == (CONFIG, 3, 7)
    other = Configured.load_from_checkpoint(checkpoint_path=path, scale=4)
    assert (other.hparams["scale"], other.scale) == (4, 4)
    other.hparams.deep["a"] = 2
    assert other.hparams_initial == CONFIG | {"scale": 4}


def test_nested_mappings_of_any_class_are_saved_as_they_were(tmp_path: Path) -> None:  # S-16
    class Built(Tiny):
        def __init__(self, config: Any, net: Any, sizes: list[int]) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.width = net.width
            net.width, config["depth"]["n"] = 7, 8
            sizes.append(9)

    config: Any = MappingProxyType({"depth": {"n": 2}, "names": ("a", "b")})
    module = Built(config, Sized(3).hparams, [1])
    net = {"width": 3, "logged": True}
    assert module.hparams == {"config": {"depth": {"n": 2}, "names": ("a", "b")}, "net": net, "sizes": [1]}
    again = Built.load_from_checkpoint(saved(module, tmp_path))
    assert again.width == 3
    assert again.hparams.config.depth.n == 2


@pytest.mark.parametrize("logged", [True, False])
def test_hyper_parameters_go_to_loggers_on_request_and_come_from_a_file(tmp_path: Path, logged: bool) -> None:  # L-10
    path = saved(Sized(logged=logged), tmp_path, logger=CSVLogger(tmp_path))
    assert bool(list(tmp_path.rglob("hparams.json"))) == logged
    (tmp_path / "hparams.json").write_text(json.dumps({"width": 6}))
    assert Sized.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.json").hparams["width"] == 6
    with pytest.raises(ConfigurationError, match="got two paths"):
        Sized.load_from_checkpoint(path, checkpoint_path=path)


def test_the_modules_strict_loading_is_used(tmp_path: Path) -> None:  # L-10
    class More(Tiny):
        strict_loading = True

        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(1, 1)

    module, path = More(), saved(Tiny(), tmp_path, weights_only=True)
    module.layer.weight.data.fill_(3.0)
    with pytest.raises(CheckpointError, match="missing"):
        More.load_from_checkpoint(path)
    with pytest.raises(CheckpointError, match="strict_loading = False"):
        fit(tmp_path).predict(module, loader(2), ckpt_path=path)
    More.strict_loading = False
    with pytest.warns(UserWarning, match="skipped, with strict=False"):
        fit(tmp_path).predict(module, loader(2), ckpt_path=path)
    assert float(module.layer.weight.detach()[0, 0]) != 3.0  # the other values were loaded
    with pytest.warns(UserWarning, match="skipped, with strict=False"):
        More.load_from_checkpoint(path)


def test_a_data_module_from_data_sets(tmp_path: Path) -> None:  # L-10
    x = loader(8).dataset
    data = DataModule.from_datasets(x, [x, x], predict_dataset=x, batch_size=2)
    trainer, module = fit(tmp_path), Logs()
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 4
    assert {"val/dataloader_idx_0", "val/dataloader_idx_1"} <= trainer.callback_metrics.keys()
    assert len(trainer.predict(module, data)) == 4
    assert isinstance(data.train_dataloader().sampler, torch.utils.data.RandomSampler)
    with pytest.raises(ConfigurationError, match="test was given no loader"):
        trainer.test(Logs(), data)
    for one in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):  # as a launcher sends it
        assert len(one.val_dataloader()) == 2


def test_a_data_modules_hyper_parameters_and_state_come_back_from_a_checkpoint(tmp_path: Path) -> None:  # L-10
    class Folds(DataModule):
        def __init__(self, fold: int, size: int = 4) -> None:
            self.save_hyperparameters()
            self.seen = 0

        def train_dataloader(self) -> Any:
            self.seen += 1
            return loader(self.hparams.size)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state_dict: Any) -> None:
            self.seen = state_dict["seen"]

    trainer = fit(tmp_path)
    trainer.fit(Tiny(), datamodule=Folds(3, size=6))
    trainer.save_checkpoint(tmp_path / "kept")
    again = Folds.load_from_checkpoint(tmp_path / "kept", size=2)
    assert (again.hparams, again.seen) == ({"fold": 3, "size": 2}, 1)


def test_a_callback_logs_and_the_bar_shows_the_values_of_get_metrics(tmp_path: Path, capsys: Any) -> None:  # L-10
    class Logging(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("mine", batch_idx, on_step=False, on_epoch=True)
            self.log_dict({"a": 1.0, "b": 2.0}, prog_bar=True)
            assert copy.deepcopy(self) is not self

    class WithAnotherValue(ProgressBar):
        def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
            return {**super().get_metrics(trainer, module), "own": 4.25}

    callback, trainer = Logging(), fit(tmp_path, callbacks=WithAnotherValue(), enable_progress_bar=True)
    trainer.callbacks.append(callback)
    trainer.fit(Tiny(), loader(6))
    assert metrics(trainer) == {"mine": 1, "a": 1, "b": 2}
    shown = "".join(capsys.readouterr())
    assert "own=4.25" in shown
    assert "a=1" in shown
    with pytest.raises(ConfigurationError, match=r"Logging.log was called outside a run"):
        callback.log("mine", 1.0)


def test_a_module_is_built_in_the_precision_and_freezing_returns_it() -> None:  # L-10
    with Fit(accelerator="cpu", precision="64-true").init_module():
        module = Tiny()
    assert module.layer.weight.dtype is torch.float64
    assert torch.nn.Linear(2, 2).weight.dtype is torch.float32
    assert module.freeze() is module.unfreeze() is module


def test_the_strategy_and_the_logger_are_those_of_the_run(tmp_path: Path) -> None:  # L-10
    trainer, logger = fit(tmp_path, accelerator="cpu", devices=1), CSVLogger(tmp_path)
    before = trainer.strategy
    for loggers in ([logger], []):
        trainer.logger = loggers[0] if loggers else None
        assert trainer.loggers == loggers
    trainer.fit(Tiny(), loader(2))
    assert trainer.strategy is before
    several = Fit(accelerator="cpu", devices=3, num_nodes=2)
    assert (several.strategy.name, several.num_devices, several.world_size) == ("ddp", 3, 6)
    assert several.device_ids == [0, 1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_zero_only_before_a_run(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:  # L-10
    ranks = {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": "2"}
    more = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "a", "GROUP_RANK": "0"}
    for name, value in (ranks | more).items():
        monkeypatch.setenv(name, value)

    length = rank_zero_only(len)
    assert length("seven") == (None if rank else 5)
    assert length.__name__ == "len"


def next_of_the_iterator(module: Any, dataloader_iter: Any) -> Any:
    return module.layer(next(dataloader_iter)).mean()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda run: run.fit(Tiny(), loader(4), model=Tiny()), "fit was given a module and a model"),
        (lambda run: run.fit(Logs, loader(4)), r"given the class Logs[\s\S]*fit\(Logs\(\.\.\.\)"),
        (lambda run: run.fit(loader(4), Logs()), r"a DataLoader in place of the module[\s\S]*data is the second arg"),
        (lambda run: run.validate(dataloaders=loader(2)), "validate was given no module"),
        (lambda run: run.test(Tiny(), loader(2), "best"), r"a str as its datamodule[\s\S]*ckpt_path="),
        (lambda run: Configured(3), "3 are not arguments of __init__"),
        (lambda run: Checkpoint(enable_version_counter=False), "enable_version_counter=False"),
        (lambda run: fit(Path(), enable_autolog_hparams=True), r"'enable_autolog_hparams'[\s\S]*logger=False"),
        (lambda run: fit(Path(), model_registry=True), r"no argument 'model_registry'[\s\S]*best_model_path"),
        (lambda run: run.fit(tiny(training_step=next_of_the_iterator), loader(2)), "cannot be called with a batch"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, call: Any, named: str) -> None:  # I-10
    with pytest.raises(ConfigurationError, match=named):
        call(fit(tmp_path))


class Scheduled(Logs):
    """Has a schedule by epochs, and logs the epoch as the loggers' step."""

    def __init__(self) -> None:
        super().__init__()
        self.stepped_at: list[tuple[int, Any]] = []

    def on_validation_epoch_end(self) -> None:
        self.log("step", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.stepped_at.append((self.current_epoch, metric))
        scheduler.step()


def test_schedules_and_rows_have_lightnings_epoch_and_step(tmp_path: Path) -> None:  # S-16
    module, logger = Scheduled(), Kept()
    trainer = fit(tmp_path, max_epochs=3, logger=logger, callbacks=LearningRateMonitor())
    trainer.fit(module, loader(4), loader(2))
    assert module.stepped_at == [(0, None), (1, None), (2, None)]
    assert logger.of("val") == [(0, 2.0), (1, 4.0), (2, 6.0)]
    assert float(trainer.callback_metrics["lr-SGD"]) == 0.25  # of the last epoch that began
    assert float(trainer.callback_metrics["step"]) == 2.0


def test_a_checkpoint_is_evaluated_at_its_step(tmp_path: Path) -> None:  # S-16
    kept = Checkpoint(tmp_path / "kept", filename="{step}", save_top_k=-1)
    trainer = fit(tmp_path, max_epochs=3, callbacks=[kept])
    trainer.fit(Logs(), loader(4))
    logger = Kept()
    fresh = fit(tmp_path, logger=logger)
    for step in (2, 6):
        fresh.validate(Logs(), loader(2), ckpt_path=tmp_path / "kept" / f"step={step}", verbose=False)
        assert (fresh.global_step, fresh.current_epoch) == (step, step // 2)
    assert logger.of("val") == [(2, 2.0), (6, 6.0)]
    trainer.validate(Logs(), loader(2), verbose=False)
    assert trainer.global_step == 6  # without a checkpoint, the counters of the fit stay


def test_messages_name_the_line_that_called(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "drivetrain"):
        drivetrain.rank_zero_info("trained for %d epochs", 3)
    with pytest.warns(UserWarning, match="careful") as caught:
        drivetrain.rank_zero_warn("careful")
    (record,) = caplog.records
    assert (record.getMessage(), record.pathname) == ("trained for 3 epochs", __file__)
    assert caught[0].filename == __file__


_SCRIPT = """
import os, sys, torch
from lightning_utilities.core.rank_zero import rank_zero_only
world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
for variables, before in (
    ({}, None), (world | {"RANK": "1"}, None), (world | {"RANK": "1", "LOCAL_WORLD_SIZE": ""}, None),
    (world | {"RANK": "1"}, 0),
):
    if os.fork() == 0:
        os.environ.update(variables)
        if before is not None:
            rank_zero_only.rank = before
        import drivetrain
        rank_zero_only(lambda: os.write(1, f"{variables} {before}\\n".encode()))()
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_the_import_sets_the_rank_of_lightning_utilities() -> None:  # S-18
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120)
    world = "{'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '2', 'RANK': '1'}"
    no_rank = world.replace("'LOCAL_WORLD_SIZE': '2'", "'LOCAL_WORLD_SIZE': ''")
    assert done.stdout.splitlines() == ["{} None", f"{no_rank} None", f"{world} 0"], done.stderr


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
    **dict.fromkeys(("trainer.strategy",), kind),
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
    ([0], "trainer.device_ids"),
    (torch.device("cpu"), "trainer.strategy.root_device module.device"),
    (torch.float32, "module.dtype"),
    ({"width": 1}, "module.hparams module.hparams_initial"),
    ({"batch_size": 2}, "datamodule.hparams"),
]
"""Values that hold in all phases."""


def expected_values(run: Recorded) -> dict[str, dict[str, Any]]:
    """When each name has which value in Lightning 2.6.6: what stands at a phase holds until the next that is named."""
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
        "trainer.log_dir": {"built": None, "fit.setup": f"{run.logger.save_dir}/drivetrain_logs/version_0"},
        "trainer.logger.version": {"built": None, "fit.setup": 0},
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


def test_an_unsupported_name_states_the_replacement() -> None:  # L-10
    trainer: Any = Fit(accelerator="cpu")
    with pytest.raises(AttributeError, match=r"has no attribute 'fit_loop': read trainer\.current_epoch, "):
        _ = trainer.fit_loop
    assert not hasattr(trainer, "fit_loop")
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        _ = trainer.nonsense
