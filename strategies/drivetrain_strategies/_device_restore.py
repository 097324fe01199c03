"""Moves a module back to its original device after a run."""

from __future__ import annotations

import torch
from torch import nn


class OriginalDevice:
    """Records a module's device, to move the module back to this device after a run.

    A module with tensors on several devices, or with none, is not moved.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        devices = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
        self._device = devices.pop() if len(devices) == 1 else None

    def restore(self) -> None:
        """Move the module back to the recorded device, but for parameters that the run has left on the meta device."""
        device = self._device
        if device is not None and device != torch.device("meta"):
            self._module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
