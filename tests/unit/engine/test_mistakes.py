"""Messages: what a run logs, once and in time (I-17), and clear ones for newcomers' mistakes (I-10)."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, recording_callback, regression
from small_modules import Logs, calling, linear, logs, tiny
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau as Plateau
from torch.utils.data import TensorDataset

from captured_warnings import captured_warnings
from drivetrain import Callback, ConfigurationError, DataModule, DrivetrainError, Fit, TrainModule
from drivetrain.callbacks import Checkpoint, EarlyStopping, Timer
from drivetrain.data import CombinedLoader
from drivetrain.loggers import CSVLogger
from drivetrain_strategies import DDPStrategy


def warnings_of(trainer: Fit, module: TrainModule, *loaders: Any) -> list[str]:
    with captured_warnings() as lines:
        trainer.fit(module, *loaders)
    return lines


def ending(trainer: Fit, module: TrainModule, *loaders: Any, **options: Any) -> str:
    """Return the line with which a fit ends."""
    with captured_warnings(logging.INFO) as lines:
        trainer.fit(module, *loaders, **options)
    (line,) = [one for one in lines if "run ended" in one]
    return line


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_epochs": 2}, "max_epochs=2 is reached (2 epochs, 8 optimizer steps)"),
        ({"max_epochs": 1}, "max_epochs=1 is reached (1 epoch, 4 optimizer steps)"),
        ({"max_epochs": 1, "max_steps": 4}, "max_steps=4 and max_epochs=1 are reached (1 epoch, 4 optimizer steps)"),
        ({"max_epochs": -1, "max_steps": 3}, "max_steps=3 is reached (0 epochs, 3 optimizer steps)"),
        ({"max_time": timedelta(microseconds=1)}, "max_time=0:00:00.000001 is up (0 epochs, 1 optimizer step)"),
        ({"limit_train_batches": 0}, "limit_train_batches=0 leaves nothing to train on (0 epochs, 0 optimizer steps)"),
    ],
)
def test_the_limit_that_ended_a_run_is_logged(tmp_path: Path, options: dict[str, Any], reason: str) -> None:  # I-17
    line = ending(fit(tmp_path, **options), Tiny(), loader())
    assert re.fullmatch(re.escape(f"The run ended: {reason} after ") + r"\d:\d\d:\d\d\.", line)


def test_who_requested_a_stop_is_logged(tmp_path: Path) -> None:  # I-17
    class Enough(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = True

    def request_and_withdraw(trainer: Any) -> None:
        trainer.request_stop("withdrawn")
        trainer.should_stop = False

    timer, withdraws = Timer(timedelta(microseconds=1), verbose=False), calling("on_train_start", request_and_withdraw)
    assert "Timer: the time of 0:00:00.000001 is up" in ending(fit(tmp_path, callbacks=timer), Tiny(), loader())
    assert "Enough.on_train_batch_end" in ending(fit(tmp_path, callbacks=Enough()), Tiny(), loader())
    assert "withdrawn" not in ending(fit(tmp_path, callbacks=withdraws), Tiny(), loader())
    patient = fit(tmp_path, max_epochs=3, callbacks=EarlyStopping("val_loss", patience=2))
    both = "max_epochs=3 is reached; EarlyStopping: val_loss did not improve on 1 by more than 0 in the last 2"
    assert both in ending(patient, Logs(), loader(), loader())


def test_a_run_logs_its_precision(tmp_path: Path) -> None:  # L-09
    with captured_warnings(logging.INFO) as lines:
        for precision in ("32-true", "bf16-mixed"):
            fit(tmp_path, precision=precision).fit(Tiny(), loader())
    precisions = [line.partition(":")[0] for line in lines if line.startswith("Precision")]
    assert precisions == ["Precision 32-true", "Precision bf16-mixed"]


class HasMonitorAttribute(Callback):
    """A user's callback with an attribute ``monitor`` of another meaning."""

    monitor, filename, dirpath = "gpu", "{split}.csv", "/proc/data"


AT_THE_END = logs(on_train_epoch_end=lambda self: self.log("at_" + "the_end", 1.0))


