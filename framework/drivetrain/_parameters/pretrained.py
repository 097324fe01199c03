"""Describes Hugging Face models in a module, so that a checkpoint can be converted for ``from_pretrained``.

Models are recognized by their attributes; no Hugging Face library is imported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from drivetrain._config.secret_values import without_secrets
from drivetrain._runtime.plain_names import plain_class

logger = logging.getLogger("drivetrain")


def pretrained_models(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what ``save_pretrained`` of each Hugging Face model in ``module`` writes besides the weights.

    Returns:
        A dict for each model, by the model's name in ``module``. Its keys are "class" and either "adapters", the names
        of PEFT adapters, or "config" and, if the model generates, "generation_config".
    """
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
