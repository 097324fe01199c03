"""Evaluates with rank 0's buffers on every rank, and restores each rank's own buffers afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drivetrain._loops.window_snapshot import has_local_values
from drivetrain._runtime.transfer import row_major
from drivetrain.strategies.strategy import Strategy


class _Copy(NamedTuple):
    """A buffer with a copy of its values, which is None if this rank does not hold the values."""

    buffer: Tensor | None
    values: Tensor | None

    def equals(self, buffer: Tensor | None) -> bool:
        """Whether ``buffer`` is the copied tensor, and its values are still those of the copy."""
        return buffer is self.buffer and (buffer is None or self.has_values_of(buffer))

    def has_values_of(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor`` are those of the copy, if they can be compared."""
        return self.values is None or _same_bits(tensor, self.values)


_NO_BUFFER = _Copy(None, None)

_Place = tuple[nn.Module, str]
"""The layer that holds a buffer, and the buffer's name in it."""


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
        self._replaced: dict[_Place, tuple[_Copy | None, _Copy]] = {}
        """The buffers that the broadcast has changed: before it, None if there was no such buffer, and after it."""

    def take_from_rank_0(self) -> None:
        """Replace this rank's buffers by rank 0's. Collective."""
        if self._strategy.world_size == 1:
            self._strategy.sync_buffers(self._module)
            return
        own = self._copies()
        self._strategy.sync_buffers(self._module)
        received = self._copies()
        pairs = {place: (own.get(place), received.get(place, _NO_BUFFER)) for place in {**own, **received}}
        self._replaced = {
            place: (before, after)
            for place, (before, after) in pairs.items()
            if before is None or not before.equals(after.buffer)
        }

    def _copies(self) -> dict[_Place, _Copy]:
        return {
            (layer, name): _Copy(buffer, buffer.detach().clone() if has_local_values(buffer) else None)
            for layer in self._module.modules()
            for name, buffer in layer._buffers.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Restore this rank's own buffers, except those that the evaluation has changed."""
        replaced, self._replaced = self._replaced, {}
        for (layer, name), (own, received) in replaced.items():
            if not received.equals(layer._buffers.get(name)):
                continue
            if own is None:
                delattr(layer, name)
                continue
            layer._buffers[name] = own.buffer
            if own.buffer is not None and own.values is not None:
                own.buffer.copy_(own.values)

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
        values: dict[str, Tensor] = {}
        for path, layer in self._module.named_modules() if self._replaced else ():
            for key, buffer in layer._buffers.items():
                own, received = self._replaced.get((layer, key), (None, _NO_BUFFER))
                name = f"{path}.{key}" if path else key
                trained = replaced.get(name)
                unchanged = received.equals(buffer) if trained is None else received.has_values_of(trained)
                if own is not None and own.values is not None and unchanged:
                    values[name] = own.values
        return values


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal bit for bit: NaN equals NaN, and 0 differs from -0."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    return torch.equal(*(row_major(tensor.detach()).view(torch.uint8) for tensor in (first, second)))
