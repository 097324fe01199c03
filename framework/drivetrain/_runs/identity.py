"""Identifies an experiment: the module's class, the run's name and the module's hyper-parameters."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain._format.documents import encode
from drivetrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Identity:
    """What identifies the experiment of a run.

    Attributes:
        module: class of the module, see `class_path`.
        name: name of the run, taken from its first logger.
        hyper_parameters: the module's hyper-parameters, without secrets, encoded as JSON.
        searched: names of hyper-parameters that a hyper-parameter search sets. They may differ within an experiment.
    """

    module: str
    name: str
    hyper_parameters: Mapping[str, Any]
    searched: frozenset[str] = frozenset()

    def difference(self, module: str, name: str, hyper_parameters: Any) -> str | None:
        """Describe how another run differs from this experiment; None if it belongs to this experiment.

        Args:
            module: class of the other run's module; "" if unknown.
            name: name of the other run; "" if unknown.
            hyper_parameters: the other run's hyper-parameters, as `encode_hyper_parameters` returns them; None if
                unknown.
        """
        if module and not is_same_class(module, self.module):
            return f"its module is {module}, and this run's module is {self.module}"
        if name and name != self.name:
            return f"its name is {name!r}, and this run's name is {self.name!r}"
        if hyper_parameters is None or hyper_parameters == self.hyper_parameters:
            return None
        other = hyper_parameters if isinstance(hyper_parameters, Mapping) else {}
        this = self.hyper_parameters
        keys = [key for key in {**other, **this} if key not in other or key not in this or other[key] != this[key]]
        keys = [key for key in keys if key not in self.searched]
        if not keys and isinstance(hyper_parameters, Mapping):
            return None
        differences = (f"{key}={_format_value(other, key)}, here {_format_value(this, key)}" for key in keys[:3])
        return f"its hyper-parameters differ: {', '.join(differences)}"


def class_path(kind: type) -> str:
    """Return the path of a class: its module and qualified name.

    For a class defined in a script, the module is the script's name, so that ``train.py`` yields the same paths whether
    it is run or imported. The path of a class defined in a notebook has no module.
    """
    module = kind.__module__
    if module in ("__main__", "__mp_main__"):
        main = sys.modules.get("__main__")
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name.removesuffix(".__main__") if spec is not None else _stem(file) if file else ""
    return f"{module}.{kind.__qualname__}" if module else kind.__qualname__


def is_same_class(first: str, second: str) -> bool:
    """Return whether two class paths refer to the same class; either may lack the leading packages or the module."""
    return first == second or first.endswith(f".{second}") or second.endswith(f".{first}")


def encode_hyper_parameters(hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as JSON-able values, which can be compared with hyper-parameters from a file."""
    tensors: dict[str, Any] = {}
    try:
        document = encode(dict(hyper_parameters), tensors, "hyper_parameters")
    except CheckpointError:  # saving reports the error
        return {}
    return document if isinstance(document, dict) else {}


def _stem(file: str) -> str:
    return os.path.splitext(os.path.basename(file))[0]


def _format_value(values: Mapping[str, Any], key: str) -> str:
    return reprlib.repr(values[key]) if key in values else "not set"
