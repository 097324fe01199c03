"""Precision: the base class of precision plugins, which itself uses float32 throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from drivetrain.precision._clipping import clip_gradients

_TRUE_PRECISION_NAMES = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
"""Names of the precisions whose parameters have the compute dtype."""


_METHODS_BY_FLAG = {
    "has_forward_context": ("forward_context",),
    "scales_loss": ("unscale", "update"),
}
"""Maps an attribute to the methods that it describes. Overriding such a method sets the attribute to True."""


class Precision:
    """Defines a run's dtypes, autocast, loss scaling and gradient clipping.

    The class is the interface and also the simplest case, float32 throughout. A subclass overrides only what differs.

    - The engine runs each step within `forward_context` and calls `backward` for the backward pass. `convert_module`,
      `convert_batch` and `module_init_context` give parameters and batches their dtypes.
    - `unscale`, `clip_gradients`, `step` and `update` handle scaled gradients.
    - `check_device` refuses unsupported devices; `state_dict` and `load_state_dict` are stored in checkpoints.

    A precision also works without the engine and without hooks::

        with precision.forward_context():
            loss = module.training_step(batch, batch_idx)
        precision.backward(loss)
        for optimizer in optimizers:
            precision.unscale(optimizer)
        norm = precision.clip_gradients(optimizers, max_norm=1.0)
        for optimizer in optimizers:
            precision.step(optimizer)
        precision.update()

    The attributes describe the dtypes of the run, and which calls the loop can omit. `has_forward_context`
    and `scales_loss` become True automatically if a subclass overrides the methods that they describe.

    Pass an instance to ``Fit(precision=...)``. Alternatively, register a callable without arguments that returns an
    instance in the entry-point group ``drivetrain.precision``, and pass the name of the entry point.
    """

    name: str = "32-true"
    """The canonical name. In a subclass, the default is the name of the class."""

    param_dtype: torch.dtype = torch.float32
    """Dtype of the parameters and their updates."""

    compute_dtype: torch.dtype = torch.float32
    """Dtype of matrix products and convolutions."""

    reduce_dtype: torch.dtype = torch.float32
    """Dtype in which gradients are reduced over ranks. DDP uses the parameters' dtype and refuses any other."""

    output_dtype: torch.dtype = torch.float32
    """Dtype of the module's outputs."""

    has_forward_context: bool = False
    """Whether `forward_context` has an effect. If False, the loop does not call it."""

    scales_loss: bool = False
    """Whether `unscale` and `update` have an effect, and `backward` does more than ``loss.backward()``."""

    unscales_while_clipping: bool = False
    """Whether `clip_gradients` unscales the gradients while it clips them. The engine then skips `unscale`, which saves
    one pass over the gradients, unless a hook reads them before clipping."""

    found_inf_reducer: Callable[[Tensor], None] | None = None
    """A function that reduces the overflow flag over ranks in place. The flag is a float tensor of shape () that is
    above zero after an overflow. The function is None if the reduction of gradients already spreads infinities to all
    ranks, which is the case for replicated gradients and for gradients on one device mesh."""

    on_minimum_scale: Callable[[float], None] | None = None
    """A function that is called with the loss scale after an overflow has reduced it to the minimum."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "name" not in own:
            cls.name = cls.__name__
        for flag, methods in _METHODS_BY_FLAG.items():
            if flag not in own and not own.keys().isdisjoint(methods):
                setattr(cls, flag, True)

    def check_device(self, device: torch.device) -> None:
        """Raise an error if the device does not support this precision, without using the device.

        Raises:
            ConfigurationError: ``device`` does not support the dtypes of this precision.
        """

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return the context in which modules are built, so that parameters are created in their final dtype."""
        return nullcontext()

    def convert_module(self, module: Module) -> Module:
        """Convert the parameters and buffers of ``module`` to this precision in place. Tied parameters stay tied."""
        return module

    def convert_batch(self, batch: Any) -> Any:
        """Convert the floating-point tensors of a nested ``batch`` to this precision."""
        return batch

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass. The engine creates one context and enters the same one for each step.

        Activation checkpointing recomputes forward passes during `backward`, outside of this context. Override
        `backward` to enter the context there as well. ``torch.autocast`` is restored automatically.
        """
        return nullcontext()

    def outside_forward(self) -> AbstractContextManager[Any]:
        """Return a context that disables `forward_context` within it.

        Used in manual optimization, where ``training_step`` runs backward and steps within the context of its forward.
        """
        return nullcontext()

    def weights_changed(self) -> None:
        """Discard, within `forward_context`, values derived from weights that have changed.

        Called in manual optimization, where one context covers the whole ``training_step``: after each backward and
        step, and before each evaluation of a closure. Call it, or ``torch.clear_autocast_cache()``, if you change
        weights between two forward passes in any other way.
        """

    run_backward: Callable[[Tensor], None] = staticmethod(Tensor.backward)
    """Runs the backward of a loss that `backward` has scaled: ``loss.backward()``, or the module's own ``backward``."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a loss of shape (), by calling `run_backward` with the loss that it scales."""
        self.run_backward(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, once after each `backward`."""

    def clip_gradients(
        self, optimizers: Optimizer | Iterable[Optimizer], max_norm: float, algorithm: str = "norm"
    ) -> Tensor:
        """Clip the gradients of all ``optimizers`` together, in place, without waiting for the device.

        Args:
            optimizers: one optimizer or several. The norm is over the gradients of all optimizers.
            max_norm: the largest allowed norm (``"norm"``) or magnitude of one element (``"value"``).
            algorithm: ``"norm"`` or ``"value"``.

        Returns:
            Tensor of shape (): the norm over all parameters and shards before clipping; for ``"value"`` the
            largest magnitude of one element before clipping.

        Raises:
            ConfigurationError: ``algorithm`` is unknown.
        """
        return clip_gradients((optimizers,) if isinstance(optimizers, Optimizer) else optimizers, max_norm, algorithm)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step ``optimizer``. Return False if the step was skipped because of an overflow in the gradients."""
        optimizer.step(closure)
        return True

    def keep_pending_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """Record optimizers that will step after the next `update`, so that `update` rescales their gradients.

        Called in manual optimization, where an optimizer may step in a later ``training_step`` than its backward.
        """

    def update(self) -> None:
        """Adapt the loss scale, once per step after all optimizers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON-serializable values."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`. The empty dict, which other precisions return, is accepted."""

    def memory_advice(self) -> Sequence[str]:
        """Return other precisions that would take less memory, for the note on an out-of-memory error."""
        if self.compute_dtype.itemsize > 2:
            return ["precision='bf16-mixed': activations of half the size"]
        if self.compute_dtype in _TRUE_PRECISION_NAMES and self.param_dtype.itemsize > 2:
            other = _TRUE_PRECISION_NAMES[self.compute_dtype]
            return [f"precision={other!r}: no float32 parameters, but less exact updates"]
        return []

    def describe(self) -> str:
        """Return the resolved dtypes on one line."""
        dtypes = {
            "parameters": self.param_dtype,
            "compute": self.compute_dtype,
            "gradient reduction": self.reduce_dtype,
            "outputs": self.output_dtype,
        }
        return f"Precision {self.name}: " + ", ".join(f"{use} {_short(dtype)}" for use, dtype in dtypes.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class FullPrecision(Precision):
    """``"32-true"``: the module runs unchanged, without autocast, loss scaling or conversion of dtypes."""

    name = "32-true"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
