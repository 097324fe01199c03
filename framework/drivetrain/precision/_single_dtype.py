"""SingleDtypePrecision: the common base of precisions that use one dtype throughout."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.nn import Module

from drivetrain._runtime.transfer import cast_floating
from drivetrain.precision._default_dtype import DefaultDtype
from drivetrain.precision.precision import Precision

T = TypeVar("T")


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
