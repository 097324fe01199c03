"""Describes a module, for what a checkpoint records of it besides its tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from drivetrain._config.secret_values import without_secrets
from drivetrain._runtime.plain_names import COMPILED, plain_class

logger = logging.getLogger("drivetrain")


class ModuleDescription(NamedTuple):
    """What a checkpoint records of a module besides its tensors.

    Attributes:
        tied: ``{tied: first}`` for names of parameters and buffers that share one tensor, where ``first`` is the
            tensor's first name among the parameters, then the buffers.
        layer_versions: the version of each submodule's state by the submodule's name, without those of version 1.
        pretrained: what ``save_pretrained`` of each Hugging Face model in the module writes besides the weights, by the
            model's name in the module: "class" and either "adapters", the names of PEFT adapters, or "config" and, if
            the model generates, "generation_config".
    """

    tied: dict[str, str]
    layer_versions: dict[str, int]
    pretrained: dict[str, dict[str, Any]]


def describe_module(module: nn.Module) -> ModuleDescription:
    """Return what a checkpoint records of a module besides its tensors."""
    return ModuleDescription(_tied_names(module), layer_versions(module), _pretrained_models(module))


def _tied_names(module: nn.Module) -> dict[str, str]:
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    parameters = nn.Module.named_parameters(module, remove_duplicate=False)
    for name, value in chain(parameters, nn.Module.named_buffers(module, remove_duplicate=False)):
        first_name = first_names.setdefault(id(value), name)
        if first_name != name:
            tied[name.replace(COMPILED, "")] = first_name.replace(COMPILED, "")
    return tied


def layer_versions(module: nn.Module) -> dict[str, int]:
    """Return the version of each submodule's state by the submodule's name, without those of version 1."""
    versions = [(name, part._version) for name, part in module.named_modules(remove_duplicate=False)]
    return {
        f"{name}.".replace(COMPILED, "")[:-1]: version
        for name, version in versions
        if type(version) is int and version != 1
    }


# Hugging Face models, which are recognized by their attributes; no Hugging Face library is imported


def _pretrained_models(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe the models, so that the checkpoint can be converted for ``from_pretrained``."""
    models = {}
    for name, child in _outermost("", module):
        try:
            models[name] = _describe(child)
        except Exception:  # another class has the same attribute names; saving must still succeed
            logger.debug("The configuration of %r could not be read and is not saved.", name, exc_info=True)
    return models


def _outermost(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if _is_pretrained(child):
            yield prefix + name, child
        else:
            yield from _outermost(f"{prefix}{name}.", child)


def _is_pretrained(module: nn.Module) -> bool:
    if not callable(getattr(type(module), "save_pretrained", None)):
        return False
    return bool(_adapters(module)) or callable(getattr(getattr(module, "config", None), "to_json_string", None))


def _adapters(module: nn.Module) -> dict[str, Any]:
    configured = getattr(module, "peft_config", None)
    return configured if isinstance(configured, dict) else {}


def _describe(model: Any) -> dict[str, Any]:
    class_name = plain_class(model).__name__
    description: dict[str, Any] = {"class": class_name}
    if adapters := _adapters(model):
        return {**description, "adapters": list(adapters)}
    description["config"] = _public(model.config) | {"architectures": [class_name]}
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)) and model.can_generate():
        description["generation_config"] = _public(generation)
    return description


def _public(config: Any) -> dict[str, Any]:
    """Return a configuration without secrets."""
    public, _ = without_secrets(json.loads(config.to_json_string()))
    return public
