"""What a precision converts, and what it leaves; ``tests/parity`` compares its numbers with a loop written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Fit, TrainModule
from drivetrain.precision import resolve_precision


def test_new_tensors_in_the_forward_have_the_dtype_and_the_default_comes_back() -> None:
    precision = resolve_precision("bf16-true", torch.device("cpu"))
    with precision.forward_context():
        assert torch.zeros(1).dtype is torch.bfloat16
    with pytest.raises(ZeroDivisionError), precision.forward_context():
        _ = 1 / 0
    assert torch.get_default_dtype() is torch.float32
    with precision.forward_context(), precision.module_init_context():
        pass
    assert torch.get_default_dtype() is torch.float32


def test_conversion_reaches_floating_point_only_and_keeps_ties() -> None:  # B-07
    module = nn.Module()
    module.first = nn.Embedding(4, 4)
    module.last = nn.Linear(4, 4)
    module.last.weight = module.first.weight
    module.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    module.register_buffer("count", torch.tensor(3))
    module.register_buffer("mean", torch.zeros(3))
    precision = resolve_precision("bf16-true", torch.device("cpu"))
    assert precision.convert_module(module) is module
    assert module.last.weight is module.first.weight
    assert module.first.weight.dtype is module.mean.dtype is torch.bfloat16
    assert module.phase.dtype is torch.complex64
    assert module.count.dtype is torch.int64
    batch: Any = {"x": torch.ones(2), "y": [torch.arange(2), "text"], "z": (torch.ones(1, dtype=torch.float64), 3)}
    converted = precision.convert_batch(batch)
    assert converted["x"].dtype is converted["z"][0].dtype is torch.bfloat16
    assert converted["y"][0].dtype is torch.int64
    assert converted["y"][1] == "text"
    assert batch["x"].dtype is torch.float32


@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_has_float32_master_weights(name: str) -> None:
    # B-01: a module in half precision gets them; frozen weights keep their memory
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    module[1].weight = module[0].weight
    module[2].requires_grad_(False)
    precision = resolve_precision(name, torch.device("cpu"))
    precision.convert_module(module)
    assert module[0].weight.dtype is torch.float32
    assert module[1].weight is module[0].weight
    assert module[2].weight.dtype is torch.bfloat16


class Adapted(TrainModule):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False).to(dtype)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.base(batch)).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_frozen_half_precision_weights_give_the_same_bits_as_in_float32() -> None:  # D-01
    heads = []
    for dtype in (torch.bfloat16, torch.float32):
        module = Adapted(dtype)
        batches = list(torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(1)))
        Fit(accelerator="cpu", barebones=True, max_epochs=2, precision="bf16-mixed").fit(module, batches)
        assert {one.dtype for one in module.base.parameters()} == {dtype}
        heads.append(list(module.head.parameters()))
    torch.testing.assert_close(*heads, rtol=0, atol=0)
