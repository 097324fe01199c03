"""The calls of a training step: of the module's steps, of backward and of an optimizer's step, as direct as possible.

They are resolved once, before the loop, so that a step calls no method that only forwards.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from drivetrain._loops.hooks import is_overridden
from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.precision import Precision
from drivetrain.strategies.strategy import StepRunner, Strategy


def bind_step(runner: StepRunner, step: Callable[..., Any], several: bool = False) -> Callable[..., Any]:
    """Return a function that calls a step of the module through ``runner``, with the arguments that the step takes.

    The function itself takes ``(batch, batch_idx)``, or with several loaders ``(batch, batch_idx, dataloader_idx)``.

    Args:
        runner: the function that `Strategy.setup_module` returned. It is omitted if it only calls the step.
        step: the bound step, whose signature is read once.
        several: whether there are several loaders.

    Raises:
        ConfigurationError: the step cannot be called with these arguments.
    """
    parameters = inspect.signature(step).parameters
    positional = [
        parameter
        for parameter in parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes_varargs = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    required = [parameter.name for parameter in positional if parameter.default is parameter.empty]
    count = 3 if takes_varargs else min(len(positional), 3)
    name = getattr(step, "__qualname__", repr(step))
    # A step may take no batch_idx. The name of the second parameter then shows that it is dataloader_idx.
    skips_batch_idx = count == 2 and positional[1].name == "dataloader_idx"
    lacks_loader = several and count < 3 and not skips_batch_idx
    if count == 0 or len(required) > 3 or lacks_loader or "dataloader_iter" in parameters:
        index = ", dataloader_idx=0" if several else ""
        raise ConfigurationError(
            f"{name}({', '.join(parameters)}) cannot be called with a batch{' of several loaders' if several else ''}.",
            "a step is called with (batch, batch_idx), and dataloader_idx if there are several loaders.",
            f"write def {name.rpartition('.')[2]}(self, batch, batch_idx{index}).",
        )
    call = step if runner is operator.call else partial(runner, step)
    if skips_batch_idx:
        return lambda batch, batch_idx, dataloader_idx=0: call(batch, dataloader_idx)
    if count == 1:
        return lambda batch, batch_idx: call(batch)
    if len(required) == 3 and not several:
        return lambda batch, batch_idx: call(batch, batch_idx, 0)
    return call


def resolve_backward(module: TrainModule, strategy: Strategy) -> Callable[[Tensor], object]:
    """Return the function that runs the backward of a loss under ``strategy``."""
    if is_overridden("backward", module, TrainModule):
        return _backward_by_module(module, strategy)
    if is_overridden("backward", strategy, Strategy):
        return strategy.backward
    if is_overridden("backward", strategy.precision, Precision):
        return strategy.precision.backward
    return Tensor.backward


def _backward_by_module(module: TrainModule, strategy: Strategy) -> Callable[[Tensor], None]:
    """Return a function that runs ``strategy.backward`` with the module's ``backward`` in place of ``loss.backward()``.

    The strategy and its precision still do what they do around the backward, such as scaling the loss. The function
    raises a `ConfigurationError` if they did not call ``Precision.run_backward``.
    """
    precision = strategy.precision

    def backward(loss: Tensor) -> None:
        was_called = False

        def run(loss: Tensor) -> None:
            nonlocal was_called
            was_called = True
            module.backward(loss)

        precision.run_backward = run
        try:
            strategy.backward(loss)
        finally:
            del precision.run_backward
        if not was_called:
            raise ConfigurationError(
                f"{type(module).__name__}.backward was not called under {type(strategy).__name__} with precision "
                f"{precision.name!r}.",
                "the strategy or the precision runs the backward itself, as DeepSpeed does.",
                "write on_before_backward(self, loss) or on_after_backward(self), which are called under every "
                "strategy, or use another strategy; a precision of your own calls self.run_backward(loss) in backward.",
            )

    return backward


def resolve_optimizer_step(strategy: Strategy) -> Callable[[Optimizer], bool] | None:
    """Return the function that steps an optimizer under ``strategy``; None if the step is ``optimizer.step()``."""
    if is_overridden("optimizer_step", strategy, Strategy):
        return strategy.optimizer_step
    return strategy.precision.step if is_overridden("step", strategy.precision, Precision) else None


def syncs_in_context(strategy: Strategy) -> bool:
    """Return whether the strategy synchronizes gradients in a context, rather than in backward or a wrapper."""
    return not isinstance(strategy.gradient_sync(True), nullcontext)


def suspends_forward(strategy: Strategy) -> bool:
    """Return whether a backward or a step within a forward has to suspend the precision's context of the forward."""
    return is_overridden("outside_forward", strategy.precision, Precision)
