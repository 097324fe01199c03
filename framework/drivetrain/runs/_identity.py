"""Identifies an experiment: the module's class, the run's name and the module's hyper-parameters."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.checkpoint._format.documents import encode
from drivetrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Identity:
    """What identifies the experiment of a run.

    Attributes:
        module: class of the module, see `class_path`.
        name: name of the run, which is its first logger's.
        hyper_parameters: the module's, without secrets, encoded as JSON.
        searched: names of hyper-parameters that a search sets, which may differ within an experiment.
    """

    module: str
    name: str
    hyper_parameters: Mapping[str, Any]
    searched: frozenset[str] = frozenset()

    @classmethod
    def of(cls, kind: type, name: str, hyper_parameters: Mapping[str, Any], searched: Iterable[str] = ()) -> Identity:
        """Return the identity of a run.

        Args:
            kind: the module's class.
            name: the run's name.
            hyper_parameters: the module's, without secrets.
            searched: names of hyper-parameters that a search sets.
        """
        return cls(class_path(kind), name, encode_hyper_parameters(hyper_parameters), frozenset(searched))

    def difference(self, module: str, name: str, hyper_parameters: Any) -> str | None:
        """Describe how another run differs from this experiment; None if it is the same.

        Args:
            module: its module's class; "" if unknown.
            name: its name; "" if unknown.
            hyper_parameters: as `encode_hyper_parameters` returns them; None if unknown.
        """
        if module and not is_same_class(module, self.module):
            return f"its module is {module}, and this one {self.module}"
        if name and name != self.name:
            return f"its name is {name!r}, and this one's {self.name!r}"
        if hyper_parameters is None or hyper_parameters == self.hyper_parameters:
            return None
        theirs = hyper_parameters if isinstance(hyper_parameters, Mapping) else {}
        ours = self.hyper_parameters
        keys = [key for key in {**theirs, **ours} if key not in theirs or key not in ours or theirs[key] != ours[key]]
        keys = [key for key in keys if key not in self.searched]
        if not keys and isinstance(hyper_parameters, Mapping):
            return None
        differences = ", ".join(
            f"{key}={_format_value(theirs, key)}, here {_format_value(ours, key)}" for key in keys[:3]
        )
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        return f"its hyper-parameters differ: {differences}{more}"


def class_path(kind: type) -> str:
    """Return a class by module and name; classes of a script count as those of a module of the script's name.

    ``train.py`` thus names its classes the same whether it is run or imported. Classes of a notebook have no module.
    """
    module = kind.__module__
    if module in ("__main__", "__mp_main__"):
        main = sys.modules.get("__main__")
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name.removesuffix(".__main__") if spec is not None else _stem(file) if file else ""
    return f"{module}.{kind.__qualname__}" if module else kind.__qualname__


def is_same_class(one: str, other: str) -> bool:
    """Return whether two class paths name one class; either may lack the leading packages or the module."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def encode_hyper_parameters(hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as JSON-able values, to compare them with those of a file."""
    tensors: dict[str, Any] = {}
    try:
        document = encode(dict(hyper_parameters), tensors, "hyper_parameters")
    except CheckpointError:  # saving reports it
        return {}
    return document if isinstance(document, dict) else {}


def _stem(file: str) -> str:
    return os.path.splitext(os.path.basename(file))[0]


def _format_value(values: Mapping[str, Any], key: str) -> str:
    return reprlib.repr(values[key]) if key in values else "not set"
