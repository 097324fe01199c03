"""Gradients are cleared by an overridden zero_grad, or without the overhead of torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import fit, loader
from small_modules import tiny
from torch import nn
from torch.optim import SGD


class Clearing(SGD):
    """Clears gradients in place, so that references to them stay valid."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none=False)


def set_on_the_instance(parameters: Any, lr: float) -> Any:
    held = list(parameters)
    optimizer, clearing = SGD(held, lr), Clearing(held, lr)
    optimizer.zero_grad = clearing.zero_grad  # type: ignore[method-assign]
    optimizer.clearing = clearing  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize("make", [Clearing, set_on_the_instance])
def test_an_overridden_zero_grad_is_called_once_per_window(tmp_path: Path, make: Any) -> None:
    runner = fit(tmp_path, max_steps=3, accumulate_grad_batches=2)
    runner.fit(tiny(configure_optimizers=lambda self: make(self.parameters(), 0.1)), loader(12))
    optimizer: Any = runner.optimizers[0]
    assert getattr(optimizer, "clearing", optimizer).cleared == 3


def test_gradients_of_every_group_are_freed_before_the_next_forward(tmp_path: Path) -> None:
    """The memory of old gradients is free for the forward's activations."""
    seen: list[bool] = []

    def configure_optimizers(self: Any) -> Any:
        optimizer = SGD([self.layer.weight], lr=0.1)
        optimizer.add_param_group({"params": [self.layer.bias, self.unused]})
        return optimizer

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.extend(one.grad is None for one in (self.layer.weight, self.layer.bias))
        seen.append(self.frozen.grad is not None)  # it is in no optimizer
        return self.layer(batch).mean()

    module: Any = tiny(configure_optimizers=configure_optimizers, training_step=step)
    module.unused, module.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    module.frozen.grad = torch.ones(2)
    fit(tmp_path, max_steps=3).fit(module, loader())
    assert seen == [True] * 9
