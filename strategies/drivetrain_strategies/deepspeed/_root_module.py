"""The module that DeepSpeed's engine wraps: its forward is a step, and nothing but the loss is seen to go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class Root(nn.Module):
    """Its forward is whatever call it is handed.

    DeepSpeed's hooks walk through what goes in and comes out, replace tensors, and fail on what they do not know: a
    float, a dataclass, nothing at all. They see a call, a loss, and a box.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    # By the names of the user's module: DeepSpeed's own checkpoints and their tools go by them.

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **options)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*args, **options)

    def forward(self, call: Callable[[], Any]) -> tuple[Any, ...]:
        output = call()
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            return loss, Box(output)
        return (Box(output),)


class Box:
    """Holds what a step returned."""

    def __init__(self, output: Any) -> None:
        self.output = output


def unboxed(returned: tuple[Any, ...]) -> Any:
    """Return what the step returned, with the loss as it came through the hooks."""
    *losses, box = returned
    if not losses:
        return box.output
    if isinstance(box.output, dict):
        box.output["loss"] = losses[0]
        return box.output
    return losses[0]
