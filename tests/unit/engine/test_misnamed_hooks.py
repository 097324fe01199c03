"""No hook, key or callback is accepted and then silently ignored (I-10)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Tiny, fit, loader

from captured_warnings import captured_warnings
from drivetrain import Callback, ConfigurationError, DataModule, Fit, RunContext, TrainModule


def nothing(self: Any, *args: Any) -> None:
    """Stand in for a method that is never called."""


def module_with(*names: str, **methods: Callable[..., Any]) -> Tiny:
    """A module with methods of these names."""
    return type("Net", (Tiny,), {**dict.fromkeys(names, nothing), **methods})()


def callback_with(*names: str, **methods: Callable[..., Any]) -> Callback:
    """A callback with methods of these names."""
    kind: type[Callback] = type("Watch", (Callback,), {**dict.fromkeys(names, nothing), **methods})
    return kind()


# Methods of the module


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("training_epoch_end", "on_train_epoch_end(self)"),
        ("validation_epoch_end", "on_validation_epoch_end(self)"),
        ("training_step_end", "on_train_batch_end"),
        ("on_validation_model_zero_grad", "on_validation_start(self)"),
        ("configure_sharded_model", "configure_model(self)"),
        ("on_train_epoch_stop", "write on_train_epoch_end"),
        ("on_epoch_end", "on_train_epoch_end"),
        ("on_train_begin", "write on_train_start"),
        ("on_fit_finished", "write on_fit_end"),
        ("on_sanity_check_start", "write it in a callback, which has a hook of that name"),
        ("on_val_epoch_end", "write on_validation_epoch_end"),
        ("on_train_step_end", "write on_train_batch_end"),
        ("validation_steps", "write validation_step"),
        ("valid_dataloader", "write val_dataloader"),
        ("train_dataloaders", "write train_dataloader"),
    ],
)
def test_a_method_with_the_name_of_another_hook_is_refused(tmp_path: Path, name: str, way_out: str) -> None:  # I-10
    module = module_with(name)
    with pytest.raises(ConfigurationError, match=rf"Net\.{name} looks like a hook") as caught:
        fit(tmp_path).fit(module, None if name == "train_dataloaders" else loader())
    assert way_out in caught.value.fix
    assert module.seen == []


def test_helpers_are_not_refused(tmp_path: Path) -> None:  # I-10
    """Names that share a word with a hook's. Nothing is said about them."""

    class Net(Tiny):
        def training_loss(self) -> None: ...
        def setup_layers(self) -> None: ...
        def step(self) -> None: ...
        def log_images(self) -> None: ...
        def get_metrics(self) -> None: ...
        def on_policy_loss(self) -> None: ...
        def on_episode(self) -> None: ...
        def test_data(self) -> None: ...
        def configure_heads(self) -> None: ...
        def predict(self) -> None: ...
        def _training_epoch_end(self) -> None: ...
        def _validation_steps(self) -> None: ...
        def val_step(self) -> None: ...

        def train_step(self, batch: Any) -> Any:
            return self.layer(batch).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.train_step(batch)

    with captured_warnings() as lines:
        fit(tmp_path).fit(Net(), loader())
    assert not [line for line in lines if "resemble hooks" in line]


def test_a_method_whose_name_is_almost_a_hooks_gets_one_warning(tmp_path: Path) -> None:  # I-10
    names = {
        "configure_optimiser": "configure_optimizers",
        "on_train_epoch_ends": "on_train_epoch_end",
        "on_befor_optimizer_step": "on_before_optimizer_step",
        "configure_callback": "configure_callbacks",
        "batch_weights": "batch_weight",
        "prepare_datas": "prepare_data",
        "training_steps": "training_step",
    }
    data = type("Numbers", (DataModule,), {"prepare_datas": nothing, "train_dataloader": lambda self: loader()})()
    with captured_warnings() as lines:
        fit(tmp_path, callbacks=callback_with("on_validation_ends")).fit(module_with(*names), datamodule=data)
    by_class = {line.split()[0]: line for line in lines if "resemble hooks" in line}
    assert len([line for line in lines if "resemble hooks" in line]) == len(by_class) == 3
    for name, hook in names.items():
        assert f"{name} (did you mean {hook}?)" in by_class["Net"]
    assert "on_validation_ends (did you mean on_validation_end?)" in by_class["Watch"]
    assert "prepare_datas (did you mean prepare_data?)" in by_class["Numbers"]


def test_a_refused_name_is_refused_even_if_the_module_calls_the_method(tmp_path: Path) -> None:  # I-10
    class Net(Tiny):
        def training_epoch_end(self, outputs: list[Any]) -> None: ...

        def on_train_epoch_end(self) -> None:
            self.training_epoch_end([])

    with pytest.raises(ConfigurationError, match="training_epoch_end looks like a hook") as caught:
        fit(tmp_path).fit(Net(), loader())
    assert "rename it or prefix its name with an underscore" in caught.value.fix


def test_a_data_module_may_have_a_method_for_its_number_of_steps(tmp_path: Path) -> None:  # I-10
    class Data(DataModule):
        def train_steps(self) -> int:
            return 4

        def train_dataloader(self) -> Any:
            return loader()

    fit(tmp_path).fit(Tiny(), datamodule=Data())


