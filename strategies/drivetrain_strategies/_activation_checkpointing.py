"""Blocks that compute their activations again in backward, and blocks that are compiled; names stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from drivetrain.errors import ConfigurationError, nearest
from drivetrain.strategies import MemoryAdvice

_MATRIX_PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
)
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)

POLICIES: dict[str, tuple[Any, ...] | None] = {
    "full": None,
    "save_matmuls": (*_MATRIX_PRODUCTS, *_ATTENTION),
    "save_attention": _ATTENTION,
}
"""What is kept by name; everything else is computed again. None keeps nothing but the inputs."""

Policy = str | Callable[..., CheckpointPolicy]


class ForwardSwap:
    """Puts other forwards in the place of modules' own, on the objects, so that neither class nor name changes.

    Hooks of a module, gathering its parameters for one, run around what is put there.
    """

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    def put(self, module: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``module.forward`` by ``wrap(module.forward)``."""
        self._before.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = wrap(module.forward)

    def undo(self) -> None:
        """Put all back."""
        for module, before in reversed(self._before):
            module.__dict__.pop("forward", None)
            if before is not None:
                module.__dict__["forward"] = before
        self._before = []


class Checkpointing:
    """Makes a forward one whose activations are computed again in backward, without re-entering autograd.

    Args:
        policy: a name of `POLICIES`, or a function as `create_selective_checkpoint_contexts` takes it.

    Raises:
        ConfigurationError: an unknown name; lists the known ones.
    """

    def __init__(self, policy: Policy) -> None:
        if isinstance(policy, str) and policy not in POLICIES:
            raise ConfigurationError(
                f"activation_policy={policy!r}.{nearest(policy, POLICIES)}",
                "it names what is kept for backward.",
                f"use one of {', '.join(POLICIES)}, or a function (context, operator, *args) -> CheckpointPolicy.",
            )
        self._policy = policy
        self.casts_anew = policy != "full"
        """Whether a weight is cast each time that it is used, and autocast keeps none of it."""

    def __call__(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        kept = POLICIES[self._policy] if isinstance(self._policy, str) else self._policy
        options: dict[str, Any] = {"use_reentrant": False}
        region = forward
        if kept is not None:
            chosen = list(kept) if isinstance(kept, tuple) else kept
            options["context_fn"] = partial(create_selective_checkpoint_contexts, chosen)
            region = _casting_anew(forward)

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(region, *args, **options, **kwargs)

        return checkpointed


def _casting_anew(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` running the same operations each time, as a policy that tells them apart by number needs it.

    Autocast keeps a weight that it has cast until the step ends. Of a weight that was used before (tied, or in a block
    that runs twice) the cast would be missing in the forward and come as a surprise when it is computed again.
    """

    def cast_anew(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # there casts are part of the graph
            return forward(*args, **kwargs)
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(before)

    return cast_anew


def modules_of(module: nn.Module, classes: Sequence[type[nn.Module]]) -> Iterable[nn.Module]:
    """Every module of one of ``classes``, the outermost of nested ones.

    Raises:
        ConfigurationError: a class does not occur; names those that do.
    """
    present = {type(child).__name__ for child in module.modules() if child is not module}
    for one in classes:
        if not any(isinstance(child, one) for child in module.modules()):
            raise ConfigurationError(
                f"activation_checkpointing: no module of class {one.__name__} is in {type(module).__name__}."
                f"{nearest(one.__name__, present)}",
                f"the classes in it are {', '.join(sorted(present))}.",
                "name one of these.",
            )
    chosen: list[str] = []
    for name, child in module.named_modules():
        if any(isinstance(child, one) for one in classes) and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen.append(name)
            yield child


def checkpointing_advice(strategy: type) -> MemoryAdvice:
    """The advice to checkpoint activations, for a class of strategies that takes ``activation_checkpointing``."""
    return MemoryAdvice(
        "activations", f"activation checkpointing ({strategy.__name__}(activation_checkpointing=[Block]))"
    )