@pytest.mark.parametrize(
    ("module", "callback", "options"),
    [
        pytest.param(Logs(), EarlyStopping("val_loss"), {}, id="logged in the sanity check"),
        pytest.param(Logs(), EarlyStopping("loss_epoch"), {}, id="with a suffix"),
        pytest.param(AT_THE_END, EarlyStopping("at_the_end"), {}, id="logged at the end of the epoch"),
        pytest.param(logs(mute=True), EarlyStopping("val_loss"), {}, id="not in the sanity check"),
        pytest.param(Logs(), EarlyStopping("val_loss"), {"num_sanity_val_steps": 0}, id="no sanity check"),
        pytest.param(Logs(), HasMonitorAttribute(), {}, id="an attribute of another meaning"),
    ],
)
def test_a_monitor_is_not_warned_about(tmp_path: Path, module: Logs, callback: Callback, options: Any) -> None:  # I-17
    assert warnings_of(fit(tmp_path, callbacks=callback, **options), module, loader(), loader()) == []


def test_folders_are_probed_in_training_only_and_without_a_trace(tmp_path: Path) -> None:  # I-17
    trainer = fit(tmp_path, callbacks=Checkpoint(dirpath=tmp_path / "a" / "b", save_top_k=0), limit_train_batches=0)
    trainer.fit(Tiny(), loader())
    assert [one.name for one in tmp_path.iterdir()] == ["drivetrain_logs"]  # the run's own
    (tmp_path / "a file").write_text("")
    assert fit(tmp_path, logger=CSVLogger(tmp_path / "a file")).predict(Tiny(), loader())


class Manual(Regression):
    """Manual optimization that steps every so many batches or as the epoch ends, and logs a value."""

    automatic_optimization = False
    every, factor, value, wrapped, at_end = 0, 1.0, 0.0, True, False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        vars(self).update(options)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) * self.factor)
        self.log("best_so_far", self.value)
        if self.every and (batch_idx + 1) % self.every == 0:
            optimizer = self.optimizers()
            (optimizer if self.wrapped else optimizer.optimizer).step()

    def on_train_epoch_end(self) -> None:
        if self.at_end:
            self.optimizers().step()


class Shifted(Regression):
    """Adds a number per batch to the loss, without changing the gradient."""

    def __init__(self, *numbers: float, from_step: int = 0) -> None:
        super().__init__()
        self.numbers, self.from_step = numbers, from_step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        shift = self.numbers[min(batch_idx, len(self.numbers) - 1)]
        return self.loss(batch) + (shift if self.trainer.global_step >= self.from_step else 0.0)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Shifted(math.inf), "In epoch 0 the loss was inf after the first micro-batch, and inf after the last"),
        (Shifted(math.nan, from_step=7), "In epoch 2 "),
        (Manual(every=1, factor=math.nan), "the loss was nan"),
        (Manual(), "Manual.training_step went through epoch 0 and did not call step()"),
        pytest.param(Shifted(math.nan, 0.0), None, id="a single loss is not finite"),
        pytest.param(Manual(every=1, value=math.inf), None, id="another value is not finite"),
        pytest.param(Manual(every=6), None, id="steps rarely"),
        pytest.param(Manual(at_end=True), None, id="steps as the epoch ends"),
        pytest.param(Manual(every=1, wrapped=False), None, id="steps the optimizer itself"),
    ],
)
def test_losses_and_steps_that_are_warned_about(tmp_path: Path, module: Any, named: str | None) -> None:  # I-17
    lines = warnings_of(fit(tmp_path, max_epochs=4), module, regression())
    assert len(lines) == (named is not None)
    assert all(str(named) in line for line in lines)


def test_a_tensor_kept_from_an_evaluation_gets_a_fix(tmp_path: Path) -> None:  # I-17
    def keep(self: Any, batch: Any, batch_idx: int) -> None:
        self.kept = self.layer(batch[0])

    def use(self: Any, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[0]) * self.kept).sum()

    kept, trainer = linear(training_step=use, validation_step=keep), fit(tmp_path)
    trainer.validate(kept, regression(), verbose=False)
    with pytest.raises(RuntimeError, match="Inference tensors") as caught:
        trainer.fit(kept, regression())
    assert any("Fit(inference_mode=False)" in note for note in caught.value.__notes__)
    trainer.fit(linear(training_step=use, validation_step=keep), regression(), regression())  # not in inference mode


