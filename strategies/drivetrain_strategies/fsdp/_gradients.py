"""Controls the exchange, accumulation and zeroing of gradients in a sharded run, and which parameters require them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._replicated_parameters import ReplicatedParameters
from drivetrain_strategies.fsdp._unsplit_gradients import UnsplitGradients
from drivetrain_strategies.fsdp._unused_parameters import UnusedParameters


class Gradients:
    """The gradients of sharded and of replicated parameters.

    Args:
        sharded: the sharded module.
        replicated: parameters that every rank holds whole.
        group: the process group of the ranks that read different data.
        unused: finds parameters that no rank used.
        unsplit: compares the gradients of unsplit parameters; None without tensor parallelism.
        reshard_after_backward: drop gathered parameters after every backward of an accumulation window. False drops
            gathered parameters only after the window's last backward.
    """

    def __init__(
        self,
        sharded: Sharded,
        replicated: Sequence[nn.Parameter],
        group: Any,
        unused: UnusedParameters,
        unsplit: UnsplitGradients | None,
        reshard_after_backward: bool,
    ) -> None:
        self._sharded = sharded
        self.replicated = list(replicated)
        self._replicated_average = ReplicatedParameters(replicated, group) if replicated else None
        self._unused = unused
        self._unsplit = unsplit
        self._reshard_after_backward = reshard_after_backward
        self._exchange_enabled = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them within this context."""
        self._sharded.set_gradient_sync(False)
        if not self._reshard_after_backward:
            self._sharded.set_reshard_after_backward(False)
        self._exchange_enabled = False
        try:
            yield
        finally:
            self._exchange_enabled = True
            self._sharded.set_gradient_sync(True)
            self._sharded.set_reshard_after_backward(True)

    @contextmanager
    def zeroed(self) -> Iterator[None]:
        """Make a backward add exactly zero to every gradient within this context."""
        handles = [
            parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
            for parameter in self.replicated
            if parameter.requires_grad
        ]
        try:
            with self._sharded.zeroed_gradients():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def requiring_only(self, parameters: set[int]) -> Iterator[None]:
        """Within this context, let only the parameters with the given ids require gradients."""
        other_sharded = [
            fsdp_param
            for fsdp_param in self._sharded.parameters
            if fsdp_param.sharded_param.requires_grad and id(fsdp_param.sharded_param) not in parameters
        ]
        other_replicated = [
            parameter for parameter in self.replicated if parameter.requires_grad and id(parameter) not in parameters
        ]

        def require(requires_grad: bool) -> None:
            for fsdp_param in other_sharded:
                self._sharded.set_requires_grad(fsdp_param, requires_grad)
            for parameter in other_replicated:
                parameter.requires_grad_(requires_grad)

        require(False)
        try:
            yield
        finally:
            require(True)

    def trainable_changed(self) -> None:
        """Let the next window determine the unused parameters again, and compare gradients of new trainable ones."""
        self._unused.reset()
        if self._unsplit is not None:
            self._unsplit.restart()

    def after_backward(self) -> None:
        """Finish the exchange of gradients. Collective, except while gradients are accumulated."""
        if not self._exchange_enabled:
            return
        self._unused.clear_unused_gradients(self._sharded.take_unused())
        if self._replicated_average is not None:
            self._replicated_average.average()
        if self._unsplit is not None and self._unsplit.pending:
            self._unsplit.compare()
