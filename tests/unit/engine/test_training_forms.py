"""Return values of training_step, windows with skipped micro-batches, closure optimizers, manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, fit, loader, regression
from small_modules import tiny
from torch import nn
from torch.amp import GradScaler
from torch.optim import LBFGS, SGD, Adam

from captured_warnings import captured_warnings
from drivetrain import Callback, ConfigurationError, TrainModule
from drivetrain.precision import MixedPrecision


class Outputs(Callback):
    """Records the outputs that on_train_batch_end receives."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept.append(outputs)


class Returning(Regression):
    """Returns the result of a function of its loss."""

    def __init__(self, make: Callable[[torch.Tensor, int], Any]) -> None:
        super().__init__()
        self._make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._make(self.loss(batch), batch_idx)


class TestOutputs:
    def test_a_dict_reaches_the_hooks_complete_detached_and_unscaled(self, tmp_path: Path) -> None:
        made: list[dict[str, Any]] = []

        def make(loss: torch.Tensor, batch_idx: int) -> Any:
            made.append({"loss": loss, "text": "x", "deep": {"list": [loss * 3, 1]}})
            return made[-1]

        outputs = Outputs()
        fit(tmp_path, callbacks=outputs, accumulate_grad_batches=3).fit(Returning(make), regression(12))
        assert len(outputs.kept) == 3
        for kept, given in zip(outputs.kept, made, strict=True):
            assert kept.keys() == given.keys()
            assert torch.equal(kept["loss"], given["loss"])  # neither divided by the window nor scaled
            assert not kept["loss"].requires_grad
            assert not kept["deep"]["list"][0].requires_grad
            assert (kept["text"], kept["deep"]["list"][1]) == ("x", 1)

    def test_a_dict_needs_a_loss_which_may_be_none(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"(?s)a dict.*dict with 'loss'"):
            fit(tmp_path).fit(Returning(lambda loss, _: {"Loss": loss}), regression(8))
        with captured_warnings() as lines:
            fit(tmp_path).fit(Returning(lambda loss, _: {"loss": None, "other": loss}), regression(8))
        assert sum("made no step" in line for line in lines) == 1

    @pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
    def test_the_loss_is_unscaled_in_mixed_precision_too(self, tmp_path: Path, precision: str) -> None:
        outputs = Outputs()
        fit(tmp_path, callbacks=outputs, precision=precision, accumulate_grad_batches=2).fit(
            Regression(lr=0.0), regression(8)
        )
        reference = Regression()
        for kept, batch in zip(outputs.kept, regression(8), strict=True):
            assert float(kept["loss"]) == pytest.approx(reference.loss(batch).item(), rel=0.03)

    def test_batch_idx_may_be_omitted_in_any_step(self, tmp_path: Path) -> None:
        seen: list[Any] = []
        module = tiny(
            training_step=lambda self, batch: self.layer(batch).mean(),
            validation_step=lambda self, batch, dataloader_idx: seen.append((int(batch[0, 0]), dataloader_idx)),
            test_step=lambda self, batch: seen.append(int(batch[0, 0])),
            predict_step=lambda self, batch: int(batch[0, 0]),
        )
        runner = fit(tmp_path, num_sanity_val_steps=0)
        runner.fit(module, loader(4), [loader(4), loader(2)])
        runner.test(module, loader(4), verbose=False)
        assert runner.predict(module, loader(4)) == [0, 2]
        assert seen == [(0, 0), (2, 0), (0, 1), 0, 2]


def _reference(kept: list[list[int]]) -> Regression:
    """Written by hand, because the windows are given: each step is over the kept micro-batches of its window."""
    module = Regression()
    optimizer = module.configure_optimizers()
    batches = list(regression(22))
    for window in filter(None, kept):
        optimizer.zero_grad()
        x, y = (torch.cat([batches[index][part] for index in window]) for part in (0, 1))
        module.loss((x, y)).backward()
        optimizer.step()
    return module


class TestNoneLosses:
    """The gradients are rescaled to the weights that contributed; a window without any makes no step."""

    @pytest.mark.parametrize(
        ("skipped", "size", "windows", "scale"),
        [
            ({1, 5}, 1, [[0], [], [2], [3], [4], []], 0.0),
            ({1, 5}, 2, [[0], [2, 3], [4]], 0.0),  # index 5 is the short last batch
            ({0, 3, 4, 5}, 3, [[1, 2], []], 0.0),
            ({2}, 4, [[0, 1, 3], [4, 5]], 0.0),
            ({1, 5}, 2, [[0], [2, 3], [4]], 64.0),
        ],
    )
    def test_none_losses_equal_the_reference(
        self, tmp_path: Path, skipped: set[int], size: int, windows: list[list[int]], scale: float
    ) -> None:
        module = Returning(lambda loss, batch_idx: None if batch_idx in skipped else loss)
        outputs = Outputs()
        precision: Any = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=scale)) if scale else "32-true"
        runner = fit(tmp_path, accumulate_grad_batches=size, callbacks=outputs, precision=precision)
        with captured_warnings() as lines:
            runner.fit(module, regression(22))
        assert sum("Returning.training_step returned None" in line for line in lines) == ([] in windows)
        tolerance = 5e-3 if scale else 1e-6
        torch.testing.assert_close(module.layer.weight, _reference(windows).layer.weight, atol=tolerance, rtol=0)
        assert runner.global_step == len([window for window in windows if window])
        assert [kept == {} for kept in outputs.kept] == [index in skipped for index in range(6)]


