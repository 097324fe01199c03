"""torch's GradScaler for several optimizers, sharded gradients and one decision a step.

The one place that reads what `torch.amp.GradScaler` keeps to itself (``_scale``, ``_per_optimizer_states``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from drivetrain.precision.gradients import by_mesh


class LossScaler:
    """Scales losses, unscales gradients, and decides for all optimizers of a step together whether they step.

    `GradScaler.step` decides for each optimizer by itself and waits for the device each time. Where clipping is over
    all of them, an overflow in one turns the others' gradients to zero or NaN, after their own check.

    Args:
        scaler: the scaler that holds the scale.
    """

    __slots__ = ("_found", "_overflowed", "_unscaled", "scaler")

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        # Optimizers unscaled since the last update, each with what was unscaled in its stead: both are kept alive,
        # since GradScaler knows them by their id.
        self._unscaled: dict[int, tuple[Optimizer, list[Any]]] = {}
        self._found: list[Tensor] = []
        self._overflowed: bool | None = None

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale and look for infinities; once a step, without waiting."""
        scaler = self.scaler
        if id(optimizer) in self._unscaled or scaler._scale is None:  # None: no loss was ever scaled
            return
        plain, sharded = by_mesh((optimizer,))
        parts: list[Any] = [optimizer]
        if sharded:
            parts = [_Parameters(parameters) for parameters in (plain, *sharded.values()) if parameters]
        for part in parts:
            scaler.unscale_(part)
            self._found.extend(scaler._per_optimizer_states[id(part)]["found_inf_per_device"].values())
        self._unscaled[id(optimizer)] = (optimizer, parts)
        self._overflowed = None

    def step(self, optimizer: Optimizer, reducer: Callable[[Tensor], None] | None) -> bool:
        """Step ``optimizer`` unless anything unscaled since the last update overflowed.

        Waits for the device once a step, however many optimizers there are.

        Args:
            optimizer: unscaled first if it is not yet.
            reducer: makes an overflow known to every rank, in place, on a float tensor of shape ().

        Returns:
            Whether it stepped.
        """
        self.unscale(optimizer)
        if self._overflowed is None:
            self._overflowed = self._decide(reducer)
        if self._overflowed:
            return False
        optimizer.step()
        return True

    def update(self) -> None:
        """Adapt the scale to what this step found, and forget it."""
        if self._found:
            self.scaler.update()
        else:  # no gradient anywhere: GradScaler.update would refuse
            self.scaler._per_optimizer_states.clear()
        self._unscaled.clear()
        self._found.clear()
        self._overflowed = None

    def _decide(self, reducer: Callable[[Tensor], None] | None) -> bool:
        found = self._found
        if reducer is not None:
            if not found:  # this rank has no gradient, but takes part in the decision
                scale = cast(Tensor, self.scaler._scale)
                found.append(torch.zeros((), device=scale.device))
                self.scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {scale.device: found[0]}
            for other in found[1:]:
                found[0].add_(other.to(found[0].device))
            reducer(found[0])  # in place: what `update` reads knows it too
            return bool(found[0].item())
        if not found:
            return False
        total = found[0]
        for other in found[1:]:
            total = total + other.to(total.device)
        return bool(total.item())


class _Parameters:
    """The part of an optimizer that `GradScaler.unscale_` reads, for the parameters of one device mesh."""

    __slots__ = ("param_groups",)

    def __init__(self, parameters: list[Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
