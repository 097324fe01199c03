"""Hyper-parameters, saving and resuming in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, fit, regression
from small_modules import calling
from torch import nn

from drivetrain import Callback, CheckpointError, ConfigurationError, TrainModule


class Shaped(TrainModule):
    """Has constructor arguments."""

    def __init__(self, width: int, *, depth: int = 1, name: str = "x", extra: Any = None, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="extra")
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


class Wider(Shaped):
    def __init__(self, width: int, factor: float = 2.0) -> None:
        super().__init__(width, depth=2)


def test_hyper_parameters_are_the_arguments_of_init() -> None:
    class Some(TrainModule):
        def __init__(self, a: int, b: int, c: int) -> None:
            super().__init__()
            self.save_hyperparameters("a", "c")

    module = Shaped(4, name="y", extra=object(), sizes=[1, 2])
    assert dict(module.hparams) == {"width": 4, "depth": 1, "name": "y", "sizes": [1, 2]}
    assert module.hparams.width == module.hparams["width"] == 4
    assert Wider(3).hparams == {"width": 3, "factor": 2.0, "depth": 2, "name": "x"}
    assert Some(1, 2, 3).hparams == {"a": 1, "c": 3}


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.float32, Path("x")])
def test_values_that_json_cannot_represent_are_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"argument 'name' is a .*\n.*\n.*ignore='name'"):
        Shaped(4, name=value)


def test_an_unknown_name_is_refused() -> None:
    class Wrong(TrainModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters("widht")

    with pytest.raises(ConfigurationError, match="'widht' are not arguments of __init__"):
        Wrong(1)


class Trained(Regression):
    """Predicts its weight."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.save_hyperparameters()

    def validation_step(self, batch: Any) -> None: ...

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.layer.weight.clone()


def saving(path: Path, weights_only: bool = False) -> Callback:
    """A callback that saves after two steps."""
    return calling(
        "on_train_batch_end",
        lambda trainer: trainer.global_step == 2 and trainer.save_checkpoint(path, weights_only),
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


def test_a_resumed_run_skips_the_sanity_check(tmp_path: Path) -> None:
    sanity: list[bool] = []
    watching = calling("on_validation_start", lambda trainer: sanity.append(trainer.sanity_checking))
    for path in (None, tmp_path / "c"):
        run = fit(tmp_path, callbacks=[saving(tmp_path / "c"), watching])
        run.fit(Trained(), regression(), regression(), ckpt_path=path)
    assert sanity == [True, False, False]


class Counting(Callback):
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]


def test_two_callbacks_with_one_state_key_do_not_collide(tmp_path: Path) -> None:  # F-12
    fit(tmp_path, callbacks=[Counting(10), Counting(20), saving(tmp_path / "c")]).fit(Trained(), regression())
    resumed = [Counting(0), Counting(0), saving(tmp_path / "d")]
    fit(tmp_path, callbacks=resumed).fit(Trained(), regression(), ckpt_path=tmp_path / "c")
    assert [callback.count for callback in resumed[:2]] == [10, 20]  # type: ignore[attr-defined]
