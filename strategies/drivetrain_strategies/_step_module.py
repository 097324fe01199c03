"""The module whose forward is a step: what a strategy wraps, so that every path through the user's module is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Rest:
    """The dict that a step returned, carried through a wrapper untouched: no tensor of it is visible to the wrapper."""

    __slots__ = ("output",)

    def __init__(self, output: dict[str, Any]) -> None:
        self.output = output


class StepModule(nn.Module):
    """Its forward is whatever step it is handed, so that every path through the module synchronises.

    Of a dict it returns the loss alone, and the rest beside it. A wrapper plans from the outputs that it finds, and in
    a dict of another class (a Hugging Face ``ModelOutput``) finds none: the ranks would part in silence. And what only
    another output uses is not used, since nothing but the loss has a backward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        output = step(*args)
        if isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
            return output["loss"], Rest(output)
        return output


def whole_output(output: Any) -> Any:
    """Return what the step returned, from what came out of the wrapper around `StepModule`."""
    if type(output) is tuple and len(output) == 2 and type(output[1]) is Rest:
        loss, rest = output
        if rest.output["loss"] is not loss:  # the wrapper put a node of its own behind it
            rest.output["loss"] = loss
        return rest.output
    return output
