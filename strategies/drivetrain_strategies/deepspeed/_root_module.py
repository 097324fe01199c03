"""Root: the module that DeepSpeed's engine wraps. Its forward runs a step and exposes only the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Root(nn.Module):
    """Runs the call that is passed to ``forward``.

    DeepSpeed's hooks traverse inputs and outputs, replace tensors, and fail for types that they do not know (a float, a
    dataclass, None). The hooks of this module see only a call, the loss and an `OpaqueOutput`.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[[], Any]) -> tuple[Any, ...]:
        output = call()
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            return loss, OpaqueOutput(output)
        return (OpaqueOutput(output),)


class OpaqueOutput:
    """Holds a step's output, so that DeepSpeed's hooks do not traverse the output."""

    def __init__(self, output: Any) -> None:
        self.output = output


def unwrap_output(returned: tuple[Any, ...]) -> Any:
    """Return the step's output, with the loss that DeepSpeed's hooks returned."""
    *losses, opaque = returned
    if not losses:
        return opaque.output
    if isinstance(opaque.output, dict):
        opaque.output["loss"] = losses[0]
        return opaque.output
    return losses[0]
