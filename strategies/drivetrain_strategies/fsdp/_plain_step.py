"""Steps optimizers on plain tensors that stand in for sharded parameters: whole ones, or this rank's shards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.errors import ConfigurationError
from drivetrain_strategies.fsdp._state import in_layout_of, map_tensors

logger = logging.getLogger("drivetrain")

_MISSING = object()


class _PlainParameter(torch.Tensor):
    """A plain tensor that can take the place of a DTensor, which requires a class of the same memory layout."""

    __slots__ = DTensor.__slots__
    __torch_function__ = nn.Parameter.__torch_function__


class PlainStep:
    """Replaces an optimizer's step, until `undo`, by one during which its sharded parameters are plain tensors.

    Each parameter stays the same object, so that whatever the optimizer keeps by parameter, or keeps of its parameters,
    stays valid. Gradients and state are plain tensors too. Between steps, state of the parameter's shape is sharded,
    and other state is the same on every rank. A closure is evaluated as outside of the step: with the shards, which
    hold the values that the optimizer has written.

    Args:
        optimizer: the optimizer whose step is replaced.
        whole: whether the tensors are whole. Otherwise they are this rank's shards, which suffice for an optimizer that
            is element-wise and cannot handle DTensors, or DTensors of several meshes.
    """

    def __init__(self, optimizer: Optimizer, whole: bool) -> None:
        self.optimizer: Any = optimizer
        self._instance_step = optimizer.__dict__.get("step")
        self._original_step: Callable[..., Any] = optimizer.step
        self.optimizer.__dict__["step"] = self.step
        self.whole = whole
        self._entered: list[_StandIn] = []

    def undo(self) -> None:
        """Restore the optimizer's original ``step``."""
        del self.optimizer.__dict__["step"]
        if self._instance_step is not None:
            self.optimizer.__dict__["step"] = self._instance_step

    def announce(self) -> None:
        """Log how an optimizer that is not known to be element-wise steps."""
        logger.info(
            "%s may not be element-wise, so each of its steps gathers parameters, gradients and state on every rank.",
            type(self.optimizer).__name__,
        )

    def check_fits(self, limit: int) -> None:
        """Refuse to gather more than ``limit`` bytes of parameters in each step.

        Raises:
            ConfigurationError: names the optimizer and both sizes.
        """
        nbytes = sum(one.numel() * one.element_size() for one in _sharded(self.optimizer.param_groups) if self.whole)
        if nbytes > limit:
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} holds {nbytes:,} bytes of sharded parameters, more than "
                f"gather_limit={limit:,}.",
                "it may not be element-wise, so each step gathers its parameters, gradients and state on every rank.",
                "return {'optimizer': o, 'elementwise': True} if it is, or raise FSDPStrategy(gather_limit=...).",
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer on plain tensors; return what its step returns. Collective."""
        self._enter()
        try:
            return self._original_step() if closure is None else self._original_step(partial(self._evaluate, closure))
        finally:
            self._leave()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._leave()
        loss = closure()
        self._enter()
        return loss

    @torch.no_grad()
    def _enter(self) -> None:
        """Make the optimizer's parameters, gradients and state plain. Collective."""
        state = self.optimizer.state
        entered = [_StandIn(shard, self.whole) for shard in _sharded(self.optimizer.param_groups)]
        for stand_in in entered:
            _map_state(state, stand_in.shard, stand_in.plain_of)
        self._entered = entered
        for stand_in in entered:
            stand_in.swap()

    @torch.no_grad()
    def _leave(self) -> None:
        """Undo `_enter`, if it was not undone yet, and write the values into the shards."""
        entered, self._entered = self._entered, []
        for stand_in in entered:
            stand_in.swap()
        for stand_in in entered:
            stand_in.write()
            _map_state(self.optimizer.state, stand_in.shard, stand_in.sharded)


