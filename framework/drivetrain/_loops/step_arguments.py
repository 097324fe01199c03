"""The module whose steps run, and the arguments that a step takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies.strategy import StepRunner, Strategy


@dataclass(frozen=True, slots=True)
class WrappedModule:
    """A module as its strategy runs it.

    Attributes:
        module: the user's module.
        runner: the function that `Strategy.setup_module` returned, which calls a step of the module.
        strategy: the strategy that runs the module.
    """

    module: TrainModule
    runner: StepRunner
    strategy: Strategy


class StepArguments:
    """Builds the arguments of a step: ``batch``, and ``batch_idx`` and ``dataloader_idx`` if the step takes them.

    Args:
        step: the bound step, whose signature is read once.
        several: whether there are several loaders, so that ``dataloader_idx`` is passed if the step takes it.

    Raises:
        ConfigurationError: the step cannot be called with these arguments.
    """

    def __init__(self, step: Callable[..., Any], several: bool = False) -> None:
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
        if count == 0 or len(required) > 3:
            raise ConfigurationError(
                f"{name}({', '.join(parameters)}) cannot be called with a batch.",
                "a step is called with (batch, batch_idx), and dataloader_idx if there are several loaders.",
                f"write def {name.rpartition('.')[2]}(self, batch, batch_idx).",
            )
        if "dataloader_iter" in parameters:
            raise ConfigurationError(
                f"{name}({', '.join(parameters)}) takes the loader's iterator.",
                "a step is called with a batch: the engine distributes data over ranks and counts what it has read.",
                f"write def {name.rpartition('.')[2]}(self, batch, batch_idx).",
            )
        # A step may take no batch_idx. The name of the second parameter then shows that it is dataloader_idx.
        skips_batch_idx = count == 2 and positional[1].name == "dataloader_idx"
        if several and count < 3 and not skips_batch_idx:
            raise ConfigurationError(
                f"{name} takes no dataloader_idx, and there are several loaders.",
                "the step could not tell which loader a batch comes from.",
                f"write def {name.rpartition('.')[2]}(self, batch, batch_idx, dataloader_idx=0).",
            )
        self.takes_batch_idx = count >= 2 and not skips_batch_idx
        self.takes_dataloader_idx = len(required) == 3 or skips_batch_idx
        self._skips_batch_idx = skips_batch_idx
        self._count = count if several or len(required) == 3 else min(count, 2)

    def adapt(self, call: Callable[..., Any]) -> Callable[[Any, int], Any]:
        """Return a function of batch and batch index that passes to ``call`` only the arguments that the step takes."""
        if self._count == 1:
            return lambda batch, batch_idx: call(batch)
        return lambda batch, batch_idx: call(*self(batch, batch_idx))

    def __call__(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[Any, ...]:
        if self._skips_batch_idx:
            return (batch, dataloader_idx)
        return (batch, batch_idx, dataloader_idx)[: self._count]
