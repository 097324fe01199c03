"""Finds the weights in files of other libraries, which may nest them under a key such as ``model``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_KEYS_OF_WEIGHTS = ("state_dict", "model_state_dict", "model", "module")


def nested_weights(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the mapping of names to tensors in a document, and the dotted keys that lead to it.

    A mapping without tensors is searched for a mapping under a key that usually holds weights, or for its only mapping.
    """
    if not any(isinstance(value, torch.Tensor) for value in document.values()):
        mappings = [key for key, value in document.items() if isinstance(value, Mapping)]
        known = [key for key in _KEYS_OF_WEIGHTS if key in mappings]
        if known or len(mappings) == 1:
            key = (known or mappings)[0]
            weights, nest = nested_weights(document[key])
            return weights, f"{key}.{nest}"
    return document, ""