BUILT = "as it is built"
START = "before the first step"
FIRST = "in the first window"
EPOCH = "at the end of the first epoch"
WHEN = {0: START, 1: FIRST, 4: EPOCH}  # by the number of steps
LOADERS: Any = (loader(), loader())


class Run(NamedTuple):
    trainer: Fit
    module: Any
    loaders: Any = LOADERS
    more: Any = MappingProxyType({})


class Row(NamedTuple):
    """A mistake and the expected message: parts of its first sentence, which names the value, of reason and fix.

    ``make`` builds the run with the mistake, and raises if the message is expected then. A run goes on after a warning.
    """

    value: str
    why: str
    fix: str
    make: Callable[[Path], Any]


def nothing(self: Any, *args: Any) -> None:
    """Stand in for a method that is never called."""


def sgd(module: nn.Module, *parameters: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters or module.parameters(), lr=0.1)


def run(module: Any = None, loaders: Any = LOADERS, more: Any = None, **options: Any) -> Callable[[Path], Run]:
    """Return a run with these arguments of Fit, and ``more`` arguments of fit."""
    return lambda path: Run(fit(path, **options), module or logs(), loaders, more or {})


def net(*loaders: Any, **methods: Any) -> Callable[[Path], Run]:
    return lambda path: Run(fit(path), logs(**methods), loaders or LOADERS)


def steps(does: Callable[[Any, Any], Any], **methods: Any) -> Callable[[Path], Run]:
    """Return a run whose training_step calls ``does``."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.seen.append([batch_idx])
        return does(self, batch)

    return net(training_step=training_step, **methods)


def returns(loss: Callable[[torch.Tensor], Any]) -> Callable[[Path], Run]:
    return steps(lambda self, batch: loss(self.layer(batch)))


def backward(self: Any, batch: Any) -> None:
    self.manual_backward(self.layer(batch).mean())


MANUAL = steps(backward, automatic_optimization=False)
BY_HAND = logs(automatic_optimization=False)


def monitored(module: Any) -> Any:
    return {"optimizer": sgd(module), "monitor": "loss"}


def optimized(configure: Callable[..., Any]) -> Callable[[Path], Run]:
    return net(configure_optimizers=configure)


def scheduled(kind: Callable[[Any], Any], automatic: bool = True, **keys: Any) -> Callable[[Path], Run]:
    def configure(module: Any) -> Any:
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": kind(optimizer), **keys}}

    return net(configure_optimizers=configure, automatic_optimization=automatic)


class ByValue:
    def __init__(self, optimizer: Any) -> None: ...

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}


def calls(kind: Any, *args: Any, **options: Any) -> Callable[[Path], Run]:
    return lambda path: Run(fit(path, callbacks=kind(*args, **options)), logs())


def resumed_at_its_end(**options: Any) -> Callable[[Path], Run]:
    """Return a run that resumes from the last checkpoint of one that has ended."""

    def make(path: Path) -> Run:
        first = fit(path, enable_checkpointing=True)
        first.fit(logs(), loader(), loader())
        assert first.checkpoint_callback is not None
        return run(more={"ckpt_path": first.checkpoint_callback.last_model_path}, **options)(path)

    return make


class Lazy(Tiny):
    """Has layers that get their shape in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 1))


FORKED: dict[str, Any] = {"devices": 2, "launcher": "fork", "accelerator": "cpu"}
LAZY = "'layer.0 (LazyLinear)', 'layer.1 (LazyBatchNorm1d)'."


def watch(*names: str, **methods: Any) -> Callback:
    kind: type[Callback] = type("Watch", (Callback,), {**dict.fromkeys(names, nothing), **methods})
    return kind()


def data_with(name: str, method: Callable[..., Any] = nothing) -> DataModule:
    return type("Numbers", (DataModule,), {name: method, "train_dataloader": lambda self: loader()})()


