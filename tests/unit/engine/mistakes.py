"""Sixty mistakes of newcomers, each with the expected message (the value, the reason, the fix) and its time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine_case import Tiny, fit, loader
from torch.utils.data import TensorDataset

from drivetrain import Callback, Fit, TrainModule
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
    module: TrainModule
    loaders: tuple[Any, ...] = field(default_factory=lambda: (loader(), loader()))
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Mistake:
    """A mistake and the expected message.

    Attributes:
        name: the name of the test.
        when: when the message is expected.
        value: a part of the message's first sentence, which names the value.
        why: a part of the reason.
        fix: a part of the fix.
        make: builds the run with the mistake; raises if the message is expected then.
        said: whether the message is a warning, after which the run continues.
    """

    name: str
    when: str
    value: str
    why: str
    fix: str
    make: Callable[[Path], Run | None]
    is_warning: bool = False


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


def hooks(**methods: Any) -> Callback:
    """Return a callback with these methods."""
    kind: type[Callback] = type("Watch", (Callback,), methods)
    return kind()


def net(**methods: Any) -> Callable[[Path], Run]:
    """Return a run of a module with these methods."""
    return lambda path: Run(fit(path), type("Net", (Net,), methods)())


def steps(does: Callable[[Any, Any], Any]) -> Callable[[Path], Run]:
    """Return a run whose training_step calls ``does``."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append([batch_idx])
        return does(self, batch)

    return net(training_step=training_step)


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


def calls(callback: Callable[[Path], Callback]) -> Callable[[Path], Run]:
    """Return a run with this callback."""
    return lambda path: Run(fit(path, callbacks=callback(path)), Net())


def resumed(path: str, **options: Any) -> Callable[[Path], Run]:
    """Return a run that resumes from a checkpoint."""
    return lambda folder: Run(fit(folder, **options), Net(), more={"ckpt_path": str(folder / path)})


def _file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file"


def _resumed_at_its_end(path: Path) -> Run:
    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 1}
    first = fit(path, **options)
    first.fit(Net(), loader(), loader())
    assert first.checkpoint_callback is not None
    return Run(fit(path, **options), Net(), more={"ckpt_path": first.checkpoint_callback.last_model_path})


def _manual(does: Callable[[Any, Any], Any], **options: Any) -> Callable[[Path], Run]:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append([batch_idx])
        return does(self, batch)

    kind = type("Net", (Net,), {"training_step": training_step, "automatic_optimization": False})
    return lambda path: Run(fit(path, **options), kind())


def _lazy(self: Any) -> None:
    Net.__init__(self)
    self.lazy = torch.nn.LazyLinear(2)


def _without_a_batch(self: Any) -> None: ...


def _appending(self: Any) -> None:
    self.trainer.callbacks.append(ProgressBar())


