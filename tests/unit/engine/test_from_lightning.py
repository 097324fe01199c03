"""Lightning's API apart from the names of `test_lightning_names`: it works, or is refused by name (L-10)."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
import subprocess
import sys
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
from drivetrain.callbacks import Checkpoint, EarlyStopping, LearningRateMonitor, ProgressBar
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
    with pytest.raises(ConfigurationError, match="does not contain hyper-parameters"):
        Sized.load_from_checkpoint(path, hparams_file=tmp_path / "tags.csv")
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


def retain_the_graph(module: Any, batch: Any, batch_idx: int) -> None:
    assert isinstance(module.optimizers(use_pl_optimizer=False), torch.optim.Optimizer)
    module.manual_backward(module.layer(batch).mean(), retain_graph=True)


MANUAL = tiny(automatic_optimization=False, training_step=retain_the_graph)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda run: run.fit(Tiny(), loader(4), model=Tiny()), "fit was given a module and a model"),
        (lambda run: run.fit(Logs, loader(4)), r"given the class Logs[\s\S]*fit\(Logs\(\.\.\.\)"),
        (lambda run: run.fit(loader(4), Logs()), r"a DataLoader in place of the module[\s\S]*data is the second arg"),
        (lambda run: run.validate(dataloaders=loader(2)), "validate was given no module"),
        (lambda run: run.test(Tiny(), loader(2), "best"), r"a str as its datamodule[\s\S]*ckpt_path="),
        (lambda run: Configured(3), "save_hyperparameters got a int"),
        (lambda run: Checkpoint(enable_version_counter=False), "enable_version_counter=False"),
        (lambda run: run.init_module(empty_init=True).__enter__(), "configure_model"),
        (lambda run: run.fit(Logs(enable_graph=True), loader(2)), "enable_graph"),
        (lambda run: run.fit(Logs(sync_dist_group=1), loader(2)), "sync_dist_group"),
        (lambda run: fit(Path(), enable_autolog_hparams=True), r"'enable_autolog_hparams'[\s\S]*logger=False"),
        (lambda run: fit(Path(), model_registry=True), r"no argument 'model_registry'[\s\S]*best_model_path"),
        (lambda run: run.fit(tiny(training_step=next_of_the_iterator), loader(2)), "takes the loader's iterator"),
        (lambda run: run.fit(MANUAL, loader(2)), "manual_backward got retain_graph=True"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, call: Any, named: str) -> None:  # I-10
    with pytest.raises(ConfigurationError, match=named):
        call(fit(tmp_path))


class Scheduled(Logs):
    """Has a schedule by epochs, and logs the epoch as the loggers' step."""

    def __init__(self) -> None:
        super().__init__()
        self.stepped_at: list[int] = []

    def on_validation_epoch_end(self) -> None:
        self.log("step", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.stepped_at.append(self.current_epoch)
        scheduler.step()


def test_schedules_and_rows_have_lightnings_epoch_and_step(tmp_path: Path) -> None:  # S-16
    module, logger = Scheduled(), Kept()
    trainer = fit(tmp_path, max_epochs=3, logger=logger, callbacks=LearningRateMonitor())
    trainer.fit(module, loader(4), loader(2))
    assert module.stepped_at == [0, 1, 2]
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
