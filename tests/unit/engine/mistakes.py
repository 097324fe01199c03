"""More than sixty mistakes of newcomers, each with the expected message and its time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_case import Tiny, fit, loader
from torch.utils.data import TensorDataset

from drivetrain import Fit, TrainModule
from drivetrain.callbacks import (
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ProgressBar,
    Timer,
)
from drivetrain.data import CombinedLoader
from drivetrain.loggers import CSVLogger
from drivetrain_strategies import DDPStrategy

BATCHES = 4

BUILT = "as it is built"
START = "before the first step"
FIRST = "in the first window"
EPOCH = "at the end of the first epoch"


@dataclass
class Run:
    """A fit that contains a mistake."""

    trainer: Fit
    module: Any
    loaders: tuple[Any, ...] = field(default_factory=lambda: (loader(), loader()))
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Mistake:
    """A mistake and the expected message: parts of its first sentence, which names the value, of reason and fix.

    ``make`` builds the run with the mistake, and raises if the message is expected then. A run goes on after a warning.
    """

    when: str
    value: str
    why: str
    fix: str
    make: Callable[[Path], Run | None]
    is_warning: bool

    @property
    def name(self) -> str:
        return f"{self.value} {self.why} {self.fix}"


class Row(NamedTuple):
    """A mistake in the table of the moments in which they are noticed."""

    value: str
    why: str
    fix: str
    make: Callable[[Path], Run | None]


class Net(Tiny):
    """Logs what it computes; a mistake replaces one of its methods."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", 1.0)


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def net(**methods: Any) -> Callable[[Path], Run]:
    """Return a run of a module with these methods."""
    return lambda path: Run(fit(path), type("Net", (Net,), methods)())


def steps(does: Callable[[Any, Any], Any]) -> Callable[[Path], Run]:
    """Return a run whose training_step calls ``does``."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append([batch_idx])
        return does(self, batch)

    return net(training_step=training_step)


def returns(loss: Callable[[torch.Tensor], Any]) -> Callable[[Path], Run]:
    """Return a run whose training_step returns ``loss(output of the layer)``."""
    return steps(lambda self, batch: loss(self.layer(batch)))


def optimized(configure: Callable[[Any], Any]) -> Callable[[Path], Run]:
    """Return a run whose configure_optimizers calls ``configure``."""
    return net(configure_optimizers=configure)


def scheduled(keys: Callable[[Any], Any]) -> Callable[[Path], Run]:
    """Return a run with a scheduler."""

    def configure(module: Any) -> Any:
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": keys(optimizer)}

    return optimized(configure)


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def by_steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def given(*loaders: Any) -> Callable[[Path], Run]:
    """Return a run with these loaders."""
    return lambda path: Run(fit(path), Net(), loaders)


def setting(**options: Any) -> Callable[[Path], Run]:
    """Return a run with these arguments of Fit."""
    return lambda path: Run(fit(path, **options), Net())


def calls(kind: Any, *args: Any, **options: Any) -> Callable[[Path], Run]:
    """Return a run with a callback of this kind."""
    return lambda path: Run(fit(path, callbacks=kind(*args, **options)), Net())


def resumed(path: str, **options: Any) -> Callable[[Path], Run]:
    """Return a run that resumes from a checkpoint."""
    return lambda folder: Run(fit(folder, **options), Net(), more={"ckpt_path": str(folder / path)})


def _file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file"


def root_is_a_file(path: Path) -> Run:
    return Run(fit(_file(path), enable_checkpointing=True), Net())


def logger_in_a_file(path: Path) -> Run:
    return Run(fit(path, logger=CSVLogger(_file(path))), Net())


def of_module(module: Any) -> Callable[[Path], Run]:
    return lambda path: Run(fit(path), module)


class Untrainable(TrainModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(()))], lr=0.1)


def longest(path: Path) -> Run:
    return given(CombinedLoader([loader()], "longest"))(path)


def resumed_from_last(path: Path) -> Run:
    return Run(fit(path), Net(), more={"ckpt_path": "last"})


def resumed_at_its_end(path: Path, **tried: Any) -> Run:
    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 1}
    first = fit(path, **options)
    first.fit(Net(), loader(), loader())
    assert first.checkpoint_callback is not None
    return Run(fit(path, **(tried or options)), Net(), more={"ckpt_path": first.checkpoint_callback.last_model_path})


def tried_at_its_end(path: Path) -> Run:
    return resumed_at_its_end(path, fast_dev_run=True)


def backward(self: Any, batch: Any) -> None:
    self.manual_backward(self.layer(batch).mean())


def manual(does: Callable[[Any, Any], Any], **options: Any) -> Callable[[Path], Run]:
    """Return a run with manual optimization whose training_step calls ``does``."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append([batch_idx])
        return does(self, batch)

    kind = type("Net", (Net,), {"training_step": training_step, "automatic_optimization": False})
    return lambda path: Run(fit(path, **options), kind())


