"""LossScaler: torch's GradScaler for several optimizers and sharded gradients, with joint decisions to skip steps.

Only this module reads private attributes of `torch.amp.GradScaler` (``_scale``, ``_per_optimizer_states``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from drivetrain.precision._clipping import clip_gradients
from drivetrain.precision._gradient_meshes import group_by_mesh, multiply

LOSS_SCALE_FLOOR = 2.0**-24
"""The smallest loss scale, which is also the smallest positive fp16 number: below it, gradients vanish in fp16.
`GradScaler` would halve the scale down to 0 and never recover."""


class LossScaler:
    """Scales losses, unscales gradients, and decides whether optimizers step.

    `GradScaler.step` decides for each optimizer separately and waits for the device each time. With clipping over all
    optimizers, an overflow in one turns the gradients of the others to zero or NaN after their own check. Therefore one
    decision covers all optimizers that are unscaled before the first of them steps.

    In manual optimization an optimizer may step several times before the scale is updated. Each backward scales its
    gradients again, and gradients unscaled after that get a decision of their own.

    Args:
        scaler: the scaler that holds the scale.
    """

    __slots__ = (
        "_checks",
        "_overflowed",
        "_skipped",
        "_stepped",
        "_to_rescale",
        "_unused_checks",
        "scaler",
        "unscaled",
    )

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.unscaled: dict[int, Optimizer] = {}
        """Optimizers with unscaled gradients, by ``id``; holding them keeps the ids valid."""
        self._overflowed: dict[int, bool] = {}
        """The decision for each of them, once it is made: whether there was an overflow."""
        self._stepped: set[int] = set()
        """Optimizers for which `step` was called since the last update, whether they stepped or not."""
        self._checks: list[Tensor] = []
        """Results of overflow checks since the last update: above zero after an overflow."""
        self._unused_checks: list[Tensor] = []
        """Results that no decision has used yet."""
        self._skipped = False
        """Whether a step was skipped since the last update."""
        self._to_rescale: list[Optimizer] = []
        """Optimizers with scaled gradients, which the next update of the scale has to rescale."""

    def scale_again(self) -> None:
        """Before a backward pass, scale unscaled gradients again, since it adds scaled gradients to them.

        Without such gradients this costs nothing. Optimizers whose parameters all have requires_grad=False get no
        gradients from the backward pass and are left alone; `toggled_optimizer` relies on this.
        """
        scale = self.scaler._scale
        assert scale is not None  # unscaling requires a scale
        for key, optimizer in list(self.unscaled.items()):
            if any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
                del self.unscaled[key]
                self._overflowed.pop(key, None)
                multiply((optimizer,), scale)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale and check for overflow, without waiting for the device."""
        scaler = self.scaler
        if id(optimizer) in self.unscaled or scaler._scale is None:  # None: no loss has been scaled yet
            return
        plain, sharded = group_by_mesh((optimizer,))
        parts: list[Any] = [optimizer]
        if sharded:
            parts = [_Parameters(parameters) for parameters in (plain, *sharded.values()) if parameters]
        for part in parts:
            if scaler._scale.device.type != "cpu" and any(
                gradient.device.type == "cpu" for gradient in _gradients((part,))
            ):
                self._unscale_on_host(part)
            else:
                scaler.unscale_(part)
            # GradScaler would otherwise refuse to unscale the optimizer again before the update.
            results = scaler._per_optimizer_states.pop(id(part))["found_inf_per_device"].values()
            self._checks.extend(results)
            self._unused_checks.extend(results)
        self.unscaled[id(optimizer)] = optimizer

    def _unscale_on_host(self, part: Any) -> None:
        """Unscale offloaded gradients with a synchronous copy of the scale; GradScaler's copy may not have arrived."""
        scaler, scale = self.scaler, self.scaler._scale
        assert scale is not None
        scaler._scale = scale.cpu()
        try:
            scaler.unscale_(part)
        finally:
            scaler._scale = scale

    def clip(self, optimizers: Sequence[Optimizer], max_norm: float) -> Tensor:
        """Unscale the gradients of ``optimizers`` and clip them by their global norm in one pass, without waiting.

        The norm shows whether a gradient overflowed: it is finite if all gradients are, unless the sum of squares
        exceeds float32, and then the scale was too large as well.

        Returns:
            Tensor of shape (): the norm of the unscaled gradients before clipping.
        """
        scale = self.scaler._scale
        gradients = _gradients(optimizers)
        separately = not gradients or not self.unscaled.keys().isdisjoint({id(optimizer) for optimizer in optimizers})
        # For gradients in fp16, GradScaler raises its own error.
        if scale is None or separately or torch.float16 in {gradient.dtype for gradient in gradients}:
            for optimizer in optimizers:
                self.unscale(optimizer)
            return clip_gradients(optimizers, max_norm)
        norm = clip_gradients(optimizers, max_norm, scale=scale)
        overflow = norm.isfinite().logical_not().float()
        self._checks.append(overflow)
        self._unused_checks.append(overflow)
        self.unscaled.update({id(optimizer): optimizer for optimizer in optimizers})
        return norm

    def step(self, optimizer: Optimizer, reducer: Callable[[Tensor], None] | None) -> bool:
        """Step ``optimizer`` unless there was an overflow in its gradients or in those unscaled together with them.

        Waits for the device once for all optimizers that were unscaled before the first of them stepped.

        Args:
            optimizer: the optimizer; unscaled first if necessary.
            reducer: combines the overflow flag, a float tensor of shape (), over all ranks in place.

        Returns:
            True if it stepped.
        """
        self.unscale(optimizer)
        self._stepped.add(id(optimizer))
        overflowed = self._overflowed.get(id(optimizer))
        if overflowed is None:
            overflowed = self._decide(reducer)
            together = self.unscaled.keys() - self._overflowed.keys()
            self._overflowed.update(dict.fromkeys(together, overflowed))
        if overflowed:
            self._skipped = True
            return False
        optimizer.step()
        return True

    def note_scaled(self, optimizers: Iterable[Optimizer]) -> None:
        """Before an update, note which of ``optimizers`` still have scaled gradients, which `update` then rescales."""
        self._to_rescale = [optimizer for optimizer in optimizers if id(optimizer) not in self.unscaled]

    def update(self, at_floor: Callable[[float], None] | None = None) -> None:
        """Adapt the scale to the overflow checks since the last update, and clear them.

        An optimizer that was unscaled but has not stepped, because it is clipped now and steps in a later
        ``training_step``, stays unscaled, and its checks count when it steps.

        Args:
            at_floor: called with the scale if an overflow has reduced it to `LOSS_SCALE_FLOOR`.
        """
        states = self.scaler._per_optimizer_states
        states.clear()
        to_rescale, self._to_rescale = self._to_rescale, []
        scale = self.scaler._scale
        before = scale.clone() if to_rescale and scale is not None else None
        if self._checks:  # GradScaler.update raises without any check
            states[0] = {"found_inf_per_device": dict(enumerate(self._checks))}
            self.scaler.update()
        for key in self._stepped:
            self.unscaled.pop(key, None)
            self._overflowed.pop(key, None)
        self._stepped.clear()
        self._checks.clear()
        if not self.unscaled:
            self._unused_checks.clear()
        skipped, self._skipped = self._skipped, False
        # Read only after an overflow, because it waits for the device.
        if skipped and self.scaler.get_scale() <= LOSS_SCALE_FLOOR:
            self.scaler.update(LOSS_SCALE_FLOOR)
            if at_floor is not None:
                at_floor(LOSS_SCALE_FLOOR)
        if before is not None and scale is not None:
            # Exact, since GradScaler changes the scale by powers of two by default.
            multiply(to_rescale, scale / before)

    def _decide(self, reducer: Callable[[Tensor], None] | None) -> bool:
        flags, self._unused_checks = self._unused_checks, []
        if reducer is not None:
            if not flags:  # this rank has no gradients but takes part in the reduction
                scale = cast(Tensor, self.scaler._scale)
                flags.append(torch.zeros((), device=scale.device))
                self._checks.extend(flags)
            for flag in flags[1:]:
                flags[0].add_(flag.to(flags[0].device))
            reducer(flags[0])  # in place, so that `update` sees the result too
            return bool(flags[0].item())
        if not flags:
            return False
        total = flags[0]
        for flag in flags[1:]:
            total = total + flag.to(total.device)
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
    """Stands in for an optimizer in `GradScaler.unscale_`, for the parameters of one device mesh."""

    __slots__ = ("param_groups",)

    def __init__(self, parameters: list[Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
