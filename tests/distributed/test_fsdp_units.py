"""Modules of every structure as units of a sharded run, and the table that describes them: D-02, D-10."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fsdp_nets import Block, Deep, DeepRegression, Tied
from small_runs import TIGHT, failing, global_batches, loader, quiet, seeded, train_by_hand, weights
from torch import Tensor, nn

from captured_warnings import captured_warnings
from drivetrain import TrainModule
from drivetrain_strategies import FSDPStrategy
from drivetrain_strategies.fsdp import strategy
from worlds import on_ranks


class Shared(Deep):
    """One block is used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


class Twice(Deep):
    """Every block runs twice in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class Nested(Deep):
    """Blocks within blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))


NETS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "shared": (Shared, {}),
    "twice": (Twice, {}),
    "twice, kept after forward": (Twice, {"reshard_after_forward": False}),
    "nested": (Nested, {"wrap": [nn.Sequential, Block]}),
    "units without parameters": (Tied, {"wrap": [nn.Identity, Block]}),
    "ties, root only": (Tied, {"wrap": lambda name, module: False}),
    "ties within one unit": (Tied, {"wrap": lambda name, module: name == "net"}),
}


def _trained(name: str) -> Tensor:
    build, options = NETS[name]
    module = DeepRegression(seeded(build))
    quiet(strategy=FSDPStrategy(**options), accumulate_grad_batches=2).fit(module, loader(40, 4))
    return weights(module)


@pytest.mark.parametrize("name", NETS)
def test_modules_of_every_structure(name: str) -> None:
    # D-02, D-10
    expected = weights(train_by_hand(DeepRegression(seeded(NETS[name][0])), global_batches(40, 8), window=2))
    first, second = on_ranks(_trained, 2, name)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, **TIGHT)


class Weightless(TrainModule):
    """Logs a metric, and has nothing to shard."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("sum", batch[0].sum(), reduce_fx="sum")


def _weightless() -> float:
    (scores,) = quiet(strategy="fsdp").validate(Weightless(), loader(10, 2), verbose=False)
    return scores["sum"]


def test_a_module_without_parameters() -> None:
    expected = sum(float(x.sum()) for x, _ in global_batches(10, 2))
    assert on_ranks(_weightless, 2) == [pytest.approx(expected, abs=1e-5)] * 2


def _printed() -> list[str]:
    strategy._LOGGED_PLANS.clear()  # these ranks may have created that plan in another test
    with captured_warnings(logging.INFO) as texts:
        for _ in range(2):
            quiet(strategy="fsdp").fit(DeepRegression(), loader(16, 4))
    lines = [line for text in texts for line in text.splitlines()]
    return [line for line in lines if "FSDP shards" in line or line.startswith("  ")]


def test_the_plan_is_printed_once() -> None:
    # D-02: the units, with their numbers and sizes; L-09: once per process
    first, second = on_ranks(_printed, 2)
    parameters = sum(one.numel() for one in Block().parameters())
    assert second == []
    assert sum("FSDP shards" in line for line in first) == 1
    assert first[0] == f"FSDP shards {sum(one.numel() for one in Deep().parameters()):,} parameters over 2 ranks " + (
        "(units: repeated blocks)"
    )
    assert first[1:] == [
        f"  3 x Block (net.blocks.0 ... net.blocks.2), each {parameters} parameters of 0.001 MiB, 0.001 MiB per rank",
        next(line for line in first if line.startswith("  the rest: ")),
    ]


class Kept(DeepRegression):
    """Builds its optimizer in the first run, and returns the same one in later runs."""

    optimizer: Any = None

    def configure_optimizers(self) -> Any:
        self.optimizer = self.optimizer or super().configure_optimizers()
        return self.optimizer


def _refusals() -> list[str]:
    texts = []
    mapped = DeepRegression()
    mapped.net.head.hf_device_map = {"": 0}
    for module, settings in (
        (mapped, {"strategy": "fsdp"}),
        (DeepRegression(), {"strategy": "fsdp", "sync_batchnorm": True}),
        (Kept(), {"strategy": "fsdp"}),
    ):
        with failing() as caught:
            quiet(**settings).fit(module, loader(16, 4))
            quiet(**settings).fit(module, loader(16, 4))
        texts.append(f"{caught['type']}: {caught['text']}")
    return texts


def test_refusals_state_the_reason_and_a_fix() -> None:
    # C-06, G-06
    expected = [
        ("'net.head' was loaded with a device_map", "load the module without device_map"),
        ("each rank would still normalise over its own samples", "use strategy='ddp', or normalise with GroupNorm"),
        (
            "AdamW holds a shard of shape (8, 4) that does not belong to the module",
            "build a new optimizer in every call of configure_optimizers",
        ),
    ]
    for texts in on_ranks(_refusals, 2):
        for text, parts in zip(texts, expected, strict=True):
            assert text.startswith("ConfigurationError")
            assert all(part in text for part in parts), text
