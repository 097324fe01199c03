"""Parameters that no rank uses, or only some ranks use, under ZeRO: rows D-11, B-08, E-09."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import Block, DeepRegression, Experts
from small_runs import FEATURES, data, each, failing, loader, quiet, seeded, weights
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from captured_warnings import captured_warnings
from drivetrain._distributed.failure import RankFailedError
from drivetrain_strategies import DeepSpeedStrategy
from worlds import on_ranks

SPREAD: dict[str, Any] = {"stage3_param_persistence_threshold": 0}


def _split_data() -> TensorDataset:
    """Return data in which rank 0's batches of 4 go to one expert, and rank 1's to the other."""
    x, y = data(32).tensors
    order = x[:, 0].argsort()
    half = torch.stack([order[:16].view(4, 4), order[16:].view(4, 4)], 1).flatten()
    return TensorDataset(x[half], y[half])


class Block2(nn.Module):
    """The experts as one module, whose parameters stage 3 gathers together."""

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
    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 8)
        self.block = Block2(count)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.stem(x), (x[:, 0] > 0).long()))


def _by_hand(net: Any) -> torch.Tensor:
    """Train the reference, with zeros for missing gradients."""
    module = DeepRegression(net)
    optimizer = module.configure_optimizers()
    x, y = _split_data().tensors
    for start in range(0, 32, 8):
        optimizer.zero_grad()
        module.loss((x[start : start + 8], y[start : start + 8])).backward()
        for parameter in module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return weights(module)


def _experts(options: dict[str, Any], count: int) -> Any:
    module = DeepRegression(seeded(lambda: Mixture(count)))
    with captured_warnings() as lines:
        quiet(strategy=DeepSpeedStrategy(**options)).fit(module, DataLoader(_split_data(), batch_size=4))
    return weights(module), lines


EXPERTS = [
    {"stage": 1},
    {"stage": 2, "find_unused_parameters": True},
    {"stage": 2, "find_unused_parameters": True, "offload_optimizer": "cpu"},
    {"stage": 3, "leaf_modules": [Block2], **SPREAD},
]


def test_experts_that_some_ranks_use() -> None:
    # D-11: raw DeepSpeed crashes at stages 1 and 2, and hangs at stage 3; an unused expert is reported once
    cases = [(options, count) for options in EXPERTS for count in (2, 3)]
    ranks = on_ranks(each, 2, _experts, *cases)
    for case, (first, heard), (second, silent) in zip(cases, *ranks, strict=True):
        assert torch.equal(first, second), case
        expected = _by_hand(seeded(partial(Mixture, case[1])))
        assert (first - expected).abs().max() < 1e-5, case
        told = [text for text in heard if "counts as zero" in text]
        assert len(told) == (case[1] == 3), case
        assert all("'net.block.experts.2.norm.weight'" in text and "6 parameter(s)" in text for text in told)
        assert not [text for text in silent if "counts as zero" in text]


def _different(options: dict[str, Any], net: Any) -> Any:
    with failing() as caught:
        quiet(strategy=DeepSpeedStrategy(**options)).fit(
            DeepRegression(seeded(net)), DataLoader(_split_data(), batch_size=4)
        )
    module = DeepRegression()
    quiet(strategy="ddp").fit(module, loader(16, 4))  # and the next run trains
    return caught, weights(module)


def test_parameters_used_on_some_ranks_only_are_refused() -> None:
    # D-11: refused in the first step, by name, without a hang
    cases: list[tuple[dict[str, Any], Any, list[str]]] = [
        ({"stage": 2}, Mixture, ["12 parameter(s)", "'net.block.experts.1.", "find_unused_parameters=True"]),
        ({"stage": 3, **SPREAD}, Experts, ["the forward of 'net.experts.0", "the forward of 'net.experts.1"]),
        ({"stage": 3}, PartlyUsed, ["1 parameter(s)", "'net.scale'", "leaf_modules"]),
    ]
    ranks = on_ranks(each, 2, _different, *((options, net) for options, net, _ in cases))
    for (_, net, parts), (first, one), (second, other) in zip(cases, *ranks, strict=True):
        for caught in (first, second):
            assert caught["type"] == "ConfigurationError", (net, caught)
            assert all(part in caught["text"] for part in parts), caught["text"]
        assert torch.equal(one, other)


class PartlyUsed(nn.Module):
    """All ranks run the same layers, but only rank 0 uses one of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(FEATURES, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return out * self.scale if dist.is_initialized() and dist.get_rank() == 0 else out


class Late(nn.Module):
    """Ranks use different parameters only after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mixture()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.net.stem(x)
        mixed = torch.arange(len(x)) % 2
        route = mixed if self.calls == 1 else (x[:, 0] > 0).long()
        return self.net.head(self.net.block(hidden, route))


def _late(options: dict[str, Any]) -> Any:
    module = DeepRegression(seeded(Late))
    with failing() as caught:
        quiet(strategy=DeepSpeedStrategy(**options)).fit(module, DataLoader(_split_data(), batch_size=4))
    return caught


def test_ranks_that_differ_after_the_first_step() -> None:
    # D-11: raw DeepSpeed silently adds gradients of different experts
    for caught in on_ranks(_late, 2, {"stage": 2}):
        assert caught["type"] == "ConfigurationError"
        assert "'net.net.block.experts." in caught["text"]
        assert "find_unused_parameters=True" in caught["text"]


class Reentrant(nn.Module):
    """Recomputes its block in a backward of its own, so that the graph of the loss does not reach its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=True))


