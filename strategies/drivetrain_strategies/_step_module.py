"""StepModule: the module that a strategy wraps. The forward of StepModule runs a step of the user's module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class OpaqueOutput:
    """Carries a step's output through a wrapper, so that the wrapper does not see the tensors in the output."""

    __slots__ = ("output",)

    def __init__(self, output: Any) -> None:
        self.output = output


class StepModule(nn.Module):
    """Runs the step that is passed to ``forward``, so that gradients synchronize for every kind of step.

    If the step returns a dict, forward returns the loss and an `OpaqueOutput` of the dict. A wrapper such as DDP finds
    the used parameters from the tensors in the output. In a subclass of dict (a Hugging Face ``ModelOutput``), DDP
    would find no tensors, and the replicas would silently diverge. Backward starts at the loss, so parameters that only
    other outputs use count as unused.

    Args:
        module: the user's module.
        hides_values: whether to return other outputs in an `OpaqueOutput` too. DeepSpeed's hooks traverse them, and
            fail for types that they do not know (a float, a dataclass, None).
    """

    def __init__(self, module: nn.Module, hides_values: bool = False) -> None:
        super().__init__()
        self.module = module
        self.trainable_names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._hides_values = hides_values

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        output = step(*args)
        if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
            return output["loss"], OpaqueOutput(output)
        return (OpaqueOutput(output),) if self._hides_values and not isinstance(output, torch.Tensor) else output


def unwrap_step_output(output: Any) -> Any:
    """Return the step's output from the output of the wrapper around `StepModule`."""
    if type(output) is not tuple or not output or type(output[-1]) is not OpaqueOutput:
        return output
    *losses, opaque = output
    if losses and opaque.output["loss"] is not losses[0]:  # the wrapper added an autograd node
        opaque.output["loss"] = losses[0]
    return opaque.output
