"""DistributedStrategy: what every strategy over a process group has in common."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.buffers import take_forms_of_rank_0
from drivetrain._distributed.collectives import all_gather, broadcast, broadcast_together, reduce
from drivetrain._distributed.control import LocalControl
from drivetrain.environments import Placement
from drivetrain.precision import Precision
from drivetrain.strategies._process_group import ProcessGroup
from drivetrain.strategies.strategy import Strategy

DEFAULT_TIMEOUT = timedelta(minutes=30)
DEFAULT_STEP_TIMEOUT = timedelta(minutes=10)


class DistributedStrategy(Strategy):
    """Joins the process group, takes the device, and runs collectives over all ranks.

    Args:
        process_group_backend: None takes gloo on the CPU and NCCL on CUDA.
        timeout: after which a collective that a rank does not join fails.
        step_timeout: the same, once a step has been made; None leaves it at ``timeout``.
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        step_timeout: timedelta | None = DEFAULT_STEP_TIMEOUT,
    ) -> None:
        super().__init__()
        self._group = ProcessGroup(process_group_backend, timeout, step_timeout)
        self._store: Store | None = None

    def bind(
        self, placement: Placement, device: torch.device, precision: Precision, store: Store | None = None
    ) -> None:
        super().bind(placement, device, precision)
        self._store = store

    def setup_environment(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.control = self._group.open(self.placement, self.device, self._store)

    def reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        return reduce(tensor, op)

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        return all_gather(tensor, sync_grads)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return broadcast(tensor, source)

    def barrier(self) -> None:
        self.control.barrier()

    def sync_buffers(self, module: nn.Module) -> None:
        take_forms_of_rank_0(module, self.control)
        buffers = list(module.buffers())
        if buffers:
            broadcast_together(buffers)

    def teardown(self) -> None:
        self.module = None
        self.optimizers = []
        self._group.close()
        self.control = LocalControl()
