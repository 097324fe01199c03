"""Modules built in `configure_model` are never whole anywhere under FSDP, and have the values of an ordinary build."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_nets import DeepRegression, Tied
from small_runs import TIGHT, Regression, Saver, global_batches, loader, quiet, refusal, train_by_hand, weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.callbacks import LambdaCallback
from drivetrain.errors import ConfigurationError
from drivetrain.precision import resolve_precision
from drivetrain.testing import assert_close_states
from drivetrain_strategies import FSDPStrategy
from worlds import on_ranks


class Everything(nn.Module):
    """Uses every way of initialising that torch has, and some user-defined ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.attention = nn.Linear(5, 7), nn.MultiheadAttention(8, 2)
        self.recurrent, self.embedding = nn.GRU(3, 4), nn.Embedding(9, 6, padding_idx=1)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
        self.register_buffer("numbers", torch.tensor([1.0, 2.0, 3.0]) * 2)
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)
        self.orthogonal, self.truncated = nn.Linear(6, 6), nn.Linear(6, 4)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        nn.init.sparse_(self.truncated.weight, 0.5)
        with torch.no_grad():
            self.linear.weight[:3].normal_(std=0.5)
            self.linear.bias.mul_(2).add_(self.linear.weight[:, 0])
        self.tied = nn.Embedding(9, 6)
        self.tied.weight = self.embedding.weight
        self.product = nn.Parameter(torch.randn(4, 4) @ torch.randn(4, 2))
        self.twos = nn.Parameter(torch.full((3,), 2.0))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        for matrix in self.conv.parameters():
            nn.init.normal_(matrix, std=0.1)
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.seeded = nn.Linear(3, 3)
            torch.manual_seed(11)
            self.seeded_alike = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)


class Factorised(nn.Module):
    """Has results whose strides differ between the meta device and the CPU, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        linalg, matrix = torch.linalg, torch.randn(4, 4)
        _, _, vh = linalg.svd(matrix)
        left, _ = linalg.qr(matrix)
        parts = {
            "svd": vh,
            "a view of svd": vh[:2].repeat(2, 1),
            "svd_lowrank": torch.svd_lowrank(matrix, q=2)[2].repeat(1, 2),
            "qr": left[:2].repeat(2, 1),
            "eigh": linalg.eigh(matrix @ matrix.T)[1][:2].repeat(2, 1),
        }
        self.weights = nn.ParameterDict(parts)


class Tabular(nn.Module):
    """Holds tensors that are neither parameters nor buffers, in places where Python code keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.GRU(4, 4)
        self.by_name: dict[str, Any] = {"a.b": [torch.full((4,), 2.0), (1, "text")]}
        self.tables = SimpleNamespace(cosine=torch.linspace(0, 1, 4).cos(), empty=torch.empty(4))
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.arange(4.0))
        self.first_frequencies = self.frequencies
        self.itself = [self]


def _lazy() -> nn.Module:
    """Build layers that get their shapes from a forward."""
    net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    with torch.no_grad():
        net(torch.zeros(2, 4))
    return net


class Built(Regression):
    """Builds its network in `configure_model`."""

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__(0.05)
        self.build = build
        self.net = None
        self.draw: Tensor | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.build()

    def on_validation_start(self) -> None:
        self.draw = torch.rand(3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def _built(build: Callable[[], Any], precision: str = "32-true") -> Built:
    module = Built(build)
    fit = quiet(strategy=FSDPStrategy(), devices=1, precision=precision, seed=3)
    fit.validate(module, loader(8, 8), verbose=False)
    return module


@pytest.mark.parametrize(
    ("build", "precision"),
    [
        *((build, "32-true") for build in (Everything, Factorised, Tabular, _lazy)),
        (lambda: nn.Linear(5, 7, dtype=torch.float32), "bf16-true"),  # is cast after it was built
    ],
)
def test_every_value_is_that_of_an_ordinary_build(build: Callable[[], Any], precision: str) -> None:
    # D-03, B-18, I-12, S-11: bit for bit, and the generator continues as if the module had been built normally
    module = _built(build, precision=precision)
    torch.manual_seed(3)
    ordinary = build().to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert_close_states(module.net.state_dict(), ordinary.state_dict(), atol=0, rtol=0)
    assert not any(value.is_meta for value in module.net.state_dict().values())
    assert module.draw is not None
    assert torch.equal(module.draw, torch.rand(3))


def test_tensors_in_lists_dicts_and_objects_have_the_values_of_an_ordinary_build() -> None:  # S-11
    ordinary, module = Tabular(), _built(Tabular).net
    assert torch.equal(module.by_name["a.b"][0], ordinary.by_name["a.b"][0])
    assert torch.equal(module.tables.cosine, ordinary.tables.cosine)
    assert not module.tables.empty.is_meta
    assert module.first_frequencies is module.frequencies


def _holding(value: Any, layer: Any = None) -> nn.Module:
    module = nn.Module()
    module.layer, module.held = layer, value
    return module


def _turned() -> nn.Module:
    layer = nn.Linear(2, 2)
    return _holding(layer.weight.t(), layer)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: _holding((torch.ones(2), torch.zeros(2))),
            r"(?s)'net\.held\[0\]' is in a tuple.*net\.held\[1\].*meta=False",
        ),
        (lambda: _holding([nn.Linear(2, 2)]), r"(?s)held\[0\]\._parameters\['weight'\].*meta=False"),
        (_turned, r"'net\.held'.*'net\.layer\.weight'"),
        (lambda: nn.Linear(2, 2).weight.sum().item(), "configure_model failed on the meta device"),
        (lambda: torch.rand(2, device="cpu"), "drew random numbers for a tensor that has storage"),
    ],
)
def test_what_cannot_be_initialised_later_is_refused_by_name(build: Any, text: str) -> None:  # S-07, S-11
    with pytest.raises(ConfigurationError, match=text):
        _built(build)