MISTAKES = [
    # Arguments of Fit
    Mistake("strategy misspelt", BUILT, "'dpp'", "entry-point group", "use one of auto", setting(strategy="dpp")),
    Mistake("strategy's class", BUILT, "DDPStrategy", "name or a Strategy", "'ddp'", setting(strategy=DDPStrategy)),
    Mistake("precision misspelt", BUILT, "'bf16-mixd'", "dtypes", "bf16-mixed", setting(precision="bf16-mixd")),
    Mistake("accelerator misspelt", BUILT, "'gpuu'", "type of device", "use one of auto", setting(accelerator="gpuu")),
    Mistake("devices in words", BUILT, "devices='two'", "a count", "devices=2", setting(devices="two")),
    Mistake("half an epoch", BUILT, "max_epochs=1.5", "an int >= -1", "such as max_epochs=1", setting(max_epochs=1.5)),
    Mistake("limit in percent", BUILT, "=50.0", "to 1.0", "=0.1 for a tenth", setting(limit_train_batches=50.0)),
    Mistake(
        "time in words", BUILT, "max_time='1h'", "limits the time of training", "'00:12:00:00'", setting(max_time="1h")
    ),
    Mistake(
        "minimum above", BUILT, "min_epochs=9", "minimum exceeds the maximum", "lower min_epochs", setting(min_epochs=9)
    ),
    Mistake("switch as text", BUILT, "='no'", "bool('no')", "use True", setting(inference_mode="no")),
    Mistake("negative clipping", BUILT, "=-1.0", "bounds", ">= 0", setting(gradient_clip_val=-1.0)),
    Mistake("gpus", BUILT, "'gpus'", "gpus=1", "devices=", setting(gpus=1)),
    Mistake("fp16", BUILT, "'fp16'", "fp16=True", "precision='16-mixed'", setting(fp16=True)),
    Mistake("steps an epoch", BUILT, "per_epoch", "=5", "limit_train_batches=", setting(max_steps_per_epoch=5)),
    Mistake("learning rate", BUILT, "'learning_rate'", "=0.1", "configure_optimizers", setting(learning_rate=0.1)),
    Mistake("argument misspelt", BUILT, "'max_epochss'", "=1", "max_epochs", setting(max_epochss=1)),
    Mistake("interval too long", START, "=9", "never run", "lower val_check_interval", setting(val_check_interval=9)),
    Mistake(
        "root is a file",
        START,
        "not a folder",
        "first save",
        "dirpath",
        lambda path: Run(fit(_file(path), enable_checkpointing=True), Net()),
    ),
    Mistake(
        "logger in a file",
        START,
        "not a folder",
        "first row",
        "logger=False",
        lambda path: Run(fit(path, logger=CSVLogger(_file(path))), Net()),
    ),
    # Callbacks
    Mistake("callback's class", BUILT, "the class ProgressBar", "hooks", "an instance", setting(callbacks=ProgressBar)),
    Mistake("callback's name", BUILT, "a str", "hooks", "an instance", setting(callbacks="EarlyStopping")),
    Mistake(
        "hook misspelt",
        BUILT,
        "on_train_epoch_stop",
        "would not run",
        "write on_train_epoch_",
        calls(lambda path: hooks(on_train_epoch_stop=lambda self, trainer, module: None)),
    ),
    Mistake(
        "hook without trainer",
        BUILT,
        "on_train_start",
        "engine calls the method",
        "(self, trainer, module)",
        calls(lambda path: hooks(on_train_start=lambda self: None)),
    ),
    Mistake(
        "no hook of LambdaCallback",
        BUILT,
        "on_epoch",
        "never be called",
        "on_train_epoch_end",
        calls(lambda path: LambdaCallback(on_epoch=print)),
    ),
    Mistake(
        "patience as text",
        BUILT,
        "patience='3'",
        "checks",
        "0 or more",
        calls(lambda path: EarlyStopping("val_loss", patience="3")),  # type: ignore[arg-type]
    ),
    Mistake(
        "mode misspelt",
        BUILT,
        "mode='maxi'",
        "direction",
        "'max'",
        calls(lambda path: EarlyStopping("val_loss", mode="maxi")),
    ),
    Mistake("best of nothing", BUILT, "mode='max'", "newest", "monitor=", calls(lambda path: Checkpoint(mode="max"))),
    Mistake(
        "folder in a name",
        BUILT,
        "'a/b'",
        "in dirpath",
        "as dirpath",
        calls(lambda path: Checkpoint(filename="a/b")),
    ),
    Mistake(
        "brace left open", BUILT, "'{epoch'", "braces", "{epoch:03d}", calls(lambda path: Checkpoint(filename="{epoch"))
    ),
    Mistake(
        "interval of a monitor",
        BUILT,
        "'batch'",
        "are logged by steps or by epochs",
        "use 'step'",
        calls(lambda path: LearningRateMonitor(logging_interval="batch")),
    ),
    Mistake(
        "duration in words", BUILT, "'an hour'", "DD:HH:MM:SS", "'00:12:00:00'", calls(lambda path: Timer("an hour"))
    ),
    Mistake(
        "empty schedule", BUILT, "({})", "at least one", "{0: 8", calls(lambda path: GradientAccumulationScheduler({}))
    ),
    Mistake(
        "stopping by a typo",
        FIRST,
        "'val_los'",
        "val_loss",
        "the run fails when the value is read",
        calls(lambda path: EarlyStopping("val_los")),
        is_warning=True,
    ),
    Mistake(
        "best by a typo",
        FIRST,
        "'val_los'",
        "val_loss",
        "the run fails when the value is read",
        calls(lambda path: Checkpoint(monitor="val_los")),
        is_warning=True,
    ),
    Mistake(
        "name by a typo",
        FIRST,
        "'val_los'",
        "val_loss",
        "the run fails when the value is read",
        calls(lambda path: Checkpoint(filename="{val_los:.2f}")),
        is_warning=True,
    ),
    Mistake(
        "stopping by nothing",
        EPOCH,
        "'val_los'",
        "logged so far: ",
        "self.log('val_los', ...)",
        calls(lambda path: EarlyStopping("val_los")),
    ),
    Mistake(
        "callback too late",
        START,
        "ProgressBar was appended",
        "never be called",
        "in setup",
        net(on_train_start=_appending),
    ),
    # Modules
    Mistake(
        "plain module",
        START,
        "a Linear",
        "calls the steps and the hooks of a drivetrain.TrainModule",
        "subclass TrainModule",
        lambda path: Run(fit(path), torch.nn.Linear(1, 1)),  # type: ignore[arg-type]
    ),
    Mistake(
        "no training_step",
        START,
        "no training_step",
        "cannot train",
        "write def training_step",
        lambda path: Run(fit(path), type("Net", (TrainModule,), {"configure_optimizers": sgd})()),
    ),
    Mistake(
        "epoch end of old",
        START,
        "training_epoch_end",
        "would not run",
        "on_train_epoch_end(self)",
        net(training_epoch_end=lambda self, outputs: None),
    ),
    Mistake(
        "plural step",
        START,
        "validation_steps",
        "would not run",
        "write validation_step",
        net(validation_steps=lambda self, batch: None),
    ),
    Mistake(
        "outputs of an epoch",
        START,
        "(outputs)",
        "engine calls the method",
        "def on_train_epoch_end(self)",
        net(on_train_epoch_end=lambda self, outputs: None),
    ),
    Mistake(
        "step without a batch",
        START,
        "without_a_batch() cannot be called",
        "called with (batch",
        "(self, batch, batch_idx)",
        net(training_step=_without_a_batch),
    ),
    # Steps
    Mistake(
        "no return",
        FIRST,
        "Net.training_step returned None",
        "made no step",
        "return loss",
        steps(lambda self, batch: None),
        is_warning=True,
    ),
    Mistake(
        "loss of each sample",
        FIRST,
        "shape (2, 1)",
        "from a scalar",
        "mean()",
        steps(lambda self, batch: self.layer(batch)),
    ),
    Mistake(
        "detached loss",
        FIRST,
        "requires no gradient",
        "detached",
        "without .detach()",
        steps(lambda self, batch: self.layer(batch).mean().detach()),
    ),
    Mistake(
        "loss as a number",
        FIRST,
        "a float",
        "needs a loss",
        "tensor of shape ()",
        steps(lambda self, batch: self.layer(batch).mean().item()),
    ),
    Mistake(
        "tuple of losses",
        FIRST,
        "a tuple",
        "needs a loss",
        "tensor of shape ()",
        steps(lambda self, batch: (self.layer(batch).mean(), 0)),
    ),
    Mistake(
        "moved within a run",
        FIRST,
        "moved or re-cast",
        "would not be trained",
        "Fit(accelerator=",
        steps(lambda self, batch: self.double()),
    ),
    Mistake(
        "logging text", FIRST, "'note'", "a number", "log_dict", steps(lambda self, batch: self.log("note", "good"))
    ),
    Mistake(
        "manual backward",
        FIRST,
        "manual_backward",
        "the engine itself runs backward",
        "automatic_optimization",
        steps(lambda self, batch: self.manual_backward(self.layer(batch).mean())),
    ),
    Mistake(
        "never finite",
        EPOCH,
        "nan",
        "the module no longer learns",
        "lower the learning rate",
        steps(lambda self, batch: self.layer(batch).mean() * math.nan),
        is_warning=True,
    ),
    Mistake(
        "manual without steps",
        EPOCH,
        "any of self.optimizers()",
        "the engine does not step optimizers",
        "step()",
        _manual(lambda self, batch: self.manual_backward(self.layer(batch).mean())),
        is_warning=True,
    ),
    Mistake(
        "manual with clipping",
        START,
        "gradient_clip_val=1.0",
        "training_step itself runs backward, clips gradients and steps the optimizers",
        "self.clip_gradients",
        _manual(lambda self, batch: None, gradient_clip_val=1.0),
    ),
    # Optimizers and schedulers
    Mistake(
        "parameters for optimizers",
        START,
        "a generator",
        "torch optimizers",
        "return an optimizer",
        optimized(lambda self: self.parameters()),
    ),
    Mistake(
        "key misspelt",
        START,
        "'lr_schedular'",
        "keys are",
        "'lr_scheduler'",
        optimized(lambda self: {"optimizer": sgd(self), "lr_schedular": None}),
    ),
    Mistake(
        "another's parameters",
        START,
        "not the module's",
        "not saved",
        "self.layer = ",
        optimized(lambda self: sgd(torch.nn.Linear(1, 1))),
    ),
    Mistake(
        "shared parameters",
        START,
        "share the parameter 'layer.weight'",
        "be updated twice",
        "disjoint",
        optimized(lambda self: [sgd(self), sgd(self)]),
    ),
    Mistake(
        "half of the parameters",
        START,
        "'layer.bias'",
        "never used",
        "add_param_group",
        optimized(lambda self: torch.optim.SGD([self.layer.weight], lr=0.1)),
        is_warning=True,
    ),
    Mistake("plateau of nothing", START, "ReduceLROnPlateau", "value of a logged", "'monitor'", scheduled(plateau)),
    Mistake(
        "interval misspelt",
        START,
        "interval='steps'",
        "optimizer steps",
        "'epoch' or 'step'",
        scheduled(lambda one: {"scheduler": by_steps(one), "interval": "steps"}),
    ),
    Mistake(
        "monitor beside StepLR",
        START,
        "'loss' is ignored with StepLR",
        "takes no value",
        "reduce_on_plateau",
        scheduled(lambda one: {"scheduler": by_steps(one), "monitor": "loss"}),
        is_warning=True,
    ),
    Mistake(
        "plateau by a typo",
        FIRST,
        "'val_los'",
        "val_loss",
        "the run fails when the value is read",
        scheduled(lambda one: {"scheduler": plateau(one), "monitor": "val_los"[:7]}),
        is_warning=True,
    ),
    # Data
    Mistake("no loader", START, "no training loader", "nothing to train on", "fit(module, loader)", given()),
    Mistake(
        "a data set", START, "TensorDataset", "single samples", "DataLoader(", given(TensorDataset(torch.ones(4, 2)))
    ),
    Mistake("empty loader", START, "The training loader", "at least one batch", "drop_last", given([])),
    Mistake(
        "empty validation",
        START,
        "The validation loader 1",
        "at least one batch",
        "data set",
        given(loader(), [loader(), loader(0)]),
    ),
    Mistake("a number for a loader", START, "The training loader: int", "iterable", "DataLoader", given(3)),
    Mistake(
        "combined how",
        BUILT,
        "mode='longest'",
        "modes are",
        "one of them",
        lambda path: given(CombinedLoader([loader()], "longest"))(path),
    ),
    Mistake(
        "nothing to validate on",
        START,
        "validation_step",
        "fit does not validate",
        "val_dataloaders",
        given(loader()),
        is_warning=True,
    ),
    Mistake(
        "lazy layer",
        START,
        "lazy (LazyLinear)",
        "in the first forward",
        "run one forward",
        lambda path: Run(fit(path), type("Net", (Net,), {"__init__": _lazy})()),
    ),
    # Checkpoints
    Mistake("no checkpoint there", START, "missing", "the path does not exist", "check the path", resumed("missing")),
    Mistake(
        "none yet",
        START,
        "'last'",
        "looked in",
        "ckpt_path='auto'",
        lambda path: Run(fit(path), Net(), more={"ckpt_path": "last"}),
    ),
    Mistake(
        "a quick try of a resume",
        START,
        "max_steps=1",
        "optimizer step(s)",
        "leave out fast_dev_run=True",
        lambda path: Run(
            fit(path, fast_dev_run=True), Net(), more={"ckpt_path": _resumed_at_its_end(path).more["ckpt_path"]}
        ),
    ),
    Mistake("nothing left", START, "max_epochs=1 is reached", "1 epoch(s)", "raise the limit", _resumed_at_its_end),
]
"""Sixty and some."""
