"""Runs the backward of a loss through a module's override of ``TrainModule.backward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule


def backward_by_module(module: TrainModule, strategy: Strategy) -> Callable[[Tensor], None]:
    """Return a function that runs ``strategy.backward`` with the module's ``backward`` in place of ``loss.backward()``.

    The strategy and its precision still do what they do around the backward, such as scaling the loss. The function
    raises a `ConfigurationError` if they did not call ``Precision.run_backward``.

    Args:
        module: the module, which overrides ``backward``.
        strategy: the strategy that runs the module.
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