def test_a_module_without_initialisation_is_refused_by_name() -> None:
    with torch.device("meta"):
        module = DeepRegression(nn.Linear(4, 1))
    text = refusal(module, loader(16, 4), strategy="fsdp", devices=1)
    assert text.startswith("ConfigurationError")
    assert "'net.weight' was not built in configure_model; 'net.bias'" in text


class Scaled(nn.Module):
    """Holds tables that its forward needs, factorised weights, and a layer that loads its state by its own method."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[Any] = [torch.linspace(1, 2, 4), {"offset": torch.full((4,), 0.5)}]
        head = nn.Linear(4, 1)
        with torch.no_grad():
            head.weight.copy_(torch.linalg.svd(torch.randn(4, 4))[2][:1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch has a newer weight_norm
            self.layers = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), head)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scales[0] + self.scales[1]["offset"])


def _whole_and_resumed(strategy: str, path: str) -> list[dict[str, Tensor]]:
    states = []
    for ckpt_path in (None, path):
        module = Built(Scaled)
        fit = quiet(strategy=strategy, devices=2, max_epochs=2, seed=5, callbacks=[] if ckpt_path else [Saver(path)])
        fit.fit(module, loader(16, 2), ckpt_path=ckpt_path)
        states.append({name: value.clone() for name, value in module.state_dict().items()})
    return states


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_3"])
def test_a_late_module_is_trained_as_by_ddp_and_resumed(strategy: str, tmp_path: Path) -> None:
    # S-11, S-13: tables and buffers have no values yet when they are loaded
    found, wanted = (
        on_ranks(_whole_and_resumed, 2, one, str(tmp_path / one), process_group=None) for one in (strategy, "ddp")
    )
    for (whole, resumed), (by_ddp, _) in zip(found, wanted, strict=True):
        assert int(resumed["net.layers.1.num_batches_tracked"]) == 8
        assert_close_states(resumed, whole)
        assert_close_states(whole, by_ddp)


def _tied() -> nn.Module:
    """Build ties and scalars, with an initialisation of their own at the end."""
    net = Tied()
    for matrix in (parameter for parameter in net.parameters() if parameter.dim() == 2):
        nn.init.normal_(matrix, std=0.3)
    return net


def _trained(strategy: Any, seed: int | None, precision: str = "32-true") -> dict[str, Any]:
    """Return the first values, which of them are whole on this rank, a number drawn in training, and the weights."""
    if seed is None:
        torch.manual_seed(20 + dist.get_rank())
    found: dict[str, Any] = {}

    def look(trainer: Any, module: nn.Module) -> None:
        named: dict[str, Any] = dict(module.named_parameters())
        sharded = {name for name, value in named.items() if isinstance(value, DTensor)}
        found["whole"] = [name for name, value in named.items() if name not in sharded and value.dim()]
        found["first"] = {
            name: value.full_tensor() if name in sharded else value.detach().clone() for name, value in named.items()
        }

    def draw(*_: Any) -> None:
        found["number"] = float(torch.rand(()))

    module, callback = Built(_tied), LambdaCallback(on_fit_start=look, on_train_batch_start=draw)
    strategy = FSDPStrategy(**strategy) if isinstance(strategy, dict) else strategy
    quiet(strategy=strategy, callbacks=callback, seed=seed, precision=precision).fit(module, loader(16, 4))
    assert not any(parameter.is_meta for parameter in module.parameters())
    return {**found, "weights": weights(module)}


@pytest.mark.parametrize(("seed", "precision"), [(7, "32-true"), (7, "bf16-true"), (None, "32-true")])
def test_initialisation_is_that_of_a_build_with_storage(seed: int | None, precision: str) -> None:
    # D-03, B-18: with a seed; and without one, equal to rank 0's
    runs, eager = (on_ranks(_trained, 2, options, seed, precision) for options in ({}, {"meta": False}))
    for found, expected in zip(runs, eager, strict=True):
        assert not found["whole"]
        assert_close_states(found["first"], expected["first"], atol=0, rtol=0)
        assert torch.equal(found["weights"], expected["weights"])
    if seed is None:
        return
    torch.manual_seed(seed)
    with resolve_precision(precision, torch.device("cpu")).module_init_context():
        module = Built(_tied)
        module.configure_model()
    assert_close_states(runs[0]["first"], dict(module.named_parameters()), atol=0, rtol=0)
    if precision == "32-true":
        by_ddp = on_ranks(_trained, 2, "ddp", seed)  # B-18: the generator continues as after a build with storage
        assert [found["number"] for found in runs] == [found["number"] for found in by_ddp]
        torch.testing.assert_close(runs[0]["weights"], weights(train_by_hand(module, global_batches(16, 8))), **TIGHT)
