"""Outcome: the result of a run in other processes, and its transfer into the caller's objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from drivetrain._engine.layer_transfer import BuiltLayers, InitialLayers, layer_structure
from drivetrain._engine.run_folder import RunFolder
from drivetrain._engine.session_context import SessionContext
from drivetrain.module.train_module import TrainModule


@dataclass(slots=True)
class Outcome:
    """The state of one rank after a run.

    Attributes:
        result: the return value of the stage.
        tensors: the module's parameters and buffers by name, in their final dtypes; empty if ``layers`` holds them.
        trains: whether each parameter requires a gradient, by parameter name.
        extra: the result of each layer's ``get_extra_state``, by layer name.
        layers: the module's layers, if the run built or replaced any; else None.
        progress: the counters of the run, such as the number of optimizer steps.
        metrics: the logged values, under every name by which they can be monitored.
        callbacks: the states of the callbacks, in their order.
        state: the trainer's ``state``.
        folder: the run's folder.
        versions: the versions of the loggers.
    """

    result: Any
    tensors: dict[str, torch.Tensor]
    trains: dict[str, bool]
    extra: dict[str, Any]
    layers: BuiltLayers | None
    progress: dict[str, int]
    metrics: dict[str, float]
    callbacks: list[dict[str, Any]]
    state: str
    folder: RunFolder
    versions: list[str]

    @classmethod
    def of(
        cls,
        trainer: SessionContext,
        module: TrainModule,
        result: Any,
        before: InitialLayers,
        with_module: bool = True,
    ) -> Self:
        """Collect the state after a run; only rank 0 includes the result and the module.

        Args:
            trainer: the `Fit` that ran the module.
            module: the module that was run.
            result: the return value of the stage.
            before: the module's layers before the run.
            with_module: whether to include the module; False after a trial, whose weights are discarded.
        """
        assert trainer.session is not None
        core = trainer.session.core
        is_rank_0 = trainer.is_global_zero
        sends_module = is_rank_0 and with_module
        layers = BuiltLayers.of(module, before) if sends_module else None
        sends_tensors = sends_module and (layers is None or layers.pickled is None)
        return cls(
            result=result if is_rank_0 else None,
            tensors={name: tensor.detach().cpu() for name, tensor in _tensors_of(module).items()}
            if sends_tensors
            else {},
            trains={name: parameter.requires_grad for name, parameter in module.named_parameters()}
            if sends_module
            else {},
            extra={name: layer.get_extra_state() for name, layer in _with_extra_state(module)} if sends_module else {},
            layers=layers,
            progress=core.progress.state_dict(),
            metrics={name: float(value) for name, value in core.metrics.callback_metrics().items()},
            callbacks=[dict(callback.state_dict()) for callback in trainer.callbacks],
            state=trainer.state,
            folder=core.folder,
            versions=[logger.version_name for logger in trainer.loggers] if core.folder.path is not None else [],
        )

    def fill(self, module: TrainModule) -> None:
        """Copy rank 0's module into the caller's module, whose tensors stay the same objects unless layers changed.

        Raises:
            ConfigurationError: layers that the run built could not be pickled, and cannot be built in this process.
        """
        if self.layers is not None and layer_structure(module) != self.layers.structure:
            self.layers.put_into(module)
        own = _tensors_of(module)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                _with_form_of(tensor, own[name], module).copy_(tensor)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trains[name])
        for name, layer in _with_extra_state(module):
            layer.set_extra_state(self.extra[name])


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _with_extra_state(module: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(name, layer) for name, layer in module.named_modules() if type(layer).get_extra_state is not plain]


def _with_form_of(wanted: torch.Tensor, own: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Give the caller's tensor the shape and dtype of the run's tensor, as a conversion in this process would do."""
    if own.is_meta:  # the run materialized the tensor
        fresh = torch.empty_like(wanted)
        replacement = nn.Parameter(fresh, own.requires_grad) if isinstance(own, nn.Parameter) else fresh
        for layer in module.modules():
            for tensors in (layer._parameters, layer._buffers):
                tensors.update({key: replacement for key, value in tensors.items() if value is own})  # type: ignore[misc]
        return replacement
    if own.shape != wanted.shape or own.dtype != wanted.dtype:
        own.data = torch.empty_like(wanted, device=own.device)
        own.grad = None  # the gradient has the old shape or dtype
    return own
