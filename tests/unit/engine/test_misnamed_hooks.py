"""No hook, key or callback is accepted and then silently ignored (I-10)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader
from small_modules import tiny

from captured_warnings import captured_warnings
from drivetrain import Callback, ConfigurationError, DataModule, Fit, RunContext, TrainModule


def nothing(self: Any, *args: Any) -> None:
    """Stand in for a method that is never called."""


def callback_with(*names: str) -> Callback:
    """A callback with methods of these names."""
    kind: type[Callback] = type("Watch", (Callback,), dict.fromkeys(names, nothing))
    return kind()


def data_with(name: str) -> DataModule:
    """A data module with a method of this name."""
    return type("Numbers", (DataModule,), {name: nothing, "train_dataloader": lambda self: loader()})()


# Methods


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("training_epoch_end", "on_train_epoch_end(self)"),
        ("training_step_end", "on_train_batch_end"),
        ("on_validation_model_zero_grad", "on_validation_start(self)"),
        ("configure_sharded_model", "configure_model(self)"),
        ("on_epoch_end", "on_train_epoch_end"),
        ("on_train_begin", "write on_train_start"),
        ("on_fit_finished", "write on_fit_end"),
        ("on_sanity_check_start", "write it in a callback, which has a hook of that name"),
        ("on_val_epoch_end", "write on_validation_epoch_end"),
        ("valid_dataloader", "write val_dataloader"),
    ],
)
def test_a_method_with_the_name_of_another_hook_is_refused(tmp_path: Path, name: str, way_out: str) -> None:  # I-10
    module = tiny(**{name: nothing})
    with pytest.raises(ConfigurationError, match=rf"Net\.{name} looks like a hook") as caught:
        fit(tmp_path).fit(module, loader())
    assert way_out in caught.value.fix
    assert module.seen == []


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("on_init_start", "write setup"),
        ("on_keyboard_interrupt", "on_exception"),
        ("on_before_batch_transfer", "write it in a module or in a data module, which has a hook of that name"),
    ],
)
def test_a_callback_is_refused_as_fit_is_built(tmp_path: Path, name: str, way_out: str) -> None:  # I-10
    with pytest.raises(ConfigurationError, match=rf"Watch\.{name} looks like a hook") as caught:
        fit(tmp_path, callbacks=[callback_with(name)])
    assert way_out in caught.value.fix


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("valid_dataloader", "write val_dataloader"),
        ("on_train_epoch_start", "write it in a module or in a callback, which has a hook of that name"),
    ],
)
def test_a_data_module_is_checked_too(tmp_path: Path, name: str, way_out: str) -> None:  # I-10
    with pytest.raises(ConfigurationError, match=rf"Numbers\.{name} looks like a hook") as caught:
        fit(tmp_path).fit(Tiny(), datamodule=data_with(name))
    assert way_out in caught.value.fix


def test_helpers_are_not_refused(tmp_path: Path) -> None:  # I-10
    """Names that share a word with a hook's. Nothing is said about them."""
    helpers = ["training_loss", "setup_layers", "step", "log_images", "get_metrics", "on_policy_loss", "on_episode"]
    helpers += ["test_data", "configure_heads", "predict", "_training_epoch_end", "_validation_steps", "val_step"]
    watch = callback_with("training_step", "backward", "on_reward", "write")
    with captured_warnings() as lines:
        fit(tmp_path, callbacks=watch).fit(tiny(**dict.fromkeys(helpers, nothing)), datamodule=data_with("train_steps"))
    assert not [line for line in lines if "resemble hooks" in line]


def test_a_method_whose_name_is_almost_a_hooks_gets_one_warning(tmp_path: Path) -> None:  # I-10
    names = {
        "configure_optimiser": "configure_optimizers",
        "on_befor_optimizer_step": "on_before_optimizer_step",
        "batch_weights": "batch_weight",
        "training_steps": "training_step",
    }
    module = tiny(**dict.fromkeys(names, nothing))
    with captured_warnings() as lines:
        fit(tmp_path, callbacks=callback_with("on_validation_ends")).fit(module, datamodule=data_with("prepare_datas"))
    by_class = {line.split()[0]: line for line in lines if "resemble hooks" in line}
    assert len([line for line in lines if "resemble hooks" in line]) == len(by_class) == 3
    for name, hook in names.items():
        assert f"{name} (did you mean {hook}?)" in by_class["Net"]
    assert "on_validation_ends (did you mean on_validation_end?)" in by_class["Watch"]
    assert "prepare_datas (did you mean prepare_data?)" in by_class["Numbers"]


