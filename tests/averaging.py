"""Third-party strategies that use only public names and must pass the same tests as the built-in ones (K-01)."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from drivetrain.strategies import DistributedStrategy, StepRunner


class Averaging(DistributedStrategy):
    """Replicates whole modules, with only the required method overridden."""

    name = "averaging"

    def setup_module(self, module: nn.Module) -> StepRunner:
        self.module = self.precision.convert_module(module)
        self.module.to(self.device)
        return operator.call


class AveragingInContext(Averaging):
    """Exchanges gradients itself, at the end of a window's last micro-batch."""

    name = "averaging_in_context"

    @contextmanager
    def gradient_sync(self, enabled: bool) -> Iterator[None]:
        yield
        if enabled:
            for parameter in self.named_parameters().values():
                if parameter.requires_grad:
                    own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = self.reduce(own, "mean")

    def exchange_gradients(self) -> None:
        """Do nothing: gradients were exchanged when the context was left."""
