"""How a precision's name becomes DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.precision import (
    LOSS_SCALE_FLOOR,
    DoublePrecision,
    FullPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from drivetrain.strategies import MemoryAdvice

_HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

_NAMED = (Precision, FullPrecision, DoublePrecision, MixedPrecision, HalfPrecision)
"""The classes of precisions for which there is, or might be, a mode of DeepSpeed's."""

_REFUSED = {
    "64-true": "its optimizers keep float32 masters",
    "bf16-true": "without float32 masters it needs an offloaded optimizer of its own, compiled for this machine",
    "16-true": "without float32 masters it needs an offloaded optimizer of its own, compiled for this machine",
}


class DeepSpeedPrecision(Precision):
    """A precision whose masters, loss scale and skipped steps are DeepSpeed's.

    Under a mixed one the parameters are in half precision, with float32 masters, and the forward runs in autocast.

    Args:
        name: "32-true", "bf16-mixed" or "16-mixed".
        device: where the run computes.

    Raises:
        ConfigurationError: DeepSpeed has no such mode.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name in _REFUSED:
            raise ConfigurationError(
                f"precision={name!r} under DeepSpeed.",
                f"{_REFUSED[name]}.",
                "use '32-true', 'bf16-mixed' or '16-mixed'.",
            )
        self.name = name
        self.half = _HALVES.get(name)
        """The dtype of the parameters that compute, where that is not the masters'."""
        self.loss_scaler: Any = None
        """DeepSpeed's loss scaler, while there is one."""
        self._device_type = device.type
        self.has_forward_context = self.half is not None
        if self.half is not None:
            self.compute_dtype = self.output_dtype = self.half

    @classmethod
    def standing_for(cls, precision: Precision, device: torch.device) -> Self:
        """Return what DeepSpeed has for ``precision``.

        Raises:
            ConfigurationError: it has nothing for it.
        """
        if type(precision) not in _NAMED:
            raise ConfigurationError(
                f"precision={precision.name!r}, a {type(precision).__name__}, under DeepSpeed.",
                "its engine keeps masters, loss scale and steps itself, and would leave out what this precision does.",
                "use '32-true', 'bf16-mixed' or '16-mixed', or another strategy, such as 'fsdp'.",
            )
        return cls(precision.name, device)

    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.half is None else torch.autocast(self._device_type, self.half)

    def outside_forward(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.half is None else torch.autocast(self._device_type, enabled=False)

    def take_scaler(self, loss_scaler: Any, keeps_floor: bool) -> None:
        """Take DeepSpeed's loss scaler for the run.

        Args:
            loss_scaler: the scaler, of a fixed or a dynamic scale.
            keeps_floor: the user's config names the smallest scale, at which DeepSpeed raises. Otherwise it is the one
                that every other strategy has, at which a run goes on.
        """
        self.loss_scaler = loss_scaler
        if loss_scaler.dynamic and not keeps_floor:
            loss_scaler.min_scale = LOSS_SCALE_FLOOR
            loss_scaler.raise_error_at_min_scale = False

    def note_skipped_step(self) -> None:
        """Say so where an overflow has brought the scale to its floor."""
        scaler = self.loss_scaler
        if scaler is not None and scaler.dynamic and scaler.cur_scale <= scaler.min_scale and self.at_floor is not None:
            self.at_floor(float(scaler.cur_scale))

    def memory_advice(self) -> Sequence[MemoryAdvice]:
        """Nothing beyond a mixed precision: those without float32 masters are refused."""
        return [] if self.half is not None else super().memory_advice()

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, by the names that torch's `GradScaler` uses."""
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
    """Refuse fp16 where the device has none, with DeepSpeed's own judgement.

    Raises:
        ConfigurationError: names the device.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    accelerator = CPU_Accelerator() if device.type == "cpu" else get_accelerator()
    if not accelerator.is_fp16_supported():
        raise ConfigurationError(
            f"precision='16-mixed' under DeepSpeed on {accelerator.device_name()!r}.",
            "its parameters are in fp16 there, for which this device has no kernels.",
            "use precision='bf16-mixed' or '32-true', or strategy='ddp', whose parameters stay in float32.",
        )