def test_a_method_that_returned_the_loaders_is_not_refused(tmp_path: Path) -> None:  # I-10
    module: Any = tiny(valid_dataloader=lambda self: loader(2))
    fit(tmp_path).fit(module, loader(), module.valid_dataloader())
    assert [0, 1] in module.evaluated


@pytest.mark.parametrize(
    ("methods", "error"),
    [
        ({"on_train_batch_end": lambda self, outputs: None}, "cannot be called with (outputs, batch, batch_idx)"),
        ({"on_train_start": lambda self, trainer: None}, "def on_train_start(self)"),
        ({"setup": lambda self: None}, "def setup(self, stage)"),
        ({"optimizer_step": lambda self, epoch, batch_idx: None}, "optimizer_closure"),
        ({"configure_optimizers": lambda self, lr: None}, "def configure_optimizers(self)"),
        ({"training_step": lambda self, batch, batch_idx, dataloader_idx, more: None}, "cannot be called with a batch"),
    ],
)
def test_a_hook_with_other_arguments_is_refused_at_the_start(
    tmp_path: Path, methods: dict[str, Any], error: str
) -> None:  # I-10
    module = tiny(**methods)
    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(module, loader())
    assert error in str(caught.value)
    assert module.seen == []


@pytest.mark.parametrize(
    ("hook", "loaders", "expected"),
    [
        (lambda self, outputs, batch, batch_idx: self.calls.append(batch_idx), loader(4), [0, 1]),
        (
            lambda self, outputs, batch, batch_idx, dataloader_idx: self.calls.append(dataloader_idx),
            [loader(2), loader(2)],
            [0, 1],
        ),
    ],
)
def test_hooks_may_omit_dataloader_idx_or_require_it(
    tmp_path: Path, hook: Any, loaders: Any, expected: list[int]
) -> None:  # I-10
    module: Any = tiny(on_validation_batch_end=hook, calls=[])
    fit(tmp_path, num_sanity_val_steps=0).fit(module, loader(), loaders)
    assert module.calls == expected


def test_a_loader_that_hides_a_method_is_refused(tmp_path: Path) -> None:  # I-10
    module = Tiny()
    module.val_dataloader = loader()  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigurationError, match=r"(?s)val_dataloader is a DataLoader.*def val_dataloader\(self\)"):
        fit(tmp_path).fit(module, loader())


# Callbacks that are added late