ERRORS: dict[str, list[Row]] = {
    BUILT: [
        Row("'dpp'", "entry-point group", "use one of auto", setting(strategy="dpp")),
        Row("DDPStrategy", "name or a Strategy", "'ddp'", setting(strategy=DDPStrategy)),
        Row("'bf16-mixd'", "dtypes", "bf16-mixed", setting(precision="bf16-mixd")),
        Row("'gpuu'", "type of device", "use one of auto", setting(accelerator="gpuu")),
        Row("devices='two'", "a count", "devices=2", setting(devices="two")),
        Row("max_epochs=1.5", "an int >= -1", "such as max_epochs=1", setting(max_epochs=1.5)),
        Row("=50.0", "to 1.0", "=0.1 for a tenth", setting(limit_train_batches=50.0)),
        Row("max_time='1h'", "limits the time of training", "'00:12:00:00'", setting(max_time="1h")),
        Row("min_epochs=9", "minimum exceeds the maximum", "lower min_epochs", setting(min_epochs=9)),
        Row("='no'", "bool('no')", "use True", setting(inference_mode="no")),
        Row("=-1.0", "bounds", ">= 0", setting(gradient_clip_val=-1.0)),
        Row("'gpus'", "gpus=1", "devices=", setting(gpus=1)),
        Row("'fp16'", "fp16=True", "precision='16-mixed'", setting(fp16=True)),
        Row("per_epoch", "=5", "limit_train_batches=", setting(max_steps_per_epoch=5)),
        Row("'learning_rate'", "=0.1", "configure_optimizers", setting(learning_rate=0.1)),
        Row("'max_epochss'", "=1", "max_epochs", setting(max_epochss=1)),
        Row("the class ProgressBar", "hooks", "an instance", setting(callbacks=ProgressBar)),
        Row("a str", "hooks", "an instance", setting(callbacks="EarlyStopping")),
        Row("on_epoch", "never be called", "on_train_epoch_end", calls(LambdaCallback, on_epoch=print)),
        Row("patience='3'", "checks", "0 or more", calls(EarlyStopping, "val_loss", patience="3")),
        Row("mode='maxi'", "direction", "'max'", calls(EarlyStopping, "val_loss", mode="maxi")),
        Row("mode='max'", "newest", "monitor=", calls(Checkpoint, mode="max")),
        Row("'a/b'", "in dirpath", "as dirpath", calls(Checkpoint, filename="a/b")),
        Row("'{epoch'", "braces", "{epoch:03d}", calls(Checkpoint, filename="{epoch")),
        Row("'batch'", "by steps or by epochs", "use 'step'", calls(LearningRateMonitor, logging_interval="batch")),
        Row("'an hour'", "DD:HH:MM:SS", "'00:12:00:00'", calls(Timer, "an hour")),
        Row("({})", "at least one", "{0: 8", calls(GradientAccumulationScheduler, {})),
        Row("mode='longest'", "modes are", "one of them", longest),
    ],
    START: [
        Row("=9", "never run", "lower val_check_interval", setting(val_check_interval=9)),
        Row("not a folder", "first save", "dirpath", root_is_a_file),
        Row("not a folder", "first row", "logger=False", logger_in_a_file),
        Row("a Linear", "hooks of a drivetrain.TrainModule", "subclass TrainModule", of_module(torch.nn.Linear(1, 1))),
        Row("no training_step", "cannot train", "write def training_step", of_module(Untrainable())),
        Row(
            "gradient_clip_val=1.0",
            "training_step itself",
            "self.clip_gradients",
            manual(backward, gradient_clip_val=1.0),
        ),
        Row("a generator", "torch optimizers", "return an optimizer", optimized(lambda self: self.parameters())),
        Row(
            "'lr_schedular'",
            "keys are",
            "'lr_scheduler'",
            optimized(lambda self: {"optimizer": sgd(self), "lr_schedular": None}),
        ),
        Row("not the module's", "not saved", "self.layer = ", optimized(lambda self: sgd(torch.nn.Linear(1, 1)))),
        Row(
            "share the parameter 'layer.weight'",
            "be updated twice",
            "disjoint",
            optimized(lambda self: [sgd(self), sgd(self)]),
        ),
        Row("ReduceLROnPlateau", "value of a logged", "'monitor'", scheduled(plateau)),
        Row("no training loader", "nothing to train on", "fit(module, loader)", given()),
        Row("TensorDataset", "single samples", "DataLoader(", given(TensorDataset(torch.ones(4, 2)))),
        Row("The training loader", "at least one batch", "drop_last", given([])),
        Row("The validation loader 1", "at least one batch", "data set", given(loader(), [loader(), loader(0)])),
        Row("The training loader: int", "iterable", "DataLoader", given(3)),
        Row("missing", "the path does not exist", "check the path", resumed("missing")),
        Row("'last'", "looked in", "ckpt_path='auto'", resumed_from_last),
        Row("max_steps=1", "optimizer step(s)", "leave out fast_dev_run=True", tried_at_its_end),
        Row("max_epochs=1 is reached", "1 epoch(s)", "raise the limit", resumed_at_its_end),
    ],
    FIRST: [
        Row("shape (2, 1)", "from a scalar", "mean()", returns(lambda y: y)),
        Row("requires no gradient", "detached", "without .detach()", returns(lambda y: y.mean().detach())),
        Row("a float", "needs a loss", "tensor of shape ()", returns(lambda y: y.mean().item())),
        Row("a tuple", "needs a loss", "tensor of shape ()", returns(lambda y: (y.mean(), 0))),
        Row("'note'", "a number", "log_dict", steps(lambda self, batch: self.log("note", "good"))),
        Row("manual_backward", "engine itself runs", "automatic_optimization", steps(backward)),
    ],
    EPOCH: [Row("'val_los'", "logged so far: ", "self.log('val_los', ...)", calls(EarlyStopping, "val_los"))],
}
WARNINGS: dict[str, list[Row]] = {
    START: [
        Row(
            "'layer.bias'",
            "never used",
            "add_param_group",
            optimized(lambda self: torch.optim.SGD([self.layer.weight], lr=0.1)),
        ),
        Row(
            "'loss' is ignored with StepLR",
            "takes no value",
            "reduce_on_plateau",
            scheduled(lambda one: {"scheduler": by_steps(one), "monitor": "loss"}),
        ),
        Row("validation_step", "fit does not validate", "val_dataloaders", given(loader())),
    ],
    FIRST: [
        Row("EarlyStopping(monitor='val_los')", "'val_loss'?", "the run fails", calls(EarlyStopping, "val_los")),
        Row("Checkpoint(monitor='val_los')", "'val_loss'?", "the run fails", calls(Checkpoint, monitor="val_los")),
        Row("names 'val_los'", "'val_loss'?", "the run fails", calls(Checkpoint, filename="{val_los:.2f}")),
        Row("Net.training_step returned None", "made no step", "return loss", steps(lambda self, batch: None)),
        Row(
            "'monitor': 'val_los' of ReduceLROnPlateau",
            "'val_loss'?",
            "the run fails",
            scheduled(lambda one: {"scheduler": plateau(one), "monitor": "val_los"}),
        ),
    ],
    EPOCH: [
        Row("nan", "no longer learns", "lower the learning rate", returns(lambda y: y.mean() * math.nan)),
        Row("of self.optimizers()", "does not step", "step()", manual(backward)),
    ],
}

MISTAKES = [
    Mistake(when, *row, is_warning=is_warning)
    for table, is_warning in ((ERRORS, False), (WARNINGS, True))
    for when, rows in table.items()
    for row in rows
]
