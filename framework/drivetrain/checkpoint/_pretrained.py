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
from drivetrain._runtime.user_class import plain_class

logger = logging.getLogger("drivetrain")


def pretrained_models(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what ``save_pretrained`` of each Hugging Face model in ``module`` writes besides the weights.

    Returns:
        A dict for each model, by the model's name in ``module``. Its keys are "class" and, if the model has them,
        "config", "generation_config", "adapters" (PEFT configurations by name) and "adapter_prefix" (prefix of tensor
        names in adapter files).
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
        description["adapters"] = {name: _as_json(config.to_dict()) for name, config in adapters.items()}
        # The parameter names of a PeftModel have this prefix, unlike those of a transformers model with add_adapter().
        is_peft_model = hasattr(type(model), "get_base_model")
        description["adapter_prefix"] = "" if is_peft_model else "base_model.model."
        if is_peft_model:  # PeftModel.save_pretrained records the base class if there is no task type
            base = plain_class(model.get_base_model())
            auto_mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
            for config in description["adapters"].values():
                if config.get("task_type") is None and config.get("auto_mapping") is None:
                    config["auto_mapping"] = auto_mapping
        return description
    description["config"] = _as_json(json.loads(model.config.to_json_string())) | {"architectures": [class_name]}
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)) and model.can_generate():
        description["generation_config"] = _as_json(json.loads(generation.to_json_string()))
    return description


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` as JSON-able values, with sets as lists and without secrets."""
    public, _ = without_secrets(json.loads(json.dumps(values, default=_to_plain)))
    return public


def _to_plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