class Counting(Callback):
    """Counts the hooks that are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        self.calls.append("setup")

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        self.calls.append("start")

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        self.calls.append("teardown")


def test_setup_may_append_and_remove_callbacks(tmp_path: Path) -> None:  # I-10
    removed, appended = Counting(), Counting()

    def setup(self: Any, stage: str) -> None:
        self.trainer.callbacks[:] = [appended]

    fit(tmp_path, callbacks=removed).fit(tiny(setup=setup), loader())
    assert removed.calls == ["setup"]
    assert appended.calls == ["setup", "start", "teardown"]


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_epoch_start"])
def test_a_callback_appended_later_is_refused(tmp_path: Path, hook: str) -> None:  # I-10
    module = tiny(**{hook: lambda self: self.trainer.callbacks.append(Counting())})
    with pytest.raises(ConfigurationError, match=r"(?s)Counting was appended.*append the callback in setup"):
        fit(tmp_path).fit(module, loader())
    assert module.seen == []


# Keys of schedulers


class ByValue:
    """A custom scheduler whose step takes a value."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def step(self, *values: Any) -> None:
        self.values.extend(values or ["none"])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def scheduled(automatic: bool = True, plateau: bool = False, **keys: Any) -> Any:
    """A module that logs ``loss`` by epoch, with a scheduler."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 2.0, on_epoch=True, on_step=False)
        return self.layer(batch).mean() if automatic else self.optimizers().step()

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.scheduler = ByValue()
        if plateau:
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, **keys}}

    steps: dict[str, Callable[..., Any]] = {"training_step": training_step}
    return tiny(automatic_optimization=automatic, configure_optimizers=configure_optimizers, **steps)


def test_a_custom_scheduler_gets_the_value(tmp_path: Path) -> None:  # I-10
    module = scheduled(reduce_on_plateau=True, monitor="loss")
    fit(tmp_path).fit(module, loader())
    assert module.scheduler.values == [2.0]


def test_without_strict_a_missing_value_is_ignored(tmp_path: Path) -> None:  # I-10
    module = scheduled(plateau=True, monitor="los", strict=False)
    with captured_warnings() as lines:
        fit(tmp_path, max_epochs=3).fit(module, loader())
    assert module.scheduler.last_epoch == 0
    (line,) = [line for line in lines if "'strict': False" in line]
    assert "'los'" in line
    assert "'loss'" in line
    with pytest.raises(ConfigurationError, match=r"monitors 'los'.*Did you mean 'loss'\?(?s:.*)'strict': False"):
        fit(tmp_path).fit(scheduled(plateau=True, monitor="los"), loader())


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"plateau": True, "monitor": "loss", "reduce_on_plateau": False}, "'reduce_on_plateau': False with Reduce"),
        ({"reduce_on_plateau": True}, "ByValue without a 'monitor'"),
        ({"strict": "no"}, "'strict': 'no'"),
        ({"monitor": 3}, "'monitor': 3"),
        ({"frequency": True}, "frequency=True"),
    ],
)
def test_invalid_scheduler_keys_are_refused(tmp_path: Path, keys: dict[str, Any], error: str) -> None:  # I-10
    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(scheduled(**keys), loader())
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "warning"),
    [
        ({"monitor": "loss"}, "'monitor': 'loss' is ignored with ByValue, whose step takes no value"),
        ({"automatic": False, "interval": "step"}, "ignored in manual optimization"),
    ],
)
def test_unused_scheduler_keys_are_warned_about(tmp_path: Path, keys: dict[str, Any], warning: str) -> None:  # I-10
    with captured_warnings() as lines:
        fit(tmp_path).fit(scheduled(**keys), loader())
    assert [warning in line for line in lines].count(True) == 1


def test_a_monitor_without_a_scheduler_is_refused_unless_it_is_switched_off(tmp_path: Path) -> None:  # I-10
    def monitoring(**keys: Any) -> Tiny:
        return tiny(
            configure_optimizers=lambda self: {
                "optimizer": torch.optim.SGD(self.parameters()),
                "monitor": "loss",
                **keys,
            }
        )

    fit(tmp_path).fit(monitoring(lr_scheduler=None), loader())
    with pytest.raises(ConfigurationError, match="'monitor': 'loss' without an 'lr_scheduler'"):
        fit(tmp_path).fit(monitoring(), loader())


# Arguments


@pytest.mark.parametrize(
    ("name", "value", "new"),
    [
        ("gradient_accumulation_steps", 4, "accumulate_grad_batches="),
        ("epochs", 3, "max_epochs="),
        ("distributed_backend", "ddp", "strategy="),
        ("resume_from_checkpoint", "last", "ckpt_path="),
        ("progress_bar_refresh_rate", 10, "ProgressBar(refresh_rate=...)"),
    ],
)
def test_old_names_of_arguments_get_the_new_one(name: str, value: Any, new: str) -> None:  # I-10
    with pytest.raises(ConfigurationError, match=rf"Fit\(\) has no argument '{name}'") as caught:
        Fit(**{name: value})
    assert new in caught.value.fix
    assert f"{name}={value!r}" in caught.value.why


def test_old_names_in_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # I-10
    monkeypatch.setenv("DRIVETRAIN_GPUS", "2")
    with pytest.raises(ConfigurationError, match=r"(?s)DRIVETRAIN_GPUS='2'.*devices="):
        Fit()
    monkeypatch.delenv("DRIVETRAIN_GPUS")
    (tmp_path / "drivetrain.toml").write_text("epochs = 3\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"(?s)sets 'epochs'.*max_epochs="):
        Fit()
