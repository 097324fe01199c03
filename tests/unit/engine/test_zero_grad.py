"""Gradients are cleared by an overridden zero_grad, or without the overhead of torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_case import Bare, fit, loader
from torch import Tensor, nn
from torch.optim import SGD

from drivetrain._loops.zero_grad import zero_grad


class Keeping(SGD):
    """Clears gradients in place, so that references to them stay valid."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none=False)


def test_an_overridden_zero_grad_is_called_once_per_window(tmp_path: Path) -> None:
    class Kept(Bare):
        def configure_optimizers(self) -> Any:
            return Keeping(self.parameters(), lr=0.1)

    runner = fit(tmp_path, max_steps=3, accumulate_grad_batches=2)
    runner.fit(Kept(), loader(12))
    (optimizer,) = runner.optimizers
    assert isinstance(optimizer, Keeping)
    assert optimizer.cleared == 3


def test_a_zero_grad_set_on_the_instance_is_called(tmp_path: Path) -> None:
    cleared: list[int] = []

    class Patched(Bare):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            torchs = optimizer.zero_grad
            optimizer.zero_grad = lambda *given: (cleared.append(1), torchs(*given))[1]  # type: ignore[method-assign, func-returns-value]
            return optimizer

    fit(tmp_path, max_steps=3).fit(Patched(), loader())
    assert len(cleared) == 3


def test_torchs_zero_grad_applies_to_every_group() -> None:
    first, later, foreign, unused = (nn.Parameter(torch.ones(2)) for _ in range(4))
    optimizer = SGD([first, unused], lr=0.1)
    optimizer.add_param_group({"params": [later]})
    for parameter in (first, later, foreign):
        parameter.grad = torch.ones(2)
    zero_grad(optimizer)
    assert [parameter.grad is None for parameter in (first, later, foreign, unused)] == [True, True, False, True]


def test_gradients_are_freed_before_the_next_forward(tmp_path: Path) -> None:
    """The memory of old gradients is free for the forward's activations."""
    seen: list[list[Tensor | None]] = []

    class Looking(Bare):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append([parameter.grad for parameter in self.parameters()])
            return self.layer(batch).mean()

    fit(tmp_path, max_steps=3).fit(Looking(), loader())
    assert all(gradient is None for gradients in seen for gradient in gradients)
    assert len(seen) == 3
