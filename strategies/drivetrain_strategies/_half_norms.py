"""Normalising layers whose parameters are in half precision, while their statistics are in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def norms_of(module: nn.Module) -> Iterator[nn.Module]:
    """The layers in ``module`` whose kernels take weights in half precision for a mistake.

    Those of BatchNorm and InstanceNorm do so wherever statistics are kept; those of LayerNorm and GroupNorm on a CPU,
    where the input is in float32.
    """
    for child in module.modules():
        if isinstance(child, (_NormBase, nn.LayerNorm, nn.GroupNorm)) and child.weight is not None:
            yield child


def with_float32_weights(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` running with the weights of ``layer`` cast to float32, as they are under plain autocast.

    Where no statistics are kept an input in half precision goes with weights in half precision, and nothing is cast.
    """
    keeps_statistics = isinstance(layer, _NormBase)

    def run(*args: Any, **kwargs: Any) -> Any:
        held: dict[str, Any] = layer._parameters
        inputs = args or tuple(kwargs.values())
        if not keeps_statistics and inputs[0].dtype == held["weight"].dtype:
            return forward(*args, **kwargs)
        halves = {name: one for name, one in held.items() if one is not None}
        held.update({name: one.float() for name, one in halves.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            held.update(halves)

    return run
