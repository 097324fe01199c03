"""What makes two runs one experiment: the module's class, the run's name and the hyper-parameters that it keeps."""

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
    """What a run is known by.

    Attributes:
        module: the class of the module, see `class_path`.
        name: the run's, which is its first logger's.
        hyper_parameters: of the module, without secrets, encoded as JSON.
        searched: those of them that a search sets, which may come out otherwise for the same experiment.
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
            name: the run's.
            hyper_parameters: of the module, without secrets.
            searched: the names of those that a search sets.
        """
        return cls(class_path(kind), name, encode_hyper_parameters(hyper_parameters), frozenset(searched))

    def difference(self, module: str, name: str, hyper_parameters: Any) -> str | None:
        """Say what another run is that this one is not; None where it is the same experiment.

        Args:
            module: its class; "" where nobody knows.
            name: its name; likewise.
            hyper_parameters: as `encode_hyper_parameters` gives them; None where nobody knows.
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
    """Return a class by its module and name. What a script defines is in a module of the script's name.

    So that ``train.py`` names its classes alike, whether it is run or imported; in a notebook they have no module.
    """
    module = kind.__module__
    if module in ("__main__", "__mp_main__"):
        main = sys.modules.get("__main__")
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name.removesuffix(".__main__") if spec is not None else _stem(file) if file else ""
    return f"{module}.{kind.__qualname__}" if module else kind.__qualname__


def is_same_class(one: str, other: str) -> bool:
    """Whether two class paths name one class: a package, or the module, may be missing of either."""
    return one == other or one.endswith(f".{other}") or other.endswith(f".{one}")


def encode_hyper_parameters(hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as JSON, so that they can be compared with those of a file."""
    aside: dict[str, Any] = {}
    try:
        document = encode(dict(hyper_parameters), aside, "hyper_parameters")
    except CheckpointError:  # which saving says
        return {}
    return document if isinstance(document, dict) else {}


def _stem(file: str) -> str:
    return os.path.splitext(os.path.basename(file))[0]


def _format_value(values: Mapping[str, Any], key: str) -> str:
    return reprlib.repr(values[key]) if key in values else "not there"
