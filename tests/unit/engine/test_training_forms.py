"""Return values of training_step, manual optimization, closure optimizers, windows with skipped micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import Regression, Tiny, fit, loader, regression
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
            made.append({"loss": loss, "half": loss / 2, "text": "x", "deep": {"list": [loss * 3, 1]}})
            return made[-1]

        outputs = Outputs()
        fit(tmp_path, callbacks=outputs, accumulate_grad_batches=3).fit(Returning(make), regression(12))
        assert len(outputs.kept) == 3
        for kept, given in zip(outputs.kept, made, strict=True):
            assert kept.keys() == given.keys()
            assert torch.equal(kept["loss"], given["loss"])  # neither divided by the window nor scaled
            tensors = [kept["loss"], kept["half"], kept["deep"]["list"][0]]
            assert not any(tensor.requires_grad for tensor in tensors)
            assert (kept["text"], kept["deep"]["list"][1]) == ("x", 1)

    def test_a_tensor_becomes_a_dict(self, tmp_path: Path) -> None:
        outputs = Outputs()
        fit(tmp_path, callbacks=outputs).fit(Regression(), regression(8))
        assert [list(kept) for kept in outputs.kept] == [["loss"]] * 2
        assert not outputs.kept[0]["loss"].requires_grad

    @pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
    def test_the_loss_is_unscaled_in_mixed_precision_too(self, tmp_path: Path, precision: str) -> None:
        outputs = Outputs()
        fit(tmp_path, callbacks=outputs, precision=precision, accumulate_grad_batches=2).fit(
            Regression(lr=0.0), regression(8)
        )
        reference = Regression()
        for kept, batch in zip(outputs.kept, regression(8), strict=True):
            assert float(kept["loss"]) == pytest.approx(reference.loss(batch).item(), rel=0.03)

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda loss, _: loss.reshape(1), ["shape (1,)", "mean()"]),
            (lambda loss, _: loss.detach(), ["requires no gradient", "frozen"]),
            (lambda loss, _: float(loss), ["a float", "dict with 'loss'"]),
            (lambda loss, _: {"Loss": loss}, ["a dict", "dict with 'loss'"]),
            (lambda loss, _: {"loss": None, "other": loss}, []),
        ],
    )
    def test_invalid_losses_are_refused(self, tmp_path: Path, make: Any, said: list[str]) -> None:
        if not said:  # a dict whose loss is None skips, as None does
            with captured_warnings() as lines:
                fit(tmp_path).fit(Returning(make), regression(8))
            assert sum("made no step" in line for line in lines) == 1
            return
        with pytest.raises(ConfigurationError) as caught:
            fit(tmp_path).fit(Returning(make), regression(8))
        for part in said:
            assert part in str(caught.value)

    def test_batch_idx_may_be_omitted_in_any_step(self, tmp_path: Path) -> None:
        seen: list[Any] = []

        class Short(TrainModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(2, 1)

            def training_step(self, batch: Any) -> Any:
                return self.layer(batch).mean()

            def validation_step(self, batch: Any, dataloader_idx: int) -> Any:
                seen.append(("validation", int(batch[0, 0]), dataloader_idx))

            def test_step(self, batch: Any) -> Any:
                seen.append(("test", int(batch[0, 0])))

            def predict_step(self, batch: Any) -> Any:
                return int(batch[0, 0])

            def configure_optimizers(self) -> Any:
                return SGD(self.parameters(), lr=0.1)

        module, runner = Short(), fit(tmp_path, num_sanity_val_steps=0)
        runner.fit(module, loader(4), [loader(4), loader(2)])
        runner.test(module, loader(4), verbose=False)
        assert runner.predict(module, loader(4)) == [0, 2]
        assert seen[:3] == [("validation", 0, 0), ("validation", 2, 0), ("validation", 0, 1)]
        assert seen[3:] == [("test", 0), ("test", 2)]

    @pytest.mark.parametrize("step", [lambda self: None, lambda self, batch, batch_idx, dataloader_idx, more: None])
    def test_a_step_of_another_signature_is_refused(self, tmp_path: Path, step: Any) -> None:
        kind = type("Odd", (Tiny,), {"training_step": step})
        with pytest.raises(ConfigurationError, match="cannot be called with a batch"):
            fit(tmp_path).fit(kind(), loader())


def _reference(kept: list[list[int]], lr: float = 0.05, size: int = 4) -> Regression:
    """Train by hand: each step over the kept micro-batches of its window, weighted by samples."""
    module = Regression(lr)
    optimizer = module.configure_optimizers()
    batches = list(regression(22, size))
    for window in kept:
        if not window:
            continue
        optimizer.zero_grad()
        x = torch.cat([batches[index][0] for index in window])
        y = torch.cat([batches[index][1] for index in window])
        module.loss((x, y)).backward()
        optimizer.step()
    return module


class TestNoneLosses:
    """The gradients are rescaled to the weights that contributed; a window without any makes no step."""

    @pytest.mark.parametrize(
        ("skipped", "size", "windows"),
        [
            ({1, 5}, 1, [[0], [], [2], [3], [4], []]),
            ({1, 5}, 2, [[0], [2, 3], [4]]),  # index 5 is the short last batch
            ({0, 3, 4, 5}, 3, [[1, 2], []]),
            ({2}, 4, [[0, 1, 3], [4, 5]]),
        ],
    )
    @pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
    def test_none_losses_equal_the_reference(
        self, tmp_path: Path, skipped: set[int], size: int, windows: list[list[int]], precision: str
    ) -> None:
        module = Returning(lambda loss, batch_idx: None if batch_idx in skipped else loss)
        outputs = Outputs()
        exact: Any = precision
        if precision == "16-mixed":  # a scale that does not overflow in the first steps
            exact = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=64.0))
        runner = fit(tmp_path, accumulate_grad_batches=size, callbacks=outputs, precision=exact)
        if [] in windows:
            with captured_warnings() as lines:
                runner.fit(module, regression(22))
            assert sum("Returning.training_step returned None" in line for line in lines) == 1
        else:
            runner.fit(module, regression(22))
        expected = _reference(windows)
        tolerance = 1e-6 if precision == "32-true" else 5e-3
        torch.testing.assert_close(module.layer.weight, expected.layer.weight, atol=tolerance, rtol=0)
        assert runner.global_step == len([window for window in windows if window])
        assert [kept == {} for kept in outputs.kept] == [index in skipped for index in range(6)]

    def test_with_weights(self, tmp_path: Path) -> None:
        """B-03 with a micro-batch left out of the window."""

        class Weighted(Returning):
            def batch_weight(self, batch: Any) -> float:
                return float(batch[0][0, 0].abs())

        module = Weighted(lambda loss, batch_idx: None if batch_idx == 1 else loss)
        fit(tmp_path, accumulate_grad_batches=3).fit(module, regression(12))
        reference = Regression()
        optimizer = reference.configure_optimizers()
        batches = [batch for index, batch in enumerate(regression(12)) if index != 1]
        weights = [float(batch[0][0, 0].abs()) for batch in batches]
        total: Any = sum(w * reference.loss(b) for w, b in zip(weights, batches, strict=True)) / sum(weights)
        total.backward()
        optimizer.step()
        torch.testing.assert_close(module.layer.weight, reference.layer.weight)


class TestClosures:
    """B-16: the closure returns the loss of the whole window."""

    @pytest.mark.parametrize("search", [None, "strong_wolfe"])
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize("clip", [None, 0.5])
    def test_lbfgs_equals_the_reference(
        self, tmp_path: Path, search: str | None, size: int, clip: float | None
    ) -> None:
        class Closing(Regression):
            def configure_optimizers(self) -> Any:
                return LBFGS(self.parameters(), lr=0.1, max_iter=4, line_search_fn=search)

        module, reference = Closing(), Closing().double()
        # In double precision: clipped gradients mislead its estimate of curvature, and rounding would be amplified.
        runner = fit(tmp_path, accumulate_grad_batches=size, gradient_clip_val=clip, precision="64-true")
        runner.fit(module, regression(22))
        optimizer = reference.configure_optimizers()
        batches = list(regression(22))
        windows = [batches[start : start + size] for start in range(0, 6, size)]
        for window in windows:
            x, y = torch.cat([x for x, _ in window]).double(), torch.cat([y for _, y in window]).double()

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = reference.loss((x, y))
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(reference.parameters(), clip)
                return loss

            optimizer.step(closure)
        torch.testing.assert_close(module.layer.weight.double(), reference.layer.weight, atol=1e-4, rtol=1e-4)
        assert runner.global_step == len(windows)

    def test_a_none_loss_within_the_window(self, tmp_path: Path) -> None:
        """Each evaluation is a mean over the micro-batches that contributed, from the first on."""

        class Closing(Returning):
            def configure_optimizers(self) -> Any:
                return LBFGS(self.parameters(), lr=0.3, max_iter=4, line_search_fn="strong_wolfe")

        module = Closing(lambda loss, batch_idx: None if batch_idx == 1 else loss)
        fit(tmp_path, accumulate_grad_batches=3).fit(module, regression(24))
        reference = Regression()
        optimizer = LBFGS(reference.parameters(), lr=0.3, max_iter=4, line_search_fn="strong_wolfe")
        batches = list(regression(24))
        for window in ([batches[0], batches[2]], batches[3:]):
            x, y = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])

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

    def test_a_closure_goes_through_an_overridden_optimizer_step(self, tmp_path: Path) -> None:
        calls: list[str] = []

        class Closing(Regression):
            def configure_optimizers(self) -> Any:
                return LBFGS(self.parameters(), max_iter=3)

            def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
                calls.append(type(optimizer.optimizer).__name__)
                optimizer.step(closure=optimizer_closure)

        module, plain = Closing(), Regression()
        runner = fit(tmp_path)
        runner.fit(module, regression(8))
        assert calls == ["LBFGS"] * 2
        assert runner.global_step == 2
        assert not torch.equal(module.layer.weight, plain.layer.weight)

    def test_loss_scaling_is_refused(self, tmp_path: Path) -> None:
        class Closing(Regression):
            def configure_optimizers(self) -> Any:
                return LBFGS(self.parameters())

        with pytest.raises(ConfigurationError, match=r"'16-mixed' with LBFGS"):
            fit(tmp_path, precision="16-mixed").fit(Closing(), regression())

    def test_a_closure_optimizer_with_another_optimizer_is_refused(self, tmp_path: Path) -> None:
        class Both(Regression):
            def configure_optimizers(self) -> Any:
                return [LBFGS([self.layer.weight]), SGD([self.layer.bias], lr=0.1)]

        with pytest.raises(ConfigurationError, match=r"Optimizer 0 \(LBFGS\).*there are 2 optimizers"):
            fit(tmp_path).fit(Both(), regression())


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
    """B-13."""

    def test_a_gan_equals_the_reference(self, tmp_path: Path) -> None:
        module, reference = Manual(), Manual()
        runner = fit(tmp_path, max_epochs=2)
        runner.fit(module, regression())
        optimizers, schedulers = reference.configure_optimizers()
        for _ in range(2):
            for x, _ in regression():
                optimizers[0].zero_grad()
                (-reference.discriminator(reference.generator(x)).mean()).backward()
                nn.utils.clip_grad_norm_(reference.generator.parameters(), 0.5)
                optimizers[0].step()
                optimizers[1].zero_grad()
                made = reference.discriminator(reference.generator(x).detach()).mean()
                (made - reference.discriminator(x).mean()).backward()
                optimizers[1].step()
                for scheduler in schedulers:
                    scheduler.step()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert runner.global_step == 12  # one training_step is one step, however many optimizers step in it

    def test_max_steps_counts_training_steps(self, tmp_path: Path) -> None:
        runner = fit(tmp_path, max_steps=3, max_epochs=-1)
        runner.fit(Manual(), regression())
        assert (runner.global_step, runner.micro_batches) == (3, 3)

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

    @pytest.mark.parametrize("option", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
    def test_accumulation_and_clipping_are_refused(self, tmp_path: Path, option: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=f"{next(iter(option))}=.* with manual optimization"):
            fit(tmp_path, **option).fit(Manual(), regression())

    def test_manual_backward_in_automatic_optimization_is_refused(self, tmp_path: Path) -> None:
        class Confused(Regression):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                self.manual_backward(self.loss(batch))

        with pytest.raises(ConfigurationError, match="manual_backward was called in automatic optimization"):
            fit(tmp_path).fit(Confused(), regression())

    def test_fp16_unscales_each_optimizer_and_updates_the_scale_once(self, tmp_path: Path) -> None:
        """B-15: no optimizer steps with scaled gradients, one update a step."""
        norms: list[float] = []

        class Watching(Callback):
            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                norms.append(max(float(p.grad.abs().max()) for p in optimizer.param_groups[0]["params"]))

        precision = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=64.0))
        runner = fit(tmp_path, precision=precision, callbacks=Watching())
        runner.fit(Manual(), regression())
        assert max(norms) < 10
        assert runner.precision.state_dict()["_growth_tracker"] == 6

    def test_a_closure_optimizer_returns_its_first_loss(self, tmp_path: Path) -> None:
        got: list[float] = []

        class Closing(Regression):
            automatic_optimization = False

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                optimizer = self.optimizers()

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = self.loss(batch)
                    self.manual_backward(loss)
                    return loss

                got.append(float(self.loss(batch)))
                got.append(float(optimizer.step(closure)))

            def configure_optimizers(self) -> Any:
                return LBFGS(self.parameters(), max_iter=3)

        fit(tmp_path).fit(Closing(), regression(4))
        assert got[0] == pytest.approx(got[1])

    def test_schedulers_are_stepped_by_the_module_only(self, tmp_path: Path) -> None:
        class Idle(Manual):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return None

        runner = fit(tmp_path, max_epochs=2)
        runner.fit(Idle(), regression())
        assert [optimizer.param_groups[0]["lr"] for optimizer in runner.optimizers] == [0.1, 0.01]
