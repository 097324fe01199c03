"""MixedPrecision: autocast over float32 parameters, with loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.precision._clipping import clip_gradients
from drivetrain.precision._loss_scaler import LossScaler
from drivetrain.precision.precision import Precision

_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class MixedPrecision(Precision):
    """Computes matrix products in half precision under autocast. Parameters, gradients and updates are in float32.

    With ``"16-mixed"`` the loss is multiplied by a loss scale before the backward pass, so that small gradients do not
    underflow in fp16. After an overflow the step is skipped for all optimizers, since an overflow in one optimizer's
    gradients makes the clipped gradients of the others meaningless.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: the device of the run, or the device's type.
        scaler: your own scaler for ``"16-mixed"``. None creates a ``torch.amp.GradScaler(device)``.

    Raises:
        ConfigurationError: the name is unknown, or ``"bf16-mixed"`` got a scaler.
    """

    def __init__(
        self,
        precision: str = "bf16-mixed",
        device: str | torch.device = "cuda",
        scaler: GradScaler | None = None,
    ) -> None:
        if precision not in _DTYPES:
            raise ConfigurationError(
                f"MixedPrecision({precision!r}) does not exist.{nearest(str(precision), _DTYPES)}",
                fix="Use 'bf16-mixed' or '16-mixed'.",
            )
        self.name = precision
        self.device_type = torch.device(device).type
        self.compute_dtype = self.output_dtype = _DTYPES[precision]
        self.scales_loss = precision == "16-mixed"
        self.unscales_while_clipping = self.scales_loss and type(self).clip_gradients is MixedPrecision.clip_gradients
        if scaler is not None and not self.scales_loss:
            raise ConfigurationError(
                f"MixedPrecision({precision!r}) got a scaler.",
                "bfloat16 has the range of float32, so the loss needs no scaling.",
                "Leave the scaler out, or use '16-mixed'.",
            )
        self._user_scaler = scaler
        self._scaler: LossScaler | None = None

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler that ``"16-mixed"`` uses. None with ``"bf16-mixed"``."""
        return (self._scaler or self._build()).scaler if self.scales_loss else None

    def check_device(self, device: torch.device) -> None:
        """Refuse a device of another type than autocast was set up for.

        Raises:
            ConfigurationError: the run cannot use autocast on ``device``.
        """
        if device.type != self.device_type:
            raise ConfigurationError(
                f"{self!r} is for device type {self.device_type!r}, but the run is on {device}.",
                "Autocast would leave every operation of this run in float32.",
                f"Construct the precision with device={device.type!r}, or pass precision={self.name!r} as a string.",
            )

    def convert_module(self, module: Module) -> Module:
        """Convert trainable half-precision parameters to float32. Frozen parameters keep their dtype."""
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a new autocast context."""
        return torch.autocast(self.device_type, self.compute_dtype)

    def outside_forward(self) -> AbstractContextManager[Any]:
        """Return a context without autocast, since autocast would cast the products of a backward pass too."""
        return torch.autocast(self.device_type, enabled=False)

    def weights_changed(self) -> None:
        """Clear the cache of cast weights, which autocast keeps until its context ends."""
        torch.clear_autocast_cache()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss of shape (). With ``"16-mixed"``, the gradients are scaled."""
        if self.scales_loss:
            scaler = self._scaler or self._build()
            if scaler.unscaled:  # in manual optimization, gradients of an earlier backward may remain
                scaler.scale_again()
            loss = scaler.scaler.scale(loss)
        self.run_backward(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, once per backward, and check them for overflow."""
        if self.scales_loss:
            (self._scaler or self._build()).unscale(optimizer)

    def clip_gradients(
        self, optimizers: Optimizer | Iterable[Optimizer], max_norm: float, algorithm: str = "norm"
    ) -> Tensor:
        """Clip as `Precision.clip_gradients` does. Scaled gradients are unscaled, in the same pass for ``"norm"``."""
        optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
        if self.scales_loss:
            scaler = self._scaler or self._build()
            if algorithm == "norm":
                return scaler.clip(optimizers, max_norm)
            for optimizer in optimizers:
                scaler.unscale(optimizer)
        return clip_gradients(optimizers, max_norm, algorithm)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step ``optimizer`` unless its gradients, or gradients unscaled together with them, overflowed.

        Raises:
            ConfigurationError: ``"16-mixed"`` got a closure. Each evaluation of the closure would need a separate
                overflow check.
        """
        if not self.scales_loss:
            optimizer.step(closure)
            return True
        if closure is not None:
            raise ConfigurationError(
                f"{type(optimizer).__name__} steps with a closure, which precision='16-mixed' does not support.",
                "The closure's gradients are scaled, and each evaluation may overflow.",
                "Use precision='bf16-mixed' or '32-true'. Or, if the optimizer calls the closure only once, before the "
                "update, call the closure yourself, and step without a closure.",
            )
        return (self._scaler or self._build()).step(optimizer, self.found_inf_reducer)

    def keep_pending_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Note which gradients are still scaled. The next `update` rescales them by the change of the loss scale."""
        if self.scales_loss:
            (self._scaler or self._build()).note_scaled(optimizers)

    def update(self) -> None:
        """Halve the loss scale after an overflow, down to 2^-24, and raise the scale after many steps without one."""
        if self.scales_loss:
            (self._scaler or self._build()).update(self.on_minimum_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and the number of steps since it last changed."""
        return (self._scaler or self._build()).scaler.state_dict() if self.scales_loss else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the loss scale. An empty state, as from a checkpoint of another precision, changes nothing."""
        if self.scales_loss and state_dict:
            scaler = (self._scaler or self._build()).scaler
            # The state of DeepSpeed's scaler has the scale but not the growth settings.
            scaler.load_state_dict({**scaler.state_dict(), **state_dict})

    def _build(self) -> LossScaler:
        # The scaler is built at first use, because a scaler for CUDA queries the driver, and constructing settings must
        # not query the driver.
        self._scaler = LossScaler(self._user_scaler or GradScaler(self.device_type))
        return self._scaler
