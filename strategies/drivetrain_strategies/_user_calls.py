"""Looks at calls of torch's functions by user code: who calls, with which tensors, and on what the results depend."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import ConfigurationError

_LIBRARIES = ("deepspeed.", "drivetrain.", "drivetrain_strategies.", "torch.distributed.fsdp.")


def is_called_by_library() -> bool:
    """Return whether drivetrain, DeepSpeed or FSDP called the function that a `TorchFunctionMode` intercepts.

    Call it in ``__torch_function__``. Frames of torch itself are skipped, so a step of torch's optimizers counts as a
    call of the engine that steps them.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_LIBRARIES) or not name.startswith("torch."):
            return bool(name.startswith(_LIBRARIES))
        frame = frame.f_back
    return False


def writes_in_place(func: Any) -> bool:
    """Return whether a function of torch writes its first argument."""
    name = getattr(func, "__name__", "")
    if name in ("requires_grad_", "detach_"):
        return False
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def tensors_in(values: Any) -> Iterator[Any]:
    """Yield the tensors among arguments of a function of torch, and those in lists of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, torch.Tensor))


def refuse_gradients_through(outputs: Tensor | Sequence[Tensor], names: Mapping[int, str], strategy: str) -> None:
    """Refuse ``torch.autograd.grad`` of values that depend on sharded parameters.

    Args:
        outputs: the values to differentiate.
        names: names of the sharded parameters, by the ``id`` of the tensor that the step computes with.
        strategy: the strategy's name in the error.

    Raises:
        ConfigurationError: names a parameter on which ``outputs`` depend.
    """
    reached = leaves_reached([outputs] if isinstance(outputs, Tensor) else outputs)
    name = next((name for key, name in names.items() if key in reached), None)
    if name is not None:
        raise ConfigurationError(
            f"torch.autograd.grad was called under {strategy} on values that depend on {name!r}.",
            "the parameter is sharded, and it is gathered for one backward only, that of the returned loss.",
            "use strategy='ddp' or strategy='deepspeed_stage_2', under which every rank has whole parameters.",
        )


def leaves_reached(outputs: Sequence[Tensor]) -> set[int]:
    """Return the ids of the tensors that get a gradient in a backward from ``outputs``."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    pending: list[Any] = [output.grad_fn for output in outputs]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves.add(id(getattr(node, "variable", None)))
        pending += [following for following, _ in node.next_functions]
    return leaves
