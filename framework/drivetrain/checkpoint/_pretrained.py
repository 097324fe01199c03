"""What a checkpoint says of Hugging Face's models in a module: their configurations, which `from_pretrained` asks for.

Nothing of those libraries is imported: a model is known by what it can do.
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
    """Return what ``save_pretrained`` of each model in ``module`` would write of it besides weights, by its name.

    Of a model within a model the outer one counts. It has "class", and "config" and "generation_config" where it has
    them; "adapters", one of PEFT's configurations for each by name, and "adapter_prefix", what their names begin with
    in a file, where it has some.
    """
    found = {}
    for name, child in _outermost("", module):
        try:
            found[name] = _describe(child)
        except Exception:  # something else by these names, whose checkpoint must be written all the same
            logger.debug("What %r says of its configuration is not kept.", name, exc_info=True)
    return found


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
    kind = plain_class(model).__name__
    description: dict[str, Any] = {"class": kind}
    if adapters := _adapters(model):
        description["adapters"] = {name: _as_json(one.to_dict()) for name, one in adapters.items()}
        # PEFT's own model has these names; one of transformers' that adapters were added to has shorter ones.
        wraps = hasattr(type(model), "get_base_model")
        description["adapter_prefix"] = "" if wraps else "base_model.model."
        if wraps:  # as its save_pretrained says what it is for where it has no task
            base = plain_class(model.get_base_model())
            kind_of_base = {"base_model_class": base.__name__, "parent_library": base.__module__}
            for one in description["adapters"].values():
                if one.get("task_type") is None and one.get("auto_mapping") is None:
                    one["auto_mapping"] = kind_of_base
        return description
    description["config"] = _as_json(json.loads(model.config.to_json_string())) | {"architectures": [kind]}
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(generation, "to_json_string", None)) and model.can_generate():
        description["generation_config"] = _as_json(json.loads(generation.to_json_string()))
    return description


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """As it stands in a JSON file, sets as lists; without secrets."""
    public, _ = without_secrets(json.loads(json.dumps(values, default=_to_plain)))
    return public


def _to_plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
