"""Refuses uninitialised lazy layers (`torch.nn.Lazy*`) before the shape of a parameter is needed."""

from __future__ import annotations

from typing import NoReturn

from torch import nn
from torch.nn.parameter import is_lazy

from drivetrain.errors import ConfigurationError

_MAX_LISTED = 8


def refuse_lazy_layers(module: nn.Module) -> NoReturn:
    """Raise the error for a module with uninitialised lazy layers.

    Raises:
        ConfigurationError: always. The error names the layers.
    """
    lazy = [
        f"{name or 'the module itself'} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if any(is_lazy(tensor) for tensor in (*layer._parameters.values(), *layer._buffers.values()))
    ]
    more = f" and {len(lazy) - _MAX_LISTED} more" if len(lazy) > _MAX_LISTED else ""
    raise ConfigurationError(
        f"{type(module).__name__} has lazy layers that are not yet initialised: {', '.join(lazy[:_MAX_LISTED])}{more}.",
        "their parameters get a shape in the first forward; optimizers, strategies and checkpoints need it earlier.",
        "run one forward on an example batch under torch.no_grad(), before you call fit or in configure_model.",
    )
