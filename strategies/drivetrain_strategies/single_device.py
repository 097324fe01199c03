"""SingleDeviceStrategy: one process, one device. Other strategies also put the module on a device, and back."""

from __future__ import annotations

import operator
from contextlib import ExitStack
from typing import ClassVar

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.precision import Precision
from drivetrain.strategies import StepRunner, Strategy
from drivetrain_strategies._module_checks import refuse_device_map


class SingleDeviceStrategy(Strategy):
    """Trains in this process, on the CPU, one CUDA device or MPS.

    Args:
        device: the device to train on; None uses ``accelerator`` and ``devices`` of ``Fit``.
    """

    name: ClassVar[str] = "single_device"
    single_process: ClassVar[bool] = True

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        super().__init__()
        self._requested_device = None if device is None else torch.device(device)
        self._undo = ExitStack()

    def bind(
        self, placement: Placement, device: torch.device, precision: Precision, store: Store | None = None
    ) -> None:
        if placement.world_size != 1:
            raise ConfigurationError(
                f"strategy='single_device' cannot run on {placement.world_size} processes.",
                "every process would train a separate model.",
                "use strategy='ddp', or start one process.",
            )
        super().bind(placement, self._requested_device or device, precision)

    def check(self, module: nn.Module) -> None:
        refuse_device_map(module)

    def setup_module(self, module: nn.Module) -> StepRunner:
        self.module = module
        self._undo.callback(OriginalDevice(module).restore)
        self.precision.convert_module(module)
        module.to(self.device)
        return operator.call

    def teardown(self) -> None:
        self._undo.close()
        super().teardown()


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
