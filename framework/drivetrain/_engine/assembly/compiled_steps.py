"""``Fit(compile=...)``: compiles the module's steps for a run and restores them afterwards."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain._run_state import RunState
from drivetrain.module.train_module import TrainModule

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class CompiledSteps:
    """Replaces a module's steps by compiled ones until `undo`.

    Args:
        module: the module.
        setting: ``Fit(compile=...)``: True, or options for `torch.compile`.
        state: the run's state, by which the steps log and make collective calls.
    """

    def __init__(self, module: TrainModule, setting: bool | dict[str, Any], state: RunState) -> None:
        self._attributes = module.__dict__
        self._replaced_attributes: dict[str, Any] = {}
        options = setting if isinstance(setting, dict) else {}
        # Logging writes to plain Python objects. If it were traced, dynamo would guard on every value in these objects.
        state.metrics.record = torch.compiler.disable(state.metrics.record)  # type: ignore[method-assign,no-untyped-call]
        # A call reads the stack and waits for other ranks, which dynamo cannot trace.
        state.all_gather = torch.compiler.disable(state.all_gather)  # type: ignore[no-untyped-call]
        for name in _STEPS:
            self._replaced_attributes[name] = self._attributes.get(name)
            self._attributes[name] = torch.compile(getattr(module, name), **options)

    def undo(self) -> None:
        """Restore the steps that the compiled ones replaced."""
        for name, attribute in self._replaced_attributes.items():
            self._attributes.pop(name)
            if attribute is not None:
                self._attributes[name] = attribute
        self._replaced_attributes = {}
