"""Leaving an evaluation within training before its end, for a signal's sake, as if it had not begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain._distributed.shards import ParameterShard
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.uneven_inputs import Buffers
from drivetrain._metrics import MetricStore
from drivetrain._metrics.metric_objects import metric_state, set_metric_state
from drivetrain._runtime.transfer import row_major
from drivetrain.strategies.strategy import Strategy


class EarlyExit:
    """Knows whether the ranks leave, and puts back what an evaluation that is left has changed.

    Buffers and metric objects come back. Where hooks have put other weights in place for its time, averages for one, it
    goes on to its end: what they put back there must be what is saved.

    Args:
        stop: who asks to leave.
        module: the user's.
        metrics: where steps log.
        strategy: where.
    """

    def __init__(self, stop: StopRequest, module: nn.Module, metrics: MetricStore, strategy: Strategy) -> None:
        self._stop = stop
        self._module = module
        self._metrics = metrics
        self._strategy = strategy
        self._held = False
        self._weights: list[Tensor] = []
        self._buffers: Buffers | None = None
        self._objects: Sequence[tuple[Any, dict[str, Any]]] = ()

    def at_once(self) -> bool:
        """Whether the ranks leave before the evaluation begins. Collective."""
        self._stop.agree_anew("the beginning of a validation run")
        return self._stop.leaves_together()

    def begin(self) -> None:
        """Take note of what there is, before any hook of the evaluation."""
        self._weights = self._sums()
        self._buffers = Buffers(self._module)
        self._objects = [(metric, metric_state(metric)) for metric in self._metrics.objects.all().values()]

    def after_hooks(self) -> None:
        """Find out whether the hooks that begin it have changed the weights. Collective."""
        self._held = self._have_changed("the hooks that begin a validation run")

    def look(self) -> Callable[[], bool] | None:
        """Return what says, after each micro-batch, whether to leave; None where the evaluation goes on to its end."""
        return None if self._held else self._leaves

    def _leaves(self) -> bool:
        if not self._stop.leaves_here():
            return False
        if not self._held:
            # Ranks whose forwards are collective are all here. Else each goes by its own weights, which are alike.
            together = self._strategy.collective_forward or self._strategy.world_size == 1
            self._held = self._have_changed("leaving a validation run") if together else self._differ()
        if self._held:
            self._stop.stay()
        return not self._held

    def is_left(self, alike: bool) -> bool:
        """Whether the ranks leave, after a loader's last micro-batch or the one that they have left at.

        Collective, unless their forwards are: one that is through waits here for those that have more to do.

        Args:
            alike: each rank has as many micro-batches.
        """
        if self._strategy.collective_forward or self._strategy.world_size == 1:
            return self._stop.leaving > 0
        self._stop.come_together("the end of a validation loader", alike=alike)
        if not self._stop.leaves_together():
            return False
        self._held = self._have_changed("leaving a validation run")
        if self._held:
            self._stop.stay()
        return not self._held

    def undo(self) -> None:
        """Put back what the evaluation has changed, if it has begun."""
        if self._buffers is None:
            return
        self._buffers.put_back()
        for metric, state in self._objects:
            set_metric_state(metric, state)
        self._metrics.enter(self._metrics.stage)

    def end(self) -> None:
        """Hold on to nothing."""
        self._weights, self._buffers, self._objects = [], None, ()

    def _have_changed(self, purpose: str) -> bool:
        """Whether the weights of any rank are others than as the evaluation began. Collective."""
        (changed,) = self._strategy.control.agree(purpose, self._differ())
        return changed > 0

    def _differ(self) -> bool:
        now = self._sums()
        return len(now) != len(self._weights) or any(
            one.shape != other.shape or not torch.equal(one, other)
            for one, other in zip(self._weights, now, strict=True)
        )

    @torch.no_grad()
    def _sums(self) -> list[Tensor]:
        """A sum of the bits of all that this rank would save of the parameters, two for each, on their devices."""
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        sums: dict[torch.device, list[Tensor]] = {}
        for name, value in self._strategy.model_state().items():
            held = self._strategy.shard_of(value) if name in parameters else None
            local = held.local if isinstance(held, ParameterShard) else held
            if isinstance(local, Tensor) and _has_bits(local):
                sums.setdefault(local.device, []).extend(_bits(local))
        return [torch.stack(of_device) for of_device in sums.values()]


def _has_bits(tensor: Tensor) -> bool:
    """Whether it lies in memory as numbers one after the other, whatever it means by them: others are not compared."""
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def _bits(tensor: Tensor) -> list[Tensor]:
    content = row_major(tensor.detach()).view(torch.uint8)
    whole = content.numel() // 8 * 8
    parts = [content[:whole].view(torch.int64), content[whole:]] if content.storage_offset() % 8 == 0 else [content]
    return [part.sum(dtype=torch.int64) for part in parts]
