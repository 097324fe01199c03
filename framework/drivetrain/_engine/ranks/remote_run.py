"""A run whose ranks are all other processes: sends it there, and copies rank 0's result into the caller's objects."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from drivetrain._distributed.failure import RankFailedError
from drivetrain._engine.assembly.missing_weights import CHECKPOINT_ATTRIBUTE
from drivetrain._engine.assembly.run_core import RunCore
from drivetrain._engine.run_request import RunRequest
from drivetrain._engine.session import Session
from drivetrain._engine.signals import as_interruption, handled_signals
from drivetrain._runs.run_folder import RunFolder
from drivetrain.environments import Placement, resolve_environment
from drivetrain.errors import ConfigurationError, listed
from drivetrain.launchers import LaunchedProcesses, Launcher
from drivetrain.module.train_module import TrainModule
from drivetrain.strategies import replace_tensors


def run_in_other_processes(
    launcher: Launcher,
    request: RunRequest,
    placement: Placement,
    device: str,
    run_entry_point: Callable[[RunRequest], Any],
) -> Any:
    """Run a stage on ranks that the launcher starts, and return its result.

    Afterwards the caller's module, trainer and callbacks have the state that a run in this process would leave.

    Args:
        launcher: calls a function on every rank.
        request: the run.
        placement: the placement of this node's first rank.
        device: the type of the device that each rank uses.
        run_entry_point: runs a request on one rank.
    """
    trainer = request.trainer
    signals = handled_signals(trainer.preemption_signals, os.environ, request.stage)
    try:
        outcome = launcher.call(placement, _run_rank, run_entry_point, request, device=device, signals=signals)
    except BaseException as error:
        trainer.state = "interrupted"
        interruption = as_interruption(error, signals) if isinstance(error, RankFailedError) else error
        if interruption is error:
            raise
        raise interruption from error
    _apply_result(outcome, placement, request)
    return outcome.result


def _run_rank(run_entry_point: Callable[[RunRequest], Any], request: RunRequest) -> RemoteResult | None:
    """Run one rank in a process that was started for the rank. Only the first rank of a node returns its result."""
    trainer = request.trainer
    if not resolve_environment(trainer.environment).started_processes:
        trainer.environment = "auto"  # the caller's setting described the caller's process
    result = run_entry_point(request)
    return RemoteResult.of(request, result) if trainer.local_rank == 0 else None


def _apply_result(outcome: RemoteResult, placement: Placement, request: RunRequest) -> None:
    """Set the state of the caller's objects to the state that they would have after a run in this process."""
    trainer = request.trainer
    if trainer.chosen_strategy is None:
        trainer.chosen_strategy = trainer.resolved_strategy(placement.world_size)
    trainer.chosen_strategy.placement = placement
    session = Session(request, trainer.chosen_strategy, LaunchedProcesses(placement, "function"))
    run = session.run
    run.progress.load_state_dict(outcome.progress)
    run.progress.cut_short = run.progress.batch_idx > 0
    run.metrics.restore(outcome.metrics)
    run.folder.adopt(outcome.folder)
    if trainer.loggers:
        from drivetrain._engine.run_location import hand_out  # only runs that log need it

        hand_out(trainer.loggers, run.folder)
    trainer.run_state = run
    trainer.state = outcome.state
    for callback, state in zip(trainer.callbacks, outcome.callbacks, strict=True):
        if state:
            callback.load_state_dict(state)
    if not request.trial:
        for owner in (request.module, request.datamodule):
            if owner is not None:
                owner.trainer = trainer
        outcome.fill(request.module)  # last, because it may raise an error