def appending_in(hook: str) -> Callable[[Path], Run]:
    return net(**{hook: lambda self: self.trainer.callbacks.append(watch("on_train_end"))})


CALLS_IT_ITSELF = net(training_epoch_end=nothing, on_train_epoch_end=lambda self: self.training_epoch_end([]))
UNLIKE = "looks like a hook but is not one"
NEVER_RUN = "its code would not run"
ARGUMENTS = "calls the method with these arguments"
OF_MODULES = {  # by the name of a method that is no hook
    "training_epoch_end": "on_train_epoch_end(self)",
    "on_validation_model_zero_grad": "on_validation_start(self)",
    "on_epoch_end": "on_train_epoch_end",
    "on_train_begin": "write on_train_start",
    "on_sanity_check_start": "write it in a callback, which has a hook of that name",
    "valid_dataloader": "write val_dataloader",
}
OF_CALLBACKS = {
    "on_init_start": "write setup",
    "on_keyboard_interrupt": "on_exception",
    "on_before_batch_transfer": "write it in a module or in a data module, which has a hook of that name",
}
OF_DATA_MODULES = {
    "valid_dataloader": "write val_dataloader",
    "on_train_epoch_start": "write it in a module or in a callback, which has a hook of that name",
}


ERRORS: dict[str, list[Row]] = {
    BUILT: [
        Row("'dpp'", "entry-point group", "use one of auto", run(strategy="dpp")),
        Row("DDPStrategy", "takes StrategyName | str | Strategy", "of this type", run(strategy=DDPStrategy)),
        Row("devices='two'", "a count", "devices=2", run(devices="two")),
        Row("devices=1.0", "takes int | str | list[int]", "of this type", run(devices=1.0)),
        Row("max_epochs=1.5", "takes int | None", "of this type", run(max_epochs=1.5)),
        Row("max_time='1h'", "limits the time of training", "'00:12:00:00'", run(max_time="1h")),
        Row("min_epochs=9", "minimum exceeds the maximum", "lower min_epochs", run(min_epochs=9)),
        Row("='no'", "takes bool", "of this type", run(inference_mode="no")),
        Row("'gpus'", "gpus=1", "devices=", run(gpus=1)),
        Row("'fp16'", "fp16=True", "precision='16-mixed'", run(fp16=True)),
        Row("per_epoch", "=5", "limit_train_batches=", run(max_steps_per_epoch=5)),
        Row("'learning_rate'", "=0.1", "configure_optimizers", run(learning_rate=0.1)),
        Row("a str", "hooks", "an instance", run(callbacks=["EarlyStopping"])),
        Row("mode='max'", "newest", "monitor=", calls(Checkpoint, mode="max")),
        Row("'{epoch'", "braces", "{epoch:03d}", calls(Checkpoint, filename="{epoch")),
        Row("mode='longest'", "modes are", "one of them", lambda path: CombinedLoader([loader()], "longest")),
        Row("'resume_from_checkpoint'", "or is set in", "ckpt_path=", run(resume_from_checkpoint="last")),
        Row("'progress_bar_refresh_rate'", "=10 has", "(refresh_rate=...)", run(progress_bar_refresh_rate=10)),
        *(Row(f"Watch.{name} {UNLIKE}", NEVER_RUN, fix, calls(watch, name)) for name, fix in OF_CALLBACKS.items()),
        Row("Watch.on_train_end()", ARGUMENTS, "(self, trainer, module)", calls(watch, on_train_end=lambda self: None)),
    ],
    START: [
        Row("=9", "never run", "lower val_check_interval", run(val_check_interval=9)),
        Row(LAZY, "first forward", "one forward", run(Lazy())),
        Row(LAZY, "first forward", "configure_model", run(Lazy(), strategy="fsdp", **FORKED)),
        Row("not a folder", "first writes", "dirpath", run(default_root_dir="/dev/null", enable_checkpointing=True)),
        Row("not a folder", "first writes", "save_dir", run(logger=CSVLogger("/dev/null"))),
        Row("a Linear", "hooks of a drivetrain", "subclass TrainModule", run(nn.Linear(1, 1))),
        Row("gradient_clip_val=1.0", "itself", "self.clip_gradients", run(BY_HAND, gradient_clip_val=1.0)),
        Row("a generator", "torch optimizers", "return an optimizer", optimized(lambda self: self.parameters())),
        Row("ByValue without", "a logged metric", "return", scheduled(ByValue, reduce_on_plateau=True)),
        Row("'monitor': 'loss' without an", "no scheduler would", "drop 'monitor'", optimized(monitored)),
        Row("TensorDataset", "single samples", "DataLoader(", run(loaders=[TensorDataset(torch.ones(4, 2))])),
        Row("The validation loader 1", "one batch", "data set", run(loaders=[loader(), [loader(), loader(0)]])),
        Row("missing", "the path does not exist", "check the path", run(more={"ckpt_path": "missing"})),
        Row("'last'", "looked in", "ckpt_path='auto'", run(more={"ckpt_path": "last"})),
        Row("max_steps=1", "optimizer step(s)", "leave out fast_dev_run=True", resumed_at_its_end(fast_dev_run=True)),
        Row("max_epochs=1 is reached", "1 epoch(s)", "raise the limit", resumed_at_its_end()),
        *(
            Row(f"Net.{name} {UNLIKE}", NEVER_RUN, fix, net(loader(), **{name: nothing}))
            for name, fix in OF_MODULES.items()
        ),
        *(
            Row(f"Numbers.{name} {UNLIKE}", NEVER_RUN, fix, run(loaders=[data_with(name)]))
            for name, fix in OF_DATA_MODULES.items()
        ),
        Row("Net.training_epoch_end", NEVER_RUN, "rename it or prefix its name with an underscore", CALLS_IT_ITSELF),
        Row("(outputs, batch, batch_idx)", ARGUMENTS, "(self, outputs", net(on_train_batch_end=lambda self, a: None)),
        Row("with a batch", "and dataloader_idx if", "batch_idx)", net(training_step=lambda self, a, b, c, d: None)),
        Row("Watch was appended", "looked up once", "append the callback in setup", appending_in("on_fit_start")),
        Row("Watch was appended to", "looked up once", "in setup", appending_in("on_train_epoch_start")),
    ],
    FIRST: [
        Row("shape (2, 1)", "a scalar", "mean()", returns(lambda y: y)),
        Row("requires_grad=False", "trainable", "without .detach()", returns(lambda y: y.mean().detach())),
        Row("a float", "the backward", "tensor of shape ()", returns(lambda y: y.mean().item())),
        Row("a tuple", "the backward", "tensor of shape ()", returns(lambda y: (y.mean(), 0))),
        Row("'note'", "a number", "log_dict", steps(lambda self, batch: self.log("note", "good"))),
        Row("manual_backward", "engine itself runs", "automatic_optimization", steps(backward)),
    ],
    EPOCH: [
        Row("'val_los'", "logged so far: ", "self.log('val_los', ...)", calls(EarlyStopping, "val_los")),
        Row("ReduceLROnPlateau monitors 'val_los'", "are: ", "'strict': False", scheduled(Plateau, monitor="val_los")),
    ],
}
WARNINGS: dict[str, list[Row]] = {
    START: [
        Row("'layer.bias'", "never used", "add_param_group", optimized(lambda self: sgd(self, self.layer.weight))),
        Row("'loss' is ignored with ByValue", "no value", "reduce_on_plateau", scheduled(ByValue, monitor="loss")),
        Row("ignored in manual", "training_step steps", "lr_schedulers()", scheduled(ByValue, False, interval="step")),
        Row("validation_step", "fit does not validate", "val_dataloaders", run(loaders=[loader()])),
    ],
    FIRST: [
        Row("EarlyStopping(monitor='val_los')", "'val_loss'?", "the run fails", calls(EarlyStopping, "val_los")),
        Row("Checkpoint(monitor='val_los')", "'val_loss'?", "the run fails", calls(Checkpoint, monitor="val_los")),
        Row("names 'val_los'", "'val_loss'?", "the run fails", calls(Checkpoint, filename="{val_los:.2f}")),
        Row("Net.training_step returned no loss", "made no step", "return loss", steps(nothing)),
        Row("'monitor': 'val_los' of Reduce", "'val_loss'?", "the run fails", scheduled(Plateau, monitor="val_los")),
    ],
    EPOCH: [
        Row("nan", "no longer learns", "lower the learning rate", returns(lambda y: y.mean() * math.nan)),
        Row("of self.optimizers()", "does not step", "step()", MANUAL),
    ],
}


