"""Replaces forwards of module instances: activation checkpointing, and norms that need weights in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from drivetrain.errors import ConfigurationError, nearest
from drivetrain_strategies._module_checks import refuse_absent_classes

_MATRIX_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
]
_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]

POLICIES: dict[str, list[Any] | None] = {
    "full": None,
    "save_matmuls": [*_MATRIX_PRODUCTS, *_ATTENTION],
    "save_attention": _ATTENTION,
}
"""The operators whose results each policy saves. Results of other operators are recomputed in backward.

The policy "full" (None) saves only the block's inputs.
"""


class ForwardSwap:
    """Replaces ``forward`` of module instances. Classes and parameter names stay the same.

    A module's hooks, such as FSDP's gathering, run around the replacement.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, Any]] = []

    def put(self, module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``module.forward`` by ``wrap(module.forward)``."""
        self._replaced.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = wrap(module.forward)

    def keep_norms_in_float32(self, module: nn.Module) -> None:
        """Let layers in ``module`` whose kernels may refuse weights in half precision cast them to float32.

        BatchNorm and InstanceNorm refuse half-precision weights if they keep running statistics. LayerNorm and
        GroupNorm refuse half-precision weights for float32 inputs on the CPU.
        """
        for child in module.modules():
            if isinstance(child, (_NormBase, nn.LayerNorm, nn.GroupNorm)) and child.weight is not None:
                self.put(child, partial(_with_float32_weights, child))

    def checkpoint(
        self, module: nn.Module, classes: Sequence[type[nn.Module]] | None, checkpointing: Checkpointing
    ) -> None:
        """Checkpoint the modules whose class is in ``classes``. Of nested modules, only the outermost.

        Raises:
            ConfigurationError: ``module`` contains no instance of a class. The error lists the classes in ``module``.
        """
        if classes is None:
            return
        refuse_absent_classes(module, classes, "activation_checkpointing")
        chosen: list[str] = []
        for name, child in list(module.named_modules()):
            within_chosen = any(name.startswith(f"{outer}.") for outer in chosen)
            if any(isinstance(child, wanted) for wanted in classes) and not within_chosen:
                chosen.append(name)
                self.put(child, checkpointing)

    def undo(self) -> None:
        """Restore all replaced forwards."""
        for module, previous in reversed(self._replaced):
            module.__dict__.pop("forward", None)
            if previous is not None:
                module.__dict__["forward"] = previous
        self._replaced = []


class Checkpointing:
    """Wraps a forward in non-reentrant activation checkpointing.

    Args:
        policy: a name of `POLICIES`.

    Raises:
        ConfigurationError: the name is unknown. The error lists the known names.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ConfigurationError(
                f"activation_policy={policy!r}.{nearest(policy, POLICIES)}",
                "the policy selects which results are saved for backward.",
                f"use one of {', '.join(POLICIES)}.",
            )
        self._saved_operators = POLICIES[policy]

    def __call__(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"use_reentrant": False}
        region = forward
        if self._saved_operators is not None:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, self._saved_operators)
            region = _without_cast_cache(forward)

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(region, *args, **options, **kwargs)

        return checkpointed


def _without_cast_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` to run without autocast's cast cache, as selective checkpointing requires.

    A policy matches the operators of forward and recomputation by position. With the cache, a weight that had been used
    before (a tied weight, or a block that runs twice) would be cast in the recomputation but not in the forward.
    """

    def run_uncached(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled graph contains the casts
            return forward(*args, **kwargs)
        was_enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(was_enabled)

    return run_uncached


def _with_float32_weights(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` to run with the weights of ``layer`` cast to float32, as under plain autocast.

    For LayerNorm and GroupNorm, the weights are not cast if the input already has their dtype.
    """
    keeps_statistics = isinstance(layer, _NormBase)

    def run(*args: Any, **kwargs: Any) -> Any:
        parameters: dict[str, Any] = layer._parameters
        inputs = args or tuple(kwargs.values())
        if not keeps_statistics and inputs[0].dtype == parameters["weight"].dtype:
            return forward(*args, **kwargs)
        half_parameters = {name: parameter for name, parameter in parameters.items() if parameter is not None}
        parameters.update({name: parameter.float() for name, parameter in half_parameters.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            parameters.update(half_parameters)

    return run


def checkpointing_advice(strategy: type) -> str:
    """Return the advice to set ``activation_checkpointing``, for a strategy that has this argument."""
    return f"activation checkpointing ({strategy.__name__}(activation_checkpointing=[Block]))"