def test_unused_loader_methods_are_not_checked(tmp_path: Path) -> None:  # I-10
    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader()

        def test_dataloader(self, split: str) -> Any:  # type: ignore[override]
            return loader()

    fit(tmp_path).fit(Tiny(), datamodule=Data())
    with pytest.raises(ConfigurationError, match="test_dataloader"):
        fit(tmp_path).test(Tiny(), datamodule=Data())

    module: Any = Tiny()
    module.train_dataloader = module.test_dataloader = loader()
    fit(tmp_path).fit(module, module.train_dataloader)


def test_a_scheduler_that_is_switched_off_keeps_its_monitor(tmp_path: Path) -> None:  # I-10
    def optimizer(self: Any) -> dict[str, Any]:
        return {"optimizer": torch.optim.SGD(self.parameters()), "lr_scheduler": None, "monitor": "val_loss"}

    fit(tmp_path).fit(module_with(configure_optimizers=optimizer), loader())


def test_a_decorator_may_pass_a_hook_more_arguments(tmp_path: Path) -> None:  # I-10
    def with_trainer(hook: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(hook)
        def wrapped(self: Any) -> None:
            hook(self, self.trainer)

        return wrapped

    seen: list[Any] = []
    trainer = fit(tmp_path)
    trainer.fit(module_with(on_train_start=with_trainer(lambda self, trainer: seen.append(trainer))), loader())
    assert seen == [trainer]


def test_hooks_of_several_loaders_may_require_dataloader_idx(tmp_path: Path) -> None:  # I-10
    seen: list[int] = []
    module = module_with(
        on_validation_batch_end=lambda self, outputs, batch, batch_idx, dataloader_idx: seen.append(dataloader_idx)
    )
    fit(tmp_path, num_sanity_val_steps=0).fit(module, loader(), [loader(2), loader(2)])
    assert seen == [0, 1]


def test_a_method_that_returned_the_loaders_is_not_refused(tmp_path: Path) -> None:  # I-10
    module: Any = module_with(valid_dataloader=lambda self: loader(2))
    fit(tmp_path).fit(module, loader(), module.valid_dataloader())
    assert [0, 1] in module.evaluated


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"on_train_epoch_end": lambda self, outputs: None}, "on_train_epoch_end(outputs) cannot be called with ()"),
        ({"on_train_batch_end": lambda self, outputs: None}, "cannot be called with (outputs, batch, batch_idx)"),
        ({"on_train_start": lambda self, trainer: None}, "def on_train_start(self)"),
        ({"setup": lambda self: None}, "def setup(self, stage)"),
        ({"optimizer_step": lambda self, epoch, batch_idx: None}, "optimizer_closure"),
        ({"configure_optimizers": lambda self, lr: None}, "def configure_optimizers(self)"),
    ],
)
def test_a_hook_with_other_arguments_is_refused_at_the_start(
    tmp_path: Path, methods: dict[str, Any], said: str
) -> None:  # I-10
    module = module_with(**methods)
    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(module, loader())
    assert said in str(caught.value)
    assert module.seen == []


def test_hooks_may_omit_dataloader_idx(tmp_path: Path) -> None:  # I-10
    seen: list[int] = []
    module = module_with(on_validation_batch_end=lambda self, outputs, batch, batch_idx: seen.append(batch_idx))
    fit(tmp_path, num_sanity_val_steps=0).fit(module, loader(), loader(4))
    assert seen == [0, 1]


def test_a_loader_that_hides_a_method_is_refused(tmp_path: Path) -> None:  # I-10
    module = Tiny()
    module.val_dataloader = loader()  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigurationError, match=r"(?s)val_dataloader is a DataLoader.*def val_dataloader\(self\)"):
        fit(tmp_path).fit(module, loader())


# Methods of callbacks and data modules


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("on_train_epoch_stop", "write on_train_epoch_end"),
        ("on_epoch_end", "on_train_epoch_end"),
        ("on_init_start", "write setup"),
        ("on_keyboard_interrupt", "on_exception"),
        ("on_before_batch_transfer", "write it in a module or in a data module, which has a hook of that name"),
    ],
)
def test_a_callback_is_refused_as_fit_is_built(tmp_path: Path, name: str, way_out: str) -> None:  # I-10
    with pytest.raises(ConfigurationError, match=rf"Watch\.{name} looks like a hook") as caught:
        fit(tmp_path, callbacks=[callback_with(name)])
    assert way_out in caught.value.fix


def test_a_callbacks_helpers_are_left_alone(tmp_path: Path) -> None:  # I-10
    fit(tmp_path, callbacks=callback_with("training_step", "validation_epoch_end", "backward", "on_reward", "write"))


