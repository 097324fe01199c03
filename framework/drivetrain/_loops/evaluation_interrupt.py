"""Interrupts a validation within training when the run is preempted, and undoes the validation's effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain._distributed.shards import ParameterShard
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.uneven_inputs import BufferSnapshot
from drivetrain._metrics import MetricStore
from drivetrain._metrics.metric_objects import metric_state, set_metric_state
from drivetrain._runtime.transfer import row_major
from drivetrain.strategies.strategy import Strategy


class EarlyExit:
    """Lets all ranks exit a validation early, and restores buffers and metric objects after an early exit.

    If hooks have replaced the weights for the validation, for example by averages, the validation runs to its end.
    At the end, the hooks put back the trained weights, which have to be saved.

    Args:
        stop: the requests to end the run.
        module: the user's module.
        metrics: the logged values.
        strategy: the strategy.
    """

    def __init__(self, stop: StopRequest, module: nn.Module, metrics: MetricStore, strategy: Strategy) -> None:
        self._stop = stop
        self._module = module
        self._metrics = metrics
        self._strategy = strategy
        self._must_finish = False
        self._weights_at_start: list[Tensor] = []
        self._buffers: BufferSnapshot | None = None
        self._metric_states: Sequence[tuple[Any, dict[str, Any]]] = ()

    def exits_immediately(self) -> bool:
        """Return whether the ranks exit before the validation begins. Collective."""
        self._stop.agree_after_pause("the beginning of a validation run")
        return self._stop.agreed_to_exit()

    def begin(self) -> None:
        """Record the state before any hook of the validation is called."""
        self._weights_at_start = self._checksums()
        self._buffers = BufferSnapshot(self._module)
        self._metric_states = [(metric, metric_state(metric)) for metric in self._metrics.objects.all().values()]

    def mark_start_hooks_done(self) -> None:
        """Check whether the hooks that begin the validation, which have now run, changed the weights. Collective."""
        self._must_finish = self._weights_changed("the hooks that begin a validation run")

    def exit_check(self) -> Callable[[], bool] | None:
        """Return a function that returns after each micro-batch whether to exit; None to run to the end."""
        return None if self._must_finish else self._exits

    def _exits(self) -> bool:
        if not self._stop.polls_and_exits():
            return False
        if not self._must_finish:
            # With collective forwards, all ranks are at this point. Otherwise each rank checks its own replica.
            ranks_are_here = self._strategy.collective_forward or self._strategy.world_size == 1
            self._must_finish = (
                self._weights_changed("leaving a validation run") if ranks_are_here else self._weights_differ()
            )
        if self._must_finish:
            self._stop.defer_leaving()
        return not self._must_finish

    def has_exited(self, equal_counts: bool) -> bool:
        """Return whether the ranks exit. Called after a loader's last micro-batch, or after the one where they stopped.

        The call is collective if forwards are not: a rank that has finished its loader then waits for the other ranks.

        Args:
            equal_counts: whether all ranks have the same number of micro-batches.
        """
        if self._strategy.collective_forward or self._strategy.world_size == 1:
            return self._stop.leaving > 0
        self._stop.agree_when_all_arrive("the end of a validation loader", equal_counts=equal_counts)
        if not self._stop.agreed_to_exit():
            return False
        self._must_finish = self._weights_changed("leaving a validation run")
        if self._must_finish:
            self._stop.defer_leaving()
        return not self._must_finish

    def undo(self) -> None:
        """Restore what the validation has changed, if the validation has begun."""
        if self._buffers is None:
            return
        self._buffers.restore()
        for metric, state in self._metric_states:
            set_metric_state(metric, state)
        self._metrics.enter(self._metrics.stage)

    def end(self) -> None:
        """Release the recorded state."""
        self._weights_at_start, self._buffers, self._metric_states = [], None, ()

    def _weights_changed(self, purpose: str) -> bool:
        """Return whether the weights of any rank have changed since the validation began. Collective."""
        (changed,) = self._strategy.control.agree(purpose, self._weights_differ())
        return changed > 0

    def _weights_differ(self) -> bool:
        now = self._checksums()
        return len(now) != len(self._weights_at_start) or any(
            before.shape != after.shape or not torch.equal(before, after)
            for before, after in zip(self._weights_at_start, now, strict=True)
        )

    @torch.no_grad()
    def _checksums(self) -> list[Tensor]:
        """Return checksums of the parameters that this rank would save, one tensor for each device."""
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        sums: dict[torch.device, list[Tensor]] = {}
        for name, value in self._strategy.model_state().items():
            shard = self._strategy.shard_of(value) if name in parameters else None
            local = shard.local if isinstance(shard, ParameterShard) else shard
            if isinstance(local, Tensor) and _is_plain(local):
                sums.setdefault(local.device, []).extend(_memory_sums(local))
        return [torch.stack(device_sums) for device_sums in sums.values()]


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is plain and strided, so that its memory can be summed. Others are not compared."""
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


def _memory_sums(tensor: Tensor) -> list[Tensor]:
    """Return sums of the tensor's memory, read as int64 numbers where the memory is aligned and as bytes elsewhere."""
    content = row_major(tensor.detach()).view(torch.uint8)
    aligned_end = content.numel() // 8 * 8
    parts = (
        [content[:aligned_end].view(torch.int64), content[aligned_end:]]
        if content.storage_offset() % 8 == 0
        else [content]
    )
    return [part.sum(dtype=torch.int64) for part in parts]