def rows(table: dict[str, list[Row]]) -> list[Any]:
    every = [(when, row) for when, several in table.items() for row in several]
    return [pytest.param(when, row, id=f"{row.value} {row.why} {row.fix}") for when, row in every]


@pytest.mark.parametrize(("when", "mistake"), rows(ERRORS))
def test_a_mistake_is_refused_in_time(tmp_path: Path, when: str, mistake: Row) -> None:  # I-10, I-12, I-17, G-06
    try:
        run = mistake.make(tmp_path)
    except DrivetrainError as refusal:
        noticed, error = BUILT, refusal
    else:
        with pytest.raises(DrivetrainError) as caught:
            run.trainer.fit(run.module, *run.loaders, **run.more)
        noticed, error = WHEN[len(getattr(run.module, "seen", []))], caught.value
    assert noticed == when
    assert mistake.value in error.what
    assert mistake.why in error.why
    assert mistake.fix in error.fix


@pytest.mark.parametrize(("when", "mistake"), rows(WARNINGS))
def test_a_mistake_is_warned_about_in_time(tmp_path: Path, monkeypatch: Any, when: str, mistake: Row) -> None:
    # I-10, I-17
    run = mistake.make(tmp_path)
    found: list[tuple[str, int]] = []

    def record(record: logging.LogRecord) -> bool:
        if mistake.value in record.getMessage():
            found.append((record.getMessage(), len(run.module.seen)))
        return True

    logger = logging.getLogger("drivetrain")
    monkeypatch.setattr(logger, "filters", [*logger.filters, record])
    # Some messages of the first window announce that the epoch's end will refuse the run.
    with suppress(DrivetrainError) if when == FIRST else nullcontext():
        run.trainer.fit(run.module, *run.loaders, **run.more)
    ((line, steps),) = found
    assert WHEN[steps] == when
    assert mistake.why in line
    assert mistake.fix in line


