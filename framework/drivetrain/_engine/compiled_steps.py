"""``Fit(compile=...)``: the module's steps are compiled for a run, and are its own again afterwards."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain._metrics import MetricStore
from drivetrain.module.train_module import TrainModule

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class CompiledSteps:
    """Compiles a module's steps, until `undo`.

    Args:
        module: whose.
        setting: ``Fit(compile=...)``: nothing, True, or options for `torch.compile`.
        metrics: where the steps log.
    """

    def __init__(self, module: TrainModule, setting: bool | dict[str, Any], metrics: MetricStore) -> None:
        self._own = module.__dict__
        self._before: dict[str, Any] = {}
        if not setting:
            return
        options = setting if isinstance(setting, dict) else {}
        # Logging writes to plain Python objects: traced, it would be guarded on every value it holds.
        metrics.record = torch.compiler.disable(metrics.record)  # type: ignore[method-assign,no-untyped-call]
        for name in _STEPS:
            self._before[name] = self._own.get(name)
            self._own[name] = torch.compile(getattr(module, name), **options)

    def undo(self) -> None:
        """Give the module what it held itself in place of each step."""
        for name, before in self._before.items():
            self._own.pop(name)
            if before is not None:
                self._own[name] = before
        self._before = {}
