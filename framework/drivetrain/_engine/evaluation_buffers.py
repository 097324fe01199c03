"""Buffers that ranks have apart, around an evaluation within training: each rank goes on with its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from drivetrain._runtime.transfer import row_major
from drivetrain.strategies.strategy import Strategy


class _Place(NamedTuple):
    """A buffer that is another one, or has other values, since rank 0's were given out.

    Attributes:
        layer: whose buffer it is.
        name: in ``layer``.
        had: whether there was such a name before.
        before: the buffer that was there.
        own: its values, where it is still there.
        given: the buffer that is there since.
        values: of ``given``.
    """

    layer: nn.Module
    name: str
    had: bool
    before: Tensor | None
    own: Tensor | None
    given: Tensor | None
    values: Tensor | None

    def untouched(self) -> bool:
        """Whether there is what was given out, with the values it had."""
        if self.layer._buffers.get(self.name) is not self.given:
            return False
        return self.given is None or self.values is None or _same(self.given, self.values)

    def put_back(self) -> None:
        if not self.had:
            delattr(self.layer, self.name)
        elif self.own is None or self.before is None:
            self.layer._buffers[self.name] = self.before
        else:
            self.before.copy_(self.own)


class BuffersAside:
    """Gives rank 0's buffers out for an evaluation, and puts this rank's own back after it.

    What the evaluation changed, by a step or by a hook, stays as the evaluation left it. On one rank nothing is done.

    Args:
        module: the user's.
        strategy: gives rank 0's buffers out.
    """

    def __init__(self, module: nn.Module, strategy: Strategy) -> None:
        self._module = module
        self._strategy = strategy
        self._places: list[_Place] = []

    def give_out(self) -> None:
        """Take rank 0's buffers. Collective."""
        if self._strategy.world_size == 1:
            self._strategy.sync_buffers(self._module)
            return
        before = [(layer, dict(layer._buffers)) for layer in self._module.modules()]
        own = {id(one): one.detach().clone() for _, buffers in before for one in buffers.values() if is_held_here(one)}
        self._strategy.sync_buffers(self._module)
        self._places = [place for layer, buffers in before for place in _changed(layer, buffers, own)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Take back this rank's own."""
        places, self._places = self._places, []
        for place in places:
            if place.untouched():
                place.put_back()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put back afterwards what `give_out` changed."""
        try:
            yield
        finally:
            self.put_back()

    def values(self) -> dict[str, Tensor]:
        """Return by name what is to be put back: a checkpoint from within an evaluation holds it."""
        if not self._places:
            return {}
        paths = {id(layer): f"{path}." if path else "" for path, layer in self._module.named_modules()}
        found = {
            paths[id(place.layer)] + place.name: place.before if place.own is None else place.own
            for place in self._places
            if id(place.layer) in paths and place.untouched()
        }
        return {name: value for name, value in found.items() if value is not None}


def _changed(layer: nn.Module, buffers: dict[str, Tensor | None], own: dict[int, Tensor]) -> Iterator[_Place]:
    """Return the places in ``layer`` whose buffers are not what they were."""
    for name in {**buffers, **layer._buffers}:
        before, given = buffers.get(name), layer._buffers.get(name)
        had = name in buffers
        if before is not given or not had:
            yield _Place(layer, name, had, before, None, given, given.detach().clone() if is_held_here(given) else None)
        elif before is not None and id(before) in own and not _same(before, own[id(before)]):
            yield _Place(layer, name, had, before, own[id(before)], given, before.detach().clone())


def is_held_here(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """Whether there is a buffer whose values are here: not on the meta device, and no part of a DTensor."""
    return buffer is not None and not buffer.is_meta and not hasattr(buffer, "full_tensor")


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits: NaN is then NaN, and 0 is not -0."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(*(row_major(tensor.detach()).view(torch.uint8) for tensor in (one, other)))
