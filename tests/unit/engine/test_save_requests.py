"""Hyper-parameters, saving and resuming in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, regression
from torch import nn

from drivetrain import Callback, CheckpointError, ConfigurationError, TrainModule
from drivetrain.loggers import CSVLogger


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
        module = Shaped(4, name="y", extra=object(), sizes=[1, 2])
        assert dict(module.hparams) == {"width": 4, "depth": 1, "name": "y", "sizes": [1, 2]}
        assert module.hparams.width == module.hparams["width"] == 4

    def test_arguments_of_a_subclass_come_first(self) -> None:
        assert Wider(3).hparams == {"width": 3, "factor": 2.0, "depth": 2, "name": "x"}

    def test_some_by_name(self) -> None:
        class Some(TrainModule):
            def __init__(self, a: int, b: int, c: int) -> None:
                super().__init__()
                self.save_hyperparameters("a", "c")

        assert Some(1, 2, 3).hparams == {"a": 1, "c": 3}

    @pytest.mark.parametrize("value", [object(), nn.ReLU(), {1, 2}, torch.float32, Path("x")])
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

    def test_they_reach_the_loggers(self, tmp_path: Path) -> None:
        class Own(Tiny):
            def __init__(self, width: int = 3) -> None:
                super().__init__()
                self.save_hyperparameters()

        logger = CSVLogger(tmp_path, version="run")
        fit(tmp_path, logger=logger).fit(Own(), loader(2))
        assert json.loads(Path(logger.log_dir, "hparams.json").read_text()) == {"width": 3}


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
    @pytest.mark.parametrize("step", [2, 6, 9])
    def test_a_resumed_run_equals_the_undisturbed_one(self, tmp_path: Path, step: int) -> None:
        whole = Trained()
        fit(tmp_path, max_epochs=2, callbacks=SaveAt(step, tmp_path / "c")).fit(whole, regression())
        resumed = Trained()
        runner = fit(tmp_path, max_epochs=2)
        runner.fit(resumed, regression(), ckpt_path=tmp_path / "c")
        assert resumed.seen == whole.seen[step:]
        assert resumed.own == whole.own == 12
        assert (runner.global_step, runner.current_epoch, runner.samples_seen) == (12, 2, 48)
        for ours, theirs in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)

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
        class Predicting(Trained):
            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer.weight.clone()

        module = Predicting()
        runner = fit(tmp_path)
        runner.fit(module, regression())
        runner.save_checkpoint(tmp_path / "c")
        (weight,) = fit(tmp_path).predict(Predicting(), regression(4), ckpt_path=tmp_path / "c")
        assert torch.equal(weight, module.layer.weight)

    @pytest.mark.parametrize(
        ("build", "said"),
        [
            (lambda: nn.Linear(3, 2), "shape"),
            (lambda: nn.Sequential(nn.Linear(3, 1)), "missing"),
        ],
    )
    def test_weights_that_do_not_fit_are_named(self, tmp_path: Path, build: Any, said: str) -> None:
        class Other(Regression):
            def __init__(self) -> None:
                super().__init__()
                self.layer = build()

        runner = fit(tmp_path)
        runner.fit(Regression(), regression())
        runner.save_checkpoint(tmp_path / "c")
        with pytest.raises(CheckpointError, match=r"layer(\.0)?\.weight") as caught:
            Other.load_from_checkpoint(tmp_path / "c")
        assert said in str(caught.value)

    def test_a_missing_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="There is no checkpoint"):
            Trained.load_from_checkpoint(tmp_path / "nothing")

    def test_a_resumed_run_skips_the_sanity_check(self, tmp_path: Path) -> None:
        class Validating(Trained):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                assert not self.trainer.sanity_checking

        fit(tmp_path, callbacks=SaveAt(2, tmp_path / "c")).fit(Trained(), regression())
        fit(tmp_path).fit(Validating(), regression(), regression(), ckpt_path=tmp_path / "c", allow=("module",))

    def test_two_callbacks_of_one_class_do_not_collide(self, tmp_path: Path) -> None:
        """F-12, also if their state_key does not distinguish them."""

        class Counting(Callback):
            def __init__(self, start: int) -> None:
                self.count = start

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                self.count += 1

            def state_dict(self) -> dict[str, Any]:
                return {"count": self.count}

            def load_state_dict(self, state_dict: Any) -> None:
                self.count = state_dict["count"]

        runner = fit(tmp_path, callbacks=[Counting(10), Counting(20)])
        runner.fit(Trained(), regression())
        runner.save_checkpoint(tmp_path / "c")
        resumed = [Counting(0), Counting(0)]
        fit(tmp_path, max_epochs=2, callbacks=resumed).fit(Trained(), regression(), ckpt_path=tmp_path / "c")
        assert [callback.count for callback in resumed] == [22, 32]
