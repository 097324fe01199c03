"""Precisions that use one dtype throughout: 64-true, bf16-true and 16-true."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.nn import Module

from drivetrain._runtime.transfer import cast_floating
from drivetrain.errors import ConfigurationError, nearest
from drivetrain.precision.precision import Precision

T = TypeVar("T")

_HALF_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


class SingleDtypePrecision(Precision):
    """Uses one floating-point dtype for parameters, buffers, batches and new tensors."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.param_dtype = self.compute_dtype = self.reduce_dtype = self.output_dtype = dtype

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new floating-point tensors have this dtype."""
        return DefaultDtype(self.param_dtype)

    def convert_module(self, module: Module) -> Module:
        """Cast floating-point parameters and buffers in place. Integer and complex tensors keep their dtype."""
        dtype = self.param_dtype
        # ``module.to(dtype)`` would drop the imaginary part of complex parameters.
        module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)  # type: ignore[no-untyped-call]
        return module

    def convert_batch(self, batch: T) -> T:
        """Cast the floating-point tensors of a nested ``batch``. Everything else is unchanged."""
        converted: T = cast_floating(batch, self.compute_dtype)
        return converted

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors that the forward pass creates have this dtype."""
        return DefaultDtype(self.compute_dtype)


class DoublePrecision(SingleDtypePrecision):
    """``"64-true"``: parameters, batches and computation in float64."""

    def __init__(self) -> None:
        super().__init__("64-true", torch.float64)


class HalfPrecision(SingleDtypePrecision):
    """Keeps parameters, gradients and computation in half precision, without float32 master weights.

    Half precision takes half the memory of float32. Updates smaller than a half-precision rounding step are lost, so
    mixed precision is the safer choice for training. The loss is not scaled.

    Args:
        precision: ``"bf16-true"`` or ``"16-true"``.

    Raises:
        ConfigurationError: the name is unknown.
    """

    def __init__(self, precision: str = "bf16-true") -> None:
        if precision not in _HALF_DTYPES:
            raise ConfigurationError(
                f"HalfPrecision({precision!r}) does not exist.{nearest(str(precision), _HALF_DTYPES)}",
                fix="Use 'bf16-true' or '16-true'.",
            )
        super().__init__(precision, _HALF_DTYPES[precision])


class DefaultDtype:
    """Sets torch's default dtype within the context and restores it on exit."""

    __slots__ = ("_dtype", "_previous")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._previous = dtype

    def __enter__(self) -> None:
        self._previous = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self._previous)
