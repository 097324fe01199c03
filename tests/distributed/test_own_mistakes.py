"""Errors that user code raises reach the user as they were raised, under every strategy: row S-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import SHARD_EVERYTHING, Regression, data, each, loader, quiet, refusal
from torch import nn

from drivetrain_strategies import DeepSpeedStrategy
from worlds import on_ranks

MESSAGE = "the tokenizer of ninja has no metadata"
"""A message with words by which explanations must not judge: `ninja`, and `meta` in a longer word."""
REFUSED = "[Errno 111] Connection refused"

STRATEGIES = ("ddp", "fsdp", "ZeRO 2", "ZeRO 3")


def strategy_named(name: str) -> Any:
    if not name.startswith("ZeRO"):
        return name
    options = SHARD_EVERYTHING if name == "ZeRO 3" else {"stage": 2}
    return DeepSpeedStrategy(**options, config={"zero_allow_untested_optimizer": True})


def _raise(*_: Any) -> Any:
    raise RuntimeError(MESSAGE)


class BuggySGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        _raise()


class Buggy(Regression):
    """Raises an error at one point, on the given ranks."""

    def __init__(self, where: str, ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.where, self.ranks = where, ranks

    def fails(self, where: str) -> bool:
        return self.where == where and self.global_rank in self.ranks

    def configure_model(self) -> None:
        if self.where == "configure_model":
            _raise()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        if self.fails("forward") or (self.fails("second forward") and batch_idx == 1):
            hidden @ torch.ones(77, 77)
        if self.fails("connection"):
            raise ConnectionRefusedError(REFUSED)
        if self.fails("backward"):
            hidden.register_hook(_raise)
        return nn.functional.mse_loss(self.net[2](hidden), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        if self.where == "configure_optimizers":
            _raise()
        return (BuggySGD if self.where == "step" else torch.optim.SGD)(self.parameters(), lr=0.1)


def _error(name: str, where: str, ranks: tuple[int, ...]) -> str:
    return refusal(Buggy(where, ranks), loader(16, 4), strategy=strategy_named(name))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_mistake_of_the_user_is_reported_as_it_was_raised(name: str) -> None:  # S-12
    places = ("forward", "second forward", "backward", "step", "configure_optimizers", "configure_model")
    for texts in on_ranks(each, 2, _error, *[(name, where, (0, 1)) for where in places]):
        for where, text in zip(places, texts, strict=True):
            message = "mat1 and mat2 shapes" if "forward" in where else MESSAGE
            assert text.startswith(f"RuntimeError: {message}"), where


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_mistake_on_one_rank_is_the_error_of_all_ranks(name: str) -> None:  # S-12
    for where, message in (
        ("forward", "RuntimeError: mat1 and mat2 shapes"),
        ("backward", f"RuntimeError: {MESSAGE}"),
        ("connection", f"ConnectionRefusedError: {REFUSED}"),
    ):
        if (name, where) == ("ZeRO 3", "backward"):
            continue  # in a process that goes on, DeepSpeed keeps the connection to the waiting rank open
        told, raised = on_ranks(_error, 2, name, where, (1,), process_group=None)
        assert raised.startswith(message), where
        assert told.startswith("RankFailedError"), (where, told)
        assert message in told, where


class Empty(Regression):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.none.sum()


class Slope(Regression):
    """Adds the slope of its output to the loss, or takes an inner step."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.inner = inner

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if not self.inner:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return self.loss(batch) + slope.square().mean()
        names, weights = zip(*self.net.named_parameters(), strict=True)
        slopes = torch.autograd.grad(self.loss(batch), weights, create_graph=True)
        moved = {name: one - 0.1 * slope for name, one, slope in zip(names, weights, slopes, strict=True)}
        return nn.functional.mse_loss(torch.func.functional_call(self.net, moved, (x,)), y)


UNTRAINABLE = {  # with the strategies that refuse it, and the parameter that they name
    "empty": (("ZeRO 2", "ZeRO 3"), "'none'"),
    "slope": (("fsdp", "ZeRO 3"), "'net."),
    "inner step": (("fsdp", "ZeRO 3"), "'net."),
}


def _untrainable(name: str, kind: str) -> str:
    module: Regression = Empty() if kind == "empty" else Slope(kind == "inner step")
    return refusal(module, loader(16, 4), strategy=strategy_named(name))


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_a_strategy_cannot_train_is_refused_by_name(name: str) -> None:  # S-12
    for texts in on_ranks(each, 2, _untrainable, *[(name, kind) for kind in UNTRAINABLE]):
        for text, (kind, (refusing, parameter)) in zip(texts, UNTRAINABLE.items(), strict=True):
            if name in refusing:
                assert text.startswith("ConfigurationError"), (kind, text)
                assert parameter in text, kind
                assert "use strategy='ddp'" in text, kind
            else:
                assert text == "nothing was raised: ", kind


def test_a_data_set_instead_of_a_loader_and_a_validation_without_a_step_are_named(caplog: Any) -> None:  # G-06
    for batches in ([data(8)], {"a": data(8)}):
        text = refusal(Regression(), batches)
        assert text.startswith("ConfigurationError")
        assert "TensorDataset, which is a data set" in text
    quiet().fit(Regression(), loader(8, 4), loader(8, 4))
    assert "Regression has no validation_step: nothing is validated" in caplog.text
