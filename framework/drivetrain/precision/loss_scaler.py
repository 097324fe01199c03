"""torch's GradScaler for several optimizers, sharded gradients and one decision a step.

The one place that reads what `torch.amp.GradScaler` keeps to itself (``_scale``, ``_per_optimizer_states``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from drivetrain.precision.clipping import clip_gradients
from drivetrain.precision.gradients import by_mesh

FLOOR = 2.0**-24
"""The smallest loss scale, as it is the smallest number in fp16: under a smaller one a loss has no gradient left there.
`GradScaler` goes on halving to 0, of which nothing comes back."""


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

    def clip(self, optimizers: Sequence[Optimizer], max_norm: float) -> Tensor:
        """Unscale the gradients of ``optimizers`` and clip them to a norm over all, in one pass, without waiting.

        The norm tells whether a gradient overflowed: a sum of squares is finite where all of them are, unless it
        itself is beyond float32, and then the scale was too large as well.

        Returns:
            Tensor of shape (): the norm of the unscaled gradients before clipping.
        """
        scale = self.scaler._scale
        gradients = _gradients(optimizers)
        apart = not gradients or not self._unscaled.keys().isdisjoint({id(optimizer) for optimizer in optimizers})
        # GradScaler refuses gradients in fp16, and says why.
        if scale is None or apart or torch.float16 in {gradient.dtype for gradient in gradients}:
            for optimizer in optimizers:
                self.unscale(optimizer)
            return clip_gradients(optimizers, max_norm)
        norm = clip_gradients(optimizers, max_norm, scale=scale)
        found = norm.isfinite().logical_not().float()
        self.scaler._per_optimizer_states[id(optimizers[0])]["found_inf_per_device"] = {found.device: found}
        self._found.append(found)
        self._unscaled.update({id(optimizer): (optimizer, []) for optimizer in optimizers})
        self._overflowed = None
        return norm

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

    def update(self, at_floor: Callable[[float], None] | None = None) -> None:
        """Adapt the scale to what this step found, and forget it.

        Args:
            at_floor: told the scale where an overflow has brought it to `FLOOR`.
        """
        overflowed = self._overflowed
        if self._found:
            self.scaler.update()
        else:  # no gradient anywhere: GradScaler.update would refuse
            self.scaler._per_optimizer_states.clear()
        self._unscaled.clear()
        self._found.clear()
        self._overflowed = None
        if (
            overflowed and self.scaler.get_scale() <= FLOOR
        ):  # looked at after an overflow alone: it waits for the device
            self.scaler.update(FLOOR)
            if at_floor is not None:
                at_floor(FLOOR)

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


def _gradients(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [
        parameter.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


class _Parameters:
    """The part of an optimizer that `GradScaler.unscale_` reads, for the parameters of one device mesh."""

    __slots__ = ("param_groups",)

    def __init__(self, parameters: list[Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
