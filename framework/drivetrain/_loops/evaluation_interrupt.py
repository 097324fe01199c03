"""Ends an evaluation early when the run is preempted, and undoes the effects of a validation within training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from drivetrain._distributed.checksum import INTEGERS, stack_on_cpu
from drivetrain._distributed.shards import ParameterShard
from drivetrain._loops.stopping import StopRequest
from drivetrain._loops.uneven_inputs import BufferSnapshot
from drivetrain._metrics import MetricStore
from drivetrain._runtime.transfer import row_major
from drivetrain.strategies.strategy import Strategy


class EarlyExit:
    """Lets all ranks exit an evaluation early: at the same micro-batch, unless they are many micro-batches apart.

    Args:
        stop: the requests to end the run.
        strategy: the strategy.
    """

    def __init__(self, stop: StopRequest, strategy: Strategy) -> None:
        self.stop = stop
        self._strategy = strategy
        self._ranks_are_apart = not strategy.collective_forward and strategy.world_size > 1

    def exits_immediately(self, name: str) -> bool:
        """Return whether the ranks exit before the evaluation, called ``name``, begins. Collective."""
        self.stop.agree(f"the beginning of a {name} run")
        return self.stop.is_preempted()

    def begin(self) -> None:
        """Record the state that `undo` restores, before any hook of the evaluation is called."""

    def exits(self) -> bool:
        """Return whether to exit. Called after each micro-batch, at least while ``stop.counts_points``."""
        if not self.stop.exits_at_point(self._ranks_are_apart):
            return False
        if self._ranks_are_apart:
            self.stop.release_ranks_behind(self._wait_for_device)
        return True

    def has_exited(self, equal_counts: bool) -> bool:
        """Return whether the ranks exit. Called after a loader's last micro-batch, or after the one where they stopped.

        The call is collective if forwards are not: a rank that has finished its loader then waits for the other ranks.

        Args:
            equal_counts: whether all ranks have the same number of micro-batches.
        """
        if not self._ranks_are_apart:
            return self.stop.preempted > 0
        self.stop.agree_when_all_arrive(
            "the end of an evaluation's loader", equal_counts=equal_counts, wait_for_device=self._wait_for_device
        )
        return self.stop.is_preempted()

    def undo(self) -> None:
        """Restore the state that `begin` has recorded."""

    def end(self) -> None:
        """Release the recorded state."""

    def _wait_for_device(self) -> None:
        if self._strategy.device.type == "cuda":
            torch.cuda.synchronize(self._strategy.device)


class ValidationExit(EarlyExit):
    """Lets all ranks exit a validation within fit early, and then restores buffers and metric objects.

    If hooks have replaced the weights for the validation, for example by averages, the validation runs to its end.
    At the end, the hooks put back the trained weights, which have to be saved.

    Args:
        stop: the requests to end the run.
        strategy: the strategy.
        module: the user's module.
        metrics: the logged values.
    """

    def __init__(self, stop: StopRequest, strategy: Strategy, module: nn.Module, metrics: MetricStore) -> None:
        super().__init__(stop, strategy)
        self._module = module
        self._metrics = metrics
        self._must_finish = False
        self._weights_at_start = torch.empty(0)
        self._restorers: Sequence[Callable[[], object]] = ()

    def begin(self) -> None:
        self._must_finish = False
        self._weights_at_start = self._weight_sums()
        self._restorers = BufferSnapshot(self._module).restore, self._metrics.objects.restorer()

    def exits(self) -> bool:
        if not super().exits():
            return False
        if not self._must_finish:
            # If the ranks may be at different points, each checks its own replica.
            self._must_finish = (
                self._weights_differ() if self._ranks_are_apart else self._weights_changed("leaving a validation run")
            )
        if self._must_finish:
            self.stop.defer_leaving()
        return not self._must_finish

    def has_exited(self, equal_counts: bool) -> bool:
        if not super().has_exited(equal_counts):
            return False
        if self._ranks_are_apart:
            self._must_finish = self._weights_changed("leaving a validation run")
            if self._must_finish:
                self.stop.defer_leaving()
        return not self._must_finish

    def undo(self) -> None:
        for restore in self._restorers:
            restore()
        if self._restorers:
            self._metrics.enter(self._metrics.stage)

    def end(self) -> None:
        self._restorers = ()

    def _weights_changed(self, purpose: str) -> bool:
        """Return whether the weights of any rank have changed since the validation began. Collective."""
        (changed,) = self._strategy.control.count_flags(purpose, self._weights_differ())
        return changed > 0

    def _weights_differ(self) -> bool:
        return not torch.equal(self._weight_sums(), self._weights_at_start)

    @torch.no_grad()
    def _weight_sums(self) -> Tensor:
        """Return a sum of the memory of each parameter that this rank would save, on the CPU."""
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        sums = []
        for name, value in self._strategy.model_state().items():
            shard = self._strategy.shard_of(value) if name in parameters else None
            local = shard.local if isinstance(shard, ParameterShard) else shard
            if isinstance(local, Tensor) and _is_plain(local):
                content = row_major(local.detach())
                sums.append(content.view(INTEGERS[min(content.dtype.itemsize, 8)]).sum(dtype=torch.int64))
        return stack_on_cpu(sums)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor is plain and strided, so that its memory can be summed. Others are not compared."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return plain and tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
