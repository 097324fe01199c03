"""Strategies of a third party: written with public names alone, they must pass what ours must (K-01)."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from drivetrain.strategies import DistributedStrategy, StepRunner


class Averaging(DistributedStrategy):
    """Whole replicas. What must be written, and nothing else."""

    name = "averaging"

    def setup_module(self, module: nn.Module) -> StepRunner:
        self.module = self.precision.convert_module(module)
        self.module.to(self.device)
        return operator.call


class AveragingInContext(Averaging):
    """Exchanges gradients by itself, as a window's last micro-batch ends."""

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
        """It is done when the context is left."""
