"""What becomes of gradients in a sharded run: exchanged or added up, silenced, or not asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drivetrain_strategies.fsdp._internals import Sharded
from drivetrain_strategies.fsdp._replicated_parameters import WholeParameters
from drivetrain_strategies.fsdp._unused_parameters import UnusedParameters


class Gradients:
    """The gradients of sharded parameters, and of those that stay whole.

    Args:
        sharded: the module as `fully_shard` left it.
        whole: parameters that stay whole.
        group: the ranks that hold other data.
        unused: knows what no rank used.
        reshard_after_backward: drop whole parameters after each backward within a window, too.
    """

    def __init__(
        self,
        sharded: Sharded,
        whole: Sequence[nn.Parameter],
        group: Any,
        unused: UnusedParameters,
        reshard_after_backward: bool,
    ) -> None:
        self._sharded = sharded
        self.whole = list(whole)
        self._average = WholeParameters(whole, group) if whole else None
        self._unused = unused
        self._reshard_after_backward = reshard_after_backward
        self._exchanges = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within it a backward talks to nobody about gradients: they are added up."""
        self._sharded.set_gradient_sync(False)
        if not self._reshard_after_backward:
            self._sharded.set_reshard_after_backward(False)
        self._exchanges = False
        try:
            yield
        finally:
            self._exchanges = True
            self._sharded.set_gradient_sync(True)
            self._sharded.set_reshard_after_backward(True)

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Within it a backward adds exactly zero to every gradient."""
        handles = [
            parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
            for parameter in self.whole
            if parameter.requires_grad
        ]
        try:
            with self._sharded.without_gradient():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def only_of(self, parameters: set[int]) -> Iterator[None]:
        """Within it only parameters of these ids require gradients; the others that did do so again afterwards."""
        others = [
            one
            for one in self._sharded.parameters
            if one.sharded_param.requires_grad and id(one.sharded_param) not in parameters
        ]
        whole = [one for one in self.whole if one.requires_grad and id(one) not in parameters]

        def require(requires_grad: bool) -> None:
            for sharded in others:
                self._sharded.set_requires_grad(sharded, requires_grad)
            for parameter in whole:
                parameter.requires_grad_(requires_grad)

        require(False)
        try:
            yield
        finally:
            require(True)

    def trainable_changed(self) -> None:
        """Let the next window decide anew what is unused."""
        self._unused.begin_anew()

    def after_backward(self) -> None:
        """Finish the exchange. Collective, unless gradients are being added up."""
        if not self._exchanges:
            return
        self._unused.settle(self._sharded.take_unused())
        if self._average is not None:
            self._average.average()
