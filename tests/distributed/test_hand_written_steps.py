"""A backward or a step by hand where the engine does it, or without gradients, is an error of ours (Q-10)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from small_runs import Regression, failing, loader, quiet

from drivetrain import ConfigurationError, DataModule, TrainModule
from worlds import on_ranks


class Backward(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        loss.backward()
        return loss


class Step(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.optimizers[0].step()
        return self.loss(batch)


class HandleStep(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()
        return self.loss(batch)


class InValidation(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch).backward()


class Mistaken(Regression):
    """Keeps a graph from the last batch, which gives torch's error about a second backward."""

    kept: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) + self.kept
        self.kept = loss * 0.1
        return loss


def _error(kind: type[Regression], strategy: str) -> dict[str, str]:
    with failing() as failed:
        quiet(strategy=strategy).fit(kind(), loader(8, 2), loader(4, 2))
    return failed


def _errors(strategy: str) -> list[dict[str, str]]:
    return [_error(kind, strategy) for kind in (Backward, Step, HandleStep, InValidation)]


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2"])
def test_a_backward_or_a_step_by_hand_is_refused_with_the_way_out(strategy: str) -> None:
    results = [_errors(strategy)] if strategy == "single_device" else on_ranks(_errors, 2, strategy)
    for backward, step, handle_step, in_validation in results:
        for error in (backward, step, handle_step):
            assert error["type"] == "ConfigurationError", error
            assert "training_step" in error["text"], error
            assert "self.automatic_optimization = False" in error["text"], error
        assert in_validation["type"] == "ConfigurationError", in_validation
        assert "without gradients" in in_validation["text"], in_validation


def test_another_cause_keeps_the_error_of_torch() -> None:
    error = _error(Mistaken, "single_device")
    assert error["type"] == "RuntimeError"
    assert "backward through the graph a second time" in error["text"]


def test_gradients_for_a_penalty_and_zeroed_gradients_are_no_backward_by_hand() -> None:
    class Penalized(Regression):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
            for parameter in self.parameters():
                parameter.grad = torch.zeros_like(parameter)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            slopes = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
            return loss + sum(slope.square().sum() for slope in slopes)

    fit = quiet()
    fit.fit(Penalized(), loader(8, 2))
    assert fit.global_step == 4


class ByHand(Regression):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def _warnings(samples: int) -> list[str]:
    import logging

    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    handler = Keep()
    logging.getLogger("drivetrain").addHandler(handler)
    try:
        quiet(strategy="ddp", max_epochs=3).fit(ByHand(), loader(samples, 2))
    finally:
        logging.getLogger("drivetrain").removeHandler(handler)
    return [text for text in found if "samples" in text]


def test_uneven_ranks_under_manual_optimization_are_one_warning() -> None:
    uneven, even = on_ranks(partial(_warnings, 7), 2), on_ranks(partial(_warnings, 8), 2)
    (message,) = [text for rank in uneven for text in rank]
    assert "Rank 0 has 2 samples in a micro-batch of 3 samples on 2 ranks" in message
    assert even == [[], []]


def test_loading_on_an_instance_says_to_call_the_class() -> None:
    for kind in (Regression, DataModule):
        with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\.load_from_checkpoint"):
            kind().load_from_checkpoint("path")


def test_hyper_parameters_that_were_not_saved_say_so() -> None:
    class Forgetful(TrainModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(self.hparams.width, 1)

    with pytest.raises(AttributeError, match=r"call self\.save_hyperparameters\(\)"):
        Forgetful()


def test_an_optimizer_of_ones_own_may_train_what_the_engine_does_not() -> None:
    class Probed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.probe = torch.nn.Linear(4, 1)
            self.probing = torch.optim.SGD(self.probe.parameters(), lr=0.1)

        def configure_optimizers(self) -> Any:
            held = {id(parameter) for parameter in self.probe.parameters()}
            return torch.optim.SGD([parameter for parameter in self.parameters() if id(parameter) not in held], lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.probing.zero_grad()
            self.probe(batch[0]).square().mean().backward()
            self.probing.step()
            return self.loss(batch)

    fit = quiet()
    fit.fit(Probed(), loader(8, 2))
    assert fit.global_step == 4


def test_clearing_gradients_that_an_earlier_run_left_is_no_backward_by_hand() -> None:
    class Clearing(Regression):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad(set_to_none=False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.zero_grad()
            return self.loss(batch)

    module, fit = Clearing(), quiet()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    fit.fit(module, loader(8, 2))
    assert fit.global_step == 4


def test_an_optimizer_without_hooks_that_wraps_another_trains() -> None:
    class Wrapping(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.defaults = inner, inner.defaults
            self.param_groups, self.state = inner.param_groups, inner.state

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    class Wrapped(Regression):
        def configure_optimizers(self) -> Any:
            return Wrapping(torch.optim.SGD(self.parameters(), lr=0.1))

    fit = quiet()
    fit.fit(Wrapped(), loader(8, 2))
    assert fit.global_step == 4


def test_an_overridden_optimizer_step_may_step_every_optimizer() -> None:
    class Together(Regression):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            every = self.optimizers()
            if optimizer is every[0]:
                for each in every:
                    each.step(optimizer_closure)

    fit, module = quiet(), Together()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    fit.fit(module, loader(8, 2))
    assert fit.global_step == 4
    assert not any(map(torch.equal, before, module.parameters()))