@pytest.mark.parametrize("settings", [{}, {"strategy": "ddp", **FORKED}])
def test_lazy_layers_train_after_one_forward(tmp_path: Path, settings: dict[str, Any]) -> None:  # I-12
    class Shaped(Lazy):
        def configure_model(self) -> None:
            with torch.no_grad():
                self.layer(torch.ones(2, 2))

    before = Lazy()
    with pytest.raises(DrivetrainError, match="LazyLinear"):
        fit(tmp_path).predict(before, loader(4))
    before.layer(torch.ones(2, 2))
    for module in (before, Shaped()):
        trainer = fit(tmp_path, **settings)
        trainer.fit(module, loader(4, 4))
        assert trainer.global_step == 1
        assert type(module.layer[0]) is nn.Linear  # also in the caller of started ranks
        assert module.layer[0].weight.shape == (4, 2)


def test_what_only_resembles_a_mistake_is_accepted(tmp_path: Path) -> None:  # I-10
    names = ["training_loss", "setup_layers", "step", "log_images", "get_metrics", "on_policy_loss", "on_episode"]
    names += ["test_data", "configure_heads", "predict", "_training_epoch_end", "_validation_steps", "val_step"]
    module: Any = tiny(**dict.fromkeys(names, nothing))
    callback = watch("training_step", "backward", "on_reward", "write")
    with captured_warnings() as lines:
        fit(tmp_path, callbacks=callback).fit(module, datamodule=data_with("train_steps"))
    assert not [line for line in lines if "resemble hooks" in line]
    module = tiny(valid_dataloader=lambda self: loader(2))
    fit(tmp_path).fit(module, loader(), module.valid_dataloader())
    assert [0, 1] in module.evaluated
    assert warnings_of(fit(tmp_path, limit_val_batches=0), tiny(), loader()) == []  # a validation_step without a loader
    module = logs(configure_optimizers=lambda self: {**monitored(self), "lr_scheduler": None})
    fit(tmp_path).fit(module, loader())
    assert len(module.seen) == 4