def _recomputed(options: dict[str, Any] | None) -> Any:
    module = DeepRegression(seeded(Reentrant))
    with failing() as caught:
        strategy = "ddp" if options is None else DeepSpeedStrategy(**options)
        quiet(strategy=strategy).fit(module, DataLoader(data(32), batch_size=4))
    return caught["text"], weights(module)


def test_recomputed_blocks_are_not_taken_for_unused_ones() -> None:
    # S-12: in the second step, these parameters "got a gradient unlike in the first window", without a name
    cases = [(None,), ({"stage": 2},), ({"stage": 3, **SPREAD},)]
    for (_, expected), *others in on_ranks(each, 2, _recomputed, *cases):
        for text, found in others:
            assert text == ""
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_ranks_that_differ_after_the_first_step_at_stage_3() -> None:
    # D-11: no hang. Ranks that gather different parameters fail in gloo, whose errors may end the process.
    try:
        results = on_ranks(_late, 2, {"stage": 3, **SPREAD})
    except RankFailedError:
        return
    assert {caught["type"] for caught in results} <= {"ConfigurationError", "RuntimeError", "DistributedError"}


def test_ranks_that_are_allowed_to_differ() -> None:
    # D-11
    cases = {"stage": 2, "find_unused_parameters": True}, {"stage": 3, "leaf_modules": [Block2], **SPREAD}
    for caught in chain.from_iterable(on_ranks(each, 2, _late, *((options,) for options in cases))):
        assert caught["type"] == "nothing was raised", caught["text"]


# The same parameters, in another order


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


def _train_reordering(since: int, options: dict[str, Any]) -> Any:
    module = DeepRegression(seeded(lambda: Reordering(since)))
    quiet(strategy=DeepSpeedStrategy(**options), accumulate_grad_batches=2).fit(module, loader(32, 4))
    return weights(module)


def _reordering_fails(since: int) -> str:
    with failing() as caught:
        _train_reordering(since, {"stage": 2})
    return caught["text"]


def test_gradients_in_another_order_are_not_mixed() -> None:
    """D-11: stage 2 silently added one parameter's gradient to the other's."""
    for text in chain(*on_ranks(each, 2, _reordering_fails, (1,), (2,))):
        assert "Gradients became ready in two orders" in text
        assert "'net.factor' took the position of 'net.bias'" in text
        assert "find_unused_parameters=True" in text
    with pytest.raises(
        RankFailedError, match=r"(?s)Rank 1 failed .*ConfigurationError: Gradients became ready in two orders"
    ):
        on_ranks(_train_reordering, 2, 4, {"stage": 2})


def test_gradients_in_another_order_are_allowed_if_enabled() -> None:
    # D-11
    cases = [(1, {"stage": 1}), (1, {"stage": 2, "find_unused_parameters": True}), (1, {"stage": 3, **SPREAD})]
    first, second = on_ranks(each, 2, _train_reordering, *cases)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert (one - first[0]).abs().max() < 1e-6


# A parameter that all ranks use occasionally


class OccasionallyUsed(DeepRegression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if batch_idx % 2 else loss + self.net.blocks[1].up.bias.square().sum() * 10

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        x = self.net.stem(x)
        return nn.functional.mse_loss(self.net.head(self.net.blocks[0](x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _occasionally_used() -> dict[str, torch.Tensor]:
    found = {}
    kinds: dict[str, dict[str, Any]] = {
        "stage 1": {"stage": 1},
        "stage 2": {"stage": 2},
        "stage 2, not looked at": {"stage": 2, "find_unused_parameters": False},
        "stage 3": {"stage": 3, **SPREAD},
        "stage 1, offload": {"stage": 1, "offload_optimizer": "cpu"},
        "stage 2, offload": {"stage": 2, "offload_optimizer": "cpu"},
        "stage 3, offload": {"stage": 3, "offload_optimizer": "cpu", **SPREAD},
    }
    for name, options in kinds.items():
        module = OccasionallyUsed()
        with torch.no_grad():
            module.net.blocks[1].up.bias.fill_(1.0)
        strategy = DeepSpeedStrategy(**{"find_unused_parameters": True, **options})
        quiet(strategy=strategy).fit(module, loader(40, 4))
        found[name] = weights(module)
    return found


def test_no_gradient_is_left_from_the_previous_step() -> None:
    # E-09: raw DeepSpeed steps again with the last gradient of a parameter that has none now, at stage 3 and offloaded
    module = OccasionallyUsed()
    with torch.no_grad():
        module.net.blocks[1].up.bias.fill_(1.0)
    optimizer = module.configure_optimizers()
    x, y = data(40).tensors
    for number, start in enumerate(range(0, 40, 8)):
        optimizer.zero_grad()
        module.training_step((x[start : start + 8], y[start : start + 8]), number).backward()
        optimizer.step()
    for found in on_ranks(_occasionally_used, 2):
        for name, actual in found.items():
            gap = (actual - weights(module)).abs().max().item()
            assert gap < 1e-5, f"{name}: {gap}"
