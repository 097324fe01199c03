"""CustomStep: the base class of replacements for an optimizer's ``step`` that cannot handle sharded parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class CustomStep(ABC):
    """Replaces an optimizer's ``step`` until `undo` is called.

    Args:
        optimizer: the optimizer whose step is replaced.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._optimizer: Any = optimizer
        self._instance_step = optimizer.__dict__.get("step")
        self._original_step: Callable[..., Any] = optimizer.step
        self._optimizer.__dict__["step"] = self.step

    def undo(self) -> None:
        """Restore the optimizer's original ``step``."""
        del self._optimizer.__dict__["step"]
        if self._instance_step is not None:
            self._optimizer.__dict__["step"] = self._instance_step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if there is one, and update the parameters. Return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    @abstractmethod
    def update(self) -> None:
        """Update the parameters with the current gradients."""
