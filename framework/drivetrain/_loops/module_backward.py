"""Runs the backward of a loss through a module's override of ``TrainModule.backward``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from drivetrain.errors import ConfigurationError
from drivetrain.strategies.strategy import Strategy

if TYPE_CHECKING:
    from drivetrain.module.train_module import TrainModule


class ModuleBackward:
    """Runs ``strategy.backward`` with the module's ``backward`` in place of ``loss.backward()``.

    The strategy and its precision still do what they do around the backward, such as scaling the loss.

    Args:
        module: the module, which overrides ``backward``.
        strategy: the strategy that runs the module.
    """

    def __init__(self, module: TrainModule, strategy: Strategy) -> None:
        self._module = module
        self._strategy = strategy
        self._was_called = False

    def __call__(self, loss: Tensor) -> None:
        """Run backward.

        Raises:
            ConfigurationError: the strategy or the precision did not call ``Precision.run_backward``.
        """
        precision = self._strategy.precision
        self._was_called = False
        precision.run_backward = self._run
        try:
            self._strategy.backward(loss)
        finally:
            del precision.run_backward
        if not self._was_called:
            raise self._not_called()

    def _run(self, loss: Tensor) -> None:
        self._was_called = True
        self._module.backward(loss)

    def _not_called(self) -> ConfigurationError:
        module, strategy = type(self._module).__name__, type(self._strategy).__name__
        return ConfigurationError(
            f"{module}.backward was not called under {strategy} with precision {self._strategy.precision.name!r}.",
            "the strategy or the precision runs the backward itself, as DeepSpeed does.",
            "write on_before_backward(self, loss) or on_after_backward(self), which are called under every strategy, "
            "or use another strategy; a precision of your own calls self.run_backward(loss) in its backward.",
        )
