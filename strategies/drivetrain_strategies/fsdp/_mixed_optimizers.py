"""Steps ``foreach`` optimizers whose parameters are on several meshes. torch accepts only one mesh per list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_strategies.fsdp._custom_step import CustomStep


class StepPerMesh(CustomStep):
    """Steps an optimizer separately for the parameters of each mesh, and for the parameters that are not sharded.

    torch's optimizers use ``foreach`` lists by default on a GPU and on request elsewhere. They keep all state per
    parameter, so they can be stepped once per mesh. Other optimizers may count steps per parameter group, so they are
    stepped only once, with ``foreach`` disabled. An optimizer's hooks are called once per step and see all parameters.

    Args:
        optimizer: an optimizer for which `mixes_meshes` returns True. `undo` restores the optimizer's ``step``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._is_torch_optimizer = type(optimizer).step.__module__.startswith("torch.")

    def update(self) -> None:
        """Step the parameters of each mesh separately, or all parameters together without ``foreach``."""
        if self._is_torch_optimizer:
            with _hooks_around(self._optimizer):
                self._step_per_mesh()
        else:
            with _without_foreach(self._optimizer):
                self._original_step()

    def _step_per_mesh(self) -> None:
        groups = self._optimizer.param_groups
        parameters = [group["params"] for group in groups]
        try:
            for mesh in dict.fromkeys(
                map(_mesh_of, (parameter for group_parameters in parameters for parameter in group_parameters))
            ):
                for group, group_parameters in zip(groups, parameters, strict=True):
                    group["params"] = [parameter for parameter in group_parameters if _mesh_of(parameter) == mesh]
                self._original_step()
        finally:
            for group, group_parameters in zip(groups, parameters, strict=True):
                group["params"] = group_parameters


@contextmanager
def _hooks_around(optimizer: Any) -> Iterator[None]:
    """Call the optimizer's step hooks once, before and after this context, and disable the hooks within the context."""
    pre_hooks, post_hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in pre_hooks.values():
        hook(optimizer, (optimizer,), {})
    optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_post_hooks = {}
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = pre_hooks, post_hooks
    for hook in post_hooks.values():
        hook(optimizer, (optimizer,), {})


@contextmanager
def _without_foreach(optimizer: Optimizer) -> Iterator[None]:
    groups = [group for group in optimizer.param_groups if "foreach" in group]
    foreach_settings = [group["foreach"] for group in groups]
    for group in groups:
        group["foreach"] = False
    try:
        yield
    finally:
        for group, foreach in zip(groups, foreach_settings, strict=True):
            group["foreach"] = foreach


def mixes_meshes(optimizer: Optimizer) -> bool:
    """Return whether the optimizer would put parameters of several meshes into one list. Scalars fit any list."""
    parameters = [parameter for group in optimizer.param_groups if "foreach" in group for parameter in group["params"]]
    return (
        len({_mesh_of(parameter) for parameter in parameters if parameter.dim() or isinstance(parameter, DTensor)}) > 1
    )


def _mesh_of(parameter: nn.Parameter) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
