"""Optimizers that step many parameters at once, of which some are shards and others whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain_strategies.fsdp._custom_step import OwnStep


class KindsApart(OwnStep):
    """Steps an optimizer once for its shards, and once for what is whole: torch refuses lists of both.

    On a GPU its optimizers make such lists by themselves (``foreach``), elsewhere where they are told to. They keep
    their state by parameter, so that the order is all the same. Others may count steps in their groups: these are
    stepped once, and told to make no lists. An optimizer's own hooks are called once a step, and see all parameters.

    Args:
        optimizer: one for which `mixes` is true; its ``step`` is replaced until `undo`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._is_torchs = type(optimizer).step.__module__.startswith("torch.")

    def update(self) -> None:
        """Step each kind by itself, or all without lists."""
        if self._is_torchs:
            with _hooks_around(self._optimizer):
                self._step_each_kind()
        else:
            with _without_lists(self._optimizer):
                self._step()

    def _step_each_kind(self) -> None:
        groups = self._optimizer.param_groups
        parameters = [group["params"] for group in groups]
        try:
            for kind in dict.fromkeys(map(_kind, (one for some in parameters for one in some))):
                for group, some in zip(groups, parameters, strict=True):
                    group["params"] = [one for one in some if _kind(one) == kind]
                self._step()
        finally:
            for group, some in zip(groups, parameters, strict=True):
                group["params"] = some


@contextmanager
def _hooks_around(optimizer: Any) -> Iterator[None]:
    """Call the optimizer's own hooks before and after, and none within."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    for hook in before.values():
        hook(optimizer, (optimizer,), {})
    optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_post_hooks = {}
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
    for hook in after.values():
        hook(optimizer, (optimizer,), {})


@contextmanager
def _without_lists(optimizer: Optimizer) -> Iterator[None]:
    groups = [group for group in optimizer.param_groups if "foreach" in group]
    said = [group["foreach"] for group in groups]
    for group in groups:
        group["foreach"] = False
    try:
        yield
    finally:
        for group, foreach in zip(groups, said, strict=True):
            group["foreach"] = foreach


def mixes(optimizer: Optimizer) -> bool:
    """Whether the optimizer would put parameters of several kinds into one list. Single numbers go with any."""
    parameters = [one for group in optimizer.param_groups if "foreach" in group for one in group["params"]]
    return len({_kind(one) for one in parameters if one.dim() or isinstance(one, DTensor)}) > 1


def _kind(parameter: nn.Parameter) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
