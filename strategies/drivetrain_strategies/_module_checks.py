"""Checks that refuse modules which a strategy cannot set up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from drivetrain.errors import ConfigurationError, nearest


def refuse_device_map(module: nn.Module) -> None:
    """Refuse a module that is already spread over devices.

    Raises:
        ConfigurationError: names the submodules that have a device_map, or a parameter on each device.
    """
    spread = [
        f"{name or type(child).__name__!r} was loaded with a device_map"
        for name, child in module.named_modules()
        if getattr(child, "hf_device_map", None)
    ]
    name_by_device: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        # Tensor parallelism has placed DTensors on the run's devices.
        if not (parameter.is_meta or isinstance(parameter, DTensor)):
            name_by_device.setdefault(parameter.device, name)
    if len(name_by_device) > 1:
        spread += [f"{name!r} is on {device}" for device, name in name_by_device.items()]
    if spread:
        raise ConfigurationError(
            f"The module is spread over devices: {', '.join(spread)}.",
            "a strategy needs the whole module on one device before placing it, without the hooks of a device_map.",
            "load the module without device_map, or move it to one device (module.to('cpu')).",
        )


def refuse_sparse_embeddings(module: nn.Module, reason: str) -> None:
    """Refuse ``nn.Embedding(sparse=True)`` for a strategy whose gradients are dense.

    Raises:
        ConfigurationError: names the embedding and gives ``reason``.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ConfigurationError(
                f"{name!r} is an {type(child).__name__} with sparse=True.",
                reason,
                "use sparse=False, or strategy='ddp'.",
            )


def refuse_absent_classes(module: nn.Module, classes: Sequence[type[nn.Module]], argument: str) -> None:
    """Refuse an argument that names classes of modules which do not occur in the module.

    Args:
        module: the module that is searched.
        classes: the classes that the argument names.
        argument: name of the argument.

    Raises:
        ConfigurationError: names the argument and the class, and lists the classes in ``module``.
    """
    class_names = {type(child).__name__ for child in module.modules()}
    for wanted in classes:
        if not any(isinstance(child, wanted) for child in module.modules()):
            raise ConfigurationError(
                f"{argument}: no module of class {wanted.__name__} is in {type(module).__name__}."
                f"{nearest(wanted.__name__, class_names)}",
                f"the module has only these classes: {', '.join(sorted(class_names))}.",
                "name one of these classes.",
            )


def refuse_accumulate_hook(name: str, parameter: Tensor) -> None:
    """Refuse a hook of ``register_post_accumulate_grad_hook``, which would see only this rank's gradient.

    Raises:
        ConfigurationError: ``parameter``, which is called ``name``, has such a hook.
    """
    if parameter._post_accumulate_grad_hooks:
        raise ConfigurationError(
            f"{name} has a hook of register_post_accumulate_grad_hook.",
            "the strategy exchanges gradients after they are accumulated, so it would see this rank's part alone.",
            "use register_hook for a function of the gradient, or do the work in on_after_backward or "
            "on_before_optimizer_step.",
        )
