"""Frozen weights in bfloat16, as docs/strategies.md advises for FSDP with mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Fit, TrainModule


class Adapted(TrainModule):
    def __init__(self, half: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)
            self.head = nn.Linear(8, 1)
        if half:
            self.base.to(torch.bfloat16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.base(batch[0])).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def trained(half: bool) -> list[float]:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    module = Adapted(half)
    Fit(accelerator="cpu", barebones=True, max_epochs=2, precision="bf16-mixed").fit(
        module, DataLoader(TensorDataset(x), batch_size=4)
    )
    assert {one.dtype for one in module.base.parameters()} == {torch.bfloat16 if half else torch.float32}
    return [float(one) for one in torch.cat([one.detach().flatten() for one in module.head.parameters()])]


def test_products_give_the_same_bits_as_with_frozen_weights_in_float32() -> None:  # D-01
    assert trained(half=True) == trained(half=False)
