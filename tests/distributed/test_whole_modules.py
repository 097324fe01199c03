"""The caller's module after a run in processes that were started for it. Row I-15."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_runs import FEATURES, Regression, data, global_batches, loader, quiet, seeded, train_by_hand, weights
from torch import nn
from torch.nn.utils import parametrizations

from drivetrain import Fit
from drivetrain.callbacks import Checkpoint
from drivetrain.errors import ConfigurationError
from drivetrain_strategies import FSDPStrategy
from oracle.check import check
from oracle.program import Net, Program

SAMPLES, SIZE = 32, 4


class Late(Regression):
    """Builds everything in `configure_model`; `__init__` only sets placeholders."""

    table: torch.Tensor
    own: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.net: Any = None
        self.act: Any = None
        self.scale: Any = None
        self.names: Any = None
        self.register_buffer("table", None)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = seeded(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8, bias=False)))
            self.act = nn.Softsign()
            self.scale = nn.Parameter(torch.full((8,), 0.5))
            self.net[2].weight = nn.Parameter(self.net[2].weight.detach().clone())
            self.out = nn.Linear(8, 8, bias=False)
            self.out.weight = self.net[2].weight
            self.table = torch.ones(1)
            self.register_buffer("own", torch.zeros(1), persistent=False)
            self.names = ["a", "b"]
            self.width = 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.width == len(self.scale)
        assert self.names == ["a", "b"]
        return (self.out(self.act(self.net(x))) * self.scale).sum(1, keepdim=True) * self.table

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        self.own += 1
        return nn.functional.mse_loss(self(x), y)


def launched(launcher: str, **settings: Any) -> Fit:
    return quiet(**{"strategy": "ddp", "devices": 2, "launcher": launcher, **settings})


def by_hand(module: Regression) -> Regression:
    module.configure_model()
    return train_by_hand(module, global_batches(SAMPLES, 2 * SIZE), step=lambda batch, _: module.loss(batch))


@pytest.mark.parametrize(("launcher", "strategy"), [("fork", "ddp"), ("forkserver", "fsdp")])
def test_layers_built_in_configure_model_are_there_after_fit(launcher: str, strategy: str) -> None:  # I-15
    module = Late()
    launched(launcher, strategy=strategy).fit(module, loader(SAMPLES, SIZE))
    reference = by_hand(Late())
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in reference.named_parameters()]
    torch.testing.assert_close(weights(module), weights(reference), atol=1e-6, rtol=1e-5)
    assert module.out.weight is module.net[2].weight
    assert module.state_dict().keys() == reference.state_dict().keys()
    x = data(SAMPLES).tensors[0]
    torch.testing.assert_close(module(x), reference(x), atol=1e-6, rtol=1e-5)
    # It can be trained further, here and in other processes.
    quiet().fit(module, loader(SAMPLES, 2 * SIZE))
    torch.testing.assert_close(weights(module), weights(by_hand(reference)), atol=1e-6, rtol=1e-5)


class Activated(Regression):
    """Builds a layer without parameters late, and has one that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Any = None

    def build(self) -> Any:
        return nn.Softsign()

    def configure_model(self) -> None:
        if self.act is None:
            self.act = self.build()

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.act(self.net(batch[0])), batch[1])


class Parametrized(Activated):
    """Has a parametrized layer, which refuses to be pickled."""

    def build(self) -> Any:
        return seeded(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(1, 1)), nn.Softsign()))


class SetUp(Parametrized):
    """Builds a layer in `setup`, which only the run calls."""

    def configure_model(self) -> None:
        assert self.act is not None

    def setup(self, stage: str) -> None:
        self.act = self.build()


class Asking(Activated):
    """Asks how many ranks there are."""

    def configure_model(self) -> None:
        if self.trainer.world_size == 2:
            super().configure_model()


def test_parameterless_and_unpicklable_layers_come_back() -> None:  # I-15
    for kind in (Activated, Parametrized, Asking):
        module, reference = kind(), kind()
        if isinstance(reference, Asking):
            reference.trainer = SimpleNamespace(world_size=2)
        launched("fork").fit(module, loader(SAMPLES, SIZE))
        torch.testing.assert_close(weights(module), weights(by_hand(reference)), atol=1e-6, rtol=1e-5)
        assert module.loss(data(SAMPLES).tensors).isfinite()


def test_layers_that_configure_model_does_not_build_are_named(tmp_path: Path) -> None:  # I-15
    trainer = launched("fork", enable_checkpointing=True, default_root_dir=tmp_path)
    words = r"(?s)'act.0 \(ParametrizedLinear\)'.*build all layers in __init__ or"
    with pytest.raises(ConfigurationError, match=words):
        trainer.fit(SetUp(), loader(SAMPLES, SIZE))
    assert trainer.checkpoint_callback is not None
    assert trainer.checkpoint_callback.best_model_path  # the run has ended, and this process knows what it has saved


class Thawing(Regression):
    """Freezes a layer in a hook, changes the shape of a buffer, and sets one and removes another."""

    seen: torch.Tensor
    last: torch.Tensor | None
    first: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("last", None)
        self.register_buffer("first", torch.zeros(1))

    def setup(self, stage: str) -> None:
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = torch.cat([self.seen, torch.tensor([batch_idx])])
        self.last, self.first = torch.tensor(batch_idx), None
        return super().training_step(batch, batch_idx)


def test_frozen_layers_and_resized_buffers_come_back() -> None:  # I-15
    module = Thawing()
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    launched("fork").fit(module, loader(SAMPLES, SIZE))
    assert [parameter.requires_grad for parameter in module.parameters()] == [False, False, True, True]
    assert module.seen.tolist() == [0, 1, 2, 3]
    assert module.last is not None
    assert module.last.item() == 3
    assert module.first is None
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_the_module_comes_back_in_the_dtype_of_the_run(precision: str, strategy: str) -> None:  # I-15
    net = Net(norm="batch", buffer="in_place")
    late = precision == "64-true"
    assert not check(Program(strategy, 2, precision=precision, net=net, launcher="fork", configure_model=late))


def test_parameters_stay_the_same_objects_when_their_dtype_changes() -> None:  # I-15
    module = Regression()
    before = list(module.parameters())
    launched("fork", precision="bf16-true").fit(module, loader(SAMPLES, SIZE))
    assert all(one is other for one, other in zip(module.parameters(), before, strict=True))
    assert {one.dtype for one in before} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [Regression, Late])
def test_above_the_limit_the_caller_is_told_where_the_weights_are(kind: type[Regression], tmp_path: Path) -> None:
    # I-15
    path = tmp_path / "epoch=0-step=4"
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": Checkpoint(dirpath=tmp_path)}
    for settings, wanted in ((saving, f"newest checkpoint is '{path}'"), ({}, "No checkpoint was saved")):
        module = kind()
        launched("fork", strategy=FSDPStrategy(gather_limit=0), **settings).fit(module, loader(SAMPLES, SIZE))
        assert all(parameter.is_meta for parameter in module.parameters())
        for trainer in (quiet(), launched("fork")):
            with pytest.raises(ConfigurationError, match=re.escape(wanted)):
                trainer.fit(module, loader(SAMPLES, 2 * SIZE))
        if settings:
            again = kind() if kind is Regression else module
            launched("fork", max_epochs=2).fit(again, loader(SAMPLES, SIZE), ckpt_path=path)
            reference = by_hand(by_hand(kind()))
            torch.testing.assert_close(weights(again), weights(reference), atol=1e-6, rtol=1e-5)