class TestClosures:
    """B-16: the closure returns the loss of the whole window."""

    def test_a_none_loss_within_the_window(self, tmp_path: Path) -> None:
        """Each evaluation is a mean over the micro-batches that contributed, from the first on."""

        class Closing(Returning):
            def configure_optimizers(self) -> Any:
                return LBFGS(self.parameters(), lr=0.3, max_iter=4, line_search_fn="strong_wolfe")

        module = Closing(lambda loss, batch_idx: None if batch_idx == 1 else loss)
        fit(tmp_path, accumulate_grad_batches=3).fit(module, regression(24))
        reference = Closing(lambda loss, batch_idx: loss)
        optimizer = reference.configure_optimizers()
        batches = list(regression(24))
        # Written by hand: the oracle's LBFGS has no line search.
        for window in ([batches[0], batches[2]], batches[3:]):
            x, y = (torch.cat([batch[part] for batch in window]) for part in (0, 1))

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = reference.loss((x, y))
                loss.backward()
                return loss

            optimizer.step(closure)
        torch.testing.assert_close(module.layer.weight, reference.layer.weight, atol=1e-4, rtol=1e-4)

    def test_logged_values_are_those_of_the_first_evaluation(self, tmp_path: Path) -> None:
        class Closing(Regression):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = self.loss(batch)
                self.log("loss", loss, on_step=True, on_epoch=True)
                self.log("calls", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
                return loss

            def configure_optimizers(self) -> Any:
                return LBFGS(self.parameters(), max_iter=5)

        module, outputs = Closing(), Outputs()
        first = float(module.loss(next(iter(regression(4)))))
        runner = fit(tmp_path, callbacks=outputs)
        runner.fit(module, regression(4))
        assert float(outputs.kept[0]["loss"]) == pytest.approx(first)
        assert float(runner.callback_metrics["loss_epoch"]) == pytest.approx(first)
        assert float(runner.callback_metrics["calls"]) == 1


class Manual(TrainModule):
    """A generator and a discriminator that take turns, each with its scheduler."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.generator = nn.Linear(3, 3)
        self.discriminator = nn.Linear(3, 1)
        self.returned: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            assert not self.discriminator.weight.requires_grad
            loss = -self.discriminator(self.generator(x)).mean()
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, 0.5, "norm")
            first.step()
        with self.toggled_optimizer(second):
            loss = self.discriminator(self.generator(x).detach()).mean() - self.discriminator(x).mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("loss", loss)
        return self.returned

    def configure_optimizers(self) -> Any:
        optimizers = [SGD(self.generator.parameters(), lr=0.1), Adam(self.discriminator.parameters(), lr=0.01)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]


class TestManual:
    def test_every_hook_of_a_step(self, tmp_path: Path) -> None:
        calls: list[str] = []

        class Watching(Callback):
            def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
                calls.append("before_backward")

            def on_after_backward(self, trainer: Any, module: Any) -> None:
                calls.append("after_backward")

            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                calls.append(type(optimizer).__name__)

        fit(tmp_path, callbacks=Watching()).fit(Manual(), regression(4))
        assert calls == ["before_backward", "after_backward", "SGD", "before_backward", "after_backward", "Adam"]

    @pytest.mark.parametrize(
        ("returned", "arrives"), [(None, {}), ({"a": 1}, {"a": 1}), (torch.tensor(2.0), {"loss": torch.tensor(2.0)})]
    )
    def test_the_output_reaches_the_hooks(self, tmp_path: Path, returned: Any, arrives: Any) -> None:
        module, outputs = Manual(), Outputs()
        module.returned = returned
        fit(tmp_path, callbacks=outputs).fit(module, regression(4))
        assert outputs.kept == [arrives]

    def test_accumulation_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"accumulate_grad_batches=2.* with manual optimization"):
            fit(tmp_path, accumulate_grad_batches=2).fit(Manual(), regression())

    def test_schedulers_are_stepped_by_the_module_only(self, tmp_path: Path) -> None:
        class Idle(Manual):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return None

        runner = fit(tmp_path, max_epochs=2)
        runner.fit(Idle(), regression())
        assert [optimizer.param_groups[0]["lr"] for optimizer in runner.optimizers] == [0.1, 0.01]
