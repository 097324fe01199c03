"""Layers whose parameters have no shape yet (`torch.nn.Lazy*`), refused before anything asks for one."""

from __future__ import annotations

from typing import NoReturn

from torch import nn
from torch.nn.parameter import is_lazy

from drivetrain.errors import ConfigurationError

_SHOWN = 8


def refuse_lazy(module: nn.Module) -> NoReturn:
    """Refuse a module with lazy layers that have not seen an input.

    Raises:
        ConfigurationError: names them.
    """
    lazy = [
        f"{name or 'the module itself'} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if any(is_lazy(tensor) for tensor in (*layer._parameters.values(), *layer._buffers.values()))
    ]
    more = f" and {len(lazy) - _SHOWN} more" if len(lazy) > _SHOWN else ""
    raise ConfigurationError(
        f"{type(module).__name__} has lazy layers that are not yet initialised: {', '.join(lazy[:_SHOWN])}{more}.",
        "their parameters get a shape with the first forward; optimizers, strategies and checkpoints need it before.",
        "run one forward on an example batch, under torch.no_grad(): before the call, or in configure_model.",
    )
