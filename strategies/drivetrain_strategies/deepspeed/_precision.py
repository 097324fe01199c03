"""Translates a precision into DeepSpeed's equivalent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.precision import (
    LOSS_SCALE_FLOOR,
    FullPrecision,
    MixedPrecision,
    Precision,
)

_HALF_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class DeepSpeedPrecision(Precision):
    """A precision whose master weights, loss scale and skipped steps are managed by DeepSpeed.

    A mixed precision keeps parameters in half precision and float32 master weights, and runs the forward under
    autocast.

    Args:
        name: "32-true", "bf16-mixed" or "16-mixed".
        device: the device that the run computes on.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.half_dtype = _HALF_DTYPES.get(name)
        """The dtype of the weights that the module computes with. None if the master weights have the same dtype."""
        self.loss_scaler: Any = None
        """DeepSpeed's loss scaler. None outside a run, and in a run without loss scaling."""
        self._device_type = device.type
        self.has_forward_context = self.half_dtype is not None
        if self.half_dtype is not None:
            self.compute_dtype = self.output_dtype = self.half_dtype

    @classmethod
    def equivalent_to(cls, precision: Precision, device: torch.device) -> Self:
        """Return DeepSpeed's equivalent of ``precision``.

        Raises:
            ConfigurationError: DeepSpeed has no equivalent.
        """
        if type(precision) not in (Precision, FullPrecision, MixedPrecision):
            raise ConfigurationError(
                f"precision={precision.name!r}, a {type(precision).__name__}, under DeepSpeed.",
                "DeepSpeed's engine manages float32 master weights, loss scale and steps, and would not call this "
                "precision's methods.",
                "use '32-true', 'bf16-mixed' or '16-mixed', or another strategy, such as 'fsdp'.",
            )
        return cls(precision.name, device)

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.half_dtype is None else torch.autocast(self._device_type, self.half_dtype)

    def outside_forward(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.half_dtype is None else torch.autocast(self._device_type, enabled=False)

    def take_scaler(self, loss_scaler: Any, sets_minimum_scale: bool) -> None:
        """Store DeepSpeed's loss scaler for the run.

        Args:
            loss_scaler: the scaler, with a fixed or a dynamic scale.
            sets_minimum_scale: whether the user's config sets the minimum scale, at which DeepSpeed raises an error.
                If False, the minimum is `LOSS_SCALE_FLOOR`, at which a run continues, as under other strategies.
        """
        self.loss_scaler = loss_scaler
        if loss_scaler.dynamic and not sets_minimum_scale:
            loss_scaler.min_scale = LOSS_SCALE_FLOOR
            loss_scaler.raise_error_at_min_scale = False

    def note_skipped_step(self) -> None:
        """Call `on_minimum_scale` if an overflow has reduced the loss scale to its minimum."""
        scaler = self.loss_scaler
        if (
            scaler is not None
            and scaler.dynamic
            and scaler.cur_scale <= scaler.min_scale
            and self.on_minimum_scale is not None
        ):
            self.on_minimum_scale(float(scaler.cur_scale))

    def memory_advice(self) -> Sequence[str]:
        """Return no advice for a mixed precision, since DeepSpeed supports none that needs less memory."""
        return [] if self.half_dtype is not None else super().memory_advice()

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale under the names of torch's `GradScaler`."""
        if self.name != "16-mixed" or self.loss_scaler is None:
            return {}
        return {
            "scale": float(self.loss_scaler.cur_scale),
            "_growth_tracker": self.loss_scaler.cur_iter - self.loss_scaler.last_overflow_iter - 1,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.name == "16-mixed" and self.loss_scaler is not None and state_dict:
            self.loss_scaler.cur_scale = float(state_dict["scale"])
            self.loss_scaler.last_overflow_iter = self.loss_scaler.cur_iter - 1 - int(state_dict["_growth_tracker"])


def check_fp16(device: torch.device) -> None:
    """Refuse fp16 if DeepSpeed reports that the device does not support it.

    Raises:
        ConfigurationError: names the device.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    accelerator = CPU_Accelerator() if device.type == "cpu" else get_accelerator()
    if not accelerator.is_fp16_supported():
        raise ConfigurationError(
            f"precision='16-mixed' under DeepSpeed on {accelerator.device_name()!r}.",
            "DeepSpeed keeps parameters in fp16, which this device does not support.",
            "use precision='bf16-mixed' or '32-true', or strategy='ddp', whose parameters stay in float32.",
        )
