"""Parameters that no rank uses, or only some ranks use, under ZeRO: rows D-11, B-08, E-09."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Block, DeepRegression, Experts, trained_in_plain_torch
from small_runs import FEATURES, SHARD_EVERYTHING, TIGHTER, data, each, failing, seeded, train_by_hand, trained, weights
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from captured_warnings import captured_warnings
from drivetrain._distributed.failure import RankFailedError  # what `on_ranks` raises; it has no public name
from drivetrain_strategies import DeepSpeedStrategy
from worlds import on_ranks


def _split_data() -> TensorDataset:
    """Return data in which rank 0's batches of 4 go to one expert, and rank 1's to the other."""
    x, y = data(32).tensors
    order = x[:, 0].argsort()
    half = torch.stack([order[:16].view(4, 4), order[16:].view(4, 4)], 1).flatten()
    return TensorDataset(x[half], y[half])


class Routed(nn.Module):
    """Experts as one module, whose parameters stage 3 gathers together; one without samples does not run."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(count))

    def forward(self, hidden: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            chosen = route == number
            if bool(chosen.any()):
                out[chosen] = expert(hidden[chosen])
        return out


class Mixture(nn.Module):
    """Routes by the sign of the first feature; if ``mixes_first``, the first step sends samples to both experts."""

    def __init__(self, count: int = 2, mixes_first: bool = False) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(FEATURES, 8), Routed(count), nn.Linear(8, 1)
        self.mixes = mixes_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        route = torch.arange(len(x)) % 2 if self.mixes else (x[:, 0] > 0).long()
        self.mixes = False
        return self.head(self.block(self.stem(x), route))


class AdamWithZeros(torch.optim.AdamW):
    """Takes zeros for missing gradients, as ZeRO does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return super().step(closure)


def _by_hand(net: nn.Module) -> torch.Tensor:
    module: Any = DeepRegression(net)
    module.configure_optimizers = lambda: AdamWithZeros(module.parameters(), lr=0.01, eps=1e-5, weight_decay=0.1)
    return weights(train_by_hand(module, [*DataLoader(_split_data(), batch_size=8)]))


def _train(options: dict[str, Any] | None, net: Callable[[], nn.Module], **settings: Any) -> torch.Tensor:
    """Train on two ranks, each with samples for its own expert; without options under DDP."""
    strategy = "ddp" if options is None else DeepSpeedStrategy(**options)
    batches = DataLoader(_split_data(), batch_size=4)
    return trained(DeepRegression(seeded(net)), batches, strategy=strategy, **settings)


def _error(options: dict[str, Any] | None, net: Callable[[], nn.Module], **settings: Any) -> str:
    with failing() as caught:
        _train(options, net, **settings)
    return f"{caught['type']}: {caught['text']}"


def _experts(options: dict[str, Any], count: int) -> Any:
    with captured_warnings() as lines:
        return _train(options, partial(Mixture, count)), lines


EXPERTS = [
    {"stage": 1},
    {"stage": 2, "find_unused_parameters": True},
    {"stage": 2, "find_unused_parameters": True, "offload_optimizer": "cpu"},
    {**SHARD_EVERYTHING, "leaf_modules": [Routed]},
]


def test_experts_that_some_ranks_use() -> None:
    # D-11: raw DeepSpeed crashes at stages 1 and 2, and hangs at stage 3; an unused expert is reported once
    cases = [(options, 3 - number % 2) for number, options in enumerate(EXPERTS)]
    ranks = on_ranks(each, 2, _experts, *cases)
    for (options, count), (first, logged), (second, silent) in zip(cases, *ranks, strict=True):
        assert torch.equal(first, second), options
        assert (first - _by_hand(seeded(partial(Mixture, count)))).abs().max() < 1e-5, options
        reports = [text for text in logged if "counts as zero" in text]
        assert len(reports) == (count == 3), options
        assert all("'net.block.experts.2.norm.weight'" in text and "6 parameter(s)" in text for text in reports)
        assert not [text for text in silent if "counts as zero" in text]


def _refusal_and_next_run(options: dict[str, Any], net: Any) -> Any:
    return _error(options, net), trained(DeepRegression(), DataLoader(data(16), batch_size=4), strategy="ddp")


def test_parameters_used_on_some_ranks_only_are_refused() -> None:
    # D-11: refused in the first step, by name, without a hang
    cases: list[tuple[dict[str, Any], Any, list[str]]] = [
        ({"stage": 2}, Mixture, ["12 parameter(s)", "'net.block.experts.1.", "find_unused_parameters=True"]),
        (SHARD_EVERYTHING, Experts, ["the forward of 'net.experts.0", "the forward of 'net.experts.1"]),
        ({"stage": 3}, PartlyUsed, ["1 parameter(s)", "'net.scale'", "leaf_modules"]),
    ]
    ranks = on_ranks(each, 2, _refusal_and_next_run, *((options, net) for options, net, _ in cases))
    for (_, net, parts), (first, one), (second, other) in zip(cases, *ranks, strict=True):
        for text in (first, second):
            assert text.startswith("ConfigurationError"), (net, text)
            assert all(part in text for part in parts), text
        assert torch.equal(one, other)


class PartlyUsed(nn.Module):
    """All ranks run the same layers, but only rank 0 uses one of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(FEATURES, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return out * self.scale if dist.is_initialized() and dist.get_rank() == 0 else out


LATE = partial(Mixture, mixes_first=True)


def test_ranks_that_differ_after_the_first_step_are_refused_unless_they_may() -> None:
    # D-11: raw DeepSpeed silently adds gradients of different experts
    for refused, *allowed in on_ranks(each, 2, _error, ({"stage": 2}, LATE), (EXPERTS[1], LATE), (EXPERTS[3], LATE)):
        assert refused.startswith("ConfigurationError")
        assert "'net.block.experts." in refused
        assert "find_unused_parameters=True" in refused
        assert all(text.startswith("nothing was raised") for text in allowed)


def test_ranks_that_differ_after_the_first_step_at_stage_3_end_with_an_error() -> None:
    # D-11: no hang; ranks that gather different parameters fail in gloo, which may end a process
    with suppress(RankFailedError):
        for text in on_ranks(_error, 2, SHARD_EVERYTHING, LATE):
            assert text.startswith(("ConfigurationError", "RuntimeError", "DistributedError")), text


class Reentrant(nn.Module):
    """Recomputes its block in a backward of its own, so that the graph of the loss does not reach its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=True))


def test_recomputed_blocks_are_not_taken_for_unused_ones() -> None:
    # S-12: in the second step, these parameters "got a gradient unlike in the first window", without a name
    cases: list[Any] = [(None, Reentrant), ({"stage": 2}, Reentrant), (SHARD_EVERYTHING, Reentrant)]
    for expected, *others in on_ranks(each, 2, _train, *cases):
        for found in others:
            torch.testing.assert_close(found, expected, **TIGHTER)


class Reordering(nn.Module):
    """From some call on, rank 1 adds before it multiplies, so its gradients arrive in reverse order."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since, self.calls = since, 0
        self.stem = nn.Linear(FEATURES, 8)
        self.factor, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.stem(x)
        turns = dist.is_initialized() and dist.get_rank() == 1 and self.calls >= self.since
        return self.head((hidden + self.bias) * self.factor if turns else hidden * self.factor + self.bias)


def _reordering(since: int, options: dict[str, Any]) -> torch.Tensor:
    return _train(options, partial(Reordering, since), accumulate_grad_batches=2)


def _reordering_fails(since: int) -> str:
    return _error({"stage": 2}, partial(Reordering, since), accumulate_grad_batches=2)


def test_gradients_in_another_order_are_refused() -> None:
    # D-11: stage 2 silently added one parameter's gradient to the other's
    for text in chain(*on_ranks(each, 2, _reordering_fails, (1,), (2,))):
        assert "Gradients became ready in two orders" in text
        assert "'net.factor' took the position of 'net.bias'" in text
        assert "find_unused_parameters=True" in text


def test_gradients_in_another_order_are_not_mixed_but_allowed_if_enabled() -> None:  # D-11
    with pytest.raises(RankFailedError, match=r"(?s)Rank 1 failed .*ConfigurationError: Gradients became ready in two"):
        on_ranks(_reordering, 2, 4, {"stage": 2})
    cases = [(1, {"stage": 1}), (1, EXPERTS[1]), (1, SHARD_EVERYTHING)]
    first, second = on_ranks(each, 2, _reordering, *cases)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert (one - first[0]).abs().max() < 1e-6


class OccasionallyUsed(DeepRegression):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.ones_(self.net.blocks[1].up.bias)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if batch_idx % 2 else loss + self.net.blocks[1].up.bias.square().sum() * 10

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net.head(self.net.blocks[0](self.net.stem(x))), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


OCCASIONALLY: list[dict[str, Any]] = [
    {**stage, **offload}
    for stage in ({"stage": 1}, {"stage": 2}, SHARD_EVERYTHING)
    for offload in ({}, {"offload_optimizer": "cpu"})
]
OCCASIONALLY.append({"stage": 2, "find_unused_parameters": False})


def _occasionally_used() -> list[torch.Tensor]:
    strategies = [DeepSpeedStrategy(**{"find_unused_parameters": True, **options}) for options in OCCASIONALLY]
    return [
        trained(OccasionallyUsed(), DataLoader(data(40), batch_size=4), strategy=strategy) for strategy in strategies
    ]


def test_no_gradient_is_left_from_the_previous_step() -> None:
    # E-09: raw DeepSpeed steps again with the last gradient of a parameter that has none now, at stage 3 and offloaded
    expected = trained_in_plain_torch(OccasionallyUsed(), 40)
    for found in on_ranks(_occasionally_used, 2):
        for options, actual in zip(OCCASIONALLY, found, strict=True):
            torch.testing.assert_close(actual, expected, **TIGHTER, msg=str(options))
