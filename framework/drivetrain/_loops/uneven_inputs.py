"""Micro-batches that must leave no trace: a rank without data keeps the others company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from drivetrain._metrics.metric_objects import metric_state, set_metric_state
from drivetrain._metrics.metric_store import MetricStore


class Muted:
    """From here until `end` nothing is logged; afterwards metric objects are as before.

    Args:
        metrics: where steps and hooks log.
    """

    __slots__ = ("_joining", "_metrics", "_muted", "_states")

    def __init__(self, metrics: MetricStore) -> None:
        self._metrics = metrics
        self._muted, self._joining = metrics.muted, metrics.joining
        self._states = [(metric, metric_state(metric)) for metric in metrics.objects.all().values()]
        metrics.muted = True

    def end(self) -> None:
        """Log again what is logged."""
        self._metrics.muted, self._metrics.joining = self._muted, self._joining
        for metric, state in self._states:
            set_metric_state(metric, state)


class Joining(Muted):
    """A micro-batch for which this rank has no data, its hooks included, from here until `end`.

    Meanwhile ``trainer.joining`` is true, and the micro-batch is `Muted`.
    """

    __slots__ = ()

    def __init__(self, metrics: MetricStore) -> None:
        super().__init__(metrics)
        metrics.joining = True


@contextmanager
def leaving_no_trace(module: nn.Module, metrics: MetricStore) -> Iterator[None]:
    """Within it this rank joins, and afterwards buffers are as before too, the same tensors with the same values.

    They are put back after the step alone: a hook that keeps an average of the weights, say, follows the optimizer's
    step on every rank.
    """
    joining = None if metrics.joining else Joining(metrics)
    buffers = Buffers(module)
    try:
        yield
    finally:
        buffers.put_back()
        if joining is not None:
            joining.end()


class Buffers:
    """A module's buffers as they are now, to be put back: the same tensors with the same values.

    Args:
        module: whose.
    """

    __slots__ = ("_places", "_values")

    def __init__(self, module: nn.Module) -> None:
        self._values = [(buffer, buffer.clone()) for buffer in module.buffers()]
        # A step may write into a buffer, or put another tensor in its place (`self.count = self.count + 1`).
        self._places = [(child, dict(child._buffers)) for child in module.modules()]

    @torch.no_grad()
    def put_back(self) -> None:
        """Let the module have them again, and no others."""
        for buffer, before in self._values:
            buffer.copy_(before)
        for child, buffers in self._places:
            _put_back(child, buffers)


def _put_back(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Let ``module`` have these buffers and no others."""
    for name in [*module._buffers]:
        if name not in buffers:
            delattr(module, name)
    for name, buffer in buffers.items():
        if name not in module._buffers or module._buffers[name] is not buffer:
            module._buffers[name] = buffer
