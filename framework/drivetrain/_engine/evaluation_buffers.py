"""Evaluates with rank 0's buffers on every rank, and restores each rank's own buffers afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from drivetrain._runtime.transfer import row_major
from drivetrain.strategies.strategy import Strategy


class _ReplacedBuffer(NamedTuple):
    """A buffer that the broadcast from rank 0 replaced or changed.

    Attributes:
        layer: the layer that holds the buffer.
        name: the buffer's name in ``layer``.
        existed: whether ``layer`` had a buffer of this name before the broadcast.
        original: the buffer before the broadcast.
        original_values: a copy of the values of ``original``, if the broadcast changed them in place; otherwise None.
        received: the buffer after the broadcast.
        received_values: a copy of the values of ``received``.
    """

    layer: nn.Module
    name: str
    existed: bool
    original: Tensor | None
    original_values: Tensor | None
    received: Tensor | None
    received_values: Tensor | None

    def is_unchanged(self, trained: Tensor | None = None) -> bool:
        """Whether the evaluation has changed neither the received buffer nor its values.

        Args:
            trained: the trained values, if a callback has replaced the buffer for now, for example by averages.
        """
        if self.layer._buffers.get(self.name) is not self.received and trained is None:
            return False
        values = self.received if trained is None else trained
        return values is None or self.received_values is None or _same_bits(values, self.received_values)

    def restore(self) -> None:
        """Restore the buffer and its values from before the broadcast."""
        if not self.existed:
            delattr(self.layer, self.name)
        elif self.original_values is None or self.original is None:
            self.layer._buffers[self.name] = self.original
        else:
            self.original.copy_(self.original_values)


class EvaluationBuffers:
    """Replaces this rank's buffers by rank 0's for an evaluation, and restores this rank's buffers afterwards.

    A buffer that the evaluation's steps or hooks have changed keeps its new value. With one rank, no buffer is
    replaced.

    Args:
        module: the user's module.
        strategy: broadcasts the buffers.
    """

    def __init__(self, module: nn.Module, strategy: Strategy) -> None:
        self._module = module
        self._strategy = strategy
        self._replaced: list[_ReplacedBuffer] = []

    def take_from_rank_0(self) -> None:
        """Replace this rank's buffers by rank 0's. Collective."""
        if self._strategy.world_size == 1:
            self._strategy.sync_buffers(self._module)
            return
        before = [(layer, dict(layer._buffers)) for layer in self._module.modules()]
        values = {
            id(buffer): buffer.detach().clone()
            for _, buffers in before
            for buffer in buffers.values()
            if has_local_values(buffer)
        }
        self._strategy.sync_buffers(self._module)
        self._replaced = [buffer for layer, buffers in before for buffer in _replaced_in(layer, buffers, values)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore this rank's own buffers, except those that the evaluation has changed."""
        replaced, self._replaced = self._replaced, []
        for buffer in replaced:
            if buffer.is_unchanged():
                buffer.restore()

    @contextmanager
    def restored_at_end(self) -> Iterator[None]:
        """Restore, after the block, the buffers that `take_from_rank_0` has replaced within the block."""
        try:
            yield
        finally:
            self.restore()

    def values(self, replaced: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers' values to restore, by name. A checkpoint written during an evaluation contains them.

        Args:
            replaced: the trained values of buffers that callbacks have replaced for now, by name.
        """
        if not self._replaced:
            return {}
        paths = {id(layer): f"{path}." if path else "" for path, layer in self._module.named_modules()}
        named = {paths[id(one.layer)] + one.name: one for one in self._replaced if id(one.layer) in paths}
        values = {
            name: buffer.original if buffer.original_values is None else buffer.original_values
            for name, buffer in named.items()
            if buffer.is_unchanged(replaced.get(name))
        }
        return {name: value for name, value in values.items() if value is not None}


def _replaced_in(
    layer: nn.Module, buffers: dict[str, Tensor | None], values: dict[int, Tensor]
) -> Iterator[_ReplacedBuffer]:
    """Yield the buffers of ``layer`` that were replaced or changed.

    Args:
        layer: the layer.
        buffers: the layer's buffers before the broadcast, by name.
        values: copies of the values before the broadcast, by the buffers' ids.
    """
    for name in {**buffers, **layer._buffers}:
        original, received = buffers.get(name), layer._buffers.get(name)
        existed = name in buffers
        if original is not received or not existed:
            copied = received.detach().clone() if has_local_values(received) else None
            yield _ReplacedBuffer(layer, name, existed, original, None, received, copied)
        elif original is not None and id(original) in values and not _same_bits(original, values[id(original)]):
            copied = original.detach().clone()
            yield _ReplacedBuffer(layer, name, existed, original, values[id(original)], received, copied)


def has_local_values(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """Whether ``buffer`` is a tensor whose values this rank holds, rather than None, a meta tensor or a DTensor."""
    return buffer is not None and not buffer.is_meta and not hasattr(buffer, "full_tensor")


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal bit for bit: NaN equals NaN, and 0 differs from -0."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    return torch.equal(*(row_major(tensor.detach()).view(torch.uint8) for tensor in (first, second)))
