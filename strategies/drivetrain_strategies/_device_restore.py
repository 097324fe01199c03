"""Restores a module's device after a run."""

from __future__ import annotations

import torch
from torch import nn


class OriginalDevice:
    """Remembers a module's device and moves the module back to it after a run.

    A module with tensors on several devices, or with none, is not moved.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        devices = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
        self._device = devices.pop() if len(devices) == 1 else None

    def restore(self) -> None:
        """Move the module back."""
        if self._device is not None and self._device != torch.device("meta"):
            self._module.to(self._device)
