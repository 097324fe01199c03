"""Hyper-parameters, saving and resuming in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, fit, regression
from small_modules import calling, linear
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


class TestHyperParameters:
    def test_the_arguments_of_init(self) -> None:
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
    def test_values_that_json_cannot_represent_are_refused_by_name(self, value: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"argument 'name' is a .*\n.*\n.*ignore='name'"):
            Shaped(4, name=value)

    def test_an_unknown_name_is_refused(self) -> None:
        class Wrong(TrainModule):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.save_hyperparameters("widht")

        with pytest.raises(ConfigurationError, match="'widht' are not arguments of __init__"):
            Wrong(1)


class Trained(Regression):
    """Has Adam, a scheduler, a buffer and custom state."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.norm = nn.BatchNorm1d(3)
        self.seen: list[float] = []
        self.own = 0

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(self.norm(x)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.item())
        self.own += 1
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.own = checkpoint["own"]


class SaveAt(Callback):
    def __init__(self, step: int, path: Path, weights_only: bool = False) -> None:
        self._step, self._path, self._weights_only = step, path, weights_only

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path, self._weights_only)


class TestCheckpoints:
    def test_a_checkpoint_saved_after_the_run_is_complete(self, tmp_path: Path) -> None:
        """The optimizer's state is checked too: nothing is omitted silently."""
        first, whole = Trained(), Trained()
        runner = fit(tmp_path)
        runner.fit(first, regression())
        runner.save_checkpoint(tmp_path / "c")
        resumed = Trained()
        fit(tmp_path, max_epochs=2).fit(resumed, regression(), ckpt_path=tmp_path / "c")
        fit(tmp_path, max_epochs=2).fit(whole, regression())
        assert resumed.seen == whole.seen[6:]
        torch.testing.assert_close(resumed.layer.weight, whole.layer.weight, rtol=0, atol=0)

    def test_saving_before_any_run_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="save_checkpoint was used outside a run"):
            fit(tmp_path).save_checkpoint(tmp_path / "c")

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_load_from_checkpoint(self, tmp_path: Path, weights_only: bool) -> None:
        module = Trained(lr=0.01)
        runner = fit(tmp_path)
        runner.fit(module, regression())
        runner.save_checkpoint(tmp_path / "c", weights_only)
        loaded = Trained.load_from_checkpoint(tmp_path / "c")
        assert loaded.lr == loaded.hparams.lr == 0.01
        assert Trained.load_from_checkpoint(tmp_path / "c", lr=0.2).lr == 0.2
        for ours, theirs in zip(loaded.state_dict().values(), module.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
        assert not any(path.suffix in (".pt", ".pkl", ".ckpt", ".bin") for path in (tmp_path / "c").iterdir())

    def test_weights_alone_do_not_resume(self, tmp_path: Path) -> None:
        fit(tmp_path, callbacks=SaveAt(2, tmp_path / "c", True)).fit(Trained(), regression())
        with pytest.raises(CheckpointError, match="holds weights only"):
            fit(tmp_path).fit(Trained(), regression(), ckpt_path=tmp_path / "c")

    def test_evaluation_takes_the_weights(self, tmp_path: Path) -> None:
        def predicting() -> Regression:
            return linear(predict_step=lambda self, batch: self.layer.weight.clone())

        module = predicting()
        runner = fit(tmp_path)
        runner.fit(module, regression())
        runner.save_checkpoint(tmp_path / "c")
        (weight,) = fit(tmp_path).predict(predicting(), regression(4), ckpt_path=tmp_path / "c")
        assert torch.equal(weight, module.layer.weight)

    def test_a_resumed_run_skips_the_sanity_check(self, tmp_path: Path) -> None:
        sanity: list[bool] = []
        watching = calling("on_validation_start", lambda trainer: sanity.append(trainer.sanity_checking))
        for path in (None, tmp_path / "c"):
            saving = SaveAt(2, tmp_path / "c")
            run = fit(tmp_path, callbacks=[saving, watching])
            run.fit(linear(validation_step=lambda self, batch: None), regression(), regression(), ckpt_path=path)
        assert sanity == [True, False, False]

    def test_two_callbacks_of_one_class_do_not_collide(self, tmp_path: Path) -> None:
        """F-12, also if their state_key does not distinguish them."""

        class Counting(Callback):
            def __init__(self, start: int) -> None:
                self.count = start

            def state_dict(self) -> dict[str, Any]:
                return {"count": self.count}

            def load_state_dict(self, state_dict: Any) -> None:
                self.count = state_dict["count"]

        runner = fit(tmp_path, callbacks=[Counting(10), Counting(20)])
        runner.fit(Trained(), regression())
        runner.save_checkpoint(tmp_path / "c")
        resumed = [Counting(0), Counting(0)]
        fit(tmp_path, max_epochs=2, callbacks=resumed).fit(Trained(), regression(), ckpt_path=tmp_path / "c")
        assert [callback.count for callback in resumed] == [10, 20]
