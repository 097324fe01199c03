"""Layers that a run in other processes has built, on their way to the caller's module."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from drivetrain.errors import ConfigurationError
from drivetrain.module.train_module import TrainModule

Build = tuple[tuple[str, str], ...]
"""By name: every layer's class, and which parameter or buffer it is, counted so that ties show."""

_CONTAINERS = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")


class Before(NamedTuple):
    """A module before a run: how it was built, and which of its own attributes had a value."""

    build: Build
    attributes: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """Take it down."""
        return cls(build_of(module), frozenset(name for name, value in module.__dict__.items() if value is not None))


@dataclass(slots=True)
class Layers:
    """How a module was built in a run.

    Attributes:
        build: its layers and tensors.
        pickled: the module's own containers, and its attributes that had no value before; None where they cannot be
            pickled.
        why_not: what the attempt to pickle them raised.
    """

    build: Build
    pickled: bytes | None
    why_not: str

    @classmethod
    def of(cls, module: TrainModule, before: Before) -> Self | None:
        """Collect them after a run; None where the module is built as it was ``before``."""
        build = build_of(module)
        if build == before.build:
            return None
        wanted = {
            name: value
            for name, value in module.__getstate__().items()
            if name in _CONTAINERS or (value is not None and name not in before.attributes)
        }
        try:
            return cls(build, pickle.dumps(wanted), "")
        except Exception as error:  # whatever a layer's own reduction raises: a parametrized one, a lambda
            return cls(build, None, f"{type(error).__name__}: {error}")

    def put_into(self, module: TrainModule) -> None:
        """Build the caller's module as the run's was.

        Raises:
            ConfigurationError: what could not be sent is not what its ``configure_model`` builds either.
        """
        if self.pickled is not None:
            state: dict[str, Any] = pickle.loads(self.pickled)
            module.__dict__.update(state)
            for name in (*state["_modules"], *state["_parameters"], *state["_buffers"]):
                module.__dict__.pop(name, None)  # `self.net = None`, which would stand before the layer
            return
        cause: Exception | None = None
        with torch.random.fork_rng(devices=[]):  # the values come from the run
            try:
                module.configure_model()
            except Exception as error:
                cause = error
        if build_of(module) != self.build:
            raise ConfigurationError(
                f"The layers that the run gave {type(module).__name__} cannot be sent to the process that called fit: "
                f"{self.why_not}.",
                "that process's configure_model does not build them by itself either.",
                "build them in __init__, or in configure_model alone; or use launcher='subprocess'.",
            ) from cause


def build_of(module: nn.Module) -> Build:
    """Return how a module is built; equal for two that weights can be copied between."""
    numbers: dict[int, int] = {}
    found = []
    for prefix, layer in module.named_modules(remove_duplicate=False):
        kind = type(layer)
        found.append((prefix, f"{kind.__module__}.{kind.__qualname__}"))
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                found.append((f"{prefix}.{name}", str(numbers.setdefault(id(tensor), len(numbers)))))
    return tuple(found)
