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

from drivetrain._distributed.gradient_meshes import group_by_mesh, multiply
from drivetrain.precision._clipping import clip_gradients

LOSS_SCALE_FLOOR = 2.0**-24
"""The smallest loss scale, which is the smallest positive fp16 number.

With a smaller scale, gradients vanish in fp16. `GradScaler` would halve the scale down to 0 and never recover.
"""


class LossScaler:
    """Scales losses, unscales gradients, and decides whether optimizers step.

    `GradScaler.step` decides for each optimizer separately and waits for the device each time. With clipping over all
    optimizers, an overflow in one optimizer's gradients turns the gradients of the others to zero or NaN after they
    were checked. Therefore one decision covers all optimizers that are unscaled before the first of them steps.

    In manual optimization an optimizer may step several times before the scale is updated. Each backward scales the
    optimizer's gradients again. When the gradients are unscaled after this backward, a new decision is made.

    Args:
        scaler: the scaler that holds the scale.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.unscaled: dict[int, Optimizer] = {}
        """Optimizers with unscaled gradients, by ``id``. The references keep the ids valid."""
        self._overflowed: dict[int, bool] = {}
        """Whether there was an overflow, by the ``id`` of each optimizer for which this is already decided."""
        self._stepped: set[int] = set()
        """Ids of optimizers for which `step` was called since the last update, including skipped optimizers."""
        self._checks: list[Tensor] = []
        """Results of overflow checks since the last update. A result above zero means an overflow."""
        self._unused_checks: list[Tensor] = []
        """Results of overflow checks that no decision has used yet."""
        self._skipped = False
        """Whether a step was skipped since the last update."""
        self._to_rescale: list[Optimizer] = []
        """Optimizers with scaled gradients, which the next update of the scale has to rescale."""

    def scale_again(self) -> None:
        """Before a backward pass, scale unscaled gradients again, because the pass adds scaled gradients to them.

        Without unscaled gradients, this method costs nothing. If all parameters of an optimizer have
        requires_grad=False, the backward pass adds no gradients to them, and the optimizer stays unscaled.
        `toggled_optimizer` relies on this behavior.
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
        if id(optimizer) in self.unscaled or scaler._scale is None:  # the scale is None until a loss is scaled
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
        """Unscale offloaded gradients with a synchronous copy of the scale.

        GradScaler copies the scale to the host asynchronously, and may use the copy before it has arrived.
        """
        scaler, scale = self.scaler, self.scaler._scale
        assert scale is not None
        scaler._scale = scale.cpu()
        try:
            scaler.unscale_(part)
        finally:
            scaler._scale = scale

    def clip(self, optimizers: Sequence[Optimizer], max_norm: float) -> Tensor:
        """Unscale the gradients of ``optimizers`` and clip them by their global norm in one pass.

        This method does not wait for the device. The norm shows whether a gradient overflowed. If all gradients are
        finite, the norm is infinite only if the sum of squares exceeds float32, and then the scale was too large too.

        Returns:
            Tensor of shape (): the norm of the unscaled gradients before clipping.
        """
        scale = self.scaler._scale
        gradients = _gradients(optimizers)
        needs_separate_pass = not gradients or not self.unscaled.keys().isdisjoint(
            {id(optimizer) for optimizer in optimizers}
        )
        # For gradients in fp16, GradScaler raises its own error.
        if scale is None or needs_separate_pass or torch.float16 in {gradient.dtype for gradient in gradients}:
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
        """Step ``optimizer`` unless there was an overflow in its gradients or in gradients unscaled together with them.

        This method waits for the device once for all optimizers that were unscaled before the first of them stepped.

        Args:
            optimizer: the optimizer, whose gradients are unscaled first if necessary.
            reducer: combines the overflow flag, a float tensor of shape (), over all ranks in place.

        Returns:
            True if the optimizer stepped.
        """
        self.unscale(optimizer)
        self._stepped.add(id(optimizer))
        overflowed = self._overflowed.get(id(optimizer))
        if overflowed is None:
            overflowed = self._decide(reducer)
            undecided_ids = self.unscaled.keys() - self._overflowed.keys()
            self._overflowed.update(dict.fromkeys(undecided_ids, overflowed))
        if overflowed:
            self._skipped = True
            return False
        optimizer.step()
        return True

    def note_scaled(self, optimizers: Iterable[Optimizer]) -> None:
        """Before an update, note which of ``optimizers`` have scaled gradients, which `update` then rescales."""
        self._to_rescale = [optimizer for optimizer in optimizers if id(optimizer) not in self.unscaled]

    def update(self, on_minimum_scale: Callable[[float], None] | None = None) -> None:
        """Adapt the scale to the overflow checks since the last update, and clear the checks.

        An optimizer may be unscaled and clipped now and step in a later ``training_step``. Such an optimizer stays
        unscaled, and its overflow checks count when it steps.

        Args:
            on_minimum_scale: called with the scale if an overflow has reduced the scale to `LOSS_SCALE_FLOOR`.
        """
        states = self.scaler._per_optimizer_states
        states.clear()
        to_rescale, self._to_rescale = self._to_rescale, []
        scale = self.scaler._scale
        scale_before = scale.clone() if to_rescale and scale is not None else None
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
        # The scale is read only after a skipped step, because reading it waits for the device.
        if skipped and self.scaler.get_scale() <= LOSS_SCALE_FLOOR:
            self.scaler.update(LOSS_SCALE_FLOOR)
            if on_minimum_scale is not None:
                on_minimum_scale(LOSS_SCALE_FLOOR)
        if scale_before is not None and scale is not None:
            # The product is exact, since GradScaler changes the scale by powers of two by default.
            multiply(to_rescale, scale / scale_before)

    def _decide(self, reducer: Callable[[Tensor], None] | None) -> bool:
        flags, self._unused_checks = self._unused_checks, []
        if not flags and reducer is not None:  # this rank has no gradients but takes part in the reduction
            flags.append(torch.zeros((), device=cast(Tensor, self.scaler._scale).device))
            self._checks.extend(flags)
        if not flags:
            return False
        for flag in flags[1:]:
            flags[0].add_(flag.to(flags[0].device))
        if reducer is not None:
            reducer(flags[0])  # reduced in place, so that `update` sees the result in ``_checks``
        return bool(flags[0].item())


def _gradients(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [
        parameter.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


class _Parameters:
    """Holds the parameters of one device mesh, in place of the optimizer that `GradScaler.unscale_` expects."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.param_groups = [{"params": parameters}]
