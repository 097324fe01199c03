"""Which arguments a step takes: ``batch``, and where it has them ``batch_idx`` and ``dataloader_idx``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from drivetrain.errors import ConfigurationError


class StepArguments:
    """Builds the arguments of a step, whose signature is read once.

    Args:
        step: the bound step.
        several: there are several loaders, so ``dataloader_idx`` is passed where the step takes it.

    Raises:
        ConfigurationError: the step takes other arguments than these.
    """

    def __init__(self, step: Callable[..., Any], several: bool = False) -> None:
        parameters = inspect.signature(step).parameters
        positional = [
            parameter
            for parameter in parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        anything = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
        required = [parameter.name for parameter in positional if parameter.default is parameter.empty]
        count = 3 if anything else min(len(positional), 3)
        name = getattr(step, "__qualname__", repr(step))
        if count == 0 or len(required) > 3:
            raise ConfigurationError(
                f"{name}({', '.join(parameters)}) cannot be called with a batch.",
                "a step is called with (batch, batch_idx), and dataloader_idx where there are several loaders.",
                f"write def {name.rpartition('.')[2]}(self, batch, batch_idx).",
            )
        if "dataloader_iter" in parameters:
            raise ConfigurationError(
                f"{name}({', '.join(parameters)}) asks for the loader's iterator.",
                "a step is called with a batch: the engine deals data to ranks and counts what it has read.",
                f"write def {name.rpartition('.')[2]}(self, batch, batch_idx).",
            )
        # batch_idx may be left out, and what stands in its place is then told by its name.
        skips = count == 2 and positional[1].name == "dataloader_idx"
        if several and count < 3 and not skips:
            raise ConfigurationError(
                f"{name} takes no dataloader_idx, and there are several loaders.",
                "it could not tell their batches apart.",
                f"write def {name.rpartition('.')[2]}(self, batch, batch_idx, dataloader_idx=0).",
            )
        self.takes_batch_idx = count >= 2 and not skips
        self.takes_dataloader_idx = len(required) == 3 or skips
        self._skips = skips
        self._count = count if several or len(required) == 3 else min(count, 2)

    def given_to(self, call: Callable[..., Any]) -> Callable[[Any, int], Any]:
        """``call`` as a function of batch and index, with those of them that the step takes."""
        if self._count == 1:
            return lambda batch, batch_idx: call(batch)
        return lambda batch, batch_idx: call(*self(batch, batch_idx))

    def __call__(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[Any, ...]:
        if self._skips:
            return (batch, dataloader_idx)
        return (batch, batch_idx, dataloader_idx)[: self._count]
