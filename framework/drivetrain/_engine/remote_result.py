"""What comes back to the caller from a run in other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from drivetrain._engine.layer_transfer import BuiltLayers, InitialLayers, layer_structure
from drivetrain._engine.run_folder import RunFolder
from drivetrain._engine.run_state import RunState
from drivetrain.module.train_module import TrainModule


@dataclass(slots=True)
class Outcome:
    """One rank's end of a run.

    Attributes:
        result: what the stage returned.
        tensors: the module's parameters and buffers by name, in the dtypes that the run left them in; none where the
            layers bring them.
        trains: which parameters require a gradient.
        extra: by layer: what its ``get_extra_state`` returned.
        layers: the module's own containers, where the run built or replaced layers; None where it only trained.
        progress: the counters.
        metrics: every value by every name.
        callbacks: their states, in their order.
        state: the trainer's.
        folder: the run's.
        versions: of the loggers.
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
        cls, trainer: RunState, module: TrainModule, result: Any, before: InitialLayers, brings_module: bool = True
    ) -> Self:
        """Collect what there is after a run, on rank 0 all of it.

        Args:
            trainer: which ran it.
            module: what was run.
            result: what the stage returned.
            before: how the module was built.
            brings_module: False after a trial, whose weights nobody keeps.
        """
        session = trainer.session
        assert session is not None
        rank_0 = trainer.is_global_zero
        first = rank_0 and brings_module
        layers = BuiltLayers.of(module, before) if first else None
        alone = first and (layers is None or layers.pickled is None)
        return cls(
            result=result if rank_0 else None,
            tensors={name: tensor.detach().cpu() for name, tensor in _tensors_of(module).items()} if alone else {},
            trains={name: one.requires_grad for name, one in module.named_parameters()} if first else {},
            extra={name: layer.get_extra_state() for name, layer in _with_extra_state(module)} if first else {},
            layers=layers,
            progress=session.progress.state_dict(),
            metrics={name: float(value) for name, value in session.metrics.callback_metrics().items()},
            callbacks=[dict(callback.state_dict()) for callback in trainer.callbacks],
            state=trainer.state,
            folder=session.folder,
            versions=[one.version_name for one in trainer.loggers] if session.folder.path is not None else [],
        )

    def fill(self, module: TrainModule) -> None:
        """Make the caller's module what rank 0's is. Its tensors stay the same objects where no layer changed.

        Raises:
            ConfigurationError: layers that the run built could not be sent, nor be built here.
        """
        if self.layers is not None and layer_structure(module) != self.layers.structure:
            self.layers.put_into(module)
        own = _tensors_of(module)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                _in_the_form_of(tensor, own[name], module).copy_(tensor)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trains[name])
        for name, layer in _with_extra_state(module):
            layer.set_extra_state(self.extra[name])


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _with_extra_state(module: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(name, layer) for name, layer in module.named_modules() if type(layer).get_extra_state is not plain]


def _in_the_form_of(wanted: torch.Tensor, own: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Give a tensor of the caller's the shape and dtype that the run's has, as a conversion here would have done."""
    if own.is_meta:  # it had no storage, and the run gave it some
        fresh = torch.empty_like(wanted)
        replacement = nn.Parameter(fresh, own.requires_grad) if isinstance(own, nn.Parameter) else fresh
        for layer in module.modules():
            for place in (layer._parameters, layer._buffers):
                place.update({key: replacement for key, value in place.items() if value is own})  # type: ignore[misc]
        return replacement
    if own.shape != wanted.shape or own.dtype != wanted.dtype:
        own.data = torch.empty_like(wanted, device=own.device)
        own.grad = None  # of another form
    return own
