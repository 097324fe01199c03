"""Gives the shards of a module that was built without storage their values, one whole tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.strategies import ControlPlane
from drivetrain_strategies._materialize import Bare, Recording, bare_tensors, replay
from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._original_parameters import Original
from drivetrain_strategies.fsdp._plan import Plan
from drivetrain_strategies.fsdp._state import like


class BareModule:
    """What of a module has no storage yet.

    Args:
        module: before anything is done to it.
        recording: of how it was built.
    """

    def __init__(self, module: nn.Module, recording: Recording | None) -> None:
        self._recording = recording
        # Views, which keep the tensors as they were built when a precision gives the parameters another dtype.
        self._built = [Bare(bare.name, bare.tensor.detach(), bare.place) for bare in bare_tensors(module, recording)]
        self._module = module

    def initialise(
        self,
        originals: Sequence[Original],
        sharded: Sharded,
        plan: Plan,
        device: torch.device,
        control: ControlPlane,
    ) -> None:
        """Run again what built the module, from rank 0's generator, and keep this rank's parts. Collective."""
        recording = self._recording
        if not self._built or recording is None:
            return
        sharded.give_storage(device)
        whole = {id(parameter): name for name, parameter in plan.whole.items()}
        targets: dict[str, Original] = {}
        for original in originals:
            if original.parameter.is_meta:
                targets[original.name] = original
                if id(original.parameter) in whole:
                    real = nn.Parameter(
                        torch.empty_like(original.parameter, device=device),
                        requires_grad=original.parameter.requires_grad,
                    )
                    original.put(real)
                    plan.whole[whole[id(original.parameter)]] = real
        places: dict[int, Callable[[torch.Tensor], None]] = {}
        for bare in self._built:
            if bare.place is not None:
                places[id(bare.tensor)] = _placer(bare, self._module, device)
            elif bare.name in targets:  # of tied names the first
                places[id(bare.tensor)] = _writer(targets[bare.name])
        state = torch.tensor(control.from_rank_0(recording.generator.tolist()), dtype=torch.uint8)
        before = torch.get_rng_state()
        torch.set_rng_state(state)
        wanted = [bare.tensor for bare in self._built if id(bare.tensor) in places]
        replay(recording, wanted, lambda tensor, value: places[id(tensor)](value))
        if not torch.equal(state, recording.generator):
            torch.set_rng_state(before)  # only rank 0 has drawn from its own


def _writer(original: Original) -> Callable[[torch.Tensor], None]:
    def write(value: torch.Tensor) -> None:
        current: Any = original.current
        part: Any = like(value.to(current.dtype), current)
        if hasattr(current, "to_local"):
            current.to_local().copy_(part.to_local())
        else:
            current.data.copy_(part)

    return write


def _placer(bare: Bare, module: nn.Module, device: torch.device) -> Callable[[torch.Tensor], None]:
    prefix, _, key = bare.name.rpartition(".")
    child = module.get_submodule(prefix)
    place = bare.place
    assert place is not None

    def put(value: torch.Tensor) -> None:
        now = child._buffers.get(key, child.__dict__.get(key))
        place(value.to(device, value.dtype if now is None else now.dtype))

    return put
