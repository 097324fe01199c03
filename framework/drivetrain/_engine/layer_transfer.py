"""Transfers layers from a run in other processes, which has built them, to the caller's module."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

LayerStructure = tuple[tuple[str, str], ...]
"""Every layer's name and class, and every tensor's name and number. Tied parameters have the same number."""

_CONTAINERS = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class InitialLayers(NamedTuple):
    """A module's structure before a run, and the names of the attributes that were not None."""

    structure: LayerStructure
    attributes: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Record the structure and attributes of ``module``."""
        attributes = frozenset(name for name, value in module.__dict__.items() if value is not None)
        return cls(layer_structure(module), attributes)


@dataclass(slots=True)
class BuiltLayers:
    """The layers of a module after a run that has changed the module's structure.

    Attributes:
        structure: the layers and tensors of the module.
        pickled: the module's dictionaries of layers and tensors, and the attributes that were None or missing before
            the run; None if pickling failed.
        pickling_error: the error with which pickling failed, as text.
    """

    structure: LayerStructure
    pickled: bytes | None
    pickling_error: str

    @classmethod
    def of(cls, module: TrainModule, before: InitialLayers) -> Self | None:
        """Collect the layers after a run. Return None if the module has the same structure as ``before``."""
        structure = layer_structure(module)
        if structure == before.structure:
            return None
        state = {
            name: value
            for name, value in module.__getstate__().items()
            if name in _CONTAINERS or (value is not None and name not in before.attributes)
        }
        try:
            return cls(structure, pickle.dumps(state), "")
        except Exception as error:  # parametrized layers and lambdas raise errors of various types
            return cls(structure, None, f"{type(error).__name__}: {error}")

    def put_into(self, module: TrainModule) -> None:
        """Build the same layers in the caller's module, by unpickling them or by calling ``configure_model``.

        Raises:
            ConfigurationError: the layers could not be pickled, and ``configure_model`` does not build the same ones.
        """
        if self.pickled is not None:
            state: dict[str, Any] = pickle.loads(self.pickled)
            module.__dict__.update(state)
            for name in (*state["_modules"], *state["_parameters"], *state["_buffers"]):
                module.__dict__.pop(name, None)  # an attribute from `self.net = None` would hide the layer
            return
        cause: Exception | None = None
        with torch.random.fork_rng(devices=[]):  # values are copied later, so draws here must not count
            try:
                module.configure_model()
            except Exception as error:
                cause = error
        if layer_structure(module) != self.structure:
            raise ConfigurationError(
                f"The layers that the run gave {type(module).__name__} cannot be sent to the process that called fit: "
                f"{self.pickling_error}.",
                "calling configure_model in that process does not build the same layers either.",
                "build all layers in __init__ or in configure_model, or use launcher='subprocess'.",
            ) from cause


def layer_structure(module: nn.Module) -> LayerStructure:
    """Return the structure of a module. Weights can be copied between modules of equal structure."""
    numbers: dict[int, int] = {}
    structure = []
    for prefix, layer in module.named_modules(remove_duplicate=False):
        kind = type(layer)
        structure.append((prefix, f"{kind.__module__}.{kind.__qualname__}"))
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                structure.append((f"{prefix}.{name}", str(numbers.setdefault(id(tensor), len(numbers)))))
    return tuple(structure)