class _StandIn:
    """The plain tensor that takes the place of a sharded parameter during a step.

    Args:
        shard: the sharded parameter.
        whole: whether the plain tensor is the whole parameter; otherwise it is this rank's shard.
    """

    def __init__(self, shard: Any, whole: bool) -> None:
        self.shard: Any = shard
        self._whole = whole
        self._plain: Any = self.plain_of(shard.detach()).as_subclass(_PlainParameter)
        self._plain.requires_grad_(shard.requires_grad)
        if shard.grad is not None:
            self._plain.grad = self.plain_of(shard.grad)

    def plain_of(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value
        return value.full_tensor() if self._whole else value.to_local()

    def swap(self) -> None:
        """Exchange what the two parameter objects are. Attributes that the user set stay with the parameter.

        `torch.utils.swap_tensors` would make an error of the next backward if the graph of the last one still exists,
        and refuses parameters with weak references. Here, the exchange is undone before either matters.
        """
        first, second = self.shard, self._plain
        first.__class__, second.__class__ = second.__class__, first.__class__
        for name in DTensor.__slots__:
            values = _take_slot(first, name), _take_slot(second, name)
            _put_slot(second, name, values[0])
            _put_slot(first, name, values[1])
        torch._C._swap_tensor_impl(first, second)

    def write(self) -> None:
        """Write the values of the plain parameter and of its gradient into the shards."""
        shard, gradient = self.shard, self._plain.grad
        _copy_local(shard, self._part_of(self._plain.detach()))
        if gradient is None:
            shard.grad = None
        elif shard.grad is None:
            shard.grad = self.sharded(gradient)
        else:
            _copy_local(shard.grad, self._part_of(gradient))

    def sharded(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of state as it is kept between steps: sharded, if it is shaped like the parameter."""
        shard = self.shard
        shape = shard.shape if self._whole else shard.to_local().shape
        # Quantised state of a whole parameter stays whole, since its blocks cannot be cut.
        if not value.dim() or value.shape != shape or (self._whole and type(value) is not torch.Tensor):
            return value
        local = self._part_of(value)
        if self._whole:
            local = local.clone()  # a part of the whole tensor would keep all of its memory
        mesh, placements = shard.device_mesh, shard.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shard.shape, stride=shard.stride())

    def _part_of(self, value: torch.Tensor) -> torch.Tensor:
        return in_layout_of(value, self.shard).to_local() if self._whole else value  # type: ignore[attr-defined]


def mixes_meshes(optimizer: Optimizer) -> bool:
    """Return whether the optimizer would put parameters of several meshes into one list, which torch refuses."""
    parameters = [parameter for group in optimizer.param_groups if "foreach" in group for parameter in group["params"]]
    meshes = {getattr(one, "device_mesh", None) for one in parameters if one.dim() or isinstance(one, DTensor)}
    return len(meshes) > 1


def _sharded(groups: Any) -> list[Any]:
    """Return the sharded parameters that a step may update."""
    parameters = (parameter for group in groups for parameter in group["params"])
    return [one for one in parameters if isinstance(one, DTensor) and (one.requires_grad or one.grad is not None)]


def _map_state(state: Any, parameter: Any, change: Callable[[Any], Any]) -> None:
    """Apply ``change`` to the tensors in a parameter's state. Containers stay the same objects where they can."""
    if parameter in state:
        changed = map_tensors(state[parameter], change)
        if isinstance(changed, dict):
            state[parameter].update(changed)
        else:
            state[parameter] = changed


def _copy_local(target: Any, source: torch.Tensor) -> None:
    local = target.to_local()
    if local.data_ptr() != source.data_ptr() or local.numel() == 0:
        local.copy_(source)


def _take_slot(tensor: Any, name: str) -> Any:
    value = getattr(tensor, name, _MISSING)
    if value is not _MISSING:
        delattr(tensor, name)
    return value


def _put_slot(tensor: Any, name: str, value: Any) -> None:
    if value is not _MISSING:
        setattr(tensor, name, value)
