"""Changes how DTensor reads, writes and draws within a run: torch uses this rank's part only, without a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, _random

from drivetrain_strategies.fsdp._internals import FULL_TENSOR, Sharded
from drivetrain_strategies.fsdp._state import write_value

SET_DATA = cast(Any, torch.Tensor.data).__set__

_ITEM = torch.ops.aten._local_scalar_dense.default


class ChangedDTensor:
    """Changes DTensor until `undo`.

    - ``full_tensor()`` averages gradients over the ranks. torch keeps those of this rank's batch.
    - ``item()``, ``float()``, ``int()`` and ``bool()`` combine the parts of a scalar, such as the norm of a sharded
      weight, before it is read. Reading it is collective, so all ranks have to read it.
    - An assignment to ``.data``, which torch drops, writes the values.
    - On the CPU, each shard gets other random numbers, as on accelerators, unless torch has an object that draws.

    Args:
        sharded: the sharded module.
        device: the device that this rank computes on.
    """

    def __init__(self, sharded: Sharded, device: torch.device) -> None:
        def full_tensor(self: Any, **options: Any) -> Any:
            needs_gradient = not options and torch.is_grad_enabled() and self.requires_grad
            if needs_gradient and self.device_mesh in sharded.meshes():
                return sharded.whole(self)
            return FULL_TENSOR(self, **options)

        dtensor: Any = DTensor
        dtensor.full_tensor = full_tensor
        dtensor.data = property(cast(Any, torch.Tensor.data).__get__, _assign)
        self._reads_scalars = dtensor._op_dispatcher._custom_op_handlers.setdefault(_ITEM, _read_whole) is _read_whole
        if device.type == "cpu":
            _random._rng_tracker = _random._rng_tracker or ShardDraws()  # type: ignore[assignment]

    def undo(self) -> None:
        dtensor: Any = DTensor
        dtensor.full_tensor = FULL_TENSOR
        if "data" in vars(dtensor):
            del dtensor.data
        if self._reads_scalars:
            del dtensor._op_dispatcher._custom_op_handlers[_ITEM]
        if isinstance(cast(Any, _random._rng_tracker), ShardDraws):
            _random._rng_tracker = None


class ShardDraws:
    """Draws other random numbers for each shard of a DTensor on the CPU, and the same for the replicas of a shard.

    torch does so on accelerators alone. On the CPU, ranks whose generators have equal states, as in hooks, would draw
    the same numbers for all shards.
    """

    distribute_region_enabled = True  # torch reads it

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        shard = 0
        for dimension, placement in enumerate(spec.placements):
            if placement.is_shard():
                shard = shard * spec.mesh.size(dimension) + spec.mesh.get_local_rank(dimension)
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed((seed + shard) % 2**63)
            yield


def _assign(tensor: Any, value: torch.Tensor) -> None:
    if value.shape == tensor.shape and value.dtype == tensor.dtype and value.device.type == tensor.device.type:
        write_value(tensor, value)
    else:
        SET_DATA(tensor, value)


@torch.no_grad()
def _read_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if not all(placement.is_replicate() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return op(tensor.to_local(), **kwargs)