def test_a_callbacks_hook_without_the_trainer_is_refused(tmp_path: Path) -> None:  # I-10
    with pytest.raises(ConfigurationError, match=r"def on_train_start\(self, trainer, module\)"):
        fit(tmp_path, callbacks=callback_with(on_train_start=lambda self: None))


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("valid_dataloader", "write val_dataloader"),
        ("on_train_epoch_start", "write it in a module or in a callback, which has a hook of that name"),
    ],
)
def test_a_data_module_is_checked_too(tmp_path: Path, name: str, way_out: str) -> None:  # I-10
    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader()

    kind = type("Numbers", (Data,), {name: nothing})
    with pytest.raises(ConfigurationError, match=rf"Numbers\.{name} looks like a hook") as caught:
        fit(tmp_path).fit(Tiny(), datamodule=kind())
    assert way_out in caught.value.fix


# Callbacks that are added late


class Counting(Callback):
    """Counts the hooks that are called."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def setup(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        self.heard.append("setup")

    def on_train_start(self, trainer: RunContext, module: TrainModule) -> None:
        self.heard.append("start")

    def teardown(self, trainer: RunContext, module: TrainModule, stage: str) -> None:
        self.heard.append("teardown")


def test_a_callback_appended_in_setup_is_called(tmp_path: Path) -> None:  # I-10
    late = Counting()
    module = module_with(setup=lambda self, stage: self.trainer.callbacks.append(late))
    fit(tmp_path).fit(module, loader())
    assert late.heard == ["setup", "start", "teardown"]


def test_a_callback_removed_in_setup_is_not_called(tmp_path: Path) -> None:  # I-10
    early = Counting()
    module = module_with(setup=lambda self, stage: self.trainer.callbacks.clear())
    fit(tmp_path, callbacks=early).fit(module, loader())
    assert early.heard == ["setup"]


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_a_callback_appended_later_is_refused(tmp_path: Path, hook: str) -> None:  # I-10
    module = module_with(**{hook: lambda self: self.trainer.callbacks.append(Counting())})
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


def scheduled(automatic: bool = True, plateau: bool = False, **keys: Any) -> Tiny:
    """A module that logs ``loss`` by epoch, with a scheduler."""

    class Net(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = automatic
            self.scheduler: Any = ByValue()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 2.0, on_epoch=True, on_step=False)
            return super().training_step(batch, batch_idx) if automatic else self.optimizers().step()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            if plateau:
                self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, **keys}}

    return Net()


def test_a_custom_scheduler_gets_the_value(tmp_path: Path) -> None:  # I-10
    module = scheduled(reduce_on_plateau=True, monitor="loss")
    fit(tmp_path).fit(module, loader())
    assert module.scheduler.values == [2.0]


def test_without_strict_a_missing_value_is_ignored(tmp_path: Path) -> None:  # I-10
    module: Any = scheduled(plateau=True, monitor="los", strict=False)
    with captured_warnings() as lines:
        fit(tmp_path, max_epochs=3).fit(module, loader())
    assert module.scheduler.last_epoch == 0
    (line,) = [line for line in lines if "'strict': False" in line]
    assert "'los'" in line
    assert "'loss'" in line
    with pytest.raises(ConfigurationError, match="'strict': False"):
        fit(tmp_path).fit(scheduled(plateau=True, monitor="los"), loader())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"plateau": True, "monitor": "loss", "reduce_on_plateau": False}, "'reduce_on_plateau': False with Reduce"),
        ({"reduce_on_plateau": True}, "ByValue without a 'monitor'"),
        ({"strict": "no"}, "'strict': 'no'"),
        ({"monitor": 3}, "'monitor': 3"),
        ({"frequency": True}, "frequency=True"),
    ],
)
def test_invalid_scheduler_keys_are_refused(tmp_path: Path, keys: dict[str, Any], said: str) -> None:  # I-10
    with pytest.raises(ConfigurationError) as caught:
        fit(tmp_path).fit(scheduled(**keys), loader())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"monitor": "loss"}, "'monitor': 'loss' is ignored with ByValue, whose step takes no value"),
        ({"automatic": False, "interval": "step"}, "ignored in manual optimization"),
    ],
)
def test_unused_scheduler_keys_are_warned_about(tmp_path: Path, keys: dict[str, Any], said: str) -> None:  # I-10
    with captured_warnings() as lines:
        fit(tmp_path).fit(scheduled(**keys), loader())
    assert [said in line for line in lines].count(True) == 1


def test_a_monitor_without_a_scheduler_is_refused(tmp_path: Path) -> None:  # I-10
    module = module_with(
        configure_optimizers=lambda self: {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1), "monitor": "loss"}
    )
    with pytest.raises(ConfigurationError, match="'monitor': 'loss' without an 'lr_scheduler'"):
        fit(tmp_path).fit(module, loader())


# Arguments


@pytest.mark.parametrize(
    ("name", "value", "new"),
    [
        ("gpus", 1, "devices="),
        ("fp16", True, "precision='16-mixed'"),
        ("max_steps_per_epoch", 5, "limit_train_batches="),
        ("gradient_accumulation_steps", 4, "accumulate_grad_batches="),
        ("epochs", 3, "max_epochs="),
        ("distributed_backend", "ddp", "strategy="),
        ("resume_from_checkpoint", "last", "ckpt_path="),
        ("progress_bar_refresh_rate", 10, "ProgressBar(refresh_rate=...)"),
        ("learning_rate", 0.1, "configure_optimizers"),
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