@dataclass(slots=True)
class RemoteResult:
    """The state of the first rank of a node after a run.

    Attributes:
        result: the return value of the stage.
        tensors: the module's parameters and buffers by name, in their final dtypes. Parameters that the run has left
            without values are on the meta device.
        checkpoint: the checkpoint that holds the weights of such parameters, or "" if there is none; else None.
        structure: the names of the module's layers, each with its class, and of the layers' parameters and buffers.
        trains: whether each parameter requires a gradient, by parameter name.
        extra: the result of each layer's ``get_extra_state``, by layer name.
        progress: the counters of the run, such as the number of optimizer steps.
        metrics: the logged values, under every name by which they can be monitored.
        callbacks: the states of the callbacks, in their order.
        state: the trainer's ``state``.
        folder: the run's folder.
    """

    result: Any
    tensors: dict[str, torch.Tensor]
    checkpoint: str | None
    structure: set[str]
    trains: dict[str, bool]
    extra: dict[str, Any]
    progress: dict[str, int]
    metrics: dict[str, float]
    callbacks: list[dict[str, Any]]
    state: str
    folder: RunFolder

    @classmethod
    def of(cls, request: RunRequest, result: Any) -> Self:
        """Collect the state after a run of which ``result`` is the return value."""
        trainer, module, run = request.trainer, request.module, request.trainer.run_state
        assert isinstance(run, RunCore)
        sent = nn.Module() if request.trial else module  # the weights of a trial are discarded
        return cls(
            result=result,
            tensors={name: _on_host(tensor) for name, tensor in _tensors_of(sent).items()},
            checkpoint=module.__dict__.get(CHECKPOINT_ATTRIBUTE),
            structure=_structure(sent),
            trains={name: parameter.requires_grad for name, parameter in sent.named_parameters()},
            extra={name: layer.get_extra_state() for name, layer in _with_extra_state(sent)},
            progress=run.progress.state_dict(),
            metrics={name: float(value) for name, value in run.metrics.callback_metrics().items()},
            callbacks=[dict(callback.state_dict()) for callback in trainer.callbacks],
            state=trainer.state,
            folder=run.folder,
        )

    def fill(self, module: TrainModule) -> None:
        """Copy the rank's module into the caller's module, whose tensors stay the same objects if they have values.

        Layers that the run has built are built by ``configure_model``.

        Raises:
            ConfigurationError: ``configure_model`` does not build the layers that the run had.
        """
        if _structure(module) != self.structure:
            self._rebuild(module)
        for name in self.tensors.keys() ^ _tensors_of(module).keys():  # buffers that were or have become None
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, self.tensors.get(name))
        without_values = {}
        for name, own in _tensors_of(module).items():
            if own.is_meta or self.tensors[name].is_meta:
                without_values[id(own)] = self.tensors[name]
            else:
                _copy(self.tensors[name], own)
        replace_tensors(module, without_values)
        if self.checkpoint is not None:
            module.__dict__[CHECKPOINT_ATTRIBUTE] = self.checkpoint
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trains[name])
        for name, layer in _with_extra_state(module):
            layer.set_extra_state(self.extra[name])

    def _rebuild(self, module: TrainModule) -> None:
        with torch.random.fork_rng(devices=[]):  # values are copied later, so draws here must not count
            module.configure_model()
        different = _structure(module) ^ self.structure
        if different:
            raise ConfigurationError(
                f"{type(module).__name__} has other layers in this process than in the run: "
                f"{listed(sorted(different))}.",
                "weights come back from the run's processes as a state dict, and calling configure_model in this "
                "process does not build the layers of the run.",
                "build all layers in __init__ or in configure_model, or use launcher='subprocess'.",
            )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.is_meta else tensor.detach().cpu()


def _structure(module: nn.Module) -> set[str]:
    """Return the names of layers, each with its class, of parameters, and of buffers, which may be None."""
    layers = dict(module.named_modules())
    return {
        *(f"{name} ({type(layer).__qualname__})" for name, layer in layers.items()),
        *(f"{name}.{buffer}" for name, layer in layers.items() for buffer in layer._buffers),
        *dict(module.named_parameters()),  # of tied parameters only the first
    }


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _with_extra_state(module: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(name, layer) for name, layer in module.named_modules() if type(layer).get_extra_state is not plain]


@torch.no_grad()
def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor of the run, and give the caller's tensor its shape and dtype, as a conversion would do."""
    if target.shape != source.shape or target.dtype != source.dtype:
        target.data = torch.empty_like(source, device=target.device)
        target.grad = None  # the gradient has the old shape or dtype
    target.copy_(source)
