"""Refuses a backward or an optimizer step by hand in a ``training_step`` with automatic optimization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch.nn import Module
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError

_FIX = (
    "only return the loss; or set self.automatic_optimization = False in __init__, and call self.manual_backward(loss) "
    "and step() of self.optimizers() in training_step."
)


def run_first_step(
    step: Callable[[Any, int], Any], module: Module, optimizers: Sequence[Optimizer], batch: Any, batch_idx: int
) -> Any:
    """Run ``step`` on a run's first micro-batch and return its output. Later micro-batches are not checked.

    Raises:
        ConfigurationError: ``step`` ran a backward or stepped an optimizer, which the engine does after it.
    """
    name = type(module).__name__
    before = _gradients(module)
    handles = [optimizer.register_step_pre_hook(refuse_step) for optimizer in optimizers]
    try:
        output = step(batch, batch_idx)
    finally:
        for handle in handles:
            handle.remove()
    if _gradients(module) != before:
        raise ConfigurationError(
            f"{name}.training_step ran a backward by hand.",
            "with automatic optimization the engine runs the backward of the returned loss, so gradients would be "
            "added twice.",
            _FIX,
        )
    return output


def refuse_step(optimizer: Optimizer, *_: Any) -> NoReturn:
    """Raise the error about a step by hand."""
    raise ConfigurationError(
        f"{type(optimizer).__name__}.step was called by hand, for example in training_step.",
        "with automatic optimization the engine steps the optimizers after the backward of the returned loss.",
        _FIX,
    )


def _gradients(module: Module) -> dict[str, tuple[int, int]]:
    """Return the identity and version of each gradient, by the parameter's name."""
    return {
        name: (id(parameter.grad), parameter.grad._version)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
