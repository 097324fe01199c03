"""State of a sharded module by plain names: given as shards, taken from whole tensors or shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from drivetrain.errors import CheckpointError


def sharded_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied names giving one object; sharded ones as DTensors."""
    detached: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):  # an _extra_state
            state[name] = value
            continue
        if id(value) not in detached:
            detached[id(value)] = value.detach()
        state[name] = detached[id(value)]
    return state


def like(value: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return ``value``, whole or sharded in any way, laid out as ``place`` is.

    A whole one is cut without talking. A sharded one of another layout is gathered first, which all ranks must do.
    """
    if not isinstance(place, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        if value.device_mesh == place.device_mesh and value.placements == place.placements:
            return value
        value = value.full_tensor()
    # Cut where it lies: only this rank's part travels to the device.
    mesh = place.device_mesh
    if mesh.device_type != value.device.type:
        value = value.to(mesh.device_type)
    return distribute_tensor(value, mesh, place.placements, src_data_rank=None)


@torch.no_grad()
def load_state(module: nn.Module, state: Mapping[str, torch.Tensor], strict: bool) -> None:
    """Load parameters and buffers by name into a sharded module.

    Raises:
        CheckpointError: names or shapes do not fit, and ``strict`` asks for it; nothing is loaded then.
    """
    own = module.state_dict(keep_vars=True)
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    wrong = [
        f"{name} ({tuple(state[name].shape)} instead of {tuple(place.shape)})"
        for name, place in own.items()
        if isinstance(place, torch.Tensor) and name in state and state[name].shape != place.shape
    ]
    if wrong or (strict and (missing or unexpected)):
        raise CheckpointError(
            f"The weights do not fit {type(module).__name__}: missing {missing[:10]}, unexpected {unexpected[:10]}, "
            f"wrongly shaped {wrong[:10]}.",
            "weights are matched by name.",
            "build the module as it was trained, or load with strict=False.",
        )
    extra = {}
    for name, place in own.items():
        if name not in state:
            continue
        if not isinstance(place, torch.Tensor):
            extra[name] = state[name]
            continue
        value = like(state[name].detach(), place)
        if isinstance(place, DTensor):
            assert isinstance(value, DTensor)
            place.to_local().copy_(value.to_local())
        else:
            place.copy_(value)
    if extra:
        module.load_state_dict(extra, strict=False)


def sharded_optimizer_state(saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return named optimizer state with every tensor shaped like its parameter laid out as the parameter is."""
    state: dict[str, Any] = {}
    for name, values in saved["state"].items():
        place = parameters.get(name)
        state[name] = {
            key: like(value, place)
            if place is not None and isinstance(value, torch.Tensor) and value.dim() and value.shape == place.shape
            else value
            for key, value in values.items()
        }
    return {"state": state, "param_groups": saved["param_groups"]}
