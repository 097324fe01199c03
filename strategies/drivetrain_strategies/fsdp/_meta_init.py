"""Initialises the shards of a module that was built on the meta device, one whole tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from drivetrain.strategies import ControlPlane
from drivetrain_strategies._deferred_init import MetaTensor, Recording, find_meta_tensors, materialize_on_every_rank
from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._original_parameters import Original
from drivetrain_strategies.fsdp._plan import Plan
from drivetrain_strategies.fsdp._state import in_layout_of


class MetaModule:
    """The meta tensors of a module, which are initialised after sharding.

    Args:
        module: the module, as ``configure_model`` built it.
        recording: the recording of the module's build.
    """

    def __init__(self, module: nn.Module, recording: Recording | None) -> None:
        self._recording = recording
        # Detached aliases keep the tensors as they were built, since a precision may change the parameters' dtype.
        self._built = [
            MetaTensor(meta_tensor.name, meta_tensor.tensor.detach(), meta_tensor.slots)
            for meta_tensor in find_meta_tensors(module, recording)
        ]

    def initialise(
        self,
        originals: Sequence[Original],
        sharded: Sharded,
        plan: Plan,
        device: torch.device,
        control: ControlPlane,
    ) -> None:
        """Replay the module's initialisation from rank 0's generator and keep this rank's shards. Collective."""
        recording = self._recording
        if not self._built or recording is None:
            return
        sharded.give_storage(device)
        replicated = {id(parameter): name for name, parameter in plan.replicated.items()}
        targets: dict[str, Original] = {}
        for original in originals:
            if original.parameter.is_meta:
                targets[original.name] = original
                if id(original.parameter) in replicated:
                    materialized = nn.Parameter(
                        torch.empty_like(original.parameter, device=device),
                        requires_grad=original.parameter.requires_grad,
                    )
                    original.register(materialized)
                    plan.replicated[replicated[id(original.parameter)]] = materialized
        writers: dict[int, Callable[[torch.Tensor], None]] = {}
        for meta_tensor in self._built:
            if meta_tensor.slots:
                writers[id(meta_tensor.tensor)] = partial(meta_tensor.assign, device=device)
            elif meta_tensor.name in targets:  # of tied names, only the first has a target
                writers[id(meta_tensor.tensor)] = _writer(targets[meta_tensor.name])
        wanted = [meta_tensor.tensor for meta_tensor in self._built if id(meta_tensor.tensor) in writers]
        materialize_on_every_rank(recording, wanted, lambda tensor, value: writers[id(tensor)](value), control)


def _writer(original: Original) -> Callable[[torch.Tensor], None]:
    def write(value: torch.Tensor) -> None:
        current: Any = original.current
        part: Any = in_layout_of(value.to(current.dtype), current)
        if hasattr(current, "to_local"):
            current.to_local().copy_(part.to_local())
        else:
            current.data.copy_(part)

    return write
