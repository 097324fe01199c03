"""Finds what stands before the names of a module's weights in files of other libraries, such as ``model.``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_KEYS_OF_WEIGHTS = ("state_dict", "model_state_dict", "model", "module")
_WRAPPER = "module."  # before each name in the state dict of DataParallel and DistributedDataParallel


def nest_of(name: str, path: Any = None) -> str:
    """Return the part of a name that does not belong to the module.

    Args:
        name: the whole name of a weight.
        path: the keys of the nested dicts that lead to the weight; the last one is the name in the module. None if the
            weight is not nested.
    """
    keys = [str(key) for key in path[:-1]] if isinstance(path, tuple | list) else []
    nest = "".join(f"{key}." for key in keys)
    nest = nest if name.startswith(nest) else ""
    return nest + _WRAPPER if name.startswith(nest + _WRAPPER) else nest


def common_nest(nests: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the nest of all ``names``; "" if there is none or if they differ."""
    found = {nests.get(name, "") for name in names}
    return found.pop() if len(found) == 1 else ""


def nested_weights(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the mapping of names to tensors in a document, and the dotted keys that lead to it.

    A mapping without tensors is searched for a mapping under a key that usually holds weights.
    """
    if not any(isinstance(value, torch.Tensor) for value in document.values()):
        for key in _KEYS_OF_WEIGHTS:
            if isinstance(document.get(key), Mapping):
                weights, nest = nested_weights(document[key])
                return weights, f"{key}.{nest}"
    return document, ""
