"""Runs micro-batches without side effects on a rank without data, to match the collectives of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from drivetrain._metrics import MetricStore


class LoggingPaused:
    """Discards logged values from its creation until `end`, which also restores the state of metric objects.

    Args:
        metrics: the logged values.
        joins: whether this rank has no data, and runs a micro-batch and its hooks only to join the other ranks. Until
            `end`, ``trainer.joining`` is then true.
    """

    def __init__(self, metrics: MetricStore, joins: bool = False) -> None:
        self._metrics = metrics
        self._was_muted, self._was_joining = metrics.muted, metrics.joining
        self._restore_objects = metrics.objects.restorer()
        metrics.muted, metrics.joining = True, metrics.joining or joins

    def end(self) -> None:
        """Resume logging."""
        self._metrics.muted, self._metrics.joining = self._was_muted, self._was_joining
        self._restore_objects()


@contextmanager
def without_side_effects(module: nn.Module, metrics: MetricStore) -> Iterator[None]:
    """Run a step that this rank only joins: logged values are discarded, and buffers are restored at the end.

    Only the step's changes to buffers are undone. The effects of hooks are kept: a hook that averages weights, for
    example, must run after the optimizer's step on every rank.
    """
    joining = None if metrics.joining else LoggingPaused(metrics, joins=True)
    buffers = BufferSnapshot(module)
    try:
        yield
    finally:
        buffers.restore()
        if joining is not None:
            joining.end()


class BufferSnapshot:
    """A copy of a module's buffers.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffer_values = [(buffer, buffer.clone()) for buffer in module.buffers()]
        # A step may write into a buffer, or replace it by another tensor (`self.count = self.count + 1`).
        self._buffers_by_layer = [(layer, dict(layer._buffers)) for layer in module.modules()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the same tensors with the same values, and remove buffers that were added after the copy."""
        for buffer, before in self._buffer_values:
            buffer.copy_(before)
        for layer, buffers in self._buffers_by_layer:
            for name in layer._buffers.keys() - buffers.keys():
                delattr(layer, name)
            layer._buffers.update(buffers)
