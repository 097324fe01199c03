"""Runs normalization layers with float32 copies of half-precision parameters, if the kernels require it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def half_precision_norms(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers in ``module`` whose kernels may refuse weights in half precision.

    BatchNorm and InstanceNorm refuse half-precision weights if they keep running statistics. LayerNorm and GroupNorm
    refuse half-precision weights for float32 inputs on the CPU.
    """
    for child in module.modules():
        if isinstance(child, (_NormBase, nn.LayerNorm, nn.GroupNorm)) and child.weight is not None:
            yield child


def with_float32_weights(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
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
