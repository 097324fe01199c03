"""torch's GradScaler for several optimizers, sharded gradients and steps that are decided together.

The one place that reads what `torch.amp.GradScaler` keeps to itself (``_scale``, ``_per_optimizer_states``).
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
from drivetrain.precision._gradient_meshes import by_mesh, multiply

LOSS_SCALE_FLOOR = 2.0**-24
"""The smallest loss scale, as it is the smallest number in fp16: under a smaller one a loss has no gradient left there.
`GradScaler` goes on halving to 0, of which nothing comes back."""


class LossScaler:
    """Scales losses, unscales gradients, and decides whether optimizers step.

    `GradScaler.step` decides for each optimizer by itself and waits for the device each time. Where clipping is over
    all of them, an overflow in one turns the others' gradients to zero or NaN, after their own check: what is unscaled
    before any of them steps is decided together.

    In manual optimization an optimizer may step several times before the one update of the scale. Each backward makes
    its gradients scaled ones again, and what is unscaled after that is decided by itself.

    Args:
        scaler: the scaler that holds the scale.
    """

    __slots__ = ("_asked", "_found", "_overflowed", "_skipped", "_undecided", "_waiting", "scaler", "unscaled")

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self.unscaled: dict[int, Optimizer] = {}
        """Optimizers whose gradients are at their true magnitude, kept alive since they are known by their ``id``."""
        self._overflowed: dict[int, bool] = {}
        """Of those of them for which it was decided."""
        self._asked: set[int] = set()
        """Optimizers that were to step since the last update, whether they did or not."""
        self._found: list[Tensor] = []
        """What was looked for infinities since the last update: a number above zero where there was one."""
        self._undecided: list[Tensor] = []
        """Those of them by which no step was decided yet."""
        self._skipped = False
        """Whether a step was left out since the last update."""
        self._waiting: list[Optimizer] = []
        """Optimizers whose gradients are scaled and follow the next update."""

    def scale_again(self) -> None:
        """Before a backward: give gradients that are unscaled the magnitude of those that it adds to them.

        Where there are none any more that costs nothing. An optimizer none of whose parameters requires a gradient gets
        none, and stays as it is: what `toggled_optimizer` is for.
        """
        scale = self.scaler._scale
        assert scale is not None  # something was unscaled
        for key, optimizer in list(self.unscaled.items()):
            if any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
                del self.unscaled[key]
                self._overflowed.pop(key, None)
                multiply((optimizer,), scale)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide gradients of ``optimizer`` that are scaled by the scale and look for infinities, without waiting."""
        scaler = self.scaler
        if id(optimizer) in self.unscaled or scaler._scale is None:  # None: no loss was ever scaled
            return
        plain, sharded = by_mesh((optimizer,))
        parts: list[Any] = [optimizer]
        if sharded:
            parts = [_Parameters(parameters) for parameters in (plain, *sharded.values()) if parameters]
        for part in parts:
            if scaler._scale.device.type != "cpu" and any(one.device.type == "cpu" for one in _gradients((part,))):
                self._unscale_on_host(part)
            else:
                scaler.unscale_(part)
            # GradScaler would refuse to unscale it once more before the update.
            found = scaler._per_optimizer_states.pop(id(part))["found_inf_per_device"].values()
            self._found.extend(found)
            self._undecided.extend(found)
        self.unscaled[id(optimizer)] = optimizer

    def _unscale_on_host(self, part: Any) -> None:
        """Unscale gradients that were offloaded: GradScaler would read the scale there before its copy has come."""
        scaler, scale = self.scaler, self.scaler._scale
        assert scale is not None
        scaler._scale = scale.cpu()
        try:
            scaler.unscale_(part)
        finally:
            scaler._scale = scale

    def clip(self, optimizers: Sequence[Optimizer], max_norm: float) -> Tensor:
        """Unscale the gradients of ``optimizers`` and clip them to a norm over all, in one pass, without waiting.

        The norm tells whether a gradient overflowed: a sum of squares is finite where all of them are, unless it
        itself is beyond float32, and then the scale was too large as well.

        Returns:
            Tensor of shape (): the norm of the unscaled gradients before clipping.
        """
        scale = self.scaler._scale
        gradients = _gradients(optimizers)
        apart = not gradients or not self.unscaled.keys().isdisjoint({id(optimizer) for optimizer in optimizers})
        # GradScaler refuses gradients in fp16, and says why.
        if scale is None or apart or torch.float16 in {gradient.dtype for gradient in gradients}:
            for optimizer in optimizers:
                self.unscale(optimizer)
            return clip_gradients(optimizers, max_norm)
        norm = clip_gradients(optimizers, max_norm, scale=scale)
        found = norm.isfinite().logical_not().float()
        self._found.append(found)
        self._undecided.append(found)
        self.unscaled.update({id(optimizer): optimizer for optimizer in optimizers})
        return norm

    def step(self, optimizer: Optimizer, reducer: Callable[[Tensor], None] | None) -> bool:
        """Step ``optimizer`` unless anything overflowed of what was unscaled together with its gradients.

        Waits for the device once for all optimizers that were unscaled before the first of them stepped.

        Args:
            optimizer: unscaled first if it is not yet.
            reducer: makes an overflow known to every rank, in place, on a float tensor of shape ().

        Returns:
            Whether it stepped.
        """
        self.unscale(optimizer)
        self._asked.add(id(optimizer))
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

    def wait(self, optimizers: Iterable[Optimizer]) -> None:
        """Before an update: of ``optimizers``, those that were not unscaled since their last backward follow it."""
        self._waiting = [optimizer for optimizer in optimizers if id(optimizer) not in self.unscaled]

    def update(self, at_floor: Callable[[float], None] | None = None) -> None:
        """Adapt the scale to what was found since the last update, and forget it.

        An optimizer that was unscaled and has not stepped yet, as one that is clipped now and steps in a later
        ``training_step``, stays unscaled, and what was found in its gradients decides when it does.

        Args:
            at_floor: told the scale where an overflow has brought it to `LOSS_SCALE_FLOOR`.
        """
        states = self.scaler._per_optimizer_states
        states.clear()
        waiting, self._waiting = self._waiting, []
        scale = self.scaler._scale
        before = scale.clone() if waiting and scale is not None else None
        if self._found:  # GradScaler.update would refuse to adapt it to nothing
            states[0] = {"found_inf_per_device": dict(enumerate(self._found))}
            self.scaler.update()
        for key in self._asked:
            self.unscaled.pop(key, None)
            self._overflowed.pop(key, None)
        self._asked.clear()
        self._found.clear()
        if not self.unscaled:
            self._undecided.clear()
        skipped, self._skipped = self._skipped, False
        # Looked at after an overflow alone: it waits for the device.
        if skipped and self.scaler.get_scale() <= LOSS_SCALE_FLOOR:
            self.scaler.update(LOSS_SCALE_FLOOR)
            if at_floor is not None:
                at_floor(LOSS_SCALE_FLOOR)
        if before is not None and scale is not None:
            multiply(waiting, scale / before)  # by a power of two, unless the user says else

    def _decide(self, reducer: Callable[[Tensor], None] | None) -> bool:
        found, self._undecided = self._undecided, []
        if reducer is not None:
            if not found:  # this rank has no gradient, but takes part in the decision
                scale = cast(Tensor, self.scaler._scale)
                found.append(torch.zeros((), device=scale.device))
                self._found.extend(found)
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
