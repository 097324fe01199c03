"""Refuses a backward or an optimizer step by hand in a ``training_step`` with automatic optimization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from torch.nn import Module, Parameter
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
    parameters = _optimized_parameters(module, optimizers)
    before = _gradients(parameters)
    with ExitStack() as hooks:
        for optimizer in optimizers:
            # An optimizer that wraps another one may not have called Optimizer.__init__, and then has no hooks.
            with suppress(AttributeError):
                hooks.callback(optimizer.register_step_pre_hook(refuse_step).remove)
        output = step(batch, batch_idx)
    if _gradients(parameters) - before:
        raise ConfigurationError(
            f"{name}.training_step ran a backward by hand (or torch.autograd.grad, with sharded parameters).",
            "with automatic optimization the engine runs the backward of the returned loss, so gradients would be "
            "added twice; and of a sharded module torch can run only one backward per forward.",
            f"{_FIX} For a gradient of a gradient, use strategy='ddp'.",
        )
    return output


def refuse_step(optimizer: Optimizer, *_: Any) -> NoReturn:
    """Raise the error about a step by hand."""
    raise ConfigurationError(
        f"{type(optimizer).__name__}.step was called by hand, for example in training_step.",
        "with automatic optimization the engine steps the optimizers after the backward of the returned loss.",
        _FIX,
    )


def _optimized_parameters(module: Module, optimizers: Sequence[Optimizer]) -> list[Parameter]:
    """Return the module's parameters, without those that only an optimizer of the user's own may hold.

    An optimizer whose parameters are not the module's, as ZeRO's are, may step any parameter of the module.
    """
    parameters = list(module.parameters())
    held = {
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    }
    if not held <= set(map(id, parameters)):
        return parameters
    return [parameter for parameter in parameters if id(parameter) in held]


def _gradients(parameters: Sequence[Parameter]) -> set[tuple[int, int, int]]:
    """Return the parameter, identity and version of each gradient."""
    gradients = [(id(parameter), parameter.grad) for parameter in parameters]
    return {(owner, id(gradient), gradient._version) for owner, gradient in gradients if gradient is not None}