def test_a_class_whose_methods_are_almost_named_as_hooks_gets_one_warning(tmp_path: Path) -> None:  # I-10
    names = {
        "configure_optimiser": "configure_optimizers",
        "on_befor_optimizer_step": "on_before_optimizer_step",
        "batch_weights": "batch_weight",
        "training_steps": "training_step",
    }
    module = tiny(**dict.fromkeys(names, nothing))
    with captured_warnings() as lines:
        fit(tmp_path, callbacks=watch("on_validation_ends")).fit(module, datamodule=data_with("prepare_datas"))
    by_class = {line.split()[0]: line for line in lines if "resemble hooks" in line}
    assert len([line for line in lines if "resemble hooks" in line]) == len(by_class) == 3
    for name, hook in names.items():
        assert f"{name} (did you mean {hook}?)" in by_class["Net"]
    assert "on_validation_ends (did you mean on_validation_end?)" in by_class["Watch"]
    assert "prepare_datas (did you mean prepare_data?)" in by_class["Numbers"]


@pytest.mark.parametrize(
    ("hook", "loaders"),
    [
        (lambda self, outputs, batch, batch_idx: self.calls.append(batch_idx), loader(4)),
        (lambda self, outputs, batch, batch_idx, dataloader_idx: self.calls.append(dataloader_idx), [loader(2)] * 2),
    ],
)
def test_hooks_may_omit_dataloader_idx_or_require_it(tmp_path: Path, hook: Any, loaders: Any) -> None:  # I-10
    module: Any = tiny(on_validation_batch_end=hook, calls=[])
    fit(tmp_path, num_sanity_val_steps=0).fit(module, loader(), loaders)
    assert module.calls == [0, 1]


def test_setup_may_append_and_remove_callbacks(tmp_path: Path) -> None:  # I-10
    calls: list[str] = []
    appended = recording_callback("appended", calls)

    def setup(self: Any, stage: str) -> None:
        self.trainer.callbacks[:] = [appended]

    fit(tmp_path, callbacks=recording_callback("removed", calls)).fit(tiny(setup=setup), loader())
    assert [call for call in calls if call.startswith("removed")] == ["removed.setup"]
    assert [calls.count(f"appended.{hook}") for hook in ("setup", "on_train_start", "teardown")] == [1, 1, 1]


@pytest.mark.parametrize(("keys", "values"), [({"monitor": "loss"}, 3), ({"monitor": "los", "strict": False}, 0)])
def test_a_custom_scheduler_gets_the_value_unless_it_is_missing(tmp_path: Path, keys: Any, values: int) -> None:  # I-10
    given: list[Any] = []

    class Recording(ByValue):
        def step(self, *values: Any) -> None:
            given.extend(values or ["none"])

    trainer, module = fit(tmp_path, max_epochs=3), scheduled(Recording, reduce_on_plateau=True, **keys)(tmp_path).module
    with captured_warnings() as lines:
        trainer.fit(module, *LOADERS)
    assert len(given) == values
    assert given[-1:] in ([], [trainer.callback_metrics["loss"]])
    found = [line for line in lines if "'strict': False" in line]
    assert len(found) == (not values)
    assert all("'los'" in line and "'loss'" in line for line in found)


def test_old_names_in_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # I-10
    monkeypatch.setenv("DRIVETRAIN_GPUS", "2")
    with pytest.raises(ConfigurationError, match=r"(?s)DRIVETRAIN_GPUS='2'.*devices="):
        Fit()
    monkeypatch.delenv("DRIVETRAIN_GPUS")
    (tmp_path / "drivetrain.toml").write_text("epochs = 3\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"(?s)sets 'epochs'.*max_epochs="):
        Fit()
