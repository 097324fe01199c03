"""Saves and loads the state that only the rank that holds it can store.

These are the buffers whose values differ between ranks, because the strategy does not synchronize them, and shards of
optimizer state that are of a tensor subclass. A block-quantised tensor has one scale per block of a rank's shard, so
the shards of all ranks are not the parts of one tensor in general. Each rank stores its own, and a run with the same
shards loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import nn

from drivetrain._distributed.control_plane import ControlPlane
from drivetrain._distributed.shards import ParameterShard, Region, region_from
from drivetrain._format import is_flattenable
from drivetrain._format.checksums import crc32
from drivetrain._loops.window_snapshot import has_local_values
from drivetrain._runtime.plain_names import plain_name
from drivetrain._runtime.transfer import row_major
from drivetrain.errors import CheckpointError, listed

# Buffers


def collect_buffers(
    module: nn.Module, saved: Collection[str], overrides: Mapping[str, torch.Tensor], control: ControlPlane
) -> dict[str, torch.Tensor]:
    """Return this rank's values of the buffers that differ between ranks. Collective.

    Args:
        module: the user's module.
        saved: the names in the checkpoint's weights. Buffers with other names are not persistent.
        overrides: this rank's values of the buffers that hold rank 0's values during an evaluation.
        control: the control plane.
    """
    buffers = {
        name: overrides.get(name, buffer)
        for name, buffer in module.named_buffers()
        if name in saved and has_local_values(buffer)
    }
    checksums = control.gather_objects({name: _checksum(buffer) for name, buffer in buffers.items()})
    return {
        name: buffer
        for name, buffer in buffers.items()
        if any(rank_checksums.get(name) != checksums[0].get(name) for rank_checksums in checksums)
    }


def _checksum(buffer: torch.Tensor) -> int:
    """Return a checksum of the values, by which ranks compare the values without sending them."""
    values = row_major(buffer.detach().cpu())
    return crc32(values.view(torch.uint8).numpy()) if len(values) else 0


@torch.no_grad()
def load_buffers(module: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Load the buffers that `collect_buffers` returned on this rank."""
    for path_and_key, buffer in list(nn.Module.named_buffers(module)):
        name = plain_name(path_and_key)
        if name not in saved:
            continue
        if buffer.shape == saved[name].shape:
            buffer.copy_(saved[name])
            continue
        path, _, key = path_and_key.rpartition(".")
        module.get_submodule(path)._buffers[key] = saved[name].to(buffer)


# Optimizer state

FlattenedState = dict[str, dict[str, Any]]
"""For each optimizer with state of a tensor subclass, by index: its ``names`` as "parameter/key" and ``per_rank``,
which tells whether ranks store their own part of it.
"""


def set_apart(
    optimizers: Sequence[Mapping[str, Any]],
    shards_of: Callable[[Mapping[Any, Any]], dict[Any, Any]],
    control: ControlPlane | None,
) -> tuple[FlattenedState, dict[str, Any]]:
    """Remove the state that only its rank can store from optimizer states.

    Args:
        optimizers: the states by parameter name, from which the values are removed.
        shards_of: returns this rank's parts of values.
        control: connects the ranks, if values may be sharded. The call is then collective, because a small shard may be
            an ordinary tensor on one rank and of a subclass on others.

    Returns:
        What the checkpoint says about state of tensor subclasses, and the values of this rank.
    """
    flattened: FlattenedState = {}
    own: dict[str, Any] = {}
    for index, state in enumerate(optimizers):
        values = {(name, key): value for name, keys in state["state"].items() for key, value in keys.items()}
        whole = [place for place, value in values.items() if type(value) is not torch.Tensor and is_flattenable(value)]
        shards: dict[Any, Any] = {}
        parts: list[tuple[str, str]] = []
        if control is not None:
            shards = shards_of(values)
            own_parts = [place for place, shard in shards.items() if _is_flattenable_shard(shard)]
            parts = sorted({(name, key) for rank in control.gather_objects(own_parts) for name, key in rank})
        if not whole and not parts:
            continue
        names = ["/".join(place) for place in (*whole, *parts)]
        flattened[str(index)] = {"names": names, "per_rank": bool(parts)}
        own[str(index)] = {name: {} for name, _ in parts}
        for name, key in parts:
            if (name, key) not in values:
                continue  # the ranks differ, which the save reports
            del state["state"][name][key]
            own[str(index)][name][key] = _plain_shard(shards[name, key])
    return flattened, own


def _is_flattenable_shard(value: Any) -> bool:
    return isinstance(value, ParameterShard) and is_flattenable(value.local)


def _plain_shard(shard: ParameterShard) -> dict[str, Any]:
    return {"local": shard.local, "shape": list(shard.shape), "bounds": [*astuple(shard.region)]}


def add_own_shards(
    path: str, state: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]], regions: Mapping[str, Region]
) -> None:
    """Add this rank's values to the state of an optimizer.

    Args:
        path: the checkpoint, for the error.
        state: the state that all ranks share, which is changed.
        own: the values that this rank's predecessor stored.
        regions: the regions of this rank by parameter name.

    Raises:
        CheckpointError: this rank holds other regions. The error names the parameters.
    """
    shards = {(name, key): _shard(value) for name, keys in own.items() for key, value in keys.items()}
    moved = sorted({name for (name, _), shard in shards.items() if regions.get(name) != shard.region})
    if moved:
        raise CheckpointError(
            f"The optimizer state of {listed(moved)} in {path!r} belongs to other shards than those of this run.",
            "each rank has stored its shard in blocks that cannot be cut in another place.",
            "resume with the sharding of the saved run, or load the weights alone with load_from_checkpoint.",
        )
    for (name, key), shard in shards.items():
        state["state"].setdefault(name, {})[key] = shard


def _shard(value: Mapping[str, Any]) -> ParameterShard:
    return ParameterShard(value["local"], tuple(value["shape"]), region_from(value["bounds"]))
