"""Runs normalization layers with half-precision parameters on float32 copies of these, where kernels need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def half_precision_norms(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers in ``module`` whose kernels may refuse weights in half precision.

    BatchNorm and InstanceNorm refuse them where statistics are kept; LayerNorm and GroupNorm on a CPU with float32
    inputs.
    """
    for child in module.modules():
        if isinstance(child, (_NormBase, nn.LayerNorm, nn.GroupNorm)) and child.weight is not None:
            yield child


def with_float32_weights(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` to run with the weights of ``layer`` cast to float32, as under plain autocast.

    Without statistics, nothing is cast if input and weights already have the same dtype.
    """
    keeps_statistics = isinstance(layer, _NormBase)

    def run(*args: Any, **kwargs: Any) -> Any:
        held: dict[str, Any] = layer._parameters
        inputs = args or tuple(kwargs.values())
        if not keeps_statistics and inputs[0].dtype == held["weight"].dtype:
            return forward(*args, **kwargs)
        halves = {name: parameter for name, parameter in held.items() if parameter is not None}
        held.update({name: parameter.float() for name, parameter in halves.items()})
        try:
            return forward(*args, **kwargs)
        finally:
            held.update(halves)

    return run
