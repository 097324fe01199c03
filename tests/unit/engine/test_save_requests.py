"""Hyper-parameters, saving and resuming in one process, and loading with a class that has changed since (J-14)."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, regression
from small_modules import calling

from drivetrain import Callback, CheckpointError, ConfigurationError

# Private: the classes that wrote these checkpoints do not exist any more.
from drivetrain._distributed.control_plane import LocalControl
from drivetrain._format import CheckpointMetadata, StateToSave, save
from drivetrain.checkpoint import convert


class Named(Tiny):
    def __init__(self, width: int, *, name: str = "x", extra: Any = None, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="extra")


class Selected(Tiny):
    def __init__(self, a: int, b: int, *names: str) -> None:
        super().__init__()
        self.save_hyperparameters(*names)


def test_hyper_parameters_are_the_arguments_of_init() -> None:
    module = Named(4, name="y", extra=object(), sizes=[1, 2])
    assert dict(module.hparams) == {"width": 4, "name": "y", "sizes": [1, 2]}
    assert module.hparams.width == module.hparams["width"] == 4
    assert Selected(1, 2, "a").hparams == {"a": 1}
    with pytest.raises(ConfigurationError, match="'aa' are not arguments of __init__"):
        Selected(1, 2, "aa")


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.float32, Path("x")])
def test_values_that_json_cannot_represent_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"argument 'name' is a .*\n.*\n.*ignore='name'"):
        Named(4, name=value)


class Trained(Regression):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.save_hyperparameters()

    def validation_step(self, batch: Any) -> None: ...

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.layer.weight.clone()


def saving(path: Path, weights_only: bool = False) -> Callback:
    """A callback that saves after two steps."""
    return calling(
        "on_train_batch_end", lambda trainer: trainer.global_step == 2 and trainer.save_checkpoint(path, weights_only)
    )


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_gives_back_hyper_parameters_and_weights(tmp_path: Path, weights_only: bool) -> None:
    module, path, runner = Trained(lr=0.01), tmp_path / "c", fit(tmp_path)
    with pytest.raises(ConfigurationError, match="save_checkpoint was used outside a run"):
        runner.save_checkpoint(path)
    runner.fit(module, regression())
    runner.save_checkpoint(path, weights_only)
    loaded = Trained.load_from_checkpoint(path)
    assert loaded.lr == loaded.hparams.lr == 0.01
    assert Trained.load_from_checkpoint(path, lr=0.2).lr == 0.2
    (predicted,) = fit(tmp_path).predict(Trained(), regression(4), ckpt_path=path)
    assert torch.equal(predicted, module.layer.weight)
    for ours, theirs in zip(loaded.state_dict().values(), module.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert not any(file.suffix in (".pt", ".pkl", ".ckpt", ".bin") for file in path.iterdir())


def test_weights_alone_do_not_resume(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=saving(tmp_path / "c", weights_only=True)).fit(Trained(), regression())
    with pytest.raises(CheckpointError, match="holds weights only"):
        fit(tmp_path).fit(Trained(), regression(), ckpt_path=tmp_path / "c")


class Counting(Callback):
    def __init__(self, count: int, key: str) -> None:
        self.count, self.key = count, key

    @property
    def state_key(self) -> str:
        return self.key

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]


@pytest.mark.parametrize("keys", [("same", "same"), ("one", "other")])
def test_a_resumed_run_skips_the_sanity_check_and_restores_both_callbacks(tmp_path: Path, keys: Any) -> None:  # F-12
    sanity: list[bool] = []
    watching = calling("on_validation_start", lambda trainer: sanity.append(trainer.sanity_checking))
    for path, counts in ((None, [10, 20]), (tmp_path / "c", [0, 0])):
        counting = [Counting(count, key) for count, key in zip(counts, keys, strict=True)]
        run = fit(tmp_path, callbacks=[*counting, saving(tmp_path / "c"), watching])
        run.fit(Trained(), regression(), regression(), ckpt_path=path)
    assert sanity == [True, False, False]
    assert [one.count for one in counting] == [10, 20]


def saved(path: Path, **hyper_parameters: Any) -> Path:
    """Return a checkpoint of a `Tiny` built with these arguments."""
    metadata = CheckpointMetadata(hyper_parameters=hyper_parameters, weights_only=True)
    save(str(path / "c"), StateToSave(Tiny().state_dict(), metadata), LocalControl())
    return path / "c"


class Renamed(Tiny):
    def __init__(self, breadth: int = 1, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


class Needs(Tiny):
    def __init__(self, breadth: int) -> None:
        super().__init__()
        self.save_hyperparameters()


class Base(Tiny):
    def __init__(self, width: int, *, depth: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


class PassesOn(Base):
    def __init__(self, lr: float, **rest: Any) -> None:
        super().__init__(**rest)


class FixedWidth(Base):
    """Passes a value to its base class, which is among the hyper-parameters of both and no argument of its own."""

    def __init__(self, lr: float) -> None:
        super().__init__(64)


class ByPosition(Tiny):
    def __init__(self, width: int, depth: int = 2, /, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


OLD = {"width": 3, "lr": 0.5}
BASE = {"lr": 0.1, "width": 3, "height": 4}


@pytest.mark.parametrize(
    ("kind", "held", "given", "what", "fix"),
    [
        (Renamed, OLD, {}, "Renamed does not take 'width'", "(path, ignore=['width'])"),
        (Needs, OLD, {"ignore": "lr"}, "Needs does not take 'width'", "ignore=['width'])"),
        (Renamed, {"bredth": 3, "depth": 2}, {}, "'bredth', 'depth'", "ignore=['bredth', 'depth'])"),
        (FixedWidth, {"width": 128, "depth": 1, "lr": 0.1}, {}, "FixedWidth does not take 'width'", "ignore=['width']"),
        (Needs, {"breadth": 3}, {"ignore": "breadth"}, "Needs needs 'breadth'", "breadth=...)"),
        (Needs, {}, {}, "Needs needs 'breadth'", "breadth=...)"),
    ],
)
def test_a_hyper_parameter_that_the_class_does_not_take_is_named_with_a_fix(
    tmp_path: Path, kind: type[Tiny], held: dict[str, Any], given: dict[str, Any], what: str, fix: str
) -> None:  # J-14
    path = saved(tmp_path, **held)
    with pytest.raises(CheckpointError, match=what) as caught:
        kind.load_from_checkpoint(path, **given)
    assert fix in caught.value.fix
    assert f"{kind.__name__}.load_from_checkpoint(path, " in caught.value.fix
    if kind is Renamed:
        assert "__init__ takes breadth, lr" in caught.value.why


@pytest.mark.parametrize(
    ("kind", "held", "given", "expected"),
    [
        (Renamed, OLD, {"ignore": "width"}, {"breadth": 1, "lr": 0.5}),
        (Renamed, OLD, {"ignore": "width", "breadth": 3}, {"breadth": 3, "lr": 0.5}),
        (Needs, OLD, {"ignore": ("lr", "width"), "breadth": 3}, {"breadth": 3}),
        (Renamed, {"bredth": 3, "depth": 2}, {"ignore": ("bredth", "depth", "never saved")}, {"breadth": 1, "lr": 0.1}),
        (PassesOn, BASE, {"ignore": "height"}, {"lr": 0.1, "width": 3, "depth": 1}),
        (FixedWidth, dict(FixedWidth(0.1).hparams), {}, {"width": 64, "depth": 1, "lr": 0.1}),
        (FixedWidth, {"width": 128, "lr": 0.1}, {"ignore": "width"}, {"width": 64, "depth": 1, "lr": 0.1}),
        (ByPosition, dict(ByPosition(3, 4, lr=0.5).hparams), {}, {"width": 3, "depth": 4, "lr": 0.5}),
    ],
)
def test_removed_hyper_parameters_can_be_ignored(
    tmp_path: Path, kind: type[Tiny], held: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:  # J-14
    assert kind.load_from_checkpoint(saved(tmp_path, **held), **given).hparams == expected


def test_a_value_of_a_class_that_is_gone(tmp_path: Path) -> None:  # J-14
    """Lightning's checkpoints may contain one."""
    gone = types.ModuleType("gone")
    exec("class Mode: pass", gone.__dict__)
    sys.modules["gone"] = gone
    try:
        hyper_parameters = {"mode": gone.Mode(), "lr": 0.5}
        torch.save({"state_dict": Tiny().state_dict(), "hyper_parameters": hyper_parameters}, tmp_path / "l.ckpt")
    finally:
        del sys.modules["gone"]

    class Moded(Tiny):
        def __init__(self, mode: Any, lr: float) -> None:
            super().__init__()

    with pytest.warns(UserWarning, match="'mode' cannot be stored as JSON and is left out"):
        convert(tmp_path / "l.ckpt", tmp_path / "c")
    with pytest.raises(CheckpointError, match="Moded needs 'mode'") as caught:
        Moded.load_from_checkpoint(tmp_path / "c")
    assert "load_from_checkpoint(path, mode=...)" in caught.value.fix
    assert isinstance(Moded.load_from_checkpoint(tmp_path / "c", mode=1), Moded)
