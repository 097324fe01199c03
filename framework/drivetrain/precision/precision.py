"""The interface of a precision; used as it is, full precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from drivetrain.precision._clipping import clip_gradients

if TYPE_CHECKING:
    from drivetrain._runtime.memory_advice import MemoryAdvice


_TRUE = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
"""The precisions whose parameters are in the dtype that they compute in."""


_FLAGS = {
    "has_forward_context": ("forward_context",),
    "converts_batch": ("convert_batch",),
    "scales_loss": ("unscale", "update"),
}
"""By attribute: the methods that do nothing where it is false."""


class Precision:
    """How exact a run computes: its dtypes, autocast, loss scaling and gradient clipping. Nothing must be written.

    This class is the interface and at the same time its plainest case, float32 throughout, which is why it is not
    abstract: a subclass overrides what differs from that, and there is no method that all precisions differ in.

    - `forward_context` is around every step, `backward` runs the backward pass, `convert_module`, `convert_batch` and
      `module_init_context` bring parameters and batches to their dtypes.
    - `unscale`, `clip_gradients`, `step` and `update` are for gradients that are not what they are to be yet.
    - `check_device` refuses a device, `state_dict` and `load_state_dict` are kept in checkpoints.

    A precision knows neither the module's hooks nor the engine, and works without either::

        loss = step_under(precision.forward_context())
        precision.backward(loss)
        for optimizer in optimizers:
            precision.unscale(optimizer)
        norm = precision.clip_gradients(optimizers, max_norm=1.0)
        for optimizer in optimizers:
            precision.step(optimizer)
        precision.update()

    The attributes tell the engine and the strategies, before the loop, in which dtypes the run is, and what may be left
    out of the loop. What may be left out follows from what a subclass overrides, unless it says otherwise.

    Give one to ``Fit(precision=...)``, or register a callable without arguments that makes one in the entry-point group
    ``drivetrain.precision``, and give its name.
    """

    name: str = "32-true"
    """Canonical name, as users write it; the name of the class where a subclass gives none."""

    param_dtype: torch.dtype = torch.float32
    """Dtype in which parameters are kept and updated."""

    compute_dtype: torch.dtype = torch.float32
    """Dtype of matrix products and convolutions."""

    reduce_dtype: torch.dtype = torch.float32
    """Dtype in which gradients are reduced over ranks. DDP reduces in that of the parameters and refuses another."""

    output_dtype: torch.dtype = torch.float32
    """Dtype in which the module's outputs arrive."""

    has_forward_context: bool = False
    """Whether `forward_context` does anything."""

    converts_batch: bool = False
    """Whether `convert_batch` does anything."""

    scales_loss: bool = False
    """Whether `unscale` and `update` do anything, and `backward` more than ``loss.backward()``."""

    clips_scaled: bool = False
    """Whether `clip_gradients` unscales what is not unscaled yet. The engine leaves it to it where nobody else looks at
    the gradients before: one pass over them for both."""

    found_inf_reducer: Callable[[Tensor], None] | None = None
    """Makes a found overflow known to every rank, in place, on a float tensor of shape () that is above zero where one
    was found. Replicated gradients and those of one device mesh do not need it: there an infinity spreads by itself."""

    at_floor: Callable[[float], None] | None = None
    """Told the loss scale, whenever an overflow leaves it at the smallest that there is."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "name" not in own:
            cls.name = cls.__name__
        for flag, methods in _FLAGS.items():
            if flag not in own and not own.keys().isdisjoint(methods):
                setattr(cls, flag, True)

    def check_device(self, device: torch.device) -> None:
        """Refuse a device that cannot do this precision. Touches no device.

        Raises:
            ConfigurationError: if ``device`` cannot compute in these dtypes.
        """

    def module_init_context(self) -> AbstractContextManager[Any]:
        """The context in which modules are built, so that parameters are created in their final dtype."""
        return nullcontext()

    def convert_module(self, module: Module) -> Module:
        """Bring ``module``'s parameters and buffers to this precision, in place; ties between parameters survive."""
        return module

    def convert_batch(self, batch: Any) -> Any:
        """Bring the floating-point tensors of a nested ``batch`` to this precision."""
        return batch

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of a forward pass. The engine takes one and enters it anew for each step, one at a time.

        What activation checkpointing runs once more in `backward` is outside it, unless `backward` enters one, too;
        ``torch.autocast`` is restored there by itself.
        """
        return nullcontext()

    def outside_forward(self) -> AbstractContextManager[Any]:
        """A context that undoes `forward_context` within it.

        Entered in manual optimization, where ``training_step`` runs backward and steps within its forward's context.
        """
        return nullcontext()

    def weights_changed(self) -> None:
        """Forget, within `forward_context`, what a forward derived from weights that are others now.

        Called in manual optimization, where one context is around the whole ``training_step``: after each backward and
        step, and before each evaluation of a closure. Who changes weights between two forwards without any of these
        calls it, or ``torch.clear_autocast_cache()``.
        """

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of a loss of shape ()."""
        loss.backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Give the gradients of ``optimizer`` their true magnitude, once after each `backward`."""

    def clip_gradients(
        self, optimizers: Optimizer | Iterable[Optimizer], max_norm: float, algorithm: str = "norm"
    ) -> Tensor:
        """Clip the gradients of all ``optimizers`` together, in place, without waiting for the device.

        Args:
            optimizers: one optimizer or several; the norm is over the gradients of all.
            max_norm: the largest norm (``"norm"``) or magnitude of one element (``"value"``) that is left alone.
            algorithm: ``"norm"`` or ``"value"``.

        Returns:
            Tensor of shape (): the norm over all parameters and shards before clipping; for ``"value"`` the
            largest magnitude of one element before clipping.

        Raises:
            ConfigurationError: if ``algorithm`` is neither of the two.
        """
        return clip_gradients((optimizers,) if isinstance(optimizers, Optimizer) else optimizers, max_norm, algorithm)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step ``optimizer``; False where an overflow in the gradients skipped it."""
        optimizer.step(closure)
        return True

    def gradients_wait(self, optimizers: Iterable[Optimizer]) -> None:
        """Take note of ``optimizers`` whose scaled gradients may outlive the coming `update`, and have to follow it.

        Called in manual optimization, where an optimizer may step in a later ``training_step`` than the backward.
        """

    def update(self) -> None:
        """Adapt the loss scale, once a step after all optimizers."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this precision: JSON-able values."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; an empty one, written under another precision, is accepted."""

    def memory_advice(self) -> Sequence[MemoryAdvice]:
        """Which other precision would take less memory, for the note on an error for want of it."""
        from drivetrain._runtime.memory_advice import MemoryAdvice  # where memory lacks alone

        if self.compute_dtype.itemsize > 2:
            return [MemoryAdvice("activations", "precision='bf16-mixed': activations of half the size")]
        if self.compute_dtype in _TRUE and self.param_dtype.itemsize > 2:
            other = _TRUE[self.compute_dtype]
            return [MemoryAdvice("state", f"precision={other!r}: no float32 copy, and less exact")]
        return []

    def describe(self) -> str:
        """The resolved dtypes on one line."""
        dtypes = {
            "parameters": self.param_dtype,
            "compute": self.compute_dtype,
            "gradient reduction": self.reduce_dtype,
            "outputs": self.output_dtype,
        }
        return f"Precision {self.name}: " + ", ".join(f"{use} {_short(dtype)}" for use, dtype in dtypes.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
