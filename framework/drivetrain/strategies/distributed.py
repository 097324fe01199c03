"""DistributedStrategy: the base class of all strategies that use a process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain._distributed.buffers import match_buffers_to_rank_0
from drivetrain._distributed.collectives import all_gather, average_gradients, broadcast, broadcast_together, reduce
from drivetrain._distributed.control_plane import LocalControl
from drivetrain.environments import Placement
from drivetrain.errors import ConfigurationError
from drivetrain.precision import Precision
from drivetrain.strategies._process_group import ProcessGroup
from drivetrain.strategies.strategy import Strategy

DEFAULT_TIMEOUT = timedelta(minutes=30)
DEFAULT_STEP_TIMEOUT = timedelta(minutes=10)


class DistributedStrategy(Strategy):
    """Base class of strategies with several ranks. A subclass must define `setup_module`.

    This class provides the process group, the control plane, collectives, failure handling and data-parallel training.
    Every rank starts with rank 0's weights, and `exchange_gradients` averages gradients over the ranks after the last
    backward of each window. Override `broadcast_module` and `exchange_gradients` if a wrapper broadcasts weights and
    exchanges gradients.

    Args:
        process_group_backend: backend of the process group. None selects gloo on the CPU and NCCL on CUDA.
        timeout: time after which a collective that a rank does not join fails: a timedelta, or seconds.
        step_timeout: the timeout of collectives after the first step; None keeps ``timeout``.
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        step_timeout: timedelta | float | None = DEFAULT_STEP_TIMEOUT,
    ) -> None:
        super().__init__()
        self._group = ProcessGroup(process_group_backend, timeout, step_timeout)
        self._store: Store | None = None
        self._accumulates = False
        self._replicated: tuple[nn.Parameter, ...] = ()
        """The parameters that have the same values on every rank."""

    def bind(
        self, placement: Placement, device: torch.device, precision: Precision, store: Store | None = None
    ) -> None:
        super().bind(placement, device, precision)
        self._store = store

    def setup_environment(self) -> None:
        super().setup_environment()
        self.control = self._group.open(self.placement, self.device, self._store)

    # Training: broadcast of weights and exchange of gradients

    def check(self, module: nn.Module) -> None:
        for name, child in module.named_modules() if self.world_size > 1 else ():
            if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
                raise ConfigurationError(
                    f"{name!r} is an {type(child).__name__} with max_norm={child.max_norm}, on several ranks.",
                    "such a layer rewrites the rows that this rank looks up, so the replicas would silently diverge.",
                    "remove max_norm, and renormalize all rows in on_train_batch_end, on every rank.",
                )

    def broadcast_module(self, module: nn.Module) -> None:
        self._replicated = tuple(module.parameters())
        broadcast_together([*self._replicated, *module.buffers()])

    def gradient_sync(self, enabled: bool) -> AbstractContextManager[Any]:
        return nullcontext() if enabled else self._accumulating()

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if self.world_size > 1 and not self._accumulates:
            self.exchange_gradients()

    def exchange_gradients(self) -> None:
        """Average the gradients accumulated in a window over the ranks. Collective."""
        average_gradients(self.named_parameters().values())

    def trainable_changed(self, module: nn.Module) -> None:
        if type(self).exchange_gradients is not DistributedStrategy.exchange_gradients:
            # The overriding method might not support the change.
            super().trainable_changed(module)
        elif self.world_size > 1:
            self._replicate_created(module)

    def _replicate_created(self, module: nn.Module) -> None:
        """Give layers that were created since then rank 0's values. Collective if there are any."""
        known_ids = {id(parameter) for parameter in self._replicated}
        self._replicated = tuple(module.parameters())
        created = [parameter for parameter in self._replicated if id(parameter) not in known_ids]
        if created:
            broadcast_together([*created, *module.buffers()])

    def restore_module(self) -> None:
        if self.module is not None and self.world_size > 1:
            self.sync_buffers(self.module)

    # Collectives

    def reduce(self, tensor: torch.Tensor, op: str = "mean") -> torch.Tensor:
        return reduce(tensor, op)

    def all_gather(self, tensor: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
        return all_gather(tensor, sync_grads)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return broadcast(tensor, source)

    def barrier(self) -> None:
        self.control.barrier()

    def sync_buffers(self, module: nn.Module, group: Any = None) -> None:
        """Copy the buffers of the first rank of ``group`` to its other ranks. None stands for all ranks."""
        match_buffers_to_rank_0(module, self.control)
        broadcast_together(list(module.buffers()), group)

    def teardown(self) -> None:
        super().teardown()
        self._replicated = ()
        self._group.close()
        self.control = LocalControl()
