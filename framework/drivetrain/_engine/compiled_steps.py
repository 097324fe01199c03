"""``Fit(compile=...)``: compiles the module's steps for a run and restores them afterwards."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain._engine.collective_calls import CollectiveCalls
from drivetrain._metrics import MetricStore
from drivetrain.module.train_module import TrainModule

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class CompiledSteps:
    """Replaces a module's steps by compiled ones until `undo`.

    Args:
        module: the module.
        setting: ``Fit(compile=...)``: True, or options for `torch.compile`.
        metrics: the store that the steps log to.
        calls: makes the collective calls of the steps.
    """

    def __init__(
        self, module: TrainModule, setting: bool | dict[str, Any], metrics: MetricStore, calls: CollectiveCalls
    ) -> None:
        self._attributes = module.__dict__
        self._replaced_attributes: dict[str, Any] = {}
        options = setting if isinstance(setting, dict) else {}
        # Logging writes to plain Python objects. If it were traced, dynamo would guard on every value in these objects.
        metrics.record = torch.compiler.disable(metrics.record)  # type: ignore[method-assign,no-untyped-call]
        # A call reads the stack and waits for other ranks, which dynamo cannot trace.
        calls.all_gather = torch.compiler.disable(calls.all_gather)  # type: ignore[method-assign,no-untyped-call]
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
